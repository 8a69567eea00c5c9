"""The programs of all ranks, and their proof for kernels that take some patches only."""

from __future__ import annotations

from tokenring.schedule.calls import Supports, anything
from tokenring.schedule.ir import PASSES, Pass, Schedule
from tokenring.schedule.lower import lower
from tokenring.schedule.program import Program
from tokenring.schedule.replay import Kept, replay
from tokenring.workload import Workload


def lower_all(
    schedule: Schedule,
    workload: Workload,
    direction: Pass = "forward",
    supports: Supports = anything,
    early_receives: bool = True,
) -> list[Program]:
    ranks = range(schedule.world_size)
    return [lower(schedule, rank, direction, workload, supports, early_receives) for rank in ranks]


def check_both_passes(
    schedule: Schedule, workload: Workload, supports: Supports = anything, early_receives: bool = True
) -> None:
    """Lower both passes and replay them, backward on what forward kept."""
    kept: Kept | None = None
    for direction in PASSES:
        programs = lower_all(schedule, workload, direction, supports, early_receives)
        kept = replay(schedule, programs, one_queue_a_pair=not early_receives, kept=kept)
