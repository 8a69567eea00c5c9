"""Attention of new tokens over what is cached and over each other; keys and values, or latents, stay where they lie."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, overload

import torch

from tokenring.api.caching.kv_cache import KVCache
from tokenring.api.caching.memory import Home
from tokenring.api.latents import latent_sizes
from tokenring.api.standing import outside_graphs
from tokenring.errors import ConfigurationError
from tokenring.runtime.agreement import refusing


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


@outside_graphs
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
    Of a cache with latents k is [B, T, 1, L + R] and v None, q [B, T, Hq, L + R] has its weights absorbed, and out is
    [B, T, Hq, L]: `cached_latent_attention` does all of that.
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


@overload
def cached_latent_attention(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, cache: KVCache, layer: int, *,
    q_home: Home = "all", scale: float | None = None, return_lse: Literal[False] = False,
) -> torch.Tensor: ...  # fmt: skip


@overload
def cached_latent_attention(
    q: torch.Tensor, latent: torch.Tensor, rope: torch.Tensor, weight: torch.Tensor, cache: KVCache, layer: int, *,
    q_home: Home = "all", scale: float | None = None, return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


@outside_graphs
def cached_latent_attention(
    q: torch.Tensor,
    latent: torch.Tensor,
    rope: torch.Tensor,
    weight: torch.Tensor,
    cache: KVCache,
    layer: int,
    *,
    q_home: Home = "all",
    scale: float | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Append latents to a layer of a cache of latents, and attend from q to all that it then holds; no gradients.

    q: [B, T, H, Dn + R], latent: [B, T, L], rope: [B, T, R], weight: [H · (Dn + Dv), L], as for `latent_attention`;
    cache: a KVCache with kv_heads=1, head_dim=L + R, latent_dim=L. Keys and values are never made: the rows of weight
    that make keys are multiplied into q, and those that make values into what comes back, as in DeepSeek's decode.
    So q and results move as wide as latents, H · (L + R) and H · L elements of a token.
    q_home: who has the new tokens, as for `cached_attention`; "heads": q and weight are of this rank's heads.
    scale: of q·k; default 1/√(Dn + R).

    Returns out [B, T, H, Dv] in q's dtype, and with return_lse also lse [B, H, T] (fp32, natural log).

    Raises what `cached_attention` raises; ConfigurationError for sizes that do not fit.
    """
    if not isinstance(cache, KVCache):
        raise ConfigurationError(f"cache is of type {type(cache).__name__}; make a KVCache, once, for all calls")
    with nullcontext() if cache.current is not None else refusing(cache.cp, "forward", cache.device):
        heads, _ = latent_sizes(q, latent, rope, weight, "cached_latent_attention")
        _check_cache(cache, latent.shape[2], rope.shape[2])
    made, nope = weight.view(heads, -1, weight.shape[1]), q.shape[3] - rope.shape[2]
    absorbed = torch.cat([torch.einsum("bthn,hnl->bthl", q[..., :nope], made[:, :nope]), q[..., nope:]], dim=-1)
    keys = torch.cat([latent, rope], dim=-1)[:, :, None]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    found, lse = cached_attention(absorbed, keys, None, cache, layer, q_home=q_home, scale=scale, return_lse=True)
    out = torch.einsum("bthl,hvl->bthv", found, made[:, nope:])
    return (out, lse) if return_lse else out


def _check_cache(cache: KVCache, latent: int, rope: int) -> None:
    if not cache.latents or (cache.head_dim, cache.value_dim) != (latent + rope, latent):
        kind = f"latent_dim={cache.value_dim}" if cache.latents else "no latents"
        raise ConfigurationError(
            f"the cache has head_dim={cache.head_dim} and {kind}, and the call latents of {latent} + {rope}: make it "
            f"with kv_heads=1, head_dim={latent + rope}, latent_dim={latent}"
        )
