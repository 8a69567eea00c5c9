"""The schedule as users hold it: the data, and what can be asked of it. What needs torch is imported when asked for."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError
from tokenring.ir import schedule_data as ir
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.backend_names import PLANNED_WITH, kernel_class, transport_target
from tokenring.lowering.target import IDEAL

if TYPE_CHECKING:
    from tokenring.lowering.program import Program
    from tokenring.sequence.workload import Workload


class Schedule(ir.ScheduleData):
    """A schedule, with its proof, its costs and its texts."""

    @classmethod
    def of(cls, data: ir.ScheduleData) -> Schedule:
        """Return the schedule with the fields of this data."""
        return cls(**{field.name: getattr(data, field.name) for field in fields(data)})

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
