"""Sizes that do not divide, and ranks that are lost: errors of our family, which name the rank, on every rank."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable

import pytest
import torch
from patience import patient
from ranks import Here, RankError, RankPools

import tokenring as tr

TIMEOUT_SECONDS = 3.0  # of a peer that is silent
Call = Callable[[Here, tr.TensorParallel], object]


def part(here: Here, *shape: int, dim: int = 0) -> torch.Tensor:
    return torch.ones(shape).chunk(here.world_size, dim)[here.rank]


# The schedule, what every rank calls, and what all hear.
UNEVEN: dict[str, tuple[str, Call, str]] = {
    "features, cut by hand": (
        "direct-q",
        lambda here, tp: tr.column_linear(torch.ones(1, 2, 8), part(here, 5, 8), tp),
        "weight: rank 0: [3, 8]; rank 1: [2, 8]",
    ),
    "features, cut by us": (
        "direct-q",
        lambda here, tp: tp.shard(torch.ones(99, 8)),
        "99 features do not divide by 2 ranks: pad dimension 0 of the weight to 100, or take another number of ranks",
    ),
    "features of a row layer": (
        "direct-q",
        lambda here, tp: tr.row_linear(torch.ones(1, 4, 3), torch.ones(8, 2), tp),
        "h with 3 features and a weight with 2: h has the weight's features",
    ),
    "tokens": (
        "direct-q",
        lambda here, tp: tr.column_linear(part(here, 1, 5, 8, dim=1), torch.ones(2, 8), tp),
        "x: rank 0: [1, 3, 8]; rank 1: [1, 2, 8]",
    ),
    "tokens of a row layer": (
        "direct-q",
        lambda here, tp: tr.row_linear(torch.ones(1, 3, 2), torch.ones(8, 2), tp),
        "3 tokens, which do not divide by 2 ranks: pad the sequence",
    ),
    "a row layer where tokens stay": (
        "direct-q",
        lambda here, tp: tr.row_linear(torch.ones(1, 4, 4), torch.ones(8, 2), tp),
        "h of 4 tokens and 4 features, but schedule 'direct-q' has 8 and 2 on a rank: compute the column layer "
        "before it by the same schedule, or say which stays: TensorParallel(stays=...)",
    ),
    "pieces": (
        "direct-q/pieces4",
        lambda here, tp: tr.column_linear(torch.ones(1, 3, 8), torch.ones(2, 8), tp),
        "4 pieces do not divide chunks of 3 tokens",
    ),
    "widths": (
        "direct-q",
        lambda here, tp: tr.column_linear(torch.ones(1, 3, 8), torch.ones(2, 7), tp),
        "column_linear was given [1, 3, 8] and [2, 7]",
    ),
    "a width on one rank": (
        "direct-q",
        lambda here, tp: tr.column_linear(torch.ones(1, 3, 8), torch.ones(2, 8 - here.rank), tp),
        "column_linear was given [1, 3, 8] and [2, 7]",
    ),
    "rows of a sum": (
        "direct-q",
        lambda here, tp: tr.reduce_scatter(torch.ones(3, 2), tp),
        "its first dimension does not divide by 2 ranks; pad it",
    ),
    "a plan": (
        "auto",
        lambda here, tp: tp.plan("column", 8, 3, 2, torch.float32),
        "plan was given 3 features, which 2 ranks do not divide: pad them",
    ),
    "ranks of a topology": (
        "tiles/2x2",
        lambda here, tp: tp,
        "tiles/2x2",
    ),
}


def uneven(here: Here, what: str) -> str:
    schedule, call, _ = UNEVEN[what]
    transport = here.base.transport
    assert transport is not None
    with pytest.raises(tr.TokenRingError) as caught, tr.TensorParallel(schedule=schedule, transport=transport) as tp:
        call(here, tp)
    with tr.TensorParallel(transport=transport) as tp:
        assert tr.all_reduce(torch.ones(4), tp).equal(torch.full((4,), 2.0))  # the group lives on
    return str(caught.value)


@pytest.mark.parametrize("what", UNEVEN)
def test_what_does_not_divide(ranks: RankPools, what: str) -> None:
    assert all(UNEVEN[what][2] in text for text in ranks(2)(uneven, what))


# ---------- ranks that are lost


def a_layer(tp: tr.TensorParallel) -> None:
    x = torch.ones(1, 4, 8, requires_grad=True)
    y = tr.row_linear(tr.column_linear(x, torch.ones(2, 8), tp), torch.ones(8, 2), tp)
    torch.autograd.backward(y.sum())


LOST: dict[str, Callable[[tr.TensorParallel], object]] = {
    "layers": a_layer,
    "all_reduce": lambda tp: tr.all_reduce(torch.ones(64), tp),
}


def with_a_dead_rank(here: Here, what: str) -> None:
    tp = tr.TensorParallel(timeout_seconds=patient(TIMEOUT_SECONDS))
    for _ in range(1000):
        LOST[what](tp)
        if here.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("what", LOST)
def test_a_dead_rank_is_named(ranks: RankPools, what: str) -> None:
    with ranks.expendable(3) as some, pytest.raises(RankError) as caught:
        some(with_a_dead_rank, what)
    text = str(caught.value)
    assert "rank 1: died with exit code -9" in text
    assert len(re.findall(r"PeerLost: rank 1 of 3 is lost: its process \(pid \d+ on .+?\) is gone", text)) == 2, text


def between_passes(here: Here) -> str:
    """What is heard where rank 1 leaves out its backward pass."""
    with tr.TensorParallel(transport="gloo", timeout_seconds=patient(TIMEOUT_SECONDS)) as tp:
        x = torch.ones(1, 4, 8, requires_grad=True)
        h = tr.column_linear(x, torch.ones(2, 8), tp)
        if here.rank == 1:
            return ""
        with pytest.raises(tr.PeerLost) as caught:
            torch.autograd.backward(h.sum())
        assert caught.value.rank == 1
        return str(caught.value)


def test_a_silent_rank_is_named(ranks: RankPools) -> None:
    with ranks.expendable(3) as some:
        assert all("rank 1 of 3 is lost" in text for rank, text in enumerate(some(between_passes)) if rank != 1)
