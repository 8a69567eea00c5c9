"""A cache of latents: kept once, to the byte; attention over it against float64 of the keys and values they make."""

from __future__ import annotations

import random
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from oracle import cached64
from ranks import Here, RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring import ConfigurationError, UnsupportedError
from tokenring.api.caching.memory import CacheMemory

cached: Any = tr.cached_latent_attention  # of operands in a list
HEADS, NOPE, ROPE, VALUE, LATENT = 4, 12, 8, 10, 24
ALL, TOKENS, BY_HEADS = "all", "tokens", "heads"


class Case(NamedTuple):
    """A sequence in chunks: (tokens, home) for each."""

    ranks: int
    chunks: tuple[tuple[int, str], ...]
    page: int = 4
    schedule: str = "auto"
    window: int | None = None
    starts: tuple[int, ...] | None = None
    batch: int = 1

    @property
    def length(self) -> int:
        return sum(tokens for tokens, _ in self.chunks)


def inputs(case: Case) -> tuple[torch.Tensor, ...]:
    """q, latent, rope of the whole sequence, and the weight; the same on all ranks."""
    generator = torch.Generator().manual_seed(case.length)
    shapes = (
        (case.batch, case.length, HEADS, NOPE + ROPE), (case.batch, case.length, LATENT),
        (case.batch, case.length, ROPE), (HEADS * (NOPE + VALUE), LATENT),
    )  # fmt: skip
    q, latent, rope, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    return q, latent, rope, weight * LATENT**-0.5


def wanted(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, T, H, Dv] and lse [B, H, T] in float64, of keys and values as a model makes them."""
    q, latent, rope, weight = (x.double() for x in inputs(case))
    made = (latent @ weight.t()).view(*latent.shape[:2], HEADS, -1)
    k = torch.cat([made[..., :NOPE], rope[:, :, None].expand(-1, -1, HEADS, -1)], -1)
    return cached64(q, k, made[..., NOPE:], torch.arange(case.length), case.window, case.starts)


class Found(NamedTuple):
    """Of one rank: out and lse of all tokens in order, and what the cache holds in the end."""

    out: torch.Tensor
    lse: torch.Tensor
    places: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    nbytes: int


def made_cache(cp: tr.ContextParallel, case: Case, **more: Any) -> tr.KVCache:
    sizes = {"capacity": case.length, "batch": case.batch, "page": case.page, "window": case.window} | more
    return tr.KVCache(cp, layers=1, kv_heads=1, head_dim=LATENT + ROPE, latent_dim=LATENT, starts=case.starts, **sizes)


def run_case(here: Here, case: Case) -> Found:
    cp = here.cp(transport=here.transport("shm"), layout="zigzag", schedule="direct-kv")
    cache = made_cache(cp, case)
    q, latent, rope, weight = inputs(case)
    outs, lses, at, moves = [], [], 0, case.schedule in ("ring", "direct-kv")
    for tokens, home in case.chunks:
        parts, own = [x[:, at : at + tokens] for x in (q, latent, rope)], weight
        if home == TOKENS:
            parts = [tr.shard(x, cp) for x in parts]
        if home == BY_HEADS:
            parts[0] = parts[0].chunk(here.world_size, 2)[here.rank].contiguous()
            own = weight.chunk(here.world_size)[here.rank]
        with cache.step(tokens, home, case.schedule if (home == TOKENS) == moves else "auto"):  # type: ignore[arg-type]
            out, lse = cached(*parts, own, cache, 0, return_lse=True)
        if home == TOKENS:
            out, lse = tr.unshard(out, cp), tr.unshard(lse.contiguous(), cp, 2)
        if home == BY_HEADS:
            out, lse = gathered(out, 2), gathered(lse, 1)
        outs.append(out)
        lses.append(lse)
        at += tokens
    return Found(torch.cat(outs, 1), torch.cat(lses, 2), cache.positions(), *cache.held(), cache.nbytes)


def gathered(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The ranks' parts of heads, together."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return x
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def check(case: Case, founds: list[Found]) -> None:
    (out, lse), (_, latent, rope, _) = wanted(case), inputs(case)
    whole = torch.cat([latent, rope], -1)[:, :, None]
    for found in founds:
        torch.testing.assert_close(found.out.double(), out, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(found.lse.double(), lse, atol=1e-5, rtol=1e-6)
        assert torch.equal(found.out, founds[0].out)
        assert torch.equal(found.keys, whole[:, found.places]) and torch.equal(found.values, found.keys[..., :LATENT])
        tokens = case.length // case.ranks + case.ranks * case.page
        assert found.nbytes == case.batch * tokens * (LATENT + ROPE) * 4  # once


def every_case() -> list[Case]:
    made = []
    for ranks, past, new, page in product((1, 2, 3, 4), (0, 1, 5, 777), (1, 3, 16, 48), (1, 4, 64)):
        even = past // (2 * ranks) * 2 * ranks
        before = tuple((n, home) for n, home in ((even, TOKENS), (past - even, ALL)) if n)
        for home in (ALL, TOKENS, BY_HEADS):
            if (home != TOKENS or new % (2 * ranks) == 0) and (home != BY_HEADS or HEADS % ranks == 0):
                made.append(Case(ranks, (*before, (new, home)), page))
    return made


SAMPLE = every_case() if FULL_GRID else random.Random(2).sample(every_case(), 12)
CHOSEN = (
    Case(2, ((24, TOKENS), (5, ALL), (16, TOKENS), *((1, ALL),) * 20)),
    Case(4, ((24, TOKENS), (5, BY_HEADS), (16, TOKENS), *((1, BY_HEADS),) * 20)),
    Case(4, ((40, ALL), *((1, ALL),) * 5), schedule="two-step"),
    Case(4, ((24, TOKENS), (16, TOKENS), (16, TOKENS)), schedule="ring"),
    Case(2, ((24, TOKENS), (16, TOKENS), (8, TOKENS)), schedule="direct-kv", batch=2),
    Case(3, ((24, TOKENS), (5, ALL), *((1, ALL),) * 9), window=9),
    Case(2, ((19, ALL), (4, ALL), *((1, ALL),) * 5), starts=(0, 7, 16), batch=3, page=1),
)


@pytest.mark.parametrize("case", [*CHOSEN, *SAMPLE], ids=str)
def test_equals_float64(case: Case, ranks: RankPools) -> None:
    check(case, ranks(case.ranks)(run_case, case))


def values_moved_apart(here: Here, case: Case) -> Found:
    """With what a cache of keys and values does: it moves values beside keys. Here they are the same memory."""
    owned = CacheMemory.owned
    both = property(lambda self: ((self.keys, self.open_keys), (self.values, self.open_values)))
    CacheMemory.owned = both  # type: ignore[method-assign, assignment]
    try:
        return run_case(here, case)
    finally:
        CacheMemory.owned = owned  # type: ignore[method-assign]


def test_values_that_are_moved_apart_are_seen(ranks: RankPools) -> None:
    case = Case(2, ((11, ALL), *((1, ALL),) * 9))
    check(case, ranks(2)(run_case, case))
    with pytest.raises(AssertionError):
        check(case, ranks(2)(values_moved_apart, case))


# ---------- bytes


def sent_by(here: Here, home: str, schedule: str = "auto") -> int:
    """Bytes of the second of two calls of 24 tokens, or of one decoded."""
    cp = here.cp(transport=here.transport("shm"), schedule="direct-kv", layout="contiguous")
    case = Case(here.world_size, ((24, TOKENS), (24, TOKENS)))
    cache, weight = made_cache(cp, case), inputs(case)[3]
    assert cp.transport is not None
    for at, tokens, home_of in ((0, 24, TOKENS), (24, 24 if home == TOKENS else 1, home)):
        parts = [x[:, at : at + tokens] for x in inputs(case)[:3]]
        parts = [tr.shard(x, cp) for x in parts] if home_of == TOKENS else parts
        before = sum(cp.transport.sent_bytes.values())
        with cache.step(tokens, home_of, schedule):  # type: ignore[arg-type]
            cached(*parts, weight, cache, 0)
    return sum(cp.transport.sent_bytes.values()) - before


@pytest.mark.parametrize("ranks_", [2, 3])
def test_bytes(ranks_: int, ranks: RankPools) -> None:
    """Decode: results as wide as latents. Sharded: q and results, or cached latents; new ones to the ranks behind."""
    assert ranks(ranks_)(sent_by, ALL) == [(ranks_ - 1) * HEADS * (LATENT * 4 + 4)] * ranks_
    part, q_and_results = 24 // ranks_, HEADS * (LATENT + ROPE + LATENT + 1)
    new = [(ranks_ - 1 - rank) * part * (LATENT + ROPE) * 4 for rank in range(ranks_)]
    for schedule, moves in (("direct-q", q_and_results), ("direct-kv", LATENT + ROPE), ("ring", LATENT + ROPE)):
        wanted_ = [part * moves * 4 * (ranks_ - 1) + each for each in new]
        assert ranks(ranks_)(sent_by, TOKENS, schedule) == wanted_, schedule


def test_deepseek_keeps_a_fiftieth_and_more() -> None:
    """128 heads of 192 and 128 in bf16: 576 of a token, for 40,960."""
    cp = tr.ContextParallel(group="self")
    sizes: dict[str, Any] = {"layers": 1, "capacity": 64, "page": 16, "dtype": torch.bfloat16}
    latents = tr.KVCache(cp, kv_heads=1, head_dim=576, latent_dim=512, **sizes)
    assert latents.nbytes == 80 * 576 * 2
    assert tr.KVCache(cp, kv_heads=128, head_dim=192, value_dim=128, **sizes).nbytes == 80 * 128 * 320 * 2


# ---------- crops, beams, reads


def run_changed(here: Here) -> float:
    """A cropped and reordered cache goes on as one that never had more, with its rows in that order."""
    cp = here.cp(transport=here.transport("shm"))
    case = Case(here.world_size, ((40, ALL),), batch=2)
    q, latent, rope, weight = inputs(case)
    found = []
    for changed in (True, False):
        cache = made_cache(cp, case)
        order = [1, 0] if changed else [0, 1]
        given = [x if changed else x[[1, 0]] for x in (q, latent, rope)]
        for at, end in ((0, 30), (21, 22)) if changed else ((0, 21), (21, 22)):
            rows = given if at == 0 else [x[[1, 0]] for x in (q, latent, rope)]
            with cache.step(end - at):
                out = cached(*(x[:, at:end] for x in rows), weight, cache, 0)
            if at == 0 and changed:
                cache.crop(21)
                cache.reorder(torch.tensor(order))
        absorbed = torch.randn(2, 1, HEADS, LATENT + ROPE, generator=torch.Generator().manual_seed(1))
        found += [out, tr.cached_attention(absorbed, None, None, cache, 0)]
    return max(float((a - b).abs().max()) for a, b in zip(found[:2], found[2:], strict=True))


@pytest.mark.parametrize("ranks_", [1, 3])
def test_crop_reorder_and_reads(ranks_: int, ranks: RankPools) -> None:
    assert max(ranks(ranks_)(run_changed)) <= 2e-6


# ---------- what is refused


def refusals(here: Here) -> list[str]:
    """Of ranks whose caches differ in kind; of a call that one rank makes wrongly outside of a step; of a right one."""
    cp, said = here.cp(transport=here.transport("shm")), []
    case = Case(2, ((8, ALL),))
    q, latent, rope, weight = inputs(case)
    kind: dict[str, Any] = {"latent_dim": LATENT} if here.rank else {"value_dim": LATENT}
    other = tr.KVCache(cp, layers=1, kv_heads=1, head_dim=LATENT + ROPE, capacity=8, page=4, **kind)
    cache = made_cache(cp, case)
    calls = (
        lambda: other.step(8).__enter__(),
        lambda: cached(q, latent, rope[:, :4] if here.rank else rope, weight, cache, 0),
        lambda: cached(q, latent, rope, weight, cache, 0),
    )
    for call in calls:
        try:
            call()
            said.append("made")
        except ConfigurationError as error:
            said.append(str(error))
    return said


def test_all_ranks_hear_what_one_refuses(ranks: RankPools) -> None:
    first, second = ranks(2)(refusals)
    assert all("kv heads and widths" in each[0] and "latents" in each[0] for each in (first, second))
    assert second[1].startswith("latent and rope must have the same tokens") and "rank 1" in first[1]
    assert first[2] == second[2] == "made"


@pytest.mark.parametrize(
    "sizes", [{"kv_heads": 2}, {"value_dim": 8}, {"latent_dim": 33}, {"latent_dim": 0}, {"latent_dim": "24"}]
)
def test_sizes_that_cannot_be(sizes: dict[str, Any]) -> None:
    given: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 32, "latent_dim": 24, "capacity": 8} | sizes
    with pytest.raises(ConfigurationError, match=r"KVCache: (latent|value)_dim="):
        tr.KVCache(tr.ContextParallel(group="self"), **given)


def test_calls_that_do_not_fit() -> None:
    cp, case = tr.ContextParallel(group="self"), Case(1, ((8, ALL),))
    q, latent, rope, weight = inputs(case)
    cache, plain = made_cache(cp, case), tr.KVCache(cp, layers=1, kv_heads=1, head_dim=LATENT + ROPE, capacity=8)
    keys = torch.cat([latent, rope], -1)[:, :, None]
    wide = torch.randn(1, 8, HEADS, LATENT + ROPE)
    for call, says in (
        (lambda: cached(q, latent, rope, weight, plain, 0), "has head_dim=32 and no latents"),
        (lambda: cached(q, latent, rope, weight[1:], cache, 0), r"weight is \[87, 24\]"),
        (lambda: cached(q, 7, rope, weight, cache, 0), "cached_latent_attention expects latent"),
        (lambda: cached(q, latent, rope, weight, 7, 0), "cache is of type int"),
        (lambda: tr.cached_attention(wide, keys, keys[..., :LATENT], cache, 0), "v was given, and values of"),
        (lambda: tr.cached_attention(wide, keys, None, plain, 0), "give both k and v"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            call()
    with pytest.raises(UnsupportedError, match="no backward"):
        cached(q.requires_grad_(), latent, rope, weight, cache, 0)
