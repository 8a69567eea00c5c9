"""The reference executor of examples/ and the real one compute the same, of every family, and what float64 does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from families import members
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.schedule.families.registry import FAMILIES, parse
from tokenring.schedule.names import make_schedule

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from reference_executor import ReferenceExecutor  # noqa: E402

RANKS, HEADS, LENGTH, HEAD_DIM = 4, (6, 3), 64, 16
CHANGES = ("", "/keep", "/late")
MASK = tr.Causal()


def one_of_each() -> dict[str, str]:
    """A member of each family that fits four ranks, the last one worth trying: it has parameters where there are any."""
    return {parse(name).family.name: name for heads in ((4, 4), HEADS) for name in members(RANKS, heads)}


def heads_of(name: str) -> tuple[int, int]:
    return HEADS if name in members(RANKS, HEADS) else (4, 4)


def inputs(name: str) -> list[torch.Tensor]:
    q_heads, kv_heads = heads_of(name)
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, LENGTH, heads, HEAD_DIM, generator=generator) for heads in (q_heads, kv_heads, kv_heads, q_heads)]


def run_on_ranks(here: Here, name: str) -> list[torch.Tensor]:
    cp = here.cp(schedule=name, layout="zigzag")
    q, k, v, dout = inputs(name)
    parts = [tr.shard(x, cp).requires_grad_() for x in (q, k, v)]
    out, lse = tr.attention(*parts, cp, mask=MASK, return_lse=True)
    torch.autograd.backward(out, tr.shard(dout, cp))
    grads = [x.grad for x in parts if x.grad is not None]
    return [tr.unshard(x.detach(), cp) for x in (out, lse, *grads)]


def by_the_letter(name: str) -> list[torch.Tensor]:
    """The same, of the reference executor in float64."""
    q, k, v, dout = (x[0].double() for x in inputs(name))
    layout = tr.make_layout("zigzag", RANKS, LENGTH)
    executor = ReferenceExecutor(make_schedule(name, layout, layout, MASK), q, k, v)
    out, lse = executor.forward()
    return [out, lse, *executor.backward(dout, out, lse)]


def test_every_family_is_there() -> None:
    assert set(one_of_each()) == set(FAMILIES)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_is_what_ranks_compute(family: str, change: str, ranks: RankPools) -> None:
    name = one_of_each()[family] + change
    wanted = by_the_letter(name)
    q, k, v, dout = inputs(name)
    whole = attention64(q, k, v, dout, allowed(MASK, LENGTH, LENGTH))
    for each, mine in zip((whole.out, whole.lse, whole.dq, whole.dk, whole.dv), wanted, strict=True):
        assert relative_error(mine[None], each) < 1e-12
    for part in ranks(RANKS)(run_on_ranks, name):
        for made, mine in zip(part, wanted, strict=True):
            assert relative_error(made, mine[None]) < 5e-6


def test_the_comparison_can_fail() -> None:
    """A schedule that lacks a tile gives another result."""
    layout = tr.make_layout("zigzag", RANKS, LENGTH)
    schedule = make_schedule("ring", layout, layout, MASK)
    q, k, v, _ = (x[0].double() for x in inputs("ring"))
    right = ReferenceExecutor(schedule, q, k, v).forward()[0]
    import dataclasses

    less = dataclasses.replace(schedule, tiles=schedule.tiles[:-1])
    wrong = ReferenceExecutor(less, q, k, v).forward()[0]
    assert relative_error(wrong, right) > 1e-3
