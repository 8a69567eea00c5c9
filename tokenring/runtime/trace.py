"""Traces of calls: one event for each instruction, with its times."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from tokenring.ir.schedule_data import Pass
from tokenring.lowering.program import Attend, Instruction, Multiply, Wait


@dataclass(frozen=True)
class Agree:
    """The exchange before a program's first instruction: the ranks tell each other what they are about to do.

    They wait for the answer here, or at the first wait for a message (`target.deferring`).
    """


class Event(NamedTuple):
    """One instruction as it ran; times are perf_counter seconds of its process."""

    rank: int
    direction: Pass
    step: int
    instruction: Instruction | Agree
    began_seconds: float
    ended_seconds: float

    @property
    def seconds(self) -> float:
        """The time that the instruction took."""
        return self.ended_seconds - self.began_seconds


@dataclass
class Trace:
    """The events of the calls that ran while it was active, in order."""

    events: list[Event] = field(default_factory=list)

    def agreed(self, rank: int, direction: Pass, began_seconds: float) -> None:
        """Add the event of an exchange by which the ranks agreed, which has just ended."""
        self.events.append(Event(rank, direction, 0, Agree(), began_seconds, perf_counter()))

    def split_seconds(self) -> dict[str, float]:
        """Return the seconds in kernels, in waits for messages or other ranks (exposed), and in everything else."""
        compute = sum(event.seconds for event in self.events if isinstance(event.instruction, Attend | Multiply))
        exposed = sum(event.seconds for event in self.events if isinstance(event.instruction, (Wait, Agree)))
        total = sum(event.seconds for event in self.events)
        return {"compute": compute, "exposed": exposed, "rest": total - compute - exposed}
