"""Transport `symm` without a GPU: its own code, on memory that processes share and on streams that are threads.

The host itself is the compute stream, so that what it queues there happens at once, and a wait there blocks it. All
other streams are threads, each a little late. `OnCpu` runs programs; `Told` also takes messages of which nobody was
told the place before, as the transports' conformance suite sends them: there the ranks tell it through a store.
boxed_ranks has both over NVSHMEM's operators.
"""

from __future__ import annotations

import json
import queue
import random
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from patience import patient

from tokenring.backends.control.control import Control, shared_segment
from tokenring.backends.control.segments import Segment
from tokenring.backends.devices import DeviceMemory as DeviceMemory
from tokenring.backends.interfaces import Work
from tokenring.backends.transports.auto_cuda import CudaTransport
from tokenring.backends.transports.gloo import GlooTransport
from tokenring.backends.transports.onesided import Line, OwnMemory, Queued
from tokenring.backends.transports.symm import SymmTransport
from tokenring.errors import ConfigurationError
from tokenring.lowering import backend_names
from tokenring.tables.transport_choice import ONE_SIDED, TransportChoice
from tokenring.weak_method import weakly

POLL_SECONDS = 0.0002
LATE_SECONDS = 0.0005  # at most, before each thing that a thread does


class Event:
    """A point of a stream."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    def query(self) -> bool:
        return self.reached.is_set()


class HostStream:
    """The compute stream. idle: what the host does while it waits."""

    def __init__(self, idle: Callable[[], object]) -> None:
        self.idle = idle

    def add(self, act: Callable[[], object]) -> None:
        act()

    def record_event(self) -> Event:
        event = Event()
        event.reached.set()
        return event

    def wait_event(self, event: Event) -> None:
        while not event.reached.wait(POLL_SECONDS):
            self.idle()

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())


class ThreadStream:
    """One that a thread works through."""

    idle = staticmethod(lambda: None)

    def __init__(self, seed: int) -> None:
        self._waiting: queue.Queue[Callable[[], object] | None] = queue.Queue()
        threading.Thread(target=_work, args=(self._waiting, seed), daemon=True).start()

    def add(self, act: Callable[[], object]) -> None:
        self._waiting.put(act)

    def record_event(self) -> Event:
        event = Event()
        self.add(event.reached.set)
        return event

    def wait_event(self, event: Event) -> None:
        self.add(event.reached.wait)

    def wait_stream(self, other: Any) -> None:
        self.wait_event(other.record_event())

    def end(self) -> None:
        self._waiting.put(None)


def _work(waiting: queue.Queue[Callable[[], object] | None], seed: int) -> None:
    draw = random.Random(seed)
    while (act := waiting.get()) is not None:
        time.sleep(draw.random() * LATE_SECONDS)
        act()


class ThreadDevice:
    """A device of such streams; `tokenring.backends.devices.DeviceRuntime` of what is asked of it."""

    type, name = "cpu", "threads"

    def __init__(self, idle: Callable[[], object]) -> None:
        self._host, self._threads = HostStream(idle), list[ThreadStream]()
        self._current: Any = self._host

    def synchronize(self) -> None:
        for each in self._threads:
            each.record_event().reached.wait()

    def clock(self) -> float:
        self.synchronize()
        return time.perf_counter()

    def stream_clock(self) -> float:
        return time.perf_counter()

    def current_stream(self) -> Any:
        return self._current

    def new_stream(self, high_priority: bool = False) -> Any:
        self._threads.append(ThreadStream(len(self._threads)))
        return self._threads[-1]

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def memory(self) -> DeviceMemory:
        return DeviceMemory(None, None, None)

    def __del__(self) -> None:
        for each in self._threads:
            each.end()


class SegmentMemory:
    """Words and heaps in shared memory; the verbs are queued on the current stream of the device."""

    def __init__(self, control: Control, device: ThreadDevice, store: Any) -> None:
        self._control, self._device, self._store = control, device, store
        self._released = False
        self._made = 0
        self._part = 0

    def _segment(self, nbytes: int) -> Segment:
        self._made += 1
        name = f"{self._control.name}-symm-{self._made}"
        made, trouble = shared_segment(name, nbytes, self._control.rank, self._agree, lambda *_: None)
        if made is None:
            raise RuntimeError(trouble)
        return made

    def _agree(self, what: str, trouble: str) -> list[str]:
        """Through the store, as torch's rendezvous does it. Raises RuntimeError if a rank does not come in time."""
        keys = [f"{what} {self._made} {rank}" for rank in range(self._control.world_size)]
        self._store.set(keys[self._control.rank], trouble)
        self._store.wait(keys)
        return [self._store.get(key).decode() for key in keys]

    def meet(self, words: int, room_bytes: int = 0) -> torch.Tensor:
        self._count, self._words = words, self._segment(words * self._control.world_size)
        return self._parts(room_bytes)

    def are_set(self, words: Sequence[int]) -> list[bool]:
        start = self._control.rank * self._count
        return [self._words.read(start + word, 1) == b"\1" for word in words]

    def grow(self, nbytes: int) -> torch.Tensor:
        return self._parts(nbytes)

    def _parts(self, nbytes: int) -> torch.Tensor:
        self._heap, self._part = self._segment(nbytes * self._control.world_size), nbytes
        return self._heap.part(self._control.rank * nbytes, nbytes)

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        start = self._heap_at(peer) + place
        source = data.view(-1).view(torch.uint8)
        self._device.current_stream().add(lambda: self._heap.bytes[start : start + source.numel()].copy_(source))
        self.signal(peer, word)

    def _heap_at(self, peer: int) -> int:
        return peer * self._part

    def signal(self, peer: int, word: int) -> None:
        self._device.current_stream().add(lambda: self._words.write(peer * self._count + word, b"\1"))

    def wait(self, word: int) -> None:
        at, stream = self._control.rank * self._count + word, self._device.current_stream()

        def act() -> None:
            while not self._released and self._words.read(at, 1) != b"\1":
                stream.idle()
                time.sleep(POLL_SECONDS)
            self._words.write(at, b"\0")

        stream.add(act)

    def release(self) -> None:
        self._released = True


class OnCpu(SymmTransport):
    """The transport on such a device."""

    name = device_type = "cpu"

    def _find_device(self) -> Any:
        return ThreadDevice(weakly(self.progress))

    def _make_memory(self, store: Any) -> OwnMemory:
        return SegmentMemory(self.control, self.device, store)  # type: ignore[arg-type]

    def progress(self) -> None:
        """What the host has to do while it waits: nothing, where places are known."""


class Told(OnCpu):
    """A send whose place is not known yet is put off; the receiver tells it through the ranks' store."""

    def __init__(self, group: Any, timeout_seconds: float) -> None:
        self._put_off: dict[Line, deque[_PutOff]] = defaultdict(deque)
        self._numbers: dict[tuple[str, Line], int] = defaultdict(int)
        super().__init__(group, timeout_seconds)
        store = dist.distributed_c10d._get_default_store()
        self._store = dist.PrefixStore(f"told {self.control.name}", store)  # type: ignore[attr-defined]
        self.control.progress = weakly(self.progress)

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        self.check()
        self.sent_bytes[dst] += data.numel() * data.element_size()
        made = _PutOff(self, data, dst, label)
        self._put_off[channel, dst].append(made)
        self.progress()
        return made

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        self.check()
        place, size = self._place_of(data, label)
        number = self._receiving[channel, src]._posted
        box = self._box(src, channel, number)
        self._store.set(f"{src}>{self.rank} {channel} {number}", json.dumps((place if box is None else box, size)))
        with self._posting(channel):
            return self._post(data, (channel, src), box, label)

    def _box(self, src: int, channel: str, number: int) -> int | None:
        return None

    def _posting(self, channel: str) -> AbstractContextManager[object]:
        return nullcontext()

    def progress(self) -> None:
        for (channel, dst), waiting in self._put_off.items():
            while waiting:
                number = self._numbers["sent", (channel, dst)]
                key = f"{self.rank}>{dst} {channel} {number}"
                if not self._store.check([key]):
                    break
                self._numbers["sent", (channel, dst)] += 1
                place, size = json.loads(self._store.get(key))
                self._store.delete_key(key)
                each = waiting.popleft()
                if size != each.data.numel() * each.data.element_size():
                    raise ConfigurationError(f"send of {each.label}: its peer expects {size} bytes")
                each.queued = self._sending[channel, dst].send(each.data, place)


class _PutOff:
    """A send whose events come when it is queued."""

    queued: Queued | None = None

    def __init__(self, transport: Told, data: torch.Tensor, dst: int, label: str) -> None:
        self.transport, self.data, self.dst, self.label = transport, data, dst, label

    def wait(self) -> None:
        transport, what = self.transport, f"waited to send {self.label}"

        def attempt(seconds: float) -> bool:
            transport.progress()
            if self.queued is None and seconds:
                time.sleep(min(seconds, 0.001))
            return self.queued is not None

        transport.control.wait(attempt, self.dst, what)
        assert self.queued is not None
        with transport.watched(self.dst, what) as end:
            end.begun, end.done = self.queued
            transport.device.current_stream().wait_event(end.done)
        transport.check()


class AutoOnCpu(CudaTransport):
    """What auto does for CUDA tensors, with stand-ins for both that it takes."""

    one_sided, two_sided = OnCpu, GlooTransport  # type: ignore[assignment]

    def _choose(self) -> TransportChoice:
        return TransportChoice(ONE_SIDED, "the test says so")


def register() -> None:
    """Makes them known by name, in this process."""
    names = {"on cpu": "OnCpu", "told": "Told", "auto on cpu": "AutoOnCpu"}
    backend_names.TRANSPORTS.update({name: f"symm_ranks:{made}" for name, made in names.items()})
    boxed = {"boxed on cpu": "Boxed", "boxed told": "BoxedTold"}
    backend_names.TRANSPORTS.update({name: f"boxed_ranks:{made}" for name, made in boxed.items()})


def fails(what: str, text: str) -> None:
    """From now on a part of the set-up fails here, or hangs: "device", "hangs", "meet", "grow", "lay"; "": none."""

    def fail(*_: Any) -> Any:
        if what == "hangs":
            time.sleep(patient(3.0))
        raise RuntimeError(text)

    if what == "lay":
        from nvshmem_ops import Emulated

        setattr(Emulated, what, fail)
    owner, name = {
        "device": (OnCpu, "_find_device"),
        "hangs": (OnCpu, "_make_memory"),
        "meet": (SegmentMemory, "meet"),
        "grow": (SegmentMemory, "grow"),
    }.get(what, (fails, "unused"))
    setattr(owner, name, fail)
