"""The schedule as users hold it: the data, and what can be asked of it. What needs torch is imported when asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Protocol

from tokenring.errors import ConfigurationError
from tokenring.ir import schedule_data as ir
from tokenring.ir.schedule_data import Kind, Pass
from tokenring.lowering.backend_names import PLANNED_WITH, kernel_class, transport_target
from tokenring.lowering.target import IDEAL

if TYPE_CHECKING:
    from tokenring.lowering.program import Program
    from tokenring.sequence.workload import Workload

MADE_LATER = frozenset({"tiles", "moves"})  # of a schedule in parts, when they are first asked for


class PartByPart(Protocol):
    """The parts of all ranks, as `own_part` makes them, before the whole is made."""

    @property
    def empty(self) -> Schedule:
        """The schedule without tiles and moves."""

    def whole(self) -> Schedule:
        """Make the whole schedule."""

    def part(self, rank: int) -> ir.ScheduleData:
        """Return a schedule in which the program of a rank is the same."""

    def moves_by_pair(self) -> Mapping[tuple[int, int, Kind], int]:
        """Return the number of moves of all ranks, as `ScheduleData.moves_by_pair`."""


class Schedule(ir.ScheduleData):
    """A schedule, with its proof, its costs and its texts."""

    @classmethod
    def of(cls, data: ir.ScheduleData) -> Schedule:
        """Return the schedule with the fields of this data."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(data)})

    @classmethod
    def in_parts(cls, parts: PartByPart) -> Schedule:
        """Return a schedule of which all tiles and moves are made when somebody first asks for them."""
        made, known = object.__new__(cls), vars(parts.empty)
        vars(made).update({each.name: known[each.name] for each in fields(cls) if each.name not in MADE_LATER})
        vars(made)["_parts"] = parts
        return made

    if not TYPE_CHECKING:  # attributes are those of the dataclass

        def __getattr__(self, name: str) -> object:
            """Make all tiles and moves of a schedule that is in parts."""
            parts: PartByPart | None = vars(self).get("_parts")
            if name not in MADE_LATER or (parts is None and name not in vars(self)):  # another thread may have made it
                raise AttributeError(f"a schedule has no {name!r}", name=name, obj=self)
            if parts is None:
                return vars(self)[name]
            from tokenring.gc_pause import no_collection

            with no_collection():
                whole = parts.whole()
            vars(self).update({each: getattr(whole, each) for each in MADE_LATER})
            vars(self).pop("_parts", None)
            vars(self).pop("_asked_for", None)
            return vars(self)[name]

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled: all tiles and moves."""
        whole = {each: getattr(self, each) for each in MADE_LATER}  # which may have to be made
        state = super().__getstate__() | whole
        for each in ("_parts", "_asked_for"):  # another thread may be about to take them away
            state.pop(each, None)
        return state

    def _count_by_pair(self) -> Mapping[tuple[int, int, Kind], int]:
        parts: PartByPart | None = vars(self).get("_parts")
        return super()._count_by_pair() if parts is None else parts.moves_by_pair()

    @property
    def is_in_parts(self) -> bool:
        """True while nobody has asked for all tiles and moves of a schedule that each rank makes in part."""
        return "_parts" in vars(self)

    def of_rank(self, rank: int) -> ir.ScheduleData:
        """Return the part of a rank, where the whole is not made; else this schedule.

        Who asks for another rank asks for many, or for all: then the whole costs less.
        """
        parts: PartByPart | None = vars(self).get("_parts")
        if parts is not None and vars(self).setdefault("_asked_for", rank) == rank:
            return parts.part(rank)
        return self

    def verify(self) -> Schedule:
        """Prove both passes; returns the schedule itself. Raises ScheduleError with step, rank and block."""
        from tokenring.proof.verify import verify

        verify(self)
        return self

    def link_bytes(self, workload: Workload, direction: Pass = "forward") -> dict[tuple[int, int], int]:
        """Return the payload bytes that each (source, destination) link carries in a pass."""
        from tokenring.lowering.footprint import link_bytes

        return link_bytes(self, workload, direction)

    def peak_bytes(self, workload: Workload, direction: Pass = "forward", transport: str | None = None) -> int:
        """Return the bytes of the buffer pool at the rank that needs most: slots and fp32 accumulators.

        With a transport by name, also what it needs more: for its connections, for messages that go or land apart.
        """
        from tokenring.lowering.footprint import peak_bytes

        target = IDEAL if transport is None else transport_target(transport)
        return peak_bytes(self, workload, direction, target, kernel_class(PLANNED_WITH).supports_patch)

    def flops(self, workload: Workload, direction: Pass = "forward") -> dict[int, int]:
        """Return the floating-point operations of each rank's tiles in a pass, visible pairs only."""
        from tokenring.lowering.footprint import flops

        return flops(self, workload, direction)

    def program(self, workload: Workload, rank: int, direction: Pass = "forward") -> Program:
        """Return what one rank does in a pass, instruction by instruction."""
        from tokenring.lowering.lower import lower

        return lower(self, rank, direction, workload)

    def to_json(self) -> str:
        """Return the schedule as documented JSON (docs/schedule-json.md)."""
        from tokenring.ir import json as interchange

        return interchange.to_json(self)

    @staticmethod
    def from_json(text: str) -> Schedule:
        """Return the schedule that to_json wrote. Raises ScheduleError."""
        from tokenring.ir import json as interchange

        return Schedule.of(interchange.from_json(_text("from_json", text)))

    def __str__(self) -> str:
        from tokenring.ir.text import to_text

        return to_text(self)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Return the schedule that str() printed. Raises ScheduleError."""
        from tokenring.ir.text_parse import parse_text

        return Schedule.of(parse_text(_text("parse", text)))


@dataclass(frozen=True)
class GivenSchedule:
    """The schedule of a call that was asked for, where nothing was planned; and why it is this one.

    transport: the mode of the transport in which it keeps to a limit; None: as it is.
    """

    schedule: Schedule
    reason: str
    transport: str | None = None


def _text(reader: str, given: object) -> str:
    if not isinstance(given, str):
        raise ConfigurationError(f"Schedule.{reader} reads a str, not one of type {type(given).__name__}")
    return given
