"""A trial of one-sided memory between every two ranks: its promises are seen to hold before it is relied on.

Peer access that is granted and does not work (an IOMMU or ACS in the way), words that a driver does not write, a peer
that is mapped as another: nothing of that fails when memory is set up. In the middle of a pass it would be a stream
that waits for ever, or wrong results. Here a host looks on, with a time limit, and no stream is left waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tokenring.backends.devices import DeviceRuntime
from tokenring.backends.transports.onesided import OwnMemory, Words
from tokenring.errors import BackendUnavailable
from tokenring.ir.schedule_data import REQUESTS

SECONDS = 10.0  # at most, for a rank's trial: what works takes milliseconds, where the host is not busy
PUT_BYTES = 4096
LOOK_SECONDS = 0.0005


class Broken(BackendUnavailable):
    """An error: memory could be set up between these ranks, and does not do what it is for."""


def room_bytes(world_size: int) -> int:
    """Return the room, in bytes, that a trial needs at each rank."""
    return world_size * PUT_BYTES


@dataclass(frozen=True)
class Trial:
    """A rank's part of a trial. All ranks make theirs together, when all have met; words are clear again behind it.

    take: queues the copy of what was put at a place of this rank's room into a tensor, which is `where`.
    """

    memory: OwnMemory
    device: DeviceRuntime
    words: Words
    rank: int
    world_size: int
    take: Callable[[torch.Tensor, int], object]
    where: torch.device
    limit_seconds: float

    def run(self) -> None:
        """Put to every peer and signal it, see theirs come, then wait for it on a stream, as programs do.

        Raises RuntimeError, within the limit.
        """
        deadline = time.monotonic() + self.limit_seconds
        own = {peer: self._words_of(peer, self.rank) for peer in self._peers()}
        stream = self.device.new_stream()
        with self.device.on(stream):
            self._put()
            put = stream.record_event()
        if not _within(deadline, lambda: self._are_set(own.values())):
            silent = [str(peer) for peer, pair in own.items() if not self._are_set([pair])]
            raise self._late(f"no signal of rank {', '.join(silent)} has come")
        try:
            with self.device.on(stream):
                found = {peer: self._received(peer, pair) for peer, pair in own.items()}
                done = stream.record_event()
            if not _within(deadline, done.query):
                raise self._late("a stream waits for words that are set")
        except BaseException:
            _within(deadline, put.query)  # a release overwrites what a put still reads: its peer would be blamed
            self.memory.release()
            raise
        for peer, data in found.items():
            if wrong := int((data.cpu() != pattern(peer, self.rank)).sum()):
                raise RuntimeError(f"{wrong} of {PUT_BYTES} bytes that rank {peer} put are wrong behind its signal")
        self.check_clear()

    def captured(self) -> Any:
        """Return a graph, not launched, that signals every peer and waits for all of theirs. Raises device errors."""
        with self.device.capture() as graph:
            for peer in self._peers():
                for word in self._words_of(self.rank, peer):
                    self.memory.signal(peer, word)
            for peer in self._peers():
                for word in self._words_of(peer, self.rank):
                    self.memory.wait(word)
        return graph

    def launch(self, graph: Any) -> None:
        """Launch the graph, on all ranks together. Raises RuntimeError, within the limit."""
        deadline, stream = time.monotonic() + self.limit_seconds, self.device.new_stream()
        with self.device.on(stream):
            graph.replay()
            done = stream.record_event()
        if not _within(deadline, done.query):
            self.memory.release()
            raise self._late("the graph does not end")

    def check_clear(self) -> None:
        """Raise RuntimeError if words are still set when all ranks have come to an end.

        A wait that did not wait has left them behind.
        """
        if any(self.memory.are_set([word for peer in self._peers() for word in self._words_of(peer, self.rank)])):
            raise RuntimeError("words that a stream has waited for and cleared are still set")

    def _peers(self) -> list[int]:
        return [peer for peer in range(self.world_size) if peer != self.rank]

    def _words_of(self, src: int, dst: int) -> tuple[int, int]:
        """Return the words that a rank signals a peer: arrival and credit.

        Their number is the peer's, which no other expects.
        """
        return self.words.arrival(REQUESTS, src, dst), self.words.credit(REQUESTS, src, dst)

    def _put(self) -> None:
        for peer in self._peers():
            arrival, credit = self._words_of(self.rank, peer)
            self.memory.put(pattern(self.rank, peer).to(self.where), peer, self.rank * PUT_BYTES, arrival)
            self.memory.signal(peer, credit)

    def _received(self, peer: int, words: Iterable[int]) -> torch.Tensor:
        """Return what a peer has put, queued behind the waits for its words."""
        for word in words:
            self.memory.wait(word)
        data = torch.empty(PUT_BYTES, dtype=torch.uint8, device=self.where)
        self.take(data, peer * PUT_BYTES)
        return data

    def _are_set(self, pairs: Iterable[Sequence[int]]) -> bool:
        return all(self.memory.are_set([word for pair in pairs for word in pair]))

    def _late(self, what: str) -> RuntimeError:
        return RuntimeError(f"no answer within {self.limit_seconds:g} s: {what}")


def pattern(src: int, dst: int) -> torch.Tensor:
    """Make what a rank puts to a peer: different for each pair, and no byte equal to what the room has at first."""
    generator = torch.Generator().manual_seed(src << 20 | dst)
    return torch.randint(1, 256, (PUT_BYTES,), generator=generator, dtype=torch.uint8)


def _within(deadline: float, asked: Callable[[], bool]) -> bool:
    """Return True if it becomes so before the deadline; asked once in any case."""
    while not asked():
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
    return True
