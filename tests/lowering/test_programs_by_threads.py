"""Programs made by several threads at once, as several ranks in one process make theirs, are those made by one."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.exchanges import exchanges
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Program
from tokenring.lowering.storage import storage_of
from tokenring.lowering.target import IDEAL, Target
from tokenring.lowering.uses import first_uses
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask
from tokenring.sequence.workload import Workload

RANKS = 8
ROUNDS = 3  # each on a schedule of which nothing is known yet
TARGETS = IDEAL, Target(early_receives=False, collectives=True)  # of the second, messages count by their identity


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


def made(name: str, mask: str) -> Schedule:
    layout = make_layout("zigzag", RANKS, 16 * RANKS)
    return make_schedule(name, layout, layout, parse_mask(mask))


@pytest.mark.parametrize("target", TARGETS, ids=("ideal", "collectives"))
@pytest.mark.parametrize("name", ["ring", "tokenring", "direct-kv/pieces2", "usp/2", "all-gather-kv", "ulysses"])
@pytest.mark.parametrize("mask", ["full", "documents(0,13,40,128)"])
def test_threads_make_the_programs_that_one_makes(name: str, mask: str, target: Target) -> None:
    workload = Workload(1, 16 * RANKS, 16 * RANKS, 8, 8, 4)
    alone = made(name, mask)
    wanted = {each: [lower(alone, rank, each, workload, target) for rank in range(RANKS)] for each in PASSES}
    start = Barrier(RANKS)

    def both(rank: int) -> list[Program]:
        start.wait(60)
        return [lower(schedule, rank, direction, workload, target) for direction in PASSES]

    with ThreadPoolExecutor(RANKS) as threads:
        for _ in range(ROUNDS):
            schedule = made(name, mask)
            for each in (storage_of, exchanges, first_uses):
                each.cache_clear()
            found = list(threads.map(both, range(RANKS)))
            for number, direction in enumerate(PASSES):
                assert [programs[number] for programs in found] == wanted[direction]
