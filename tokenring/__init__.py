"""tokenring: attention over many devices, with schedules that are data.

cp = tokenring.ContextParallel(layout="zigzag", schedule="auto")
x = tokenring.shard(x, cp, dim=1)
out = tokenring.attention(q, k, v, cp, mask=tokenring.Causal())
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from tokenring._version import __version__

if TYPE_CHECKING:
    from tokenring.attention import attention, plan
    from tokenring.capture import CapturedAttention, capture
    from tokenring.context import ContextParallel
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
    from tokenring.layout import Layout, Positions
    from tokenring.mask import Causal, Documents, Full, Mask, SlidingWindow
    from tokenring.named import schedule
    from tokenring.planner.plan import Plan
    from tokenring.schedule.build import Scheme
    from tokenring.schedule.ir import Block, Move, Tile
    from tokenring.schedule.questions import Schedule
    from tokenring.sharding import positions, shard, unshard
    from tokenring.topology.ranks import Topology
    from tokenring.workload import Workload

__all__ = [
    "BackendUnavailable",
    "Block",
    "CapturedAttention",
    "Causal",
    "ConfigurationError",
    "ContextParallel",
    "Documents",
    "Full",
    "Layout",
    "Mask",
    "Move",
    "PeerLost",
    "Plan",
    "Positions",
    "Schedule",
    "ScheduleError",
    "Scheme",
    "SlidingWindow",
    "Tile",
    "TokenRingError",
    "TokenRingWarning",
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "attention",
    "capture",
    "plan",
    "positions",
    "schedule",
    "shard",
    "unshard",
]

# The modules that the public names come from. They are imported when first asked for: most need torch, which takes
# longer to import than `tokenring topology` to answer.
_MODULES = {
    "attention": "attention plan",
    "capture": "CapturedAttention capture",
    "context": "ContextParallel",
    "errors": "BackendUnavailable ConfigurationError PeerLost ScheduleError TokenRingError "
    "TokenRingWarning TopologyError UnsupportedError",
    "layout": "Layout Positions",
    "mask": "Causal Documents Full Mask SlidingWindow",
    "named": "schedule",
    "planner.plan": "Plan",
    "schedule.build": "Scheme",
    "schedule.ir": "Block Move Tile",
    "schedule.questions": "Schedule",
    "sharding": "positions shard unshard",
    "topology.ranks": "Topology",
    "workload": "Workload",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}


def _imported(module: str) -> ModuleType:
    """A module of ours. Raises BackendUnavailable, in one sentence, where torch cannot be imported."""
    try:
        return importlib.import_module(module)
    except (ImportError, RuntimeError) as error:  # what torch loads by itself, as torch_npu, may raise either
        from tokenring.doctor.explain import import_failure
        from tokenring.errors import BackendUnavailable

        if (known := import_failure(error)) is None:
            raise
    raise BackendUnavailable(known)


class _Package(ModuleType):
    """This package, whose public names come when they are wanted."""

    def __getattr__(self, name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(_imported(f"{__name__}.{_HOMES[name]}"), name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        # Importing a sub-module binds its name here; `attention` and `schedule` are the functions of that name.
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
