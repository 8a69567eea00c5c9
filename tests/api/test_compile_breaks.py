"""torch.compile of layers, collectives and cached attention: called between graphs, alike, and not looked into."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from ranks import Here, RankPools
from test_compile import CALL_SECONDS, compiler

import tokenring as tr

Tensors = tuple[torch.Tensor, ...]
Call = Callable[[torch.Tensor], torch.Tensor]


def layers(here: Here) -> Call:
    """Return a layer of two, and a sum over all ranks of what has no gradient."""
    tp = tr.TensorParallel()
    generator = torch.Generator().manual_seed(here.rank)
    first, second = torch.randn(6, 8, generator=generator), torch.randn(8, 6, generator=generator)

    def call(x: torch.Tensor) -> torch.Tensor:
        made = tr.row_linear(tr.column_linear(x * 2, first, tp).relu(), second, tp)
        return made + tr.all_reduce(made.detach() + 1, tp)

    return call


def cached(here: Here) -> Call:
    """Return a step of decoding that appends to a cache of its own."""
    cache = tr.KVCache(here.cp(), layers=1, kv_heads=2, head_dim=8, capacity=64, page=2)

    def call(x: torch.Tensor) -> torch.Tensor:
        q = x.detach()[:1, :1, None].expand(1, 1, 2, 8)
        return tr.cached_attention(q * 2, q, q + 1, cache, 0) + 1

    return call


def engine(here: Here) -> Call:
    """Return what an engine asks for: the queries of all ranks, and partial results combined."""
    cp = here.cp()

    def call(x: torch.Tensor) -> torch.Tensor:
        q = tr.gather_queries(x.detach()[:, :2], cp) * 2
        return tr.combine(q, q.float().sum(-1), cp, q_home="all") + 1

    return call


def both_ways(here: Here, make: Callable[[Here], Call]) -> tuple[list[Tensors], set[str], int]:
    """Return results as they are and compiled, with gradients; what torch warned of us; how many frames it compiled."""
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    found: list[Tensors] = []
    with compiler() as dynamo, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for call in (make(here), torch.compile(make(here), backend="eager")):
            for _ in range(3):
                out = call(x)
                grads = torch.autograd.grad(out.square().sum(), x) if out.requires_grad else ()
            found.append((out.detach(), *grads))
        compiled = int(dynamo.utils.counters["frames"]["ok"])
    return found, {str(each.message) for each in warned if "tokenring" in str(each.message)}, compiled


@pytest.mark.parametrize("make", [layers, cached, engine])
def test_graphs_break_for_the_call_alone(make: Callable[[Here], Call], ranks: RankPools) -> None:
    """Only the caller's frames are compiled: the function, and what is left of it after each break."""
    for (plain, compiled), warned, frames in ranks(2).within(CALL_SECONDS, both_ways, make):
        for a, b in zip(plain, compiled, strict=True):
            assert torch.equal(a, b)
        assert not warned and frames <= 8
