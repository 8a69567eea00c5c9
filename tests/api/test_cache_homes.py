"""Homes of q and the exchanges of partial results: against float64, to the bit and to the byte; on 1 to 4 ranks."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from oracle import cached64
from ranks import Here, RankPools
from sampling import FULL_GRID
from test_kv_cache import SIZES

import tokenring as tr
from tokenring.ir.cached_exchange import ONE_SHOT, TWO_STEP, exchange_data
from tokenring.proof.cached_exchange import verify_exchange

DIM = 8


class Homed(NamedTuple):
    """New tokens over cached ones; query heads are 12, which 1 to 4 ranks divide."""

    ranks: int
    cached: int
    new: int
    home: str = "heads"
    schedule: str = "auto"
    kv_heads: int = 2
    heads: int = 12
    window: int | None = None
    starts: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    page: int = 4
    transport: str = "shm"
    reads: bool = False

    @property
    def batch(self) -> int:
        return 1 if self.starts is None else len(self.starts)

    @property
    def length(self) -> int:
        return self.cached + (0 if self.reads else self.new)


def given(case: Homed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q of the new tokens, k and v of all, the same on all ranks."""
    draw = torch.Generator().manual_seed(case.length)
    sizes = (case.new, case.heads), (case.length, case.kv_heads), (case.length, case.kv_heads)
    q, k, v = (torch.randn(case.batch, n, heads, DIM, generator=draw).to(case.dtype) for n, heads in sizes)
    return q, k, v


def right(case: Homed) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, T, H, D] and lse [B, H, T] in float64."""
    q, k, v = given(case)
    q_at = torch.arange(case.cached, case.cached + case.new)
    return cached64(q, k, v, torch.full_like(q_at, case.cached) if case.reads else q_at, case.window, case.starts)


def run_homed(here: Here, case: Homed) -> tuple[torch.Tensor, torch.Tensor, int]:
    """out and lse of the new tokens, and the bytes that a rank sent for them after what is said once."""
    cp = here.cp(transport=here.transport(case.transport))
    cache = tr.KVCache(
        cp, layers=2, kv_heads=case.kv_heads, head_dim=DIM, capacity=case.length + 8, page=case.page, dtype=case.dtype,
        window=case.window, batch=case.batch, starts=case.starts,
    )  # fmt: skip
    q, k, v = given(case)
    if case.cached:
        with cache.step(case.cached):
            for layer in range(2):
                rows = torch.zeros(case.batch, case.cached, case.heads, DIM, dtype=case.dtype)
                tr.cached_attention(rows, k[:, : case.cached], v[:, : case.cached], cache, layer)
    heads = case.heads // cp.world_size
    mine = q[:, :, cp.rank * heads : (cp.rank + 1) * heads] if case.home == "heads" else q
    new: tuple[Any, Any] = (None, None) if case.reads else (k[:, case.cached :], v[:, case.cached :])
    found, sent = [], []
    with cache.step(case.new, case.home, case.schedule):  # type: ignore[arg-type]
        for layer in range(2):
            before_bytes = 0 if cp.transport is None else sum(cp.transport.sent_bytes.values())
            found.append(tr.cached_attention(mine, *new, cache, layer, return_lse=True))
            sent.append(0 if cp.transport is None else sum(cp.transport.sent_bytes.values()) - before_bytes)
        if case.reads:
            for layer in range(2):
                tr.cached_attention(mine, k[:, : case.new], v[:, : case.new], cache, layer)
    assert torch.equal(found[0][0], found[1][0])
    return *found[1], sent[1]


def check(case: Homed, founds: list[tuple[torch.Tensor, torch.Tensor, int]]) -> None:
    wanted, wanted_lse = right(case)
    limit = 1e-6 if case.dtype == torch.float32 else 2e-2
    heads = case.heads // (case.ranks if case.home == "heads" else 1)
    for rank, (out, lse, _) in enumerate(founds):
        own = slice(rank * heads, (rank + 1) * heads) if case.home == "heads" else slice(None)
        assert out.dtype == case.dtype
        torch.testing.assert_close(out.double(), wanted[:, :, own], atol=limit, rtol=limit)
        torch.testing.assert_close(lse.double(), wanted_lse[:, own], atol=1e-5, rtol=1e-6)
        if case.home == "all":
            assert torch.equal(out, founds[0][0]) and torch.equal(lse, founds[0][1])  # to the bit, on all ranks


KINDS: tuple[dict[str, Any], ...] = ({}, {"window": 9}, {"starts": (0, 5, 2)})


def every_case() -> list[Homed]:
    made = []
    for ranks, new, kind, (home, schedule) in product(
        (1, 2, 3, 4), (1, 3, 16, 129), KINDS, (("heads", "auto"), ("all", "two-step"), ("all", "auto"))
    ):
        for cached in sorted({0, 1, ranks - 1, ranks, 777, 8192}):
            for kv_heads in (1, 2, 12):
                made.append(Homed(ranks, cached, new, home, schedule, kv_heads, **kind))
    return made


CASES = every_case()
SAMPLE = CASES if FULL_GRID else random.Random(5).sample([each for each in CASES if 0 < each.cached < 1000], 16)
CHOSEN = (
    Homed(4, 77, 1, kv_heads=4),
    Homed(3, 77, 5, kv_heads=4, transport="gloo"),  # parts of the heads that are no groups of a kv head
    Homed(2, 3, 1, kv_heads=12),  # nothing is sealed
    Homed(4, 77, 4, dtype=torch.bfloat16),
    Homed(4, 77, 3, "all", "two-step", dtype=torch.bfloat16, transport="gloo"),
    Homed(4, 41, 3, "heads", reads=True),
    Homed(3, 41, 3, "all", "two-step", reads=True),
    Homed(2, 777, 16, "heads", page=64),  # many open tokens
)


@pytest.mark.parametrize("case", [*CHOSEN, *SAMPLE], ids=str)
def test_homes_equal_float64(case: Homed, ranks: RankPools) -> None:
    check(case, ranks(case.ranks)(run_homed, case))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks_", [2, 3, 4])
def test_two_steps_give_the_results_of_one(ranks_: int, dtype: torch.dtype, ranks: RankPools) -> None:
    """And in each exchange a rank sends what the data say, and the docs: T 5, H 12, D 8."""
    item, new = dtype.itemsize, 5
    partial, q = new * 12 * (DIM * item + 4), new * 12 * DIM * item
    bits = []
    for home, schedule, name, part in (
        ("all", "one-shot", ONE_SHOT, partial), ("all", "two-step", TWO_STEP, partial // ranks_),
        ("heads", "auto", "direct-q", partial // ranks_),
    ):  # fmt: skip
        case = Homed(ranks_, 77, new, home, schedule, dtype=dtype)
        founds = ranks(ranks_)(run_homed, case)
        data = exchange_data(name, ranks_)
        verify_exchange(data)
        for rank, (*_, sent) in enumerate(founds):
            assert sent == data.sent_bytes(rank, {"partial": part, "result": part, "q": q // ranks_})
        bits.append([out for out, *_ in founds])
    limit = 3e-7 if dtype == torch.float32 else 1e-2  # exp of other vectors, then rounded
    for founds_ in (bits[1], [torch.cat(bits[2], 2)]):
        torch.testing.assert_close(founds_[0], bits[0][0], atol=limit, rtol=0)


def wrong(here: Here, what: str) -> str:
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, **{**SIZES, "layers": 1})
    q, k, v = (torch.zeros(1, 20, heads, DIM) for heads in (4, 2, 2))
    tr.cached_attention(q, k, v, cache, 0)
    q, k, v = (x[:, :1] for x in (q, k, v))
    try:
        if what == "odd heads":
            with cache.step(1, "heads"):
                tr.cached_attention(q[:, :, :1].repeat(1, 1, 3, 1), k, v, cache, 0)
        elif what == "schedules":
            with cache.step(1, "all", "two-step" if here.rank else "one-shot"):
                pass
        elif what == "homes":
            with cache.step(1, "heads" if here.rank else "all"):
                pass
        elif what == "parts":
            tr.cached_attention(q[:, :, : 2 + here.rank * 2], k, v, cache, 0, q_home="heads")
        else:
            with cache.step(1, "all", "two-step"):
                tr.cached_attention(q[:, :, :2], k, v, cache, 0)
    except tr.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("world", "what", "said"),
    [(3, "odd heads", "multiple of 2; each rank gives an equal part of them, Hq/3"),
     (2, "schedules", "schedule: rank 0: one-shot; rank 1: two-step"),
     (2, "homes", "q_home: rank 0: all; rank 1: heads"),
     (2, "parts", "query heads: rank 0: 4; rank 1: 8"), (3, "parts do not divide", "2 do not divide over 3")],
)  # fmt: skip
def test_what_does_not_go_is_refused_on_all_ranks(world: int, what: str, said: str, ranks: RankPools) -> None:
    with ranks.expendable(world) as pool:
        for text in pool(wrong, what):
            assert said in text, text


def chosen(here: Here, cached: int) -> tuple[list[str], int]:
    """The exchanges that steps of 1 and of 2,048 tokens take on slow links, and what was said for the second time."""
    from tokenring.planner.interconnects.interconnect import mesh_fabric, of_one_host

    net = of_one_host("slow", mesh_fabric(here.world_size, 0.01))
    cp = here.cp(transport=here.transport("shm"), topology=net)
    cache = tr.KVCache(cp, layers=1, kv_heads=2, head_dim=DIM, capacity=8192, page=4)
    for _ in range(2):
        for tokens in (64, 1, 2048):
            q, k, v = (torch.ones(1, tokens, heads, DIM) for heads in (4, 2, 2))
            tr.cached_attention(q, k, v, cache, 0)
    return list(cache.choices.values()), len(cache.choices)


def test_the_exchange_is_chosen_by_size_and_links(ranks: RankPools) -> None:
    for names, count in ranks(4)(chosen, 64):
        assert names == [ONE_SHOT, TWO_STEP, TWO_STEP][: len(names)] and count == len(names) >= 2
