"""Every family of schedules on emulated NPUs over the emulated HCCL: both passes, exact, and without deadlock."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ascend.hccl_ranks import run_case
from ascend.operators import register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS
from cases import Case, Local, check_bytes, check_exact
from families import length_of, points, sample
from ranks import Here

from tokenring import Causal, Full
from tokenring.schedule.families import parse

TRANSPORTS = ("hccl", "hccl/channel", "hccl/pair")
CHUNKS = {"zigzag": 2, "contiguous": 1}
FACTORS: dict[str, list[Any]] = {"transport": list(TRANSPORTS), "mask": [Causal(), Full()], "layout": list(CHUNKS)}


def cases(ranks: int) -> list[tuple[Case, str]]:
    """Members of all families for so many ranks, each over some transport, mask, layout and heads (grouped, too)."""
    found = []
    for point, transport, mask, layout in sample(points([ranks], ("", "/late")), FACTORS):
        length = length_of(point, CHUNKS[layout], None, 4)
        case = Case(
            ranks, point.name, layout, "", point.heads[0], point.heads[1], 1, 8, torch.float32, None,
            given_mask=mask, given_length=length, seed=ranks,
        )  # fmt: skip
        found.append((case, transport))
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", range(2, 9))
def test_every_family(world_size: int, npus: NpuPools) -> None:
    ranks = npus(world_size)
    for case, transport in cases(world_size):
        parts = ranks(run_case, case, transport)
        check_bytes(case, case.make_schedule(), parts)
        check_exact(case.whole(parts), case.reference())


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_named_schedules(world_size: int, transport: str, npus: NpuPools) -> None:
    for name in ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q"):
        length = 16 * world_size
        case = Case(world_size, name, "zigzag", "causal", 4, 2, 1, 8, torch.bfloat16, None, given_length=length)
        parts = npus(world_size)(run_case, case, transport)
        check_bytes(case, case.make_schedule(), parts)
        wanted, got = case.reference(), case.whole(parts)
        assert (got.out.double() - wanted.out).norm() / wanted.out.norm() < 8e-3


def with_fused_attention(here: Here, case: Case, transport: str) -> Local:
    register(next(iter(OFFERS)))
    return run_case(here, case, transport, kernel="npu-fusion")


@pytest.mark.parametrize("world_size", [2, 3])
def test_with_the_kernel_of_npus(world_size: int, npus: NpuPools) -> None:
    """Both emulations together; every operator is watched here too."""
    for name in ("ring", "tokenring", "direct-q"):
        length = 16 * world_size
        case = Case(world_size, name, "zigzag", "causal", 4, 2, 1, 16, torch.float32, None, given_length=length)
        parts = npus(world_size)(with_fused_attention, case, "hccl")
        check_exact(case.whole(parts), case.reference())


def test_the_sample_meets_all() -> None:
    families = {point.family for point in points(range(2, 9))}
    met = {parse(case.schedule).family.name for world_size in range(2, 9) for case, _ in cases(world_size)}
    assert met == families
    assert {transport for world_size in (3, 8) for _, transport in cases(world_size)} == set(TRANSPORTS)
