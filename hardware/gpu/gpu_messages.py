"""Messages of a one-sided transport, for hardware/gpu/gpu_transports: all pairs, both channels, every byte."""

from __future__ import annotations

import time
from typing import Any

import torch

from tokenring.ir.schedule_data import PARTIALS, REQUESTS

SIZE, COUNT = 1 << 20, 100


def whole_messages(made: Any, device: str, size: int = SIZE, count: int = COUNT) -> str:
    """Into places that are used again and again; made: a transport whose heap nobody has asked for yet.

    Raises AssertionError for bytes that are wrong.
    """
    rank = made.rank
    others = [each for each in range(made.world_size) if each != rank]
    lines = [(channel, peer) for channel in (REQUESTS, PARTIALS) for peer in others]
    heap = made.allocate(len(lines) * size)
    assert heap is not None
    places = heap[: len(lines) * size].view(len(lines), size)
    placement = made.place([(peer, channel, place) for (channel, peer), place in zip(lines, places, strict=True)])
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    began = time.perf_counter()
    for number in range(count):
        made.begin(placement)
        data = torch.full((size,), (number + 7 * rank) % 250 + 1, dtype=torch.uint8, device=device)
        received = [made.recv(place, peer, channel, "") for (channel, peer), place in zip(lines, places, strict=True)]
        sent = [made.send(data, peer, channel, "") for channel, peer in lines]
        for handle in (*received, *sent):
            handle.wait()
        for (_, peer), place in zip(lines, places, strict=True):
            wrong += (place != (number + 7 * peer) % 250 + 1).sum()
    seconds = time.perf_counter() - began
    assert int(wrong) == 0, f"{int(wrong)} bytes are wrong"
    host = seconds / count / len(lines) / 2 * 1e6
    return f"{count * len(lines)} messages of {size >> 10} KiB whole; host {host:.0f} µs a post"
