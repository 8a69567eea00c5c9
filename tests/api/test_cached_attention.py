"""Cached attention against float64: prefill in any chunks, decode, padding, windows; on 1 to 4 ranks."""

from __future__ import annotations

import math
import random
from itertools import product
from typing import NamedTuple

import pytest
import torch
from oracle import cached64
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring import ConfigurationError

HEADS, DIM = 4, 8


class Case(NamedTuple):
    """A sequence in chunks: (tokens, home) for each."""

    ranks: int
    chunks: tuple[tuple[int, str], ...]
    kv_heads: int = 2
    page: int = 4
    transport: str = "shm"
    layout: str = "zigzag"
    window: int | None = None
    starts: tuple[int, ...] | None = None
    batch: int = 1
    value_dim: int = DIM
    schedule: str = "auto"  # of sharded chunks

    @property
    def compared(self) -> int:
        """The first row that is compared: of long sequences only the last chunk is."""
        return self.length - self.chunks[-1][0] if self.length > 1000 else 0

    @property
    def length(self) -> int:
        return sum(tokens for tokens, _ in self.chunks)


def inputs(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v of the whole sequence, the same on all ranks."""
    generator = torch.Generator().manual_seed(case.length)
    widths = (HEADS, DIM), (case.kv_heads, DIM), (case.kv_heads, case.value_dim)
    q, k, v = (torch.randn(case.batch, case.length, heads, dim, generator=generator) for heads, dim in widths)
    return q, k, v


def wanted(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, T, H, D] and lse [B, H, T] in float64, by the definition; from the first row on that is compared."""
    q, k, v = inputs(case)
    return cached64(q[:, case.compared :], k, v, torch.arange(case.compared, case.length), case.window, case.starts)


def chunks_of(here: Here, case: Case, whole: torch.Tensor, at: int, tokens: int, home: str) -> torch.Tensor:
    part = whole[:, at : at + tokens]
    return tr.shard(part, here.memory["cp"]) if home == "tokens" else part


class Found(NamedTuple):
    """Of one rank: out and lse of all tokens in order, and what the cache holds in the end."""

    out: torch.Tensor
    lse: torch.Tensor
    places: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    nbytes: int
    local_length: int


def run_case(here: Here, case: Case) -> Found:
    cp = here.memory["cp"] = here.cp(transport=here.transport(case.transport), layout=case.layout, schedule="direct-kv")
    cache = tr.KVCache(
        cp, layers=1, batch=case.batch, kv_heads=case.kv_heads, head_dim=DIM, value_dim=case.value_dim,
        capacity=case.length, page=case.page, window=case.window, starts=case.starts,
    )  # fmt: skip
    q, k, v = inputs(case)
    outs, lses, at = [], [], 0
    for tokens, home in case.chunks:
        parts = [chunks_of(here, case, x, at, tokens, home) for x in (q, k, v)]
        with cache.step(tokens, home, case.schedule if home == TOKENS else "auto"):  # type: ignore[arg-type]
            out, lse = tr.cached_attention(parts[0], parts[1], parts[2], cache, 0, return_lse=True)
        if home == "tokens":
            out, lse = tr.unshard(out, cp), tr.unshard(lse.contiguous(), cp, 2)
        outs.append(out)
        lses.append(lse)
        at += tokens
    keys, values = cache.held()
    return Found(
        torch.cat(outs, 1), torch.cat(lses, 2), cache.positions(), keys, values, cache.nbytes, cache.local_length
    )


def check(case: Case, founds: list[Found]) -> None:
    (out, lse), first = wanted(case), case.compared
    for found in founds:
        torch.testing.assert_close(found.out[:, first:].double(), out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.lse[:, :, first:].double(), lse, atol=1e-5, rtol=1e-6)
        assert torch.equal(found.out, founds[0].out) and torch.equal(found.lse, founds[0].lse)  # to the bit
    check_held(case, founds)


def check_held(case: Case, founds: list[Found]) -> None:
    """Every token lies at one rank, sealed, or at all of them; with the bits that were given; in S/P + P · page."""
    _, k, v = inputs(case)
    for found in founds:
        assert torch.equal(found.keys, k[:, found.places]) and torch.equal(found.values, v[:, found.places])
        most = case.length // case.ranks + case.ranks * case.page
        assert found.nbytes == case.batch * most * case.kv_heads * (DIM + case.value_dim) * 4
        assert found.local_length == len(found.places) <= most
    times = torch.cat([found.places for found in founds]).bincount(minlength=case.length)
    assert set(times.tolist()) <= {1, case.ranks}


ALL, TOKENS = "all", "tokens"
PAST = (0, 1, 2, 3, 4, 777, 8192)


def every_case() -> list[Case]:
    made = []
    for ranks, past, new, kv_heads in product((1, 2, 3, 4), PAST, (1, 3, 16, 129), (4, 2, 1)):
        even = past // (2 * ranks) * 2 * ranks
        before = tuple((n, home) for n, home in ((even, TOKENS), (past - even, ALL)) if n)
        made.append(Case(ranks, (*before, (new, ALL)), kv_heads))
        if new % (2 * ranks) == 0:
            made.append(Case(ranks, (*before, (new, TOKENS)), kv_heads))
    return made


CASES = every_case()
SAMPLE = CASES if FULL_GRID else random.Random(3).sample([case for case in CASES if case.length < 1000], 20)
CHOSEN = (
    Case(2, ((24, TOKENS), (5, ALL), (16, TOKENS), *((1, ALL),) * 20)),
    Case(3, ((24, TOKENS), (5, ALL), (12, TOKENS), *((1, ALL),) * 14), transport="gloo", layout="striped"),
    Case(4, ((24, TOKENS), (5, ALL), (16, TOKENS), *((1, ALL),) * 20), window=9),
    Case(2, ((3, ALL), (24, TOKENS), (5, ALL), (16, TOKENS), (1, ALL), (1, ALL)), window=30, page=1),
    Case(2, ((19, ALL), (4, ALL), *((1, ALL),) * 5), starts=(0, 7, 16), batch=3),
    Case(3, ((300, ALL), (1, ALL)), kv_heads=1, starts=(290, 3), batch=2, window=40),
    Case(2, ((16, TOKENS), (3, ALL), (1, ALL)), value_dim=4),
    Case(2, ((16, TOKENS), (3, ALL), (8, TOKENS), (1, ALL)), value_dim=4, schedule="ring"),
    Case(3, ((24, TOKENS), (29, ALL), (12, TOKENS), (18, TOKENS)), schedule="direct-kv", batch=2),
    Case(4, ((24, TOKENS), (16, TOKENS), (1, ALL)), schedule="ring", layout="contiguous", kv_heads=1),
    Case(4, ((24, TOKENS), (16, TOKENS), (1, ALL)), schedule="direct-q"),
)


def chunkings(ranks_: int, home: str) -> list[tuple[tuple[int, str], ...]]:
    """A prompt of 96 tokens and 5 decoded ones: at once, token by token, and in chunks of all sizes."""
    unit = 2 * ranks_ if home == TOKENS else 1
    draw = random.Random(ranks_)
    made = [[96], [unit] * (96 // unit)]
    for _ in range(3):
        sizes: list[int] = []
        while sum(sizes) < 96:
            sizes.append(min(unit * draw.randint(1, 40 // unit), 96 - sum(sizes)))
        made.append(sizes)
    return [(*((size, home) for size in sizes), *((1, ALL),) * 5) for sizes in made]


@pytest.mark.parametrize("home", [ALL, TOKENS])
@pytest.mark.parametrize("ranks_", [2, 3])
def test_any_chunks_make_the_same_cache(ranks_: int, home: str, ranks: RankPools) -> None:
    """To the bit, wherever a token lies; of tokens that all ranks had, each also lies at the same rank."""
    first: list[Found] = []
    for chunks in chunkings(ranks_, home):
        case = Case(ranks_, chunks)
        founds = ranks(ranks_)(run_case, case)
        check(case, founds)
        first = first or founds
        for found, wanted_ in zip(founds, first, strict=True):
            assert (found.out - wanted_.out).norm() <= 1e-6 * wanted_.out.norm()
            if home == ALL:
                assert torch.equal(found.places, wanted_.places)
                assert torch.equal(found.keys, wanted_.keys) and torch.equal(found.values, wanted_.values)


class Sent(NamedTuple):
    """Bytes that a rank sent for a decode step, and how many steps after the first bound anything."""

    one: int
    bound: int


def run_long(here: Here, dtype: torch.dtype) -> Sent:
    """Many decode steps."""
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, layers=2, kv_heads=2, head_dim=DIM, capacity=200, page=4, dtype=dtype)
    q, k, v = (torch.randn(1, 33, heads, DIM, generator=torch.Generator().manual_seed(1)) for heads in (HEADS, 2, 2))
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    with cache.step(33):
        for layer in range(2):
            tr.cached_attention(q, k, v, cache, layer)
    sent, bound = [], []
    assert cp.transport is not None
    for _ in range(120):
        before = sum(cp.transport.sent_bytes.values())
        with cache.step(1):
            for layer in range(2):
                tr.cached_attention(q[:, :1], k[:, :1], v[:, :1], cache, layer)
        sent.append(sum(cp.transport.sent_bytes.values()) - before)
        bound.append(list(cp.pool(cache.device).exchanges.values()))
    assert len(set(sent)) == 1, "what is sent depends on what is cached"
    return Sent(sent[0], sum(now != bound[0] for now in bound))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks_", [2, 3])
def test_a_decode_step_sends_results_alone_and_binds_nothing_new(
    ranks_: int, dtype: torch.dtype, ranks: RankPools
) -> None:
    a_layer = (ranks_ - 1) * HEADS * (DIM * dtype.itemsize + 4)  # (P - 1)(o + l)
    for found in ranks(ranks_)(run_long, dtype):
        assert found == Sent(2 * a_layer, 0)


def run_sharded(here: Here, schedule: str, cached: int, new: int) -> int:
    """Bytes of the second of two sharded chunks, less those of its tokens among themselves."""
    cp = here.cp(transport=here.transport("shm"), schedule="direct-kv")
    assert cp.transport is not None
    sent = []
    for before_it in (0, cached):
        cache = tr.KVCache(cp, layers=1, kv_heads=2, head_dim=DIM, capacity=cached + new, page=4)
        for tokens in (before_it, new):
            x = [torch.randn(1, tokens // here.world_size, heads, DIM) for heads in (HEADS, 2, 2)]
            before = sum(cp.transport.sent_bytes.values())
            if tokens:
                with cache.step(tokens, "tokens", schedule):  # type: ignore[arg-type]
                    tr.cached_attention(x[0], x[1], x[2], cache, 0)
        sent.append(sum(cp.transport.sent_bytes.values()) - before)
        cache.close()
    return sent[1] - sent[0]


@pytest.mark.parametrize("ranks_", [2, 3])
def test_a_sharded_chunk_sends_q_and_results_or_the_cache(ranks_: int, ranks: RankPools) -> None:
    """To the byte; "auto" sends what is predicted to be faster."""
    share = (ranks_ - 1) / ranks_
    q_and_results, cache = HEADS * (DIM * 4 + DIM * 4 + 4), 2 * 2 * DIM * 4  # of a new token, of a cached one
    for schedule, cached, new, wanted_ in (
        ("direct-q", 48, 24, 24 * q_and_results), ("direct-kv", 48, 24, 48 * cache), ("ring", 48, 24, 48 * cache),
        ("auto", 12000, 12, 12 * q_and_results), ("auto", 24, 240, 24 * cache),
    ):  # fmt: skip
        assert ranks(ranks_)(run_sharded, schedule, cached, new) == [round(wanted_ * share)] * ranks_, schedule


def run_uneven(here: Here) -> tuple[str, str, float]:
    """What is said where the cache cannot move: of a window, of unequal parts; and how far "auto" is off then."""
    cp, said = here.cp(transport=here.transport("shm"), schedule="direct-kv"), []
    case = Case(2, ((24, TOKENS), (8, TOKENS)))
    q, k, v = inputs(case)
    q, k, v = (torch.cat([x[:, :21], x[:, 24:]], 1) for x in (q, k, v))  # as a cache that is cropped
    for window in (9, None):
        cache = tr.KVCache(cp, layers=1, kv_heads=2, head_dim=DIM, capacity=32, page=4, window=window)
        first = [torch.cat([x[:, :21], x[:, :3]], 1) for x in (q, k, v)]
        for schedule in ("direct-q", "ring", "auto"):
            cut = first if cache.length == 0 else [x[:, 21:] for x in (q, k, v)]
            parts = [tr.shard(x, cp) for x in cut]
            try:
                with cache.step(cut[0].shape[1], "tokens", schedule):
                    out = tr.cached_attention(parts[0], parts[1], parts[2], cache, 0)
            except ConfigurationError as error:
                said.append(str(error))
            if schedule == "direct-q":
                cache.crop(21)
    right, _ = cached64(q[:, 21:], k, v, torch.arange(21, 29))
    return said[0], said[1], float((tr.unshard(out, cp).double() - right).abs().max())


def test_a_cache_that_cannot_move(ranks: RankPools) -> None:
    for window, parts, error in ranks(2)(run_uneven):
        assert window.startswith("schedule='ring' moves what is cached: layer 0 has a window")
        assert "sealed tokens of layer 0, and a schedule moves equal parts; give 'direct-q' or 'auto'" in parts
        assert error <= 1e-6


def run_half(here: Here) -> tuple[float, bool]:
    """A cache in bf16, against float64 of the same rounded inputs."""
    cp = here.cp(transport=here.transport("gloo"))
    cache = tr.KVCache(cp, layers=1, kv_heads=2, head_dim=DIM, capacity=64, page=4, dtype=torch.bfloat16)
    case = Case(2, ((24, ALL), (1, ALL)))
    q, k, v = (x.bfloat16() for x in inputs(case))
    outs = [tr.cached_attention(q[:, a:b], k[:, a:b], v[:, a:b], cache, 0) for a, b in ((0, 24), (24, 25))]
    k, v = (x.double().repeat_interleave(2, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) / math.sqrt(DIM)
    scores = scores.masked_fill(torch.ones(25, 25).triu(1).bool(), -math.inf)
    right = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    return float((torch.cat(outs, 1).double() - right).abs().max()), outs[0].dtype == torch.bfloat16


def test_bfloat16(ranks: RankPools) -> None:
    for error, same in ranks(2)(run_half):
        assert same and error < 2e-2


@pytest.mark.parametrize("case", [*CHOSEN, *SAMPLE], ids=str)
def test_equals_float64(case: Case, ranks: RankPools) -> None:
    check(case, ranks(case.ranks)(run_case, case))
