"""A cache over ranks: what it keeps, drops, refuses, and says when a rank is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import cached64, error_of_terms
from ranks import Here, RankError, RankPools
from test_cached_attention import HEADS

import tokenring as tr
from tokenring.api.caching.filling import CacheSight, Filled, Room, below, cut, places
from tokenring.api.caching.one_token import one_token
from tokenring.api.caching.rows import _after, rows_over
from tokenring.backends.merging.all_at_once import merge_all
from tokenring.runtime.cached_exchange import PartialSlots, Rows
from tokenring.sequence.layout import Positions, make_layout

SIZES: dict[str, Any] = {"layers": 2, "kv_heads": 2, "head_dim": 8, "capacity": 64, "page": 4}


def alone(**options: Any) -> tr.KVCache:
    return tr.KVCache(tr.ContextParallel("self"), **{**SIZES, **options})


def new_tokens(count: int, batch: int = 1, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + count)
    q, k, v = (torch.randn(batch, count, heads, 8, generator=generator) for heads in (HEADS, 2, 2))
    return q, k, v


def feed(cache: tr.KVCache, count: int, seed: int = 0) -> torch.Tensor:
    """Append so many tokens to all layers; out of the last."""
    q, k, v = new_tokens(count, cache.batch, seed)
    out = q
    with cache.step(count):
        for layer in range(cache.layers):
            out = tr.cached_attention(q, k, v, cache, layer)
    return out


# ---------- what it keeps


def cropped_is_as_never_fed(here: Here, first: int, dropped: int) -> bool:
    """Feed, drop, and go on; against a cache that never had what was dropped."""
    cp = here.cp(transport=here.transport("shm"))
    a, b = (tr.KVCache(cp, **SIZES) for _ in range(2))
    feed(a, first), feed(a, 9), feed(b, first), feed(b, 9)
    feed(a, dropped, seed=5)
    a.drop(dropped)
    assert a.length == b.length == first + 9
    left = {int(place) for place in a.positions()}
    assert max(left) < a.length
    tokens = [new_tokens(first), new_tokens(9), *(new_tokens(1, seed=seed) for seed in range(12))]
    _, k, v = (torch.cat(parts, dim=1) for parts in zip(*tokens, strict=True))
    for seed in range(12):
        q, end = new_tokens(1, seed=seed)[0], first + 9 + seed + 1
        want, terms = (cached64(q, k[:, :end], x[:, :end], torch.tensor([end - 1]))[0] for x in (v, v.abs()))
        assert all(error_of_terms(feed(cache, 1, seed), want, terms) <= 1e-6 for cache in (a, b))
    return True


@pytest.mark.parametrize(("ranks_", "first", "dropped"), [(1, 3, 5), (2, 5, 3), (2, 11, 13), (3, 7, 16), (3, 20, 20)])
def test_what_is_cropped_was_never_there(ranks_: int, first: int, dropped: int, ranks: RankPools) -> None:
    assert all(ranks(ranks_)(cropped_is_as_never_fed, first, dropped))


def sharded_and_cropped(here: Here) -> list[int]:
    """Crop into what was sharded, after open tokens that lie before it."""
    cp = here.cp(transport=here.transport("shm"), schedule="ring")
    cache = tr.KVCache(cp, **{**SIZES, "layers": 1})
    for count, home in ((3, "all"), (16, "tokens"), (6, "all")):
        parts = [tr.shard(x, cp) if home == "tokens" else x for x in new_tokens(count)]
        tr.cached_attention(parts[0], parts[1], parts[2], cache, 0, q_home=home)  # type: ignore[call-overload]
    cache.crop(9)
    places = cache.positions().tolist()
    feed(cache, 30)
    return [*places, *cache.positions().tolist()]


def test_a_crop_into_sharded_tokens(ranks: RankPools) -> None:
    a, b = ranks(2)(sharded_and_cropped)
    assert {*a, *b} == set(range(39))


def reordered(here: Here) -> tuple[torch.Tensor, torch.Tensor]:
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, **SIZES, batch=3, starts=[0, 4, 2])
    feed(cache, 21)
    cache.reorder(torch.tensor([2, 0, 0]))
    keys, _ = cache.held()
    assert cache.starts is not None and cache.starts.tolist() == [2, 0, 0]
    return keys, cache.positions()


def test_rows_go_on_with_what_others_cached(ranks: RankPools) -> None:
    whole = new_tokens(21, 3)[1][[2, 0, 0]]
    for keys, places_ in ranks(2)(reordered):
        assert torch.equal(keys, whole[:, places_])


def test_a_reset_cache_is_as_new() -> None:
    cache = alone()
    first = feed(cache, 21)
    cache.reset()
    assert cache.length == cache.local_length == 0
    assert torch.equal(feed(cache, 21), first)


def test_reading_sees_all_and_appends_nothing() -> None:
    cache = alone(layers=1)
    q, k, v = new_tokens(21)
    with cache.step(21):
        out = tr.cached_attention(q, k, v, cache, 0)
    read = tr.cached_attention(q[:, -1:], None, None, cache, 0)
    torch.testing.assert_close(read, out[:, -1:])
    assert cache.length == 21


def test_it_says_what_it_is() -> None:
    cache = alone()
    feed(cache, 5)
    assert repr(cache) == "KVCache(5 of 64 tokens, 5 of them at rank 0 of 1, 2 layers, 17408 bytes)"
    assert cache.nbytes == 2 * 2 * 2 * 8 * 4 * (64 + 4)
    assert "filled" not in dir(cache) and "crop" in dir(cache)
    cache.close()
    assert repr(cache).endswith(" 0 bytes, closed)")


def decoded(here: Here, short: bool) -> tuple[torch.Tensor, int]:
    """Outs of some tokens, and how many calls went the short way."""
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, **SIZES)
    feed(cache, 21)
    taken = 0

    def counted(*given: Any) -> object:
        nonlocal taken
        found = one_token(*given) if short else None
        taken += found is not None
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokenring.api.caching.attending.one_token", counted)
        outs = [feed(cache, 1, seed) for seed in range(12)]
    return torch.cat(outs), taken


def test_the_short_way_gives_the_bits_of_the_long_one(ranks: RankPools) -> None:
    (short, taken), (long, none) = ranks(2)(decoded, True)[0], ranks(2)(decoded, False)[0]
    assert torch.equal(short, long)
    assert taken == 10 and none == 0  # two of the steps seal pages


def in_any_mode(here: Here) -> float:
    """Made and first used in inference mode, then used outside of it; and gradients after that."""
    cp = tr.ContextParallel(schedule="direct-kv")
    with torch.inference_mode():
        cache = tr.KVCache(cp, **SIZES)
        feed(cache, 21), feed(cache, 1)
    feed(cache, 12)
    x = torch.randn(1, 8, 2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(tr.attention(x, x, x, cp, is_causal=True).sum(), [x])
    with torch.inference_mode():
        feed(cache, 1)
    cp.close()
    return float(gradient.abs().sum())


def test_training_and_serving_share_a_context(ranks: RankPools) -> None:
    assert all(found > 0 for found in ranks(2)(in_any_mode))


# ---------- what it refuses

REFUSED: dict[str, tuple[str, Callable[[tr.KVCache], object]]] = {
    "capacity": ("has room for 64 tokens and holds 5: 60 more are 1 too many", lambda c: c.step(60).__enter__()),
    "ids": (r"token_ids are \[2, 3\]: give", lambda c: c.step(torch.zeros(2, 3, dtype=torch.int64)).__enter__()),
    "no tokens": ("a step of 0 tokens", lambda c: c.step(0).__enter__()),
    "home": ("q_home='rows': write 'all'", lambda c: c.step(1, "rows").__enter__()),  # type: ignore[arg-type]
    "schedule": ("schedule='ring' of a step with q_home='all': give one of 'auto'",
                 lambda c: c.step(1, "all", "ring").__enter__()),  # type: ignore[arg-type]
    "schedule of heads": ("give one of 'auto', 'direct-q'", lambda c: c.step(1, "heads", "one-shot").__enter__()),
    "layer": ("layer=2: the cache has layers 0 to 1", lambda c: tr.cached_attention(*new_tokens(1), c, 2)),
    "only k": ("give both k and v", lambda c: tr.cached_attention(*new_tokens(1)[:2], None, c, 0)),
    "heads": ("multiple of 2", lambda c: tr.cached_attention(new_tokens(1)[0][:, :, :3], *new_tokens(1)[1:], c, 0)),
    "other lengths": ("so give k", lambda c: tr.cached_attention(new_tokens(1)[0], *new_tokens(2)[1:], c, 0)),
    "dtype": ("is torch.float64", lambda c: tr.cached_attention(new_tokens(1)[0].double(), *new_tokens(1)[1:], c, 0)),
    "cache": ("make a KVCache", lambda c: tr.cached_attention(*new_tokens(1), None, 0)),  # type: ignore[call-overload]
    "crop": ("give how many tokens to keep", lambda c: c.crop("2")),  # type: ignore[arg-type]
    "crop below 0": (r"drop\(n\) drops the newest n", lambda c: c.crop(-1)),
    "drop": ("how many of the newest tokens to drop", lambda c: c.drop(-1)),
    "rows": ("row numbers from 0 to 0", lambda c: c.reorder(torch.tensor([1]))),
    "shape of rows": ("expects 1 row numbers", lambda c: c.reorder(torch.tensor([0, 0]))),
    "starts": ("give the first token of each", lambda c: c.reset([0, 0])),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused(what: str) -> None:
    said, call = REFUSED[what]
    cache = alone()
    feed(cache, 5)
    with pytest.raises(tr.ConfigurationError, match=said):
        call(cache)
    assert cache.length == 5
    feed(cache, 1)  # it goes on


@pytest.mark.parametrize(
    ("options", "said"),
    [({"page": 0}, "page=0"), ({"window": [3]}, r"window=\[3\]"), ({"starts": [-1]}, r"starts=\[-1\]"),
     ({"layers": True}, "layers=True"), ({"capacity": 1.5}, "capacity=1.5")],
)  # fmt: skip
def test_sizes_that_cannot_be(options: dict[str, Any], said: str) -> None:
    with pytest.raises(tr.ConfigurationError, match=said):
        alone(**options)


def test_other_refusals() -> None:
    with pytest.raises(tr.UnsupportedError, match="float64"):
        alone(dtype=torch.float64)
    cache = alone(layers=1)
    q, k, v = new_tokens(1)
    with pytest.raises(tr.UnsupportedError, match="no backward"):
        tr.cached_attention(q.requires_grad_(), k, v, cache, 0)
    q = q.detach()
    with pytest.raises(tr.ConfigurationError, match="layer 0 holds 0 where 1 are due"), cache.step(1):
        pass
    with cache.step(1):
        tr.cached_attention(q, k, v, cache, 0)
        with pytest.raises(tr.ConfigurationError, match="call it once in each step"):
            tr.cached_attention(q, k, v, cache, 0)
        with pytest.raises(tr.ConfigurationError, match="crop inside of a step"):
            cache.crop(0)
        with pytest.raises(tr.ConfigurationError, match="has not ended"):
            cache.step(1).__enter__()
    cache.close()
    with pytest.raises(tr.ConfigurationError, match="was closed"):
        cache.step(1).__enter__()
    closed = alone(layers=1)
    closed.cp.close()
    with pytest.raises(tr.ConfigurationError, match="was closed"):
        tr.cached_attention(q, k, v, closed, 0)


def differing(here: Here, what: str) -> str:
    cp = here.cp(transport=here.transport("shm"))
    options = {"page": 4 + (what == "page") * here.rank}
    cache = tr.KVCache(cp, **{**SIZES, **options})
    ids = torch.tensor([[5, 7 + (what == "ids") * here.rank]])
    try:
        feed(cache, 3)
        with cache.step(60 + 2 if what == "capacity" and here.rank else ids):
            pass
    except tr.ConfigurationError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [("ids", "token ids: rank 0: ending in [7]"), ("page", "page: rank 0: 4; rank 1: 5"),
     ("capacity", "rank 1 refused: the cache has room for 64")],
)  # fmt: skip
def test_ranks_that_differ_are_told_before_anything_moves(what: str, said: str, ranks: RankPools) -> None:
    first, second = ranks(2)(differing, what)
    assert said in first
    assert said in second or (what == "capacity" and "has room for 64" in second)


def uneven(here: Here) -> str:
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, **SIZES)
    try:
        with cache.step(6, "tokens"):
            pass
    except tr.ConfigurationError as error:
        return str(error)
    return ""


def test_a_part_that_does_not_divide(ranks: RankPools) -> None:
    for said in ranks(2)(uneven):
        assert "6 tokens do not divide into the 4 chunks of layout 'zigzag': give 4 of them" in said


def lose(here: Here) -> str:
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, **SIZES)
    feed(cache, 13), feed(cache, 1)
    with cache.step(1):
        if here.rank == 1:
            os._exit(3)
        tr.cached_attention(*new_tokens(1), cache, 0)
    return ""


def test_a_lost_rank_is_named_with_its_step(ranks: RankPools) -> None:
    with ranks.expendable(2) as pool, pytest.raises(RankError, match=r"rank 1 of 2 is lost.*layer 0 in step 3"):
        pool(lose)


def raise_in(here: Here) -> str:
    cp = tr.ContextParallel(timeout_seconds=20.0)
    cache = tr.KVCache(cp, **SIZES)
    feed(cache, 13), feed(cache, 1)
    try:
        with cache.step(1):
            if here.rank == 1:
                raise KeyError("mine")
            tr.cached_attention(*new_tokens(1), cache, 0)
    except (tr.PeerLost, KeyError) as error:
        return str(error)
    return ""


def test_an_error_in_a_step_reaches_the_other_ranks(ranks: RankPools) -> None:
    with ranks.expendable(2) as pool:
        first, second = pool(raise_in)
    assert "rank 1" in first and "step 3" in first
    assert second == "'mine'"


# ---------- parts


def test_runs() -> None:
    runs = (Positions(0, 4), Positions(10, 20, 5), Positions(7, 9))
    assert places(runs, torch.device("cpu")).tolist() == [0, 1, 2, 3, 10, 15, 7, 8]
    assert places(cut(runs, 3, 3), torch.device("cpu")).tolist() == [3, 10, 15]
    assert places(below(runs, 11), torch.device("cpu")).tolist() == [0, 1, 2, 3, 10, 7, 8]


def test_what_a_window_has_left_is_not_read() -> None:
    runs = (Positions(0, 4), Positions(8, 12), Positions(16, 20))
    k = torch.full((1, 1, 12, 8), torch.nan)
    k[:, :, 4:] = 1.0
    q = torch.ones(1, 1, 1, 8)
    for window, left in ((12, 8), (10, 8), (9, 4), (8, 4)):
        found = _after(runs, 20 - window)
        assert sum(map(len, found[1])) == left and found[0] == 12 - left
        out, lse = rows_over(q, (Positions(20, 21),), k, k, runs, CacheSight(window), 1.0)
        assert torch.equal(out, torch.ones_like(out)) and bool(lse.isfinite().all())
    out, lse = rows_over(q, (Positions(90, 91),), k, k, runs, CacheSight(5), 1.0)
    assert not out.any() and bool((lse == -torch.inf).all())


def test_pages_go_where_fewest_are_sealed() -> None:
    room = Room(2, 4, 40, 20)
    filled = Filled.empty(2).after(19, room).filled
    assert (filled.counts, filled.open) == ((8, 8), 3)
    filled = filled.cropped(7)  # rank 1 loses more: positions 4 to 7 were its first page
    assert filled.counts == (4, 3)
    after = filled.after(9, room)
    assert [deal.rank for deal in after.deals] == [1, 0]
    assert after.filled.length == 16


def test_a_cropped_cache_takes_all_that_it_has_room_for() -> None:
    room = Room(3, 4, 50, 16)
    filled = Filled.empty(3)
    for fed, kept in ((13, 6), (13, 7), (20, 17), (9, 21)):
        filled = filled.after(fed, room).filled.cropped(kept)
    while filled.length < room.capacity:
        filled = filled.after(1, room).filled
        assert filled.open <= room.open and max(filled.counts) <= room.sealed
    assert sum(filled.counts) + filled.open == 50


def test_sharded_parts_need_room() -> None:
    filled = Filled.empty(2).after_sharded(make_layout("zigzag", 2, 32), Room(2, 4, 40, 20))
    with pytest.raises(tr.ConfigurationError, match="room for 20 sealed tokens at each rank"):
        filled.after_sharded(make_layout("zigzag", 2, 16), Room(2, 4, 40, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merging_all_at_once(dtype: torch.dtype) -> None:
    rows = Rows(2, 3, 2, 6, dtype)
    slots = PartialSlots(torch.empty(4 * rows.slot_bytes, dtype=torch.uint8), rows, 4)
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(4, 2, 3, 2, 6, generator=generator).to(dtype).float()
    lses = 30 * torch.randn(4, 2, 3, 2, generator=generator)
    lses[1:3, 0] = -torch.inf
    lses[:, 1, 1] = -torch.inf
    outs = outs.masked_fill((lses == -torch.inf)[..., None], 0.0)
    for index in range(4):
        slots.put(index, (outs[index], lses[index]))
    out, lse = merge_all(slots.outs, slots.lses)
    wanted = torch.logsumexp(lses.double(), 0)
    weights = (lses.double() - wanted.masked_fill(wanted == -torch.inf, 0.0)).exp()[..., None]
    torch.testing.assert_close(lse.double(), wanted, atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(out.double(), (weights * outs.double()).sum(0), atol=1e-5, rtol=1e-5)
    assert len(slots.messages[0]) == rows.number * (4 + 6 * dtype.itemsize)
