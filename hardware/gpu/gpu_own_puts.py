"""Messages that move inside one GPU, for the host's time of a step: what `symm` queues for a put, a signal, a wait.

Protocol and streams are those of transport symm (backends/transports/onesided.py); all peers are this rank itself,
and no wait ever waits. What symm does beside that on the host (its watch, its checks of places) is not in it. Not yet
run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenring.backends.devices import DeviceRuntime
from tokenring.backends.interfaces import Landing
from tokenring.backends.transports import driver
from tokenring.backends.transports.onesided import OneSidedMemory, Receiving, Sending, Words
from tokenring.backends.transports.symmetric import CLEAR
from tokenring.ir.schedule_data import CHANNELS
from tokenring.lowering.target import Target

HEAP_BYTES = 16 << 20


class OwnMemory:
    """Words and a heap of this GPU in place of every peer's. Words are written clear, which is what waits wait for."""

    def __init__(self, device: torch.device, words: int) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self._device = device
        self._heap = torch.empty(HEAP_BYTES, dtype=torch.uint8, device=device)
        self._words = torch.zeros(words, dtype=torch.int32, device=device)
        self._clear = torch.full((1,), CLEAR, dtype=torch.int32, device=device)
        self._flags = driver.wait_flags(index)

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        source = data.view(-1).view(torch.uint8)
        self._heap[place : place + source.numel()].copy_(source)
        self.signal(peer, word)

    def signal(self, peer: int, word: int) -> None:
        self._words[word : word + 1].copy_(self._clear)

    def wait(self, word: int) -> None:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        driver.wait_and_clear(stream, self._words.data_ptr() + 4 * word, CLEAR, self._flags, CLEAR)

    def release(self) -> None:
        """Nothing waits."""


class OwnPuts:
    """Transport of rank 0. memory: OwnMemory, or another with the same verbs."""

    target = Target(placing=True)

    def __init__(self, memory: OneSidedMemory, device: DeviceRuntime, world_size: int) -> None:
        self.rank, self.world_size, self._device = 0, world_size, device
        lines = [(channel, peer) for channel in CHANNELS for peer in range(1, world_size)]
        self._sending = {line: Sending(memory, device, words_of(world_size), 0, line) for line in lines}
        self._receiving = {line: Receiving(memory, device, words_of(world_size), 0, line) for line in lines}

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> _Sent:
        return _Sent(self._device, self._sending[channel, dst].send(data, 0).done)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> _Received:
        line = self._receiving[channel, src]
        return _Received(line, line.post())

    def place(self, receives: Sequence[Landing]) -> None:
        """All go to one place, where nobody reads them."""

    def begin(self, placement: None) -> None:
        for line in self._receiving.values():
            line.begin()

    def fail(self, error: BaseException) -> None:
        raise error


def words_of(world_size: int) -> Words:
    return Words(CHANNELS, world_size)


class _Sent:
    def __init__(self, device: DeviceRuntime, done: Any) -> None:
        self._device, self._done = device, done

    def wait(self) -> None:
        self._device.current_stream().wait_event(self._done)


class _Received:
    def __init__(self, line: Receiving, number: int) -> None:
        self._line, self._number = line, number

    def wait(self) -> None:
        self._line.wait(self._number)
