"""Programs of all ranks of `symm` in one process, on streams that run late and out of step; and graphs of them.

Each rank is a thread with a device of stream_world. `Late` queues what torch operators do on the device's current
stream: a tensor has its values when the world has run that far. The transport is the real one over FakeMemory; the
ranks meet at a barrier, and the world runs while all of them wait for their devices. A graph is what was queued while
it was captured, checked as CUDA checks it: it begins and ends in one stream, and waits for nothing outside.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from nvshmem_ops import Emulated, Streams
from stream_world import (
    POISON,
    Event,
    FakeDevice,
    FakeMemory,
    Operation,
    Queue,
    Refused,
    Stream,
    World,
    awaiting,
    check_joined,
    setting,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tokenring.backends.transports.onesided import Words
from tokenring.backends.transports.symm import SymmTransport
from tokenring.errors import PeerLost
from tokenring.ir.schedule_data import CHANNELS
from tokenring.launch.groups import HeldGroup

SECONDS = 60.0
T = TypeVar("T")


class Party:
    """What the ranks share. boxed: messages go over NVSHMEM's operators, by way of boxes."""

    def __init__(self, ranks: int, seed: int, merged: bool, boxed: bool = False) -> None:
        self.ranks, self.world, self.boxed = ranks, World(ranks, seed, merged), boxed
        self.symmetric: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self.heaps: list[torch.Tensor] = [torch.empty(0)] * ranks
        self.words = [[0] * Words(CHANNELS, ranks).count for _ in range(ranks)]
        self.said = [b""] * ranks
        self.met = threading.Barrier(ranks)
        self.synchronized = threading.Barrier(ranks, self._run)

    def _run(self) -> None:
        with _disable_current_modes():
            self.world.run()

    def each(self, act: Callable[[Device], T]) -> list[T]:
        """What each rank makes, in a thread of its own. Raises what the first that failed has raised."""
        made: dict[int, T] = {}
        errors: list[BaseException] = []

        def work(rank: int) -> None:
            device = Device(self, rank)
            try:
                with Late(device):
                    made[rank] = act(device)
            except BaseException as error:
                errors.append(error)
                self.met.abort()
                self.synchronized.abort()

        threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(self.ranks)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(SECONDS)
        if errors:
            raise next((each for each in errors if not isinstance(each, threading.BrokenBarrierError)), errors[0])
        return [made[rank] for rank in range(self.ranks)]


class Marker:
    """As torch.cuda.Event: whoever waits for it waits for its last record."""

    last: Event | None = None

    def record(self, stream: Stream) -> None:
        self.last = stream.record_event()


class LateStream(Stream):
    def wait_event(self, event: Event | Marker) -> None:
        last = event.last if isinstance(event, Marker) else event
        if last is not None:
            super().wait_event(last)


class Device(FakeDevice):
    """One rank's, with graphs."""

    type = "cpu"

    def __init__(self, party: Party, rank: int) -> None:
        self.party, self.capturing = party, False
        super().__init__(party.world, rank)
        self._current = self.new_stream()

    def new_stream(self, high_priority: bool = False) -> LateStream:
        return LateStream(self.world, self.world.stream(self.rank).queue)

    def new_event(self) -> Marker:
        return Marker()

    def synchronize(self) -> None:
        self.party.synchronized.wait(SECONDS)

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        assert not any(queue.waiting for queue in self.world.queues[self.rank])
        graph, origin = Graph(self), self.new_stream()
        self.capturing = True
        with self.on(origin):
            yield graph
        self.capturing = False
        graph.take(origin)


class Graph:
    """What was queued while it was captured, for each queue; the first is that of the stream it began in."""

    def __init__(self, device: Device) -> None:
        self.device, self.queues = device, list[list[Operation]]()

    def take(self, origin: Stream) -> None:
        """Out of the queues. Raises Refused for what is no graph."""
        queues = sorted(self.device.world.queues[self.device.rank], key=lambda each: each is not origin.queue)
        self.queues = [list(queue.waiting) for queue in queues if queue is origin.queue or queue.waiting]
        for queue in queues:
            queue.waiting.clear()
        set_here = {id(each.sets) for queue in self.queues for each in queue if each.sets}
        for operations in self.queues:
            for each in operations:
                if each.awaits is not None and id(each.awaits) not in set_here:
                    raise Refused("a graph waits for an event from outside of it")
                if each.sets is not None:
                    each.sets.graph = True
        if stray := [queue[0].name for queue in self.queues[1:] if queue[0].awaits is None]:
            raise Refused(f"not captured: {stray[0]}, on a stream that does not follow the first")
        check_joined(self.queues)

    def replay(self) -> None:
        """Behind what the current stream has come to; what comes there is behind all of it."""
        world, stream = self.device.world, self.device.current_stream()
        start, fresh, ends = stream.record_event(), dict[int, Event](), []
        for operations in self.queues:
            ends.append(Event())
            again = Queue()
            again.waiting.extend([awaiting(start), *(_again(each, fresh) for each in operations), setting(ends[-1])])
            if world.merged:
                stream.queue.waiting.extend(again.waiting)
            else:
                world.queues[self.device.rank].append(again)
        for end in ends:
            stream.wait_event(end)


def _again(operation: Operation, fresh: dict[int, Event]) -> Operation:
    """The same for one replay, with events of its own."""
    if operation.sets is not None:
        return setting(fresh.setdefault(id(operation.sets), Event()))
    if operation.awaits is not None:
        return awaiting(fresh.setdefault(id(operation.awaits), Event()))
    return operation


class Late(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators are queued: what they give is memory, and gets its values when the device comes to them."""

    def __init__(self, device: Device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func._schema.name.startswith("aten::empty"):
            return func(*args, **kwargs)
        given = {each.name: x for each, x in zip(func._schema.arguments, args, strict=False)} | kwargs
        written = [given[each.name] for each in func._schema.arguments if _is_written(each) and each.name in given]
        before = [x.clone() for x in written]
        made = func(*args, **kwargs)  # for its sizes
        for x, old in zip(written, before, strict=True):
            x.copy_(old)
        self.device.current_stream().add(str(func), partial(act_again, func, args, kwargs, made))
        return made


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def act_again(func: Any, args: Any, kwargs: Any, made: Any) -> None:
    """An operator once more, into the tensors that it made when it was queued or captured."""
    again = func(*args, **kwargs)
    for old, new in zip(several(made), several(again), strict=True):
        if old is not new:
            old.copy_(new)


def several(made: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(x, torch.Tensor))


# ---------- the transport


class Memory(FakeMemory):
    """Its words are there from the start."""

    def __init__(self, device: Device) -> None:
        super().__init__(device, device.party.heaps, device.party.words)

    def meet(self, words: int, room_bytes: int = 0) -> torch.Tensor:
        assert words == len(self.words[self.device.rank])
        return torch.zeros(room_bytes, dtype=torch.uint8)

    def are_set(self, words: Sequence[int]) -> list[bool]:
        return [self.words[self.device.rank][word] == 1 for word in words]

    def grow(self, nbytes: int) -> torch.Tensor:
        made = torch.empty(nbytes, dtype=torch.uint8)
        with _disable_current_modes():
            made.fill_(POISON)
        self.heaps[self.device.rank] = made
        return made


class _Threads(HeldGroup):
    """A device in place of the group."""

    def __init__(self, device: Device) -> None:
        self.device = device


class Control:
    """Exchanges of threads; nobody is ever lost."""

    closed, broken, name = False, None, "captured"

    def __init__(self, transport: str, group: _Threads, timeout_seconds: float) -> None:
        device = group.device
        self.party, self.rank, self.world_size = device.party, device.rank, device.party.ranks
        self.timeout_seconds = timeout_seconds
        self.shared = self.board = self

    def check_usable(self) -> None:
        """It is."""

    def note_waiting(self, peer: int | None) -> None:
        """Nobody reads it."""

    def is_hopeless(self, peer: int) -> bool:
        return False

    def lost(self, peer: int, what: str, found: str) -> PeerLost:
        return PeerLost(f"rank {peer}: {what}: {found}", peer)

    def fail(self, error: BaseException) -> None:
        raise error

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        self.party.said[self.rank] = payload
        self.party.met.wait(SECONDS)
        heard = list(self.party.said)
        self.party.met.wait(SECONDS)
        return heard

    exchange_text = exchange


class InWorld(SymmTransport):
    """The transport on such a device. Needs `Control` in place of that of transports.symm."""

    name = device_type = "cpu"

    def __init__(self, device: Device) -> None:
        self._given = device
        super().__init__(_Threads(device), SECONDS)

    def _find_device(self) -> Any:
        return self._given

    def _meeting_place(self, group: Any) -> Any:
        return None

    def _make_memory(self, store: Any) -> Any:
        party = self._given.party
        return Emulated(party.ranks, Streams(self._given, party.symmetric)) if party.boxed else Memory(self._given)

    def _try_verbs(self, room: torch.Tensor) -> None:
        """Nothing: hosts look on at a trial, and here nothing runs while they do (test_trial has it)."""

    def try_capture(self) -> None:
        """Nothing, for the same reason."""

    def _is_captured(self) -> bool:
        return self._given.capturing
