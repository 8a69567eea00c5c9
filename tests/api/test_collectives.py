"""All-reduce, reduce-scatter and all-gather as schedules: exact, two steps, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr

POINTS = [(2, "auto"), (3, "direct-q"), (4, "auto"), (4, "direct-q/pieces4"), (4, "mesh-q/2x2")]
if FULL_GRID:
    POINTS += [(5, "auto"), (6, "mesh-q/2x3"), (7, "tokenring"), (8, "auto"), (8, "direct-q/pieces4"), (8, "reduced/4")]
SHAPES = ((7,), (3, 5), (64, 33), ())


def values(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def reduced(here: Here, schedule: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[int, int]]:
    """Sums of several shapes, and the bytes that this rank sent for the largest."""
    assert here.base.transport is not None
    sent = here.base.transport.sent_bytes
    made = []
    with tr.TensorParallel(schedule=schedule, transport=here.base.transport) as tp:
        for shape in SHAPES:
            mine = values(here.rank, *shape, dtype=dtype)
            before = mine.clone()
            sent.clear()
            made.append(tr.all_reduce(mine, tp))
            if shape == (64, 33):
                counted = dict(sent)
            assert mine.equal(before)
    return made, counted


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=("fp32", "bf16"))
@pytest.mark.parametrize(("world", "schedule"), POINTS)
def test_all_reduce(ranks: RankPools, world: int, schedule: str, dtype: torch.dtype) -> None:
    """The same on every rank, and of parts that are rounded once on their way."""
    parts = ranks(world)(reduced, schedule, dtype)
    for at, shape in enumerate(SHAPES):
        wanted = sum(values(rank, *shape, dtype=dtype).double() for rank in range(world))
        assert isinstance(wanted, torch.Tensor)
        limit = 1e-5 if dtype == torch.float32 else 2**-7
        for made, _ in parts:
            assert made[at].dtype == dtype
            torch.testing.assert_close(made[at].double(), wanted, rtol=limit, atol=limit)
            assert made[at].equal(parts[0][0][at])
    if schedule in ("auto", "direct-q"):  # two steps: to each other rank its part, and then one's own
        part = -(-64 * 33 // world) * dtype.itemsize
        assert all(sent == dict.fromkeys(set(range(world)) - {rank}, 2 * (-(-part // 4) * 4))
                   for rank, (_, sent) in enumerate(parts))


def in_bf16(here: Here, partials: torch.dtype | None) -> torch.Tensor:
    assert here.base.transport is not None
    with tr.TensorParallel(partials=partials, transport=here.base.transport) as tp:
        return tr.all_reduce(values(here.rank, 4096, dtype=torch.bfloat16), tp)


def test_sums_are_rounded_once(ranks: RankPools) -> None:
    """Of bf16: the exact sum in that dtype, to the bit. Parts that go straight home are the tensors themselves."""
    wanted = sum(values(rank, 4096, dtype=torch.bfloat16).double() for rank in range(3))
    assert isinstance(wanted, torch.Tensor)
    assert all(made.equal(wanted.bfloat16()) for made in ranks(3)(in_bf16, torch.float32))
    assert all(made.equal(wanted.bfloat16()) for made in ranks(3)(in_bf16, None))


def scattered(here: Here, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert here.base.transport is not None
    with tr.TensorParallel(schedule="direct-q/pieces4", transport=here.base.transport) as tp:
        return tr.reduce_scatter(values(here.rank, 2 * rows, 5), tp), tr.all_gather(values(here.rank, rows, 5), tp)


@pytest.mark.parametrize("rows", (4, 3, 1))
def test_reduce_scatter_and_all_gather(ranks: RankPools, rows: int) -> None:
    """Also of parts that the pieces do not divide."""
    parts = ranks(2)(scattered, rows)
    wanted = values(0, 2 * rows, 5) + values(1, 2 * rows, 5)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), wanted)
    for _, gathered in parts:
        assert gathered.equal(torch.cat([values(0, rows, 5), values(1, rows, 5)]))


REFUSED: dict[str, Callable[[tr.TensorParallel], Any]] = {
    "torch.int64 is not supported": lambda tp: tr.all_reduce(torch.arange(4), tp),
    "has no derivative": lambda tp: tr.all_reduce(torch.ones(4, requires_grad=True), tp),
    "has no elements": lambda tp: tr.all_gather(torch.ones(0), tp),
    "without dimensions": lambda tp: tr.all_gather(torch.tensor(1.0), tp),
    "its first dimension": lambda tp: tr.reduce_scatter(torch.tensor(1.0), tp),
    "was given a list": lambda tp: tr.all_reduce([1.0], tp),  # type: ignore[arg-type]
    "tp is of type int": lambda tp: tr.all_gather(torch.ones(1), 3),  # type: ignore[arg-type]
    "tp is of type NoneType": lambda tp: tr.reduce_scatter(torch.ones(1), None),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("says", REFUSED)
def test_refused(says: str) -> None:
    with tr.TensorParallel("self") as tp, pytest.raises(tr.TokenRingError) as caught:
        REFUSED[says](tp)
    assert says in str(caught.value)


def test_columns_that_would_move() -> None:
    with tr.TensorParallel("self", "ring") as tp, pytest.raises(tr.ConfigurationError, match="rows have to move"):
        tr.all_reduce(torch.ones(4), tp)


def other_length(here: Here) -> str:
    assert here.base.transport is not None
    with tr.TensorParallel(transport=here.base.transport) as tp:
        with pytest.raises(tr.ConfigurationError) as caught:
            tr.all_reduce(torch.ones(4 + 4 * here.rank), tp)
        assert tr.all_reduce(torch.ones(4), tp).equal(torch.full((4,), 2.0))
        return str(caught.value)


def test_ranks_that_differ(ranks: RankPools) -> None:
    assert all("shape: rank 0: [4]; rank 1: [8]" in text for text in ranks(2)(other_length))
