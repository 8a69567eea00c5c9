"""Steps of a cache: what their ranks compare, and what cannot be done in them."""

from __future__ import annotations

import pytest
import torch
from ranks import Here, RankPools
from test_kv_cache import SIZES, feed, new_tokens

import tokenring as tr
from tokenring.api.caching.model_step import _shown


def read_among_own(here: Here) -> str:
    """What a read says in a step whose rows are each rank's own; the step itself goes on."""
    cp = here.cp(transport=here.transport("shm"), schedule="ring")
    cache = tr.KVCache(cp, **{**SIZES, "layers": 1})
    feed(cache, 21)
    q, k, v = (tr.shard(x, cp) for x in new_tokens(16))
    with cache.step(16, "tokens"):
        with pytest.raises(tr.ConfigurationError) as refused:
            tr.cached_attention(q, None, None, cache, 0)
        tr.cached_attention(q, k, v, cache, 0, q_home="tokens")
    return str(refused.value)


def test_rows_of_each_rank_cannot_only_read(ranks: RankPools) -> None:
    assert all("reading is for rows that every rank has" in said for said in ranks(2)(read_among_own))


def test_ids_beyond_the_shown_ones_are_compared() -> None:
    ids = torch.arange(9)[:, None]
    other = ids.clone()
    other[8] = 77
    assert _shown(ids) != _shown(other) and "alone" in _shown(ids[:8])
