"""The choice of a schedule for a linear layer, or a collective."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.planner.interconnects.interconnect import Interconnect


def choose(operator: str, size: Workload, ranks: int, stays: str, topology: Interconnect | None) -> str:
    """Return the name of the schedule of an operator over so many ranks."""
    return "direct-q"
