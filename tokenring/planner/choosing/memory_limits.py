"""Memory that schedules need at a rank, without simulating them: tells whether any of them can keep to a limit at all.

A limit that nothing meets is refused by this alone. Simulating them all only to say so takes minutes for 64 ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heappush
from typing import TypeVar

from tokenring.ir.schedule_data import ScheduleData
from tokenring.lowering.footprint import HeldBytes, Pools, held, kept_bytes, program_bytes, staged_bytes
from tokenring.lowering.target import contacts
from tokenring.planner.simulation.predict import Setting, lowered

T = TypeVar("T")


def least_bytes(schedule: ScheduleData, setting: Setting) -> int:
    """Return the bytes that rank 0 needs in the last pass, without boxes of others' messages: a lower bound."""
    size, target = setting.workload, setting.target
    (program,) = lowered(schedule, setting, setting.passes[-1], [0])
    own = program_bytes(schedule, size, program, target.one_sided) + staged_bytes(schedule, size, program)
    used = contacts(schedule, target, setting.passes)
    return held(used, target, [own + kept_bytes(schedule, size, program)]).peak_bytes


def needs(schedule: ScheduleData, setting: Setting) -> HeldBytes:
    """Return what a prediction would say that a schedule needs, to the byte."""
    size, target = setting.workload, setting.target
    of_passes = []
    for direction in setting.passes:
        pools = Pools(schedule, size, target)
        for program in lowered(schedule, setting, direction):
            pools.add(program, kept_bytes(schedule, size, program))
        of_passes.append(pools.nbytes())
    used = contacts(schedule, target, setting.passes)
    return held(used, target, [max(each) for each in zip(*of_passes, strict=True)])


def smallest(some: Iterable[tuple[T, float]], exactly: Callable[[T], HeldBytes]) -> tuple[T, HeldBytes]:
    """Return the item that needs least, and what it needs.

    some: items, each with bytes that are no more than it needs. exactly: tells what an item needs; few are asked.
    """
    waiting: list[tuple[float, int, T, HeldBytes | None]] = []
    waiting += ((nbytes, at, each, None) for at, (each, nbytes) in enumerate(some))
    heapify(waiting)
    while True:
        _, at, each, need = heappop(waiting)
        if need is not None:
            return each, need
        need = exactly(each)
        heappush(waiting, (need.peak_bytes, at, each, need))
