"""Cached tokens that move to the rows of new ones, where these are each rank's own: a schedule of keys and values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenring.api.attention import attend
from tokenring.api.context import ContextParallel
from tokenring.sequence.layout import AUTO
from tokenring.sequence.mask import Full

if TYPE_CHECKING:
    import torch

    from tokenring.api.caching.memory import CacheMemory
    from tokenring.runtime.cached_kernel import Partial


def why_it_stays(cache: CacheMemory, layer: int) -> str | None:
    """Return why sealed tokens of a layer cannot move by a schedule; None: they can. The same on all ranks."""
    counts, cp = cache.filled[layer].counts, cache.cp
    if not cache.sight(layer).hides_nothing:
        return f"layer {layer} has a window, and tokens of a schedule that moves a cache are all seen"
    if not isinstance(cp.layout, str) or cp.layout == AUTO:
        return "the layout of the context is not one by name, by which cached tokens could be numbered"
    if any(counts) and (len(set(counts)) > 1 or cp.layout_for(sum(counts)).local_lengths != counts):
        return f"ranks have {list(counts)} sealed tokens of layer {layer}, and a schedule moves equal parts"
    return None


def over_moved(q: torch.Tensor, cache: CacheMemory, layer: int, name: str, scale: float) -> Partial:
    """Return out [B, H, T, Dv] in fp32 and lse of this rank's rows q [B, T, H, D] over the sealed tokens of all ranks.

    name: of the schedule, which moves keys and values, or latents once. They stay where they lie, too.
    """
    keys, values = (each.transpose(1, 2) for each in cache.sealed(layer))
    cp = _context(cache, name)
    if cache.latents:
        from tokenring.api.caching.new_latents import attend_new

        out, lse = attend_new(q, keys, cache.value_dim, cp, Full(), scale)
    else:
        out, lse = attend(q, keys, values, cp, Full(), scale, training=False)
    return out.transpose(1, 2).float(), lse


def _context(cache: CacheMemory, name: str) -> ContextParallel:
    """Return the context of a schedule by name, over the transport of the cache's own; all ranks ask together."""
    if name not in cache.movers:
        cp = cache.cp
        transport = cp.transport_for(cache.device)
        assert transport is not None  # there are several ranks
        cache.movers[name] = ContextParallel(
            cp.group, cp.layout, name, transport, kernel=cp.kernel_name, timeout_seconds=cp.timeout_seconds
        )
    return cache.movers[name]
