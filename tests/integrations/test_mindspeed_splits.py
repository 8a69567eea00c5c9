"""Context parallelism under MindSpeed beside other splits, one step each: gradients as without any split.

Real Megatron-core, of the version that MindSpeed's main line is for, in all groups over the emulated HCCL; of MindSpeed
the stand-in. What is compared with is one CPU rank in float64.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from mcore import npu_steps
from mcore.gpt import Job, whole_gradients
from mcore.versions import PINNED, folder, need
from mcore.world import load
from patience import patient
from ranks import RankPools
from sampling import FULL_GRID

VERSION = PINNED[0]  # 0.12.1
LOAD_SECONDS, STEP_SECONDS = 240.0, 200.0
LIMIT = 5e-6  # of a gradient, relative, in float32 against float64
pytestmark = pytest.mark.timeout(400)
SCHEDULES = ["ring", "tokenring"] if FULL_GRID else ["ring"]
JOBS = {
    "TP 2 with sequence parallelism": Job(tp=2, cp=2, sequence_parallel=True),
    "PP 2, VPP 2": Job(pp=2, vpp=2, cp=2, layers=4),
    "EP 2": Job(cp=2, ep=2, experts=4, layers=1),
}
MORE = {
    "recompute, full": Job(cp=4, recompute="full"),
    "TP 2": Job(tp=2, cp=2),
    "PP 2": Job(pp=2, cp=2),
    "recompute, selective": Job(cp=4, recompute="selective"),
}
TOGETHER = Job(tp=2, cp=2, pp=2, vpp=2, layers=4, recompute="full", sequence_parallel=True)


@pytest.fixture(scope="module")
def megatron() -> Iterator[RankPools]:
    need(VERSION)
    pools = RankPools(load, str(folder(VERSION)))
    try:
        assert pools.loaded is not None and pools.loaded.result(patient(LOAD_SECONDS)) == VERSION
        yield pools
    finally:
        pools.close()


def largest_error(megatron: RankPools, job: Job, ranks: int = 4, schedules: Sequence[str] = SCHEDULES) -> float:
    """Return the largest error of any gradient on any rank with any of these schedules."""
    (whole,) = megatron(1)(whole_gradients, job)
    said = megatron(ranks).within(STEP_SECONDS, npu_steps.errors_of_step, job, whole, list(schedules))
    found = [each for of_rank in said for each in of_rank.values()]
    assert {name for _, classes in found for name in classes} == {"MindSpeedTokenRingAttention"}
    return max(error for error, _ in found)


@pytest.mark.parametrize("split", [*JOBS, *(MORE if FULL_GRID else {})])
def test_gradients_are_those_of_one_rank(megatron: RankPools, split: str) -> None:
    error = largest_error(megatron, (JOBS | MORE)[split])
    print(f"{split}: {error:.1e}")
    assert error <= LIMIT


@pytest.mark.skipif(not FULL_GRID, reason="eight ranks, by hand: TOKENRING_FULL_GRID=1")
def test_all_together(megatron: RankPools) -> None:
    error = largest_error(megatron, TOGETHER, 8)
    print(f"all together: {error:.1e}")
    assert error <= LIMIT


def test_another_cut_is_seen(megatron: RankPools) -> None:
    assert largest_error(megatron, Job(pp=2, cp=2, rows="contiguous"), schedules=["ring"]) > 0.01
