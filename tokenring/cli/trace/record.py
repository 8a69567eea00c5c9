"""The record of a traced call, on one clock: seconds since the first rank began."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from tokenring.cli.bench.results import CachedCase, RaceCase, RaceMachine
from tokenring.ir.schedule_data import Pass


@dataclass(frozen=True)
class Bar:
    """Something that a rank did. `name` is short, `label` a sentence, `short` fits into a bar."""

    rank: int
    direction: str
    kind: str  # one of picture.KINDS
    label: str
    short: str
    began: float
    ended: float
    step: int = 0
    name: str = ""
    details: dict[str, int | str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The time from its beginning to its end."""
        return self.ended - self.began


@dataclass(frozen=True)
class TracedMessage:
    """A message, from its post until its receiver had waited for it; `waited`: when that wait began."""

    src: int
    dst: int
    label: str
    sent: float
    received: float
    waited: float = 0.0
    direction: str = ""
    details: dict[str, int | str] = field(default_factory=dict)


@dataclass(frozen=True)
class Stretch:
    """One pass at one rank, from the caller's side: its instructions lie inside."""

    rank: int
    direction: Pass
    began: float
    ended: float


@dataclass(frozen=True)
class Simulated:
    """A simulation of the call as the planner expects it, on a clock of its own. source: where its figures are from."""

    source: str
    stretches: list[Stretch]
    bars: list[Bar]
    messages: list[TracedMessage]

    def seconds(self, direction: str) -> float:
        """Return the time of a pass: the slowest rank's; 0 where there was none."""
        return max((each.ended - each.began for each in self.stretches if each.direction == direction), default=0.0)


@dataclass(frozen=True)
class Traced:
    """One call on all ranks: the round with the median time.

    rounds_s: the slowest rank's time in each round; round: which of them this is. one_clock: ranks share
    a machine and so a clock; else their clocks were set by the barrier before the call. simulated: None for one rank,
    and for a step over a cache.
    """

    case: RaceCase | CachedCase
    machine: RaceMachine
    schedule: str
    rounds_s: list[float]
    round: int
    one_clock: bool
    stretches: list[Stretch]
    bars: list[Bar]
    messages: list[TracedMessage]
    simulated: Simulated | None = None

    @property
    def seconds(self) -> float:
        """The slowest rank's time."""
        return self.rounds_s[self.round]

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.machine.ranks

    def to_json(self) -> str:
        """Return the record as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Traced:
        """Read the record that to_json wrote."""
        values = json.loads(text)
        kind: Any = CachedCase if "cached" in values["case"] else RaceCase
        values["case"], values["machine"] = kind(**values["case"]), RaceMachine(**values["machine"])
        if values["simulated"] is not None:
            values["simulated"] = Simulated(**_timed(values["simulated"]))
        return cls(**_timed(values))


def _timed(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values with stretches, bars and messages as objects."""
    kinds: dict[str, Any] = {"stretches": Stretch, "bars": Bar, "messages": TracedMessage}
    return values | {name: [kind(**each) for each in values[name]] for name, kind in kinds.items()}
