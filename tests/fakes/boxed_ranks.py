"""Transport `nvshmem` without a GPU: its own memory over NVSHMEM's operators (nvshmem_ops), between processes.

Devices and ranks are those of symm_ranks.
"""

from __future__ import annotations

import random
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from nvshmem_ops import Act, Emulated, Ready
from symm_ranks import POLL_SECONDS, OnCpu, SegmentMemory, ThreadDevice, ThreadStream, Told

from tokenring.backends.control.control import Control
from tokenring.backends.control.segments import Segment
from tokenring.backends.transports.nvshmem import NvshmemTransport
from tokenring.backends.transports.onesided import OwnMemory
from tokenring.backends.transports.symm import SymmTransport
from tokenring.ir.schedule_data import CHANNELS
from tokenring.lowering.mailboxes import BOXES, Mailboxes

NETWORK = 3  # how many things fly at once
LARGEST_BYTES = {2: 16 << 20}  # of a message of the suite, by ranks


class SegmentPlace:
    """Symmetric memory in shared memory; what is put flies on threads of its own. A Place of nvshmem_ops."""

    def __init__(self, control: Control, device: ThreadDevice, store: Any) -> None:
        self._rank, self._world_size, self._device = control.rank, control.world_size, device
        self._segments = SegmentMemory(control, device, store)
        self._parts: list[tuple[Segment, int]] = []
        self.own: list[torch.Tensor] = []
        self._network = [ThreadStream(number) for number in range(NETWORK)]

    def allocate(self, nbytes: int) -> torch.Tensor:
        self._parts.append((self._segments._segment(nbytes * self._world_size), nbytes))
        self.own.append(self.there(self._rank, -1))
        return self.own[-1]

    def there(self, peer: int, number: int) -> torch.Tensor:
        segment, nbytes = self._parts[number]
        return segment.part(peer * nbytes, nbytes)

    def queue(self, name: str, act: Act, ready: Ready) -> None:
        stream = self._device.current_stream()

        def when_ready() -> None:
            while not ready():
                stream.idle()
                time.sleep(POLL_SECONDS)
            act()

        stream.add(when_ready)

    def fly(self, acts: list[tuple[str, Act]]) -> None:
        stream = random.choice(self._network)
        for _, act in acts:
            stream.add(act)

    def __del__(self) -> None:
        for each in self._network:
            each.end()


def boxed_memory(transport: SymmTransport, store: Any) -> Emulated:
    return Emulated(transport.world_size, SegmentPlace(transport.control, transport.device, store))  # type: ignore[arg-type]


class Boxed(OnCpu):
    """Programs by way of boxes."""

    target = NvshmemTransport.target

    def _make_memory(self, store: Any) -> OwnMemory:
        return boxed_memory(self, store)


class BoxedTold(Told):
    """Every line has boxes for the largest message. Posts stand on streams of their own: they wait for boxes."""

    def _make_memory(self, store: Any) -> OwnMemory:
        return boxed_memory(self, store)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        made = super().allocate(nbytes)
        size = min(nbytes, LARGEST_BYTES.get(self.world_size, 2 << 20))
        ranks = range(self.world_size)
        lines = {(a, b, channel): [(0, size)] * BOXES for a in ranks for b in ranks if a != b for channel in CHANNELS}
        self._boxes: Mailboxes | None = self._lay(lines)
        self._streams = {channel: self.device.new_stream() for channel in CHANNELS}
        for each in self._receiving.values():
            each.begin(BOXES)
        return made

    def _box(self, src: int, channel: str, number: int) -> int | None:
        assert self._boxes is not None
        return self._boxes.place((src, self.rank, channel), number)

    def _posting(self, channel: str) -> AbstractContextManager[object]:
        return self.device.on(self._streams[channel])
