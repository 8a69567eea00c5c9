"""What ranks hear of each other in calls of a cache and of its exchange: nobody waits for a rank that refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Here, RankPools
from test_cached_attention import HEADS
from test_kv_cache import SIZES, feed, new_tokens

import tokenring as tr
from tokenring.sequence.layout import make_layout


def said_by(call: Callable[[], object]) -> str:
    """The class and the text of what a call raises; "" if nothing."""
    try:
        call()
    except tr.TokenRingError as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------- engines


def combined(cp: tr.ContextParallel, dtype: torch.dtype = torch.float32, heads: int = 4) -> torch.Tensor:
    return tr.combine(torch.ones(2, heads, 8), torch.zeros(2, heads, dtype=dtype), cp)


def with_another_pool(here: Here, transport: str) -> bool:
    """Combine beside attention, after the memory of one rank alone has grown, as programs of ranks differ in size."""
    cp = here.cp(transport=here.transport(transport), schedule="ring")
    found = [combined(cp)]
    if here.rank == 1 and transport == "gloo":  # that of shm grows at all ranks together
        cp.pool(torch.device("cpu")).reserve(1 << 20)
    found.append(combined(cp))
    x = torch.ones(1, 64, 2, 8)
    tr.attention(x, x, x, cp, is_causal=True)
    found.append(combined(cp))
    return all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_ranks_agree_alike_whatever_their_memory(transport: str, ranks: RankPools) -> None:
    assert all(ranks(2)(with_another_pool, transport))


def refused_at(here: Here, time: int) -> tuple[str, str]:
    """Combine, where rank 1 refuses its own call; and what the next call says."""
    cp = tr.ContextParallel(timeout_seconds=20.0)
    if time:
        combined(cp)
    said = said_by(lambda: combined(cp, torch.float64 if here.rank else torch.float32))
    return said, said_by(lambda: combined(cp))


def test_a_first_call_is_refused_together(ranks: RankPools) -> None:
    for said, after in ranks(2)(refused_at, 0):
        assert "ConfigurationError: combine expects" in said or "rank 1 refused: combine expects" in said
        assert after == ""


def test_a_later_refusal_is_heard_at_once(ranks: RankPools) -> None:
    with ranks.expendable(2) as pool:
        (first, _), (second, _) = pool(refused_at, 1)
    assert first.startswith("PeerLost") and "combine expects" in first and "no answer" not in first
    assert second.startswith("ConfigurationError: combine expects")


def one_gathers(here: Here) -> str:
    """Rank 1 gathers what it should combine, of the same sizes."""
    cp = here.cp()
    if here.rank:
        return said_by(lambda: tr.gather_queries(torch.ones(1, 2, 4), cp))
    return said_by(lambda: tr.combine(torch.ones(1, 4, 4), torch.zeros(1, 4), cp))


def test_a_gather_is_no_combine(ranks: RankPools) -> None:
    with ranks.expendable(2) as pool:
        for said in pool(one_gathers):
            assert "function: rank 0: combine; rank 1: gather_queries" in said, said


def gathered(here: Here) -> str:
    cp = here.cp(transport=here.transport("shm"))
    return said_by(lambda: tr.gather_queries(torch.ones(2, 2, 8) if here.rank else torch.ones(2), cp))


def test_queries_are_refused_together(ranks: RankPools) -> None:
    first, second = ranks(2)(gathered)
    assert "gather_queries expects" in first and "rank 0 refused: gather_queries expects" in second


def test_lengths_of_ranks_that_there_are() -> None:
    cp = tr.ContextParallel("self")
    with pytest.raises(tr.ConfigurationError, match="has ranks 0 to 0"):
        tr.local_lengths(torch.tensor([3]), cp, rank=1)
    with pytest.raises(tr.ConfigurationError, match="tensor of integers"):
        tr.local_lengths([3], cp)  # type: ignore[arg-type]


# ---------- what ranks compare

def call(cache: tr.KVCache, layer: int = 0, heads: int = 4, scale: float | None = None, **more: Any) -> object:
    q, k, v = new_tokens(1)
    return tr.cached_attention(q[:, :, :heads], k, v, cache, layer, scale=scale, **more)


def in_a_step(cache: tr.KVCache, other: bool, **given: Any) -> None:
    with cache.step(1):
        for layer in range(2):
            call(cache, layer, **given if other else {})


def read(cache: tr.KVCache, rows: int) -> object:
    return tr.cached_attention(new_tokens(rows)[0], None, None, cache, 0)


def read_in_a_step(cache: tr.KVCache, rows: int) -> None:
    with cache.step(1):
        read(cache, rows)


def moved(cache: tr.KVCache, other: bool, how: Callable[[tr.KVCache], object]) -> None:
    if other:
        how(cache)
    feed(cache, 1)


def dealt_twice(cache: tr.KVCache) -> None:
    """Two layers that hold as much, dealt each in its own way."""
    whole = new_tokens(16)
    tr.cached_attention(*whole, cache, 0)
    q, k, v = (tr.shard(x, cache.cp) for x in whole)
    tr.cached_attention(q, k, v, cache, 1, q_home="tokens")


DIFFERING: dict[str, tuple[str, Callable[[tr.KVCache, bool], object]]] = {
    "heads in a step": ("query heads: rank 0: 4; rank 1: 2", lambda c, other: in_a_step(c, other, heads=2)),
    "heads": ("query heads: rank 0: 4; rank 1: 2", lambda c, other: call(c, heads=2 if other else 4)),
    "scale in a step": ("scale: rank 0: 0.35", lambda c, other: in_a_step(c, other, scale=0.5)),
    "scale": ("scale: rank 0: 0.35", lambda c, other: call(c, scale=0.5 if other else None)),
    "rows of a read": ("rows of the read: rank 0: 3; rank 1: 4", lambda c, other: read(c, 3 + other)),
    "rows in a step": ("rows of the read: rank 0: 3; rank 1: 4", lambda c, other: read_in_a_step(c, 3 + other)),
    "reorder": ("crops, drops and reorders: rank 0: none",
                lambda c, other: moved(c, other, lambda c: c.reorder(torch.tensor([1, 0])))),
    "crop": ("crops, drops and reorders: rank 0: none", lambda c, other: moved(c, other, lambda c: c.crop(2))),
    "reset": ("tokens cached: rank 0: 3; rank 1: 0", lambda c, other: moved(c, other, lambda c: c.reset())),
}  # fmt: skip


def differing(here: Here, what: str) -> tuple[str, str, int]:
    """What a rank hears of another that does it otherwise, what a call says after it, and what is cached then."""
    cp = here.cp(transport=here.transport("shm"), schedule="ring")
    batch = 2 if what == "reorder" else 1
    cache = tr.KVCache(cp, **SIZES, batch=batch)
    if what not in ("heads in a step", "scale in a step"):
        feed(cache, 3)
    said = said_by(lambda: DIFFERING[what][1](cache, here.rank == 1))
    cache.reset()
    after = said_by(lambda: feed(cache, 1))
    return said, after, cache.length


@pytest.mark.parametrize("what", DIFFERING)
def test_ranks_that_differ_are_refused_before_anything_moves(what: str, ranks: RankPools) -> None:
    for said, after, length in ranks(2)(differing, what):
        assert said.startswith("Disagreement") and DIFFERING[what][0] in said
        assert after == "" and length == 1


def of_another_layout(here: Here) -> str:
    """One name, two layouts: what lies where would differ."""
    mine = replace(make_layout("zigzag" if here.rank else "contiguous", 2, 16), name="mine")
    cp = here.cp(transport=here.transport("shm"), schedule="ring", layout=mine)
    cache = tr.KVCache(cp, **SIZES)
    return said_by(lambda: cache.step(16, "tokens").__enter__())


def test_layouts_are_compared_by_what_they_say(ranks: RankPools) -> None:
    assert all("layout: rank 0:" in said for said in ranks(2)(of_another_layout))


def dealt_otherwise(here: Here) -> tuple[str, str]:
    """Layers of equal length that lie elsewhere, agreed on call by call: rank 1 made its calls in another order."""
    cp = here.cp(transport=here.transport("shm"), schedule="ring")
    cache = tr.KVCache(cp, **SIZES)
    dealt_twice(cache)
    alike = said_by(lambda: feed(cache, 1))
    if here.rank == 1:
        cache.filled = [*reversed(cache.filled)]
    return alike, said_by(lambda: feed(cache, 1))


def test_what_each_layer_holds_is_compared(ranks: RankPools) -> None:
    for alike, said in ranks(2)(dealt_otherwise):
        assert alike == "" and "all layers: rank 0" in said, (alike, said)


# ---------- refusals of one rank


def alone_refused(here: Here, what: str) -> tuple[str, str]:
    """Calls outside of steps that rank 1 refuses; and whether the context lives."""
    cp = here.cp(transport=here.transport("shm"))
    cache = tr.KVCache(cp, **{**SIZES, "layers": 1})
    q, k, v = new_tokens(1)
    given: tuple[Any, Any, Any] = q, k, v
    if here.rank == 1:
        given = {
            "gradients": (q.clone().requires_grad_(), k, v), "shape": (q, k[:, :, :1], v), "only k": (q, k, None),
            "device": (q, k.to("meta"), v), "dtype": (q, k, v.double()),
        }[what]  # fmt: skip
    said = said_by(lambda: tr.cached_attention(*given, cache, 0))
    return said, said_by(lambda: feed(cache, 1))


@pytest.mark.parametrize(
    ("what", "reason"),
    [("gradients", "no backward"), ("shape", "so give k"), ("only k", "give both k and v"), ("device", "k is torch"),
     ("dtype", "v is torch.float64")],
)  # fmt: skip
def test_a_call_that_one_rank_refuses(what: str, reason: str, ranks: RankPools) -> None:
    (first, after), (second, _) = ranks(2)(alone_refused, what)
    assert "rank 1 refused" in first and reason in first, first
    assert reason in second and after == ""


def forgetful(here: Here) -> tuple[str, str]:
    """A step in which rank 1 leaves out a layer, for whose results the other waits."""
    cp = tr.ContextParallel(timeout_seconds=20.0)
    cache = tr.KVCache(cp, **SIZES)
    feed(cache, 13)

    def forget() -> None:
        with cache.step(1):
            for layer in range(2 - here.rank):
                call(cache, layer)

    return said_by(forget), said_by(lambda: feed(cache, 1))


def test_a_layer_left_out_is_told(ranks: RankPools) -> None:
    with ranks.expendable(2) as pool:
        (first, _), (second, _) = pool(forgetful)
    assert first.startswith("PeerLost") and "layer 1 holds 13 where 14 are due" in first
    assert second.startswith("ConfigurationError: step 2 is of 1 tokens")


def test_layers_of_uneven_length_are_refused() -> None:
    cache = tr.KVCache(tr.ContextParallel("self"), **SIZES)
    feed(cache, 3)
    call(cache, 1)
    with pytest.raises(tr.ConfigurationError, match=r"layer 0 holds 3 tokens, and layer 1 4: .*call crop\(3\)"):
        feed(cache, 1)
    cache.crop(3)
    feed(cache, 1)


def other_form_later(here: Here) -> str:
    cp = tr.ContextParallel(timeout_seconds=20.0)
    cache = tr.KVCache(cp, **SIZES)
    feed(cache, 13)
    return said_by(lambda: in_a_step(cache, True, heads=2))


def test_another_form_is_refused(ranks: RankPools) -> None:
    with ranks.expendable(2) as pool:
        for said in pool(other_form_later):
            assert "layer 0 is called with 2 query heads and scale 0.353553" in said and "the ranks agreed on 4" in said


# ---------- the memory of an exchange


def grown_in_a_step(here: Here) -> bool:
    """The memory grows between two layers of a step: the second is bound anew, and right."""
    cp = here.cp(transport=here.transport("shm"))
    one, two = (tr.KVCache(cp, **SIZES) for _ in range(2))
    feed(one, 13), feed(two, 13)
    wanted: list[Any] = []
    made: list[Any] = []
    for cache, outs in ((one, wanted), (two, made)):
        with cache.step(1):
            for layer in range(2):
                outs.append(call(cache, layer))
                if cache is two and layer == 0:
                    pool = cp.pool(cache.device)
                    pool.reserve(pool.data.numel() + (1 << 20))
                    before = pool.data
    exchanges: list[Any] = list(cp.pool(two.device).exchanges.values())
    (exchange,) = (each for each in exchanges if each.rows[:3] == (1, HEADS, 1))
    return all(map(torch.equal, wanted, made)) and exchange.base is before


def test_an_exchange_follows_its_memory(ranks: RankPools) -> None:
    assert all(ranks(2)(grown_in_a_step))


# ---------- devices and closed caches


def test_a_device_without_a_number_is_the_one_that_tensors_name() -> None:
    cache = tr.KVCache(tr.ContextParallel("self"), **SIZES, device="cpu:0")
    assert cache.device == torch.empty(0, device="cpu:0").device
    feed(cache, 3)


CLOSED: dict[str, Callable[[tr.KVCache], object]] = {
    "reset": lambda c: c.reset(), "crop": lambda c: c.crop(0), "drop": lambda c: c.drop(1),
    "reorder": lambda c: c.reorder(torch.tensor([0])), "positions": lambda c: c.positions(), "held": lambda c: c.held(),
    "step": lambda c: c.step(1).__enter__(), "call": lambda c: call(c),
}  # fmt: skip


@pytest.mark.parametrize("what", CLOSED)
def test_a_closed_cache_says_so(what: str) -> None:
    cache = tr.KVCache(tr.ContextParallel("self"), **SIZES)
    feed(cache, 3)
    for _ in range(2):
        cache.close()
    with pytest.raises(tr.ConfigurationError, match="this KVCache was closed"):
        CLOSED[what](cache)
    assert cache.length == cache.nbytes == 0


def test_a_cache_closed_in_a_step_says_so() -> None:
    cache = tr.KVCache(tr.ContextParallel("self"), **SIZES)
    with pytest.raises(tr.ConfigurationError, match="this KVCache was closed"), cache.step(1):
        cache.close()
        call(cache)


def test_steps_are_counted_as_they_begin() -> None:
    cache = tr.KVCache(tr.ContextParallel("self"), **{**SIZES, "layers": 1})
    first, second = cache.step(1), cache.step(1)
    for number, step in ((1, second), (2, first), (3, first)):
        with step:
            call(cache)
        assert step.number == cache.steps == number


def test_a_read_stands_where_the_next_token_will() -> None:
    windowed, newest = (tr.KVCache(tr.ContextParallel("self"), **{**SIZES, "layers": 1}, window=w) for w in (3, None))
    q, k, v = new_tokens(5)
    tr.cached_attention(q, k, v, windowed, 0)
    tr.cached_attention(q[:, 3:], k[:, 3:], v[:, 3:], newest, 0)
    out = tr.cached_attention(q[:, :1], None, None, windowed, 0)
    torch.testing.assert_close(out, tr.cached_attention(q[:, :1], None, None, newest, 0))


WRONG: dict[str, tuple[str, Callable[[tr.KVCache], object]]] = {
    "rows": ("expects a tensor of row numbers", lambda c: c.reorder([0])),  # type: ignore[arg-type]
    "starts": ("give the first token of each row", lambda c: c.reset(3)),  # type: ignore[arg-type]
    "layer": ("layer='0': the cache has layers", lambda c: call(c, "0")),  # type: ignore[arg-type]
    "device": ("device='gpu'; give one", lambda c: tr.KVCache(c.cp, **SIZES, device="gpu")),
    "layer of positions": ("layer=2: the cache has layers", lambda c: c.positions(2)),
    "ids": ("token_ids are in torch.float32", lambda c: c.step(torch.ones(1, 1)).__enter__()),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_such_thing(what: str) -> None:
    cache = tr.KVCache(tr.ContextParallel("self"), **SIZES)
    feed(cache, 3)
    with pytest.raises(tr.ConfigurationError, match=WRONG[what][0]):
        WRONG[what][1](cache)
    feed(cache, 1)
