"""The exchange that a call takes: by who has the new tokens, by what the step was told, or as rank 0 chooses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tokenring.errors import ConfigurationError
from tokenring.ir.cached_exchange import DIRECT_Q, ONE_SHOT, TWO_STEP

if TYPE_CHECKING:
    import torch

    from tokenring.api.caching.memory import CacheMemory
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.tables.rates import Machine

CachedSchedule = Literal["auto", "one-shot", "two-step", "direct-q", "direct-kv", "ring"]
AUTO, DIRECT_KV, RING = "auto", "direct-kv", "ring"
OF_HOME = {
    "all": (AUTO, ONE_SHOT, TWO_STEP), "tokens": (AUTO, DIRECT_Q, DIRECT_KV, RING), "heads": (AUTO, DIRECT_Q)
}  # fmt: skip
KEPT_CHOICES = 64  # of a cache, on all ranks alike


def check_schedule(schedule: str, home: str) -> None:
    """Raise ConfigurationError unless the rows of this home have an exchange of this name."""
    if schedule not in OF_HOME[home]:
        known = ", ".join(repr(each) for each in OF_HOME[home])
        raise ConfigurationError(f"schedule={schedule!r} of a step with q_home={home!r}: give one of {known}")


def exchange_name(cache: CacheMemory, home: str, schedule: str, heads: int, q: torch.Tensor) -> str:
    """Return the exchange for rows of so many query heads over all ranks, of which there are several.

    home, schedule: of the step; q [B, H, T, D].

    All ranks get here together, with rows of one size. Rank 0 chooses once for each size, and tells the others.
    Raises ConfigurationError where it was asked for by name and the heads do not divide.
    """
    world = cache.cp.world_size
    if home != "all":
        return DIRECT_Q
    if schedule == TWO_STEP and heads % world:
        raise ConfigurationError(
            f"schedule='two-step' cuts query heads over the ranks, and {heads} do not divide over {world}: give "
            f"'one-shot' or 'auto'"
        )
    if schedule != AUTO:
        return schedule
    if world == 2 or heads % world:  # two ranks send as much in one round as in two
        return ONE_SHOT
    key = q.shape[0], heads, (q.shape[2] - 1).bit_length()
    if key not in cache.choices:
        _keep(cache, key, _told(cache, heads, 1 << key[2]))
    return cache.choices[key]


def own_exchange(cache: CacheMemory, layer: int, schedule: str, q: torch.Tensor) -> str:
    """Return what moves where each rank has its own rows q [B, T, H, D] and sealed tokens: q, or what is cached.

    Rank 0 chooses once for each size, of rows and of what is cached, up to the next power of two.
    """
    if schedule != AUTO:
        return schedule  # a step that begins has checked that it can be
    from tokenring.api.caching.moving import why_it_stays

    if why_it_stays(cache, layer) is not None:
        return DIRECT_Q
    sizes = q.shape[1] * cache.cp.world_size, sum(cache.filled[layer].counts)
    key = q.shape[0], q.shape[2], *((size - 1).bit_length() for size in sizes)
    if key not in cache.choices:
        _keep(cache, key, _told(cache, q.shape[2], 1 << key[2], 1 << key[3]))
    return cache.choices[key]


def check_moves(cache: CacheMemory, schedule: str, layers: range) -> None:
    """Raise ConfigurationError where a step is to move what is cached, and a layer cannot."""
    if schedule not in (DIRECT_KV, RING):
        return
    from tokenring.api.caching.moving import why_it_stays

    if reason := next(filter(None, (why_it_stays(cache, layer) for layer in layers)), None):
        raise ConfigurationError(f"schedule={schedule!r} moves what is cached: {reason}; give 'direct-q' or 'auto'")


def _keep(cache: CacheMemory, key: tuple[int, ...], name: str) -> None:
    while len(cache.choices) >= KEPT_CHOICES:
        cache.choices.pop(next(iter(cache.choices)))
    cache.choices[key] = name


def _told(cache: CacheMemory, heads: int, tokens: int, cached: int | None = None) -> str:
    """Return what rank 0 takes, on all ranks. cached: tokens that may move; None: they stay."""
    from tokenring.planner.choosing.cached_calls import CachedCall, of_own_rows, reduction
    from tokenring.planner.choosing.planner import Planner
    from tokenring.sequence.workload import Workload

    cp = cache.cp
    transport = cp.transport_for(cache.device)
    assert transport is not None  # there are several ranks
    size = Workload(
        cache.batch, tokens, cached or cp.world_size, heads, cache.kv_heads, cache.head_dim, cache.dtype,
        cache.value_dim, cache.head_dim if cache.latents else None,
    )  # fmt: skip

    def choose(net: Interconnect, machine: Machine) -> str:
        call = CachedCall(size, net, machine.over(transport.target))
        return reduction(call) if cached is None else of_own_rows(call)

    planner = Planner(cp.group, cp.world_size, cp.topology, (), None, cp.tensor_parallel, cp.timeout_seconds)
    return planner.told(transport, cache.device, cache.dtype, choose)
