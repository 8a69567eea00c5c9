"""A device of streams that nobody can see into: what is queued happens late, and out of step between the streams.

All ranks are in one process. Host code queues; `World.run` then takes the next operation of any stream that can go
on, at random, until none is left or none can. A copy is two operations, so that it can be seen half done, and so is
what a kernel reads. With `merged` all streams of a rank stand in one queue, as streams of CUDA may that share a
hardware connection.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

POISON = 255


class Refused(AssertionError):
    """What the world finds wrong with what was queued."""


@dataclass(eq=False)
class Event:
    """A point of a stream, of one record of it. graph: it was captured, so that nobody outside can wait for it."""

    done: bool = False
    graph: bool = False

    def query(self) -> bool:
        return self.done


@dataclass
class Operation:
    """What happens, as soon as it is ready and the first of its queue; the event that it sets or waits for."""

    name: str
    act: Callable[[], None] = lambda: None
    ready: Callable[[], bool] = lambda: True
    sets: Event | None = None
    awaits: Event | None = None


def setting(event: Event) -> Operation:
    def set_it() -> None:
        event.done = True

    return Operation("record", set_it, sets=event)


def awaiting(event: Event) -> Operation:
    return Operation("wait for an event", ready=event.query, awaits=event)


def check_joined(queues: Sequence[Sequence[Operation]]) -> None:
    """Raises Refused where the end of some queue does not come before the end of the first, by events alone.

    cudaStreamEndCapture has it so (cudaErrorStreamCaptureUnjoined): what a graph forked must come back.
    """
    places = {id(each.sets): (at, n) for at, queue in enumerate(queues) for n, each in enumerate(queue) if each.sets}
    behind = [len(queues[0]), *([0] * (len(queues) - 1))]  # of each queue, how much surely comes before that end
    moved = True
    while moved:
        moved = False
        for queue, count in zip(queues, list(behind), strict=True):
            for each in queue[:count]:
                at, place = places.get(id(each.awaits), (0, -1))
                if place >= behind[at]:
                    behind[at], moved = place + 1, True
    if left := [queue[count].name for queue, count in zip(queues, behind, strict=True) if count < len(queue)]:
        raise Refused(f"unjoined: {'; '.join(left)} and what follows does not lead back to the first stream")


@dataclass
class Queue:
    waiting: deque[Operation] = field(default_factory=deque)


class Stream:
    """As torch.cuda.Stream, of what the protocol uses."""

    def __init__(self, world: World, queue: Queue) -> None:
        self.world, self.queue = world, queue

    def add(self, name: str, act: Callable[[], None] = lambda: None, ready: Callable[[], bool] = lambda: True) -> None:
        self.queue.waiting.append(Operation(name, act, ready))

    def record_event(self) -> Event:
        event = Event()
        self.world.events.append(event)
        self.queue.waiting.append(setting(event))
        return event

    def wait_event(self, event: Event) -> None:
        if event.graph:
            raise Refused("an event of a graph is waited for outside of it")
        self.queue.waiting.append(awaiting(event))

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class World:
    """The streams of all ranks. turn: what contents depend on, so that a replay has other ones."""

    def __init__(self, ranks: int, seed: int, merged: bool = False) -> None:
        self.random, self.merged = random.Random(seed), merged
        self.queues: list[list[Queue]] = [[] for _ in range(ranks)]
        self.network: list[Queue] = []  # what is under way between ranks, beside all streams
        self.events: list[Event] = []
        self.turn = self.checked = 0

    def stream(self, rank: int) -> Stream:
        if not self.merged or not self.queues[rank]:
            self.queues[rank].append(Queue())
        return Stream(self, self.queues[rank][-1])

    def run(self, most: int | None = None) -> None:
        """So many operations; all that there are, if no number is given, or Refused where they are stuck."""
        queues = [queue for each in self.queues for queue in each]
        while most is None or most > 0:
            self.network = [queue for queue in self.network if queue.waiting]
            heads = [queue for queue in (*queues, *self.network) if queue.waiting and queue.waiting[0].ready()]
            if not heads:
                break
            self.random.choice(heads).waiting.popleft().act()
            most = None if most is None else most - 1
        if most is None and (left := [queue.waiting[0].name for queue in queues if queue.waiting]):
            raise Refused(f"stuck: {'; '.join(left)}")

    def capture(self) -> Callable[[], None]:
        """What is queued now, to be queued again, as a graph is that is replayed."""
        kept = [[list(queue.waiting) for queue in each] for each in self.queues]
        for of_rank in kept:
            check_joined(of_rank)

        def replay() -> None:
            for event in self.events:
                event.done = False
            for each, operations in zip(self.queues, kept, strict=True):
                for queue, some in zip(each, operations, strict=True):
                    queue.waiting.extend(some)

        return replay


class FakeDevice:
    """One rank's device, of what the protocol uses."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self._current = world.stream(rank)

    def current_stream(self) -> Stream:
        return self._current

    def new_stream(self, high_priority: bool = False) -> Stream:
        return self.world.stream(self.rank)

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before


class FakeMemory:
    """Heaps and words of all ranks, and the three verbs of one of them; `Memory` of transports.onesided."""

    def __init__(self, device: FakeDevice, heaps: list[torch.Tensor], words: list[list[int]]) -> None:
        self.device, self.heaps, self.words = device, heaps, words

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        self.copy(data, peer, place)
        self.signal(peer, word)

    def copy(self, data: torch.Tensor, peer: int, place: int) -> None:
        half = data.numel() // 2
        for start, stop in ((0, half), (half, data.numel())):
            target = self.heaps[peer][place + start : place + stop]
            self.stream.add(f"put to {peer}", lambda t=target, s=data[start:stop]: t.copy_(s))  # type: ignore[misc]

    def signal(self, peer: int, word: int) -> None:
        def act() -> None:
            self.words[peer][word] = 1

        self.stream.add(f"rank {self.device.rank} signals {peer}", act)

    def wait(self, word: int) -> None:
        own = self.words[self.device.rank]

        def clear() -> None:
            own[word] = 0

        self.stream.add(f"rank {self.device.rank} waits for word {word}", clear, lambda: own[word] == 1)

    def release(self) -> None:
        raise AssertionError("nobody is lost here")

    @property
    def stream(self) -> Stream:
        return self.device.current_stream()
