"""The plans of DESIGN §7 that fit four ranks, executed: exact in both passes, bytes as predicted."""

from __future__ import annotations

import plans
import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.schedule.ir import PASSES

RANKS = 4
NONE: frozenset[str] = frozenset()
RUN = {
    "tiles 2 × 2": ("tiles", (2,)),
    "Ulysses, kept": ("ulysses", (4,)),
    "Ulysses, gathered again": ("ulysses", (4, NONE)),
    "Ulysses, only kv kept": ("ulysses", (4, frozenset({"kv"}))),
    "Ulysses 2 with a ring of 2": ("usp", (2,)),
    "Ulysses 2 with a ring of 2, kept": ("usp", (2, plans.KEEP)),
    "two-level ring": ("two_level_ring", (2,)),
    "reduced inside the node": ("reduced_in_node", (2,)),
    "KV crosses once": ("own_nic", (2,)),
    "Q here, KV there": ("mixed_stationary", ()),
    "sub-sharded tiles 1 × 2 × 2": ("sub_sharded", (1, 2, 2)),
    "sub-sharded tiles 2 × 2 × 1": ("sub_sharded", (2, 2, 1)),
    "direct KV, a tile for each peer": ("direct_by_peer", ("kv", 2)),
    "direct Q, a tile for each peer": ("direct_by_peer", ("q", 2)),
}
MASKS = {
    "full": tr.Full(),
    "causal": tr.Causal(),
    "packed window": tr.SlidingWindow(30, 0) & tr.Documents([0, 50, 51, 110]),
}


def run_plan(
    here: Here,
    maker: str,
    arguments: tuple[object, ...],
    layout: str,
    mask: tr.Mask,
    dtype: torch.dtype,
    kv_length: int,
) -> tuple[list[float], bool]:
    """Errors of out, lse, dq, dk, dv against float64, and whether the bytes were as predicted."""
    cp = here.cp(layout=layout, schedule=getattr(plans, maker)(*arguments))
    torch.manual_seed(7)
    q, dout = (torch.randn(2, 128, 4, 40).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, kv_length, 4, 40).to(dtype) for _ in range(2))
    want = attention64(q, k, v, dout, allowed(mask, 128, kv_length))
    q_part, k_part, v_part = (tr.shard(x, cp).requires_grad_() for x in (q, k, v))
    assert cp.transport is not None
    counted = cp.transport.sent_bytes
    counted.clear()
    out, lse = tr.attention(q_part, k_part, v_part, cp, mask=mask, return_lse=True)
    forward = dict(counted)
    counted.clear()
    torch.autograd.backward(out, tr.shard(dout, cp))
    schedule = tr.plan(q_part, k_part, v_part, cp, mask).schedule
    workload = tr.Workload(2, 128, kv_length, 4, 4, 40, dtype)
    as_predicted = all(
        sent == {dst: size for (src, dst), size in schedule.link_bytes(workload, direction).items() if src == here.rank}
        for direction, sent in zip(PASSES, (forward, dict(counted)), strict=True)
    )
    grads = [x.grad for x in (q_part, k_part, v_part) if x.grad is not None]
    got = [tr.unshard(out, cp), tr.unshard(lse, cp, dim=2), *(tr.unshard(grad, cp) for grad in grads)]
    return [relative_error(a, b) for a, b in zip(got, want, strict=True)], as_predicted


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("layout", ["zigzag", "striped"])
@pytest.mark.parametrize(("maker", "arguments"), RUN.values(), ids=RUN)
def test_plan_is_exact(ranks: RankPools, maker: str, arguments: tuple[object, ...], layout: str, mask: tr.Mask) -> None:
    for errors, as_predicted in ranks(RANKS)(run_plan, maker, arguments, layout, mask, torch.float32, 128):
        assert max(errors[:2]) <= 2e-6
        assert max(errors[2:]) <= 5e-6
        assert as_predicted


@pytest.mark.parametrize(("maker", "arguments"), RUN.values(), ids=RUN)
def test_plan_in_half_precision(ranks: RankPools, maker: str, arguments: tuple[object, ...]) -> None:
    """Rounding of q, k, v, out and once of each partial; nothing that grows."""
    for errors, as_predicted in ranks(RANKS)(run_plan, maker, arguments, "zigzag", tr.Causal(), torch.bfloat16, 128):
        assert max(errors) <= 3e-3
        assert as_predicted


@pytest.mark.parametrize("maker", ["tiles", "two_level_ring", "reduced_in_node"])
def test_queries_over_a_cached_kv_of_another_length(ranks: RankPools, maker: str) -> None:
    for errors, as_predicted in ranks(RANKS)(run_plan, maker, (2,), "contiguous", tr.Full(), torch.float32, 512):
        assert max(errors) <= 2e-6
        assert as_predicted
