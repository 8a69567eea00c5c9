"""tokenring: context parallelism for PyTorch, with attention schedules that are plain data.

cp = tokenring.ContextParallel(layout="zigzag", schedule="auto")
x = tokenring.shard(x, cp, dim=1)
out = tokenring.attention(q, k, v, cp, mask=tokenring.Causal())
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenring._version import __version__
    from tokenring.api.attention import attention, plan
    from tokenring.api.caching.cached_attention import cached_attention, cached_latent_attention
    from tokenring.api.caching.engines import combine, gather_queries, local_lengths
    from tokenring.api.caching.kv_cache import KVCache
    from tokenring.api.capture import CapturedAttention, capture
    from tokenring.api.collectives import all_gather, all_reduce, centered, reduce_scatter
    from tokenring.api.context import ContextParallel
    from tokenring.api.latents import latent_attention
    from tokenring.api.linear import column_linear, row_linear
    from tokenring.api.sharding import choose_layout, positions, shard, unshard
    from tokenring.api.tensor_parallel import TensorParallel
    from tokenring.errors import (
        BackendUnavailable,
        ConfigurationError,
        PeerLost,
        ScheduleError,
        TokenRingError,
        TokenRingWarning,
        TopologyError,
        UnsupportedError,
    )
    from tokenring.ir.schedule_data import Block, Move, Tile
    from tokenring.planner.choosing.plan import Plan
    from tokenring.schedule.by_name import schedule
    from tokenring.schedule.schedule import Schedule
    from tokenring.schedule.scheme import Scheme
    from tokenring.sequence.layout import Layout, Positions
    from tokenring.sequence.mask import (
        Bidirectional,
        BlockCausal,
        Causal,
        Chunks,
        Documents,
        Full,
        Mask,
        PrefixLM,
        PrefixTree,
        Slices,
        SlidingWindow,
    )
    from tokenring.sequence.workload import Workload
    from tokenring.topology.ranks import Topology

__all__ = [
    "BackendUnavailable",
    "Bidirectional",
    "Block",
    "BlockCausal",
    "CapturedAttention",
    "Causal",
    "Chunks",
    "ConfigurationError",
    "ContextParallel",
    "Documents",
    "Full",
    "KVCache",
    "Layout",
    "Mask",
    "Move",
    "PeerLost",
    "Plan",
    "Positions",
    "PrefixLM",
    "PrefixTree",
    "Schedule",
    "ScheduleError",
    "Scheme",
    "Slices",
    "SlidingWindow",
    "TensorParallel",
    "Tile",
    "TokenRingError",
    "TokenRingWarning",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "all_gather",
    "all_reduce",
    "attention",
    "cached_attention",
    "cached_latent_attention",
    "capture",
    "centered",
    "choose_layout",
    "column_linear",
    "combine",
    "gather_queries",
    "latent_attention",
    "local_lengths",
    "plan",
    "positions",
    "reduce_scatter",
    "row_linear",
    "schedule",
    "shard",
    "unshard",
]

# The modules that the public names come from. They are imported when first asked for: most need torch, which takes
# longer to import than `tokenring topology` to answer.
_MODULES = {
    "_version": "__version__",
    "api.attention": "attention plan",
    "api.caching.cached_attention": "cached_attention cached_latent_attention",
    "api.caching.engines": "combine gather_queries local_lengths",
    "api.caching.kv_cache": "KVCache",
    "api.capture": "CapturedAttention capture",
    "api.collectives": "all_gather all_reduce centered reduce_scatter",
    "api.context": "ContextParallel",
    "api.latents": "latent_attention",
    "api.linear": "column_linear row_linear",
    "api.sharding": "choose_layout positions shard unshard",
    "api.tensor_parallel": "TensorParallel",
    "errors": "BackendUnavailable ConfigurationError PeerLost ScheduleError TokenRingError "
    "TokenRingWarning TopologyError UnsupportedError",
    "ir.schedule_data": "Block Move Tile",
    "planner.choosing.plan": "Plan",
    "schedule.by_name": "schedule",
    "schedule.schedule": "Schedule",
    "schedule.scheme": "Scheme",
    "sequence.layout": "Layout Positions",
    "sequence.mask": "Bidirectional BlockCausal Causal Chunks Documents Full Mask PrefixLM "
    "PrefixTree Slices SlidingWindow",
    "sequence.workload": "Workload",
    "topology.ranks": "Topology",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def _imported(module: str) -> ModuleType:
    """Import a module of ours. Raises BackendUnavailable, in one sentence, if torch cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # what torch loads by itself, as torch_npu, may raise either
        from tokenring.errors import BackendUnavailable
        from tokenring.imports import import_failure

        if (known := import_failure(error)) is None:
            raise
    raise BackendUnavailable(known)


class _Package(ModuleType):
    """The package, whose public names are imported at their first use."""

    def __getattr__(self, name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_imported(f"{__name__}.{_HOMES[name]}"), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a sub-module binds its name here; `schedule` is the function of that name.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
