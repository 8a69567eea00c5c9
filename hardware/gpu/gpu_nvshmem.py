"""Transport nvshmem, for hardware/gpu/gpu_transports: messages and programs of two ranks, each on a GPU of its own.

Its release notes promise limited support for ranks that share a GPU: where there is one, the line says "not here".
Not yet run on a GPU.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from gpu_messages import whole_messages
from gpu_programs import worst_error
from gpu_team import NotHere

from tokenring.backends.transports import nvshmem
from tokenring.backends.transports.nvshmem import NvshmemTransport

NVSHMEM_RANKS = 2
SCHEDULES = ("ring", "tokenring", "direct-kv")
PEER_SECONDS = 10.0


def why_not() -> str | None:
    """None, or why this machine runs none of it. Nothing is started."""
    if reason := nvshmem.missing():
        return reason
    if (count := torch.cuda.device_count()) < NVSHMEM_RANKS:
        return f"it takes a GPU for each of {NVSHMEM_RANKS} ranks, and this machine has {count}"
    return None


def nvshmem_messages(rank: int) -> str:
    """Both channels, every byte."""
    return whole_messages(_transport(rank), "cuda")


def nvshmem_programs(rank: int) -> str:
    """Both passes, against one call in float64 on the CPU."""
    worst = worst_error(_transport(rank), "cuda", SCHEDULES)
    return f"{len(SCHEDULES)} schedules, both passes: error {worst:.1e} against float64"


def _transport(rank: int) -> NvshmemTransport:
    """Raises NotHere."""
    torch.cuda.set_device(rank)
    if reason := nvshmem.unavailable():
        raise NotHere(reason)
    assert dist.group.WORLD is not None
    return NvshmemTransport(dist.group.WORLD, PEER_SECONDS)
