"""The reference executor of examples/ and the real one compute the same, of every family, and what float64 does."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families import members
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.schedule.families import FAMILIES, parse
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from reference_executor import ReferenceExecutor

HEADS = ((6, 3), (4, 4))
TOKENS, HEAD_DIM = 16, 16  # tokens of each rank
CHANGES = ("", "/keep", "/late")
MASK = tr.Causal()
# Of each family the last member worth trying, which has parameters where there are any: (ranks, heads, name).
ONE_OF_EACH = {
    parse(name).family.name: (ranks, heads, name)
    for ranks in (5, 4)  # rings in several directions at once need five
    for heads in HEADS
    for name in members(ranks, heads)
}


def inputs(family: str) -> list[torch.Tensor]:
    ranks, (q_heads, kv_heads), _ = ONE_OF_EACH[family]
    generator = torch.Generator().manual_seed(1)
    sizes = (q_heads, kv_heads, kv_heads, q_heads)
    return [torch.randn(1, TOKENS * ranks, heads, HEAD_DIM, generator=generator) for heads in sizes]


def run_on_ranks(here: Here, family: str, change: str) -> list[torch.Tensor]:
    cp = here.cp(schedule=ONE_OF_EACH[family][2] + change, layout="zigzag")
    q, k, v, dout = inputs(family)
    parts = [tr.shard(x, cp).requires_grad_() for x in (q, k, v)]
    out, lse = tr.attention(parts[0], parts[1], parts[2], cp, mask=MASK, return_lse=True)
    torch.autograd.backward(out, tr.shard(dout, cp))
    grads = [x.grad for x in parts if x.grad is not None]
    return [tr.unshard(out.detach(), cp), tr.unshard(lse, cp, dim=2), *(tr.unshard(x, cp) for x in grads)]


def schedule_of(family: str, change: str = "") -> tr.Schedule:
    ranks, _, name = ONE_OF_EACH[family]
    layout = make_layout("zigzag", ranks, TOKENS * ranks)
    return make_schedule(name + change, layout, layout, MASK)


def by_the_letter(family: str, schedule: tr.Schedule) -> list[torch.Tensor]:
    """The same, of the reference executor in float64."""
    q, k, v, dout = (x[0].double() for x in inputs(family))
    executor = ReferenceExecutor(schedule, q, k, v)
    out, lse = executor.forward()
    return [x[None] for x in (out, lse.T, *executor.backward(dout, out, lse))]


def test_every_family_is_there() -> None:
    assert set(ONE_OF_EACH) == set(FAMILIES)


@pytest.mark.sampled(32)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_is_what_ranks_compute(family: str, change: str, ranks: RankPools) -> None:
    wanted = by_the_letter(family, schedule_of(family, change))
    q, k, v, dout = inputs(family)
    whole = attention64(q, k, v, dout, allowed(MASK, q.shape[1], q.shape[1]))
    for each, mine in zip((whole.out, whole.lse, whole.dq, whole.dk, whole.dv), wanted, strict=True):
        assert relative_error(mine, each) < 1e-12
    for part in ranks(ONE_OF_EACH[family][0])(run_on_ranks, family, change):
        for made, mine in zip(part, wanted, strict=True):
            assert relative_error(made, mine) < 5e-6


def test_the_comparison_can_fail() -> None:
    """A schedule that lacks a tile gives another result."""
    whole = schedule_of("ring")
    right = by_the_letter("ring", whole)
    wrong = by_the_letter("ring", replace(whole, tiles=whole.tiles[:-1]))
    assert relative_error(wrong[0], right[0]) > 1e-3


def test_is_a_hundred_lines() -> None:
    path = Path(__file__).resolve().parents[2] / "examples" / "reference_executor.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 100
