"""Transport nccl on one GPU, for hardware/gpu/gpu_transports.

One rank alone sends to itself: a real communicator, real groups of sends and receives, every byte. Programs need two
ranks, which NCCL lets share a GPU from 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE is 1: where it refuses, the line says
so. Not yet run on a GPU.
"""

from __future__ import annotations

import re
from typing import Any

import torch
import torch.distributed as dist
from gpu_programs import worst_error
from gpu_team import NotHere as NotHere

from tokenring.backends.transports.nccl import NcclTransport
from tokenring.errors import TokenRingError
from tokenring.ir.schedule_data import PARTIALS, REQUESTS

DEVICE = "cuda"
SCHEDULES = ("ring", "tokenring", "direct-kv")
CHANNELS = (REQUESTS, PARTIALS)
SIZE, COUNT = 1 << 20, 50
PEER_SECONDS = 10.0
# NCCL's src/init.cc: up to 2.29 "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", and from 2.30 on
# "Multiple Ranks are using the same GPU/Partition".
REFUSED = re.compile(r"duplicate gpu|multiple ranks are using the same gpu", re.IGNORECASE)


def nccl_messages(rank: int) -> str:
    """Of one rank to itself, and a program, which at one rank has no messages."""
    made = _transport()
    told = own_messages(made, DEVICE)
    error = worst_error(made, DEVICE, ("ring",))
    made.close()
    return f"{told}; NCCL {_version()}; a program of one rank: error {error:.1e} against float64"


def own_messages(made: Any, device: str) -> str:
    """Both channels, each message behind the one before it; made: a transport of one rank."""
    made.prepare([(0, 0, channel) for channel in CHANNELS], torch.device(device))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for number in range(COUNT):
        places = torch.zeros(len(CHANNELS), SIZE, dtype=torch.uint8, device=device)
        data = torch.stack([torch.full_like(place, (number + 7 * at) % 250 + 1) for at, place in enumerate(places)])
        handles = [made.recv(place, 0, channel, "") for channel, place in zip(CHANNELS, places, strict=True)]
        handles += [made.send(each, 0, channel, "") for channel, each in zip(CHANNELS, data, strict=True)]
        made.go()
        for handle in handles:
            handle.wait()
        wrong += (places != data).sum()
    assert int(wrong) == 0, f"{int(wrong)} bytes are wrong"
    return f"{COUNT * len(CHANNELS)} messages of {SIZE >> 10} KiB whole"


def nccl_programs(rank: int) -> str:
    """Both passes of two ranks, where NCCL lets them share the GPU."""
    made = _transport()
    try:
        worst = worst_error(made, DEVICE, SCHEDULES)
    except TokenRingError as error:
        if reason := refusal(error):
            raise NotHere(f"NCCL {_version()}: {reason}") from error
        raise
    made.close()
    return f"{len(SCHEDULES)} schedules, both passes: error {worst:.1e} against float64; NCCL {_version()}"


def refusal(error: BaseException | None) -> str | None:
    """What NCCL says where it lets no two ranks share a GPU; None: something else is wrong."""
    while error is not None:
        for line in str(error).splitlines():
            if REFUSED.search(line):
                return line.strip()[:200]
        error = error.__cause__
    return None


def _transport() -> NcclTransport:
    assert dist.group.WORLD is not None
    return NcclTransport(dist.group.WORLD, PEER_SECONDS)


def _version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
