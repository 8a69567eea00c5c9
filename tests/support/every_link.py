"""Transports that are connected for all that could be sent, and the device whose tensors they move."""

from __future__ import annotations

from itertools import permutations

import torch
import torch.distributed as dist
from machines import transport_name
from ranks import PEER_SECONDS

from tokenring.backends.interfaces import Transport
from tokenring.backends.registry import make_transport
from tokenring.ir.schedule_data import CHANNELS


def device_of(name: str) -> torch.device:
    """Where the tensors lie that a transport moves."""
    return torch.device("npu" if name.startswith(("hccl", "nccl")) else "cpu")


def new(name: str, seconds: float = PEER_SECONDS) -> Transport:
    """Of all ranks, which call it together."""
    assert dist.group.WORLD is not None
    with transport_name(name) as known:
        made = make_transport(known, dist.group.WORLD, seconds)
    pairs = permutations(range(made.world_size), 2)
    made.prepare([(src, dst, channel) for src, dst in pairs for channel in CHANNELS], device_of(name))
    return made
