"""Attention of new tokens over what is cached and over each other; keys and values stay where they lie."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tokenring.api.caching.kv_cache import KVCache
from tokenring.api.caching.memory import Home
from tokenring.errors import ConfigurationError


@overload
def cached_attention(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: KVCache, layer: int, *,
    q_home: Home = "all", scale: float | None = None, return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def cached_attention(
    q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, cache: KVCache, layer: int, *,
    q_home: Home = "all", scale: float | None = None, return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def cached_attention(
    q: torch.Tensor,
    k: torch.Tensor | None,
    v: torch.Tensor | None,
    cache: KVCache,
    layer: int,
    *,
    q_home: Home = "all",
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append k and v to a layer of the cache, and attend from q to all that it then holds, causally; no gradients.

    q: [B, T, Hq, D], k: [B, T, Hkv, D], v: [B, T, Hkv, Dv], the new tokens, after rotary embedding. q_home "all": every
    rank has all T of them, and gets all results, the same bits on every rank. "tokens": each rank has its part in cp's
    layout (`shard`, `positions`), and gets its results. "heads": every rank has all T tokens and all of k and v, and q
    [B, T, Hq/P, D] of its part of the query heads, rank r the r-th; it gets their results, as tensor parallelism wants
    them. Inside of `cache.step` q_home is that of the step.
    k and v None: nothing is appended, and each row of q sees all that is cached; with a window w the newest w - 1
    tokens, as the row stands where the next token will.
    scale: of q·k; default 1/√D.

    Returns out [B, T, Hq, Dv] in q's dtype, and with return_lse also lse [B, Hq, T] (fp32, natural log), of the heads
    that q has. A row that
    sees nothing, as padding does, has out 0 and lse -inf.

    Raises ConfigurationError (sizes that do not fit the cache, no room in it), UnsupportedError (gradients) and
    PeerLost. Outside of `cache.step` each call is a step of its own layer: all ranks agree on it. In a step they agree
    on query heads and scale at the first call of each layer, which keeps them.
    """
    if not isinstance(cache, KVCache):
        raise ConfigurationError(f"cache is of type {type(cache).__name__}; make a KVCache, once, for all calls")
    from tokenring.api.caching.attending import attended, refuse_gradients  # whoever does not serve need not load it

    with cache.cp.turn:
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, k, v)):
            refuse_gradients(cache)
        out, lse = attended(q, k, v, cache, layer, q_home, scale, return_lse)
    out = out.transpose(1, 2)
    out = out if out.dtype == cache.dtype else out.to(cache.dtype)
    return (out, lse) if return_lse and lse is not None else out
