"""tokenring: attention over many devices, with schedules that are data.

cp = tokenring.ContextParallel(layout="zigzag", schedule="auto")
x = tokenring.shard(x, cp, dim=1)
out = tokenring.attention(q, k, v, cp, mask=tokenring.Causal())
"""

from tokenring._version import __version__
from tokenring.attention import attention, plan
from tokenring.context import ContextParallel
from tokenring.errors import (
    BackendUnavailable,
    ConfigurationError,
    PeerLost,
    ScheduleError,
    TokenRingError,
    TopologyError,
    UnsupportedError,
)
from tokenring.layout import Layout, Positions
from tokenring.mask import Causal, Documents, Full, Mask, SlidingWindow
from tokenring.named import schedule
from tokenring.planner.select import Plan
from tokenring.schedule.build import Scheme
from tokenring.schedule.ir import Block, Move, Schedule, Tile
from tokenring.sharding import positions, shard, unshard
from tokenring.topology.ranks import Topology
from tokenring.workload import Workload

__all__ = [
    "BackendUnavailable",
    "Block",
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
    "Topology",
    "TopologyError",
    "UnsupportedError",
    "Workload",
    "__version__",
    "attention",
    "plan",
    "positions",
    "schedule",
    "shard",
    "unshard",
]
