"""A plan: the chosen schedule for a workload, what else there was, and why."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.candidates import Candidate, candidate_of, table
from tokenring.schedule.schedule import GivenSchedule, Schedule
from tokenring.sequence.workload import Workload

VERSION = 1
FORMAT = "tokenring-plan"
READ = (FORMAT, "tokenring-plan/1", "tokenring plan")  # also its older names


@dataclass(frozen=True, repr=False)
class Plan:
    """The chosen schedule, why, and what else there was, best first.

    transport: the mode of the transport that keeps it to a limit, or to few connections; None: as it is.
    direction: that of the schedule's rings, where somebody has found out which moves less, so that nobody else has to.
    """

    schedule: Schedule
    workload: Workload
    reason: str
    candidates: tuple[Candidate, ...] = ()
    transport: str | None = None
    direction: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        """Name of the chosen schedule."""
        return self.schedule.name

    def __str__(self) -> str:
        """Return the reason, and the candidates as a table."""
        return _shown(self)

    def __repr__(self) -> str:
        return f"Plan({self.name} of {len(self.candidates) or 1} candidates, for {self.schedule.world_size} ranks)"

    def to_json(self) -> str:
        """Return the plan as JSON, with its schedule; `Plan.load` reads it.

        Raises ConfigurationError where the schedule is of too many ranks to write each of its moves.
        """
        from tokenring.schedule.size_limits import MADE_RANKS

        if (ranks := self.schedule.world_size) > MADE_RANKS and self.schedule.is_in_parts:
            raise ConfigurationError(
                f"a plan of {ranks:,} ranks is written with each move of {self.name!r}, which takes minutes and "
                f"gigabytes above {MADE_RANKS}: keep its name, and ask for schedule={self.name!r}"
            )
        return _document(self, json.loads(self.schedule.to_json()))

    def save(self, path: str | Path) -> None:
        """Write it as JSON. Raises ConfigurationError."""
        try:
            Path(path).write_text(self.to_json(), encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"cannot write {str(path)!r}: {error.strerror}") from None

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Return the plan that `save` or `tokenring plan --json` wrote. Raises ConfigurationError, ScheduleError."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"cannot read the plan {str(path)!r}: {error}") from None
        return Plan.from_json(text)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Return the plan of to_json. Raises ConfigurationError; ScheduleError for what is wrong in its schedule."""
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:  # broken JSON, or a number of thousands of digits
            raise ConfigurationError(f"this is not a plan: {error}") from None
        if not isinstance(found, dict) or found.get("format") not in READ:
            raise ConfigurationError("this is not a plan: write one with Plan.save or `tokenring plan --json`")
        if found.get("version") != VERSION:
            raise ConfigurationError(
                f"the plan has version {found.get('version')!r}, this reads version {VERSION}: plan again"
            )
        if found.get("schedule") is None:
            raise ConfigurationError("the plan has no schedule: it is for more ranks than can be written down")
        try:
            workload = Workload(**found["workload"] | {"dtype": _dtype(found["workload"]["dtype"])})
            candidates = tuple(candidate_of(each) for each in found["candidates"])
            reason, transport = str(found["reason"]), found.get("transport")
        except (KeyError, TypeError) as error:
            raise ConfigurationError(
                f"the plan is not whole ({type(error).__name__}: {error}): write it again with Plan.save"
            ) from None
        if transport is not None and not isinstance(transport, str):
            raise ConfigurationError(f"the plan's transport is {transport!r}: a name, or null")
        return Plan(Schedule.from_json(json.dumps(found["schedule"])), workload, reason, candidates, transport)


def plan_of(found: Plan | GivenSchedule, workload: Workload) -> Plan:
    """Return a plan as it is; one with the schedule that was given, for this workload."""
    if isinstance(found, Plan):
        return found
    return Plan(found.schedule, workload, found.reason, (), found.transport)


@dataclass(frozen=True)
class Forecast:
    """A plan for more ranks than a schedule can be made for: the candidates, best first, and why."""

    name: str
    workload: Workload
    reason: str
    candidates: tuple[Candidate, ...]
    transport: str | None = None  # as of a plan

    def __str__(self) -> str:
        """Return the reason, and the candidates as a table."""
        return _shown(self)

    def to_json(self) -> str:
        """Return the forecast as JSON, as of a plan, but for its schedule, which is null."""
        return _document(self, None)


def _shown(found: Plan | Forecast) -> str:
    reason = found.reason if found.reason.startswith(f"{found.name}: ") else f"{found.name}: {found.reason}"
    rows, says = table(found.candidates)
    wire: list[str] = []
    if isinstance(found, Plan) and found.schedule.formats:
        from tokenring.ir.wire_formats import wire_report

        wire = wire_report(found.schedule)
    if isinstance(found, Plan) and found.schedule.operator.left_out:
        wire.append("out goes home without its lse, which nobody wants: each row is computed at one rank")
    return "\n".join([reason, *wire, *([""] if rows else []), *rows, *says])


def _document(found: Plan | Forecast, schedule: object) -> str:
    document = {
        "format": FORMAT,
        "version": VERSION,
        "name": found.name,
        "reason": found.reason,
        "transport": found.transport,
        "workload": found.workload.to_dict(),
        "candidates": [asdict(each) for each in found.candidates],
        "schedule": schedule,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _dtype(name: object) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ConfigurationError(f"the plan's workload has dtype {name!r}, which torch does not know")
    return dtype
