"""The programs of all ranks, and their proof for kernels that take some patches only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.calls import Supports, anything
from tokenring.lowering.lower import lower
from tokenring.lowering.program import OWN, Attend, Program, Wait
from tokenring.lowering.target import Target
from tokenring.proof import replay as module
from tokenring.proof.replay import Kept, replay
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.workload import Workload


def lower_all(
    schedule: Schedule,
    workload: Workload,
    direction: Pass = "forward",
    supports: Supports = anything,
    early_receives: bool = True,
) -> list[Program]:
    ranks, target = range(schedule.world_size), Target(early_receives=early_receives)
    return [lower(schedule, rank, direction, workload, target, supports) for rank in ranks]


def rearranged(program: Program, order: Sequence[int]) -> Program:
    """The same instructions in another order."""
    return replace(
        program,
        instructions=tuple(program.instructions[i] for i in order),
        steps=tuple(program.steps[i] for i in order),
    )


def reads_early(program: Program) -> Program:
    """A kernel call before the wait for what it reads."""
    attend = next(i for i, x in enumerate(program.instructions) if isinstance(x, Attend) and x.kv.slot != OWN)
    wait = next(i for i, x in enumerate(program.instructions) if isinstance(x, Wait))
    order = [i for i in range(len(program.instructions)) if i != attend]
    order.insert(wait, attend)
    return rearranged(program, order)


def size_of(schedule: Schedule) -> Workload:
    """The smallest workload of a schedule."""
    groups = schedule.head_groups
    return Workload(1, schedule.q_layout.length, schedule.kv_layout.length, groups, groups, 2, torch.bfloat16)


def replays_with_collectives(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each pass that is replayed from now on, whether the programs have collectives or bundles."""
    seen: list[bool] = []
    whole_replay = module.replay

    def noted(made: Schedule, programs: list[Program], *more: object, **options: object) -> Kept:
        seen.append(bool(programs[0].collectives))
        return whole_replay(made, programs, *more, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "replay", noted)
    return seen


def check_both_passes(
    schedule: Schedule, workload: Workload, supports: Supports = anything, early_receives: bool = True
) -> None:
    """Lower both passes and replay them, backward on what forward kept."""
    kept: Kept | None = None
    for direction in PASSES:
        programs = lower_all(schedule, workload, direction, supports, early_receives)
        kept = replay(schedule, programs, one_queue_a_pair=not early_receives, kept=kept)
