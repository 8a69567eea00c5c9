"""What one thing costs: an operation and a post on the host, a small operation on the device, messages of any size."""

from __future__ import annotations

import time
from typing import Any

import torch

from npu_smoke.here import Here, pair_buffer_bytes
from npu_smoke.traffic import sum_of

OPERATIONS, POSTS = 200, 50
SIZES = tuple(4 << 10 << 2 * step for step in range(9))  # 4 KiB to 256 MiB
DRY_SIZES = (4 << 10, 16 << 10, 64 << 10)
CHUNK_BYTES = 32 << 10  # where nothing is real
CURVE_ROUNDS = 3


def launches(here: Here) -> dict[str, Any]:
    """Microseconds: of the host for an operation and for a send or receive, of the device for a small operation."""
    if here.kind == "cpu":
        return {"left out": "a CPU does what it is given at once"}
    data = torch.zeros(16, device=here.place)
    found: dict[str, Any] = {"host us": _host_us(here, data), "device us": _device_us(here, data), "post us": None}
    if here.ranks > 1:
        found["post us"] = _post_us(here)
    return found


def _host_us(here: Here, data: torch.Tensor) -> float:
    for _ in range(OPERATIONS):
        data.add_(1)
    here.device.synchronize()
    began = time.perf_counter()
    for _ in range(OPERATIONS):
        data.add_(1)
    seconds = time.perf_counter() - began
    here.device.synchronize()
    return 1e6 * here.slowest(seconds) / OPERATIONS


def _device_us(here: Here, data: torch.Tensor) -> float:
    """By events, behind a long operation, so that the host is ahead."""
    module: Any = getattr(torch, here.kind)
    attend = here.attention()
    attend()
    here.device.synchronize()
    began, ended = (module.Event(enable_timing=True) for _ in range(2))
    for _ in range(4):
        attend()
    began.record()
    for _ in range(OPERATIONS):
        data.add_(1)
    ended.record()
    here.device.synchronize()
    return 1e3 * here.slowest(float(began.elapsed_time(ended))) / OPERATIONS


def _post_us(here: Here) -> float:
    """Ranks 0 and 1: calls of isend and irecv, waits apart."""
    here.warm_up(["up"], [(0, 1)])
    data = [here.buffer(1024) for _ in range(POSTS)]
    here.device.synchronize()
    here.meet()
    seconds, works = 0.0, []
    if here.rank < 2:
        began = time.perf_counter()
        works = [here.message(each, 1 - here.rank, here.rank == 0, "up") for each in data]
        seconds = time.perf_counter() - began
    for each in works:
        each.wait()
    return 1e6 * here.slowest(seconds) / POSTS


# ---------- messages of any size


def curve(here: Here) -> dict[str, Any]:
    """Ranks 0 and 1, one way: seconds of each size; and whether what fills HCCL's buffer, or more, arrives whole."""
    if here.ranks < 2:
        return {"left out": "one rank has no peer"}
    here.warm_up(["up"], [(0, 1)])
    dry = here.emulated or here.kind == "cpu"
    seconds = {}
    for size in DRY_SIZES if dry else SIZES:
        here.say(f"{size} bytes")
        data = here.buffer(size)
        seconds[str(size)] = here.timed(lambda data=data: _one_way(here, data), CURVE_ROUNDS)  # type: ignore[misc]
    chunk = CHUNK_BYTES if dry else pair_buffer_bytes() // 2
    sizes = (chunk - 1, chunk, chunk + 1, 2 * chunk + 1)
    wrong = [size for size in sizes if not _is_whole(here, size)]
    return {"seconds": seconds, "chunk bytes": chunk, "tried": len(sizes), "wrong": wrong}


def curve64(here: Here) -> dict[str, Any]:
    """In processes that have P2P_HCCL_BUFFSIZE=64."""
    return curve(here)


def curve128(here: Here) -> dict[str, Any]:
    """In processes that have P2P_HCCL_BUFFSIZE=128."""
    return curve(here)


def _one_way(here: Here, data: torch.Tensor) -> None:
    if here.rank < 2:
        here.message(data, 1 - here.rank, here.rank == 0, "up").wait()


def _is_whole(here: Here, size: int) -> bool:
    """All bytes, each of which says where it is."""
    wanted = (torch.arange(size) % 251).to(torch.uint8)
    data = wanted.to(here.place) if here.rank == 0 else here.buffer(size)
    _one_way(here, data)
    return not sum_of(here, int(here.rank == 1 and not torch.equal(data.cpu(), wanted)))
