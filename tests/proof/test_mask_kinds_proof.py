"""Proofs under each kind of mask: right programs pass, and a hole, an overlap and another window are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from mask_kinds import KINDS, kind
from oracle import allowed
from program_mutants import Mutant, computed_twice, dropped_kernel_call, other_mask
from programs import lower_all

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.schedule_data import Pass
from tokenring.lowering.program import Attend, Program
from tokenring.proof.replay import replay
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Mask, Slices
from tokenring.sequence.slices import END, Slice, without
from tokenring.sequence.workload import Workload

MUTANTS = {"hole": dropped_kernel_call, "overlap": computed_twice, "another window": other_mask}
BLOCK = r"(q|kv|o)\d"
NAMED = re.compile(rf"tokenring, forward: step \d+, rank \d+: (.*{BLOCK}|merges nothing )")
OTHERWISE = re.compile(rf"tokenring, forward: step \d+, rank \d+: .*{BLOCK}.* with {BLOCK}.*(otherwise|second time)")


@cache
def made(name: str) -> tuple[Schedule, Workload]:
    some = kind(name, 48, 3, {"later start": 96, "cross-attention": 96}.get(name))
    q_layout, kv_layout = (make_layout("zigzag", 3, length) for length in (some.q_length, some.kv_length))
    size = Workload(1, some.q_length, some.kv_length, 1, 1, 2, torch.bfloat16)
    return make_schedule("tokenring", q_layout, kv_layout, some.mask), size


@cache
def programs(name: str, direction: Pass = "forward") -> list[Program]:
    return lower_all(*made(name), direction)


def narrow(program: Program, at: int) -> bool:
    """A patch in which another window may say the same."""
    attend = program.instructions[at]
    return isinstance(attend, Attend) and min(attend.patch.rows, attend.patch.cols) == 1


def some_mutants(name: str, wrong: str) -> Iterator[list[Program]]:
    right = programs(name)
    for rank, program in enumerate(right):
        found: list[Mutant] = list(MUTANTS[wrong](program))
        found = [each for each in found if not any(narrow(program, at) for at in changed(program, each.program))]
        for each in (found[0], found[len(found) // 2], found[-1]) if found else ():
            yield [*right[:rank], each.program, *right[rank + 1 :]]


def changed(a: Program, b: Program) -> list[int]:
    pairs = zip(a.instructions, b.instructions, strict=False)
    return [at for at, (one, other) in enumerate(pairs) if one != other][:1]


@pytest.mark.parametrize("name", KINDS)
def test_right_ones_pass(name: str) -> None:
    schedule, _ = made(name)
    schedule.verify()
    kept = replay(schedule, programs(name), one_queue_a_pair=False)
    replay(schedule, programs(name, "backward"), one_queue_a_pair=False, kept=kept)


@pytest.mark.parametrize("wrong", MUTANTS)
@pytest.mark.parametrize("name", KINDS)
def test_wrong_programs_are_refused(name: str, wrong: str) -> None:
    tried = 0
    for mutant in some_mutants(name, wrong):
        with pytest.raises(ScheduleError) as caught:
            replay(made(name)[0], mutant, one_queue_a_pair=False)
        assert NAMED.match(str(caught.value)), caught.value
        tried += 1
    assert tried


@pytest.mark.parametrize("name", KINDS)
def test_programs_of_other_masks_are_refused(name: str) -> None:
    """Of a mask with one pair less, and of one with one pair more."""
    schedule, size = made(name)
    dense = allowed(schedule.mask, size.q_length, size.kv_length)
    start = schedule.mask.q_start or 0
    q, kv = map(int, dense.nonzero()[dense.sum() // 2])
    others = without(Slice(0, END, 0, END), Slice(q + start, q + start + 1, kv, kv + 1))
    fewer = schedule.mask & Mask(slices=tuple(others), q_start=schedule.mask.q_start)
    seen = next((i, j) for i, j in (~dense).nonzero().tolist() if dense[i, max(0, j - 1) : j + 2].any())
    pair = Slice(seen[0] + start, seen[0] + start + 1, seen[1], seen[1] + 1)
    more = schedule.mask | Mask(slices=(pair,), q_start=schedule.mask.q_start)
    for mask, pairs in ((fewer, -1), (more, 1)):
        assert int((allowed(mask, size.q_length, size.kv_length).int() - dense.int()).sum()) == pairs
        with pytest.raises(ScheduleError) as caught:
            replay(schedule, lower_all(schedule.replace(mask=mask), size), one_queue_a_pair=False)
        assert OTHERWISE.match(str(caught.value)), caught.value


@pytest.mark.parametrize("name", KINDS)
def test_wrong_schedules_are_refused(name: str) -> None:
    schedule, _ = made(name)
    for tiles in (schedule.tiles[1:], (schedule.tiles[0], *schedule.tiles)):
        with pytest.raises(ScheduleError):
            schedule.replace(tiles=tiles).verify()


class TestSlices:
    """A pair in two slices would count twice without any proof that fails: no mask has such slices."""

    def test_that_overlap(self) -> None:
        says = r"slices \(q 0:5, kv 0:9\) and \(q 4:8, kv 8:12, kv - q <= 4\) overlap: a pair may be in one only"
        for make in (Slices, lambda rows: Mask(slices=tuple(map(Slice._make, rows)))):
            with pytest.raises(ConfigurationError, match=says):
                make([(0, 5, 0, 9, None, None), (4, 8, 8, 12, None, 4)])

    def test_that_do_not(self) -> None:
        mask = Slices([(0, 8, 0, 8, None, 0), (0, 8, 0, 8, 1, None)])
        assert len(mask.slices or ()) == 2
