"""Several ranks in one process and on one device: a thread for each, with a stream of its own where there are streams.

The threads stay from one schedule to the next, since cuDNN keeps its plans for each thread. What fails at one rank ends
the waits of all others.

Their transport copies from the sender's slot into the receiver's once both have posted, on a stream between them. It
keeps the rules that the executor relies on: messages of two ranks on one channel keep their order, a post waits for
what stands in the current stream, and `wait` holds up the current stream. For figures of exactness; its timings mean
nothing, since threads of Python take turns.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from tokenring.api.autograd import run_backward, run_forward
from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import AttentionKernel
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.lower import lower
from tokenring.lowering.target import Target
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.workload import Workload

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
WAIT_SECONDS = 60.0


class Stopped(RuntimeError):
    """Another rank failed."""


@dataclass
class _End:
    """One end of a message: memory, and when it may be used."""

    data: torch.Tensor
    ready: Any
    met: threading.Event = field(default_factory=threading.Event)  # with the other end, or with an error
    moved: bool = False
    done: Any = None


class Meeting:
    """Where the ends of messages meet."""

    def __init__(self, device: torch.device) -> None:
        self.device = device_of(device)
        self.lock = threading.Lock()
        self.waiting: dict[tuple[int, int, str, str], deque[_End]] = defaultdict(deque)
        self.streams: dict[tuple[int, int, str], Any] = {}
        self.error: BaseException | None = None  # the first one of any rank

    def fail(self, error: BaseException) -> None:
        """A rank has failed: nobody needs to wait for anybody."""
        with self.lock:
            self.error = self.error or error
            ends = [end for some in self.waiting.values() for end in some]
        for end in ends:
            end.met.set()

    def post(self, src: int, dst: int, channel: str, kind: str, data: torch.Tensor) -> _End:
        end = _End(data, self._event())
        with self.lock:
            if self.error is not None:
                raise Stopped(f"another rank failed: {self.error}")
            others = self.waiting[src, dst, channel, "recv" if kind == "send" else "send"]
            if not others:
                self.waiting[src, dst, channel, kind].append(end)
                return end
            other = others.popleft()
            sent, received = (end, other) if kind == "send" else (other, end)
            self._copy((src, dst, channel), sent, received)
        return end

    def _event(self) -> Any:
        event = self.device.new_event()
        if event is not None:
            event.record(self.device.current_stream())
        return event

    def _copy(self, way: tuple[int, int, str], sent: _End, received: _End) -> None:
        if way not in self.streams:
            self.streams[way] = self.device.new_stream()
        stream = self.streams[way]
        with self.device.on(stream) if stream is not None else nullcontext():
            for end in (sent, received):
                if stream is not None:
                    stream.wait_event(end.ready)
            received.data.copy_(sent.data)
            sent.done = received.done = self._event()
        sent.moved = received.moved = True
        sent.met.set()
        received.met.set()


@dataclass
class _Handle:
    end: _End
    meeting: Meeting
    label: str

    def wait(self) -> None:
        if not self.end.met.wait(WAIT_SECONDS):
            raise TimeoutError(f"{self.label}: nobody posted the other end within {WAIT_SECONDS:g} s")
        if not self.end.moved:
            raise Stopped(f"{self.label}: another rank failed: {self.meeting.error}")
        if self.end.done is not None:
            self.meeting.device.current_stream().wait_event(self.end.done)


class VirtualTransport:
    """The transport of one virtual rank."""

    target = Target()

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, world_size

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> _Handle:
        return _Handle(self.meeting.post(self.rank, dst, channel, "send", data), self.meeting, f"send of {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> _Handle:
        return _Handle(self.meeting.post(src, self.rank, channel, "recv", data), self.meeting, f"receive of {label}")

    def fail(self, error: BaseException) -> None:
        self.meeting.fail(error)


Bound = dict[Pass, Executor]  # the programs of one rank


def bind(
    schedule: Schedule, workload: Workload, rank: int, kernel: AttentionKernel, transport: Any, device: torch.device
) -> Bound:
    """Both passes of one rank."""
    pool, scale = Pool(device), workload.head_dim**-0.5
    made: Bound = {}
    for direction in (*PASSES, *PASSES):  # again, on the memory that the pool has grown to
        program = lower(schedule, rank, direction, workload, supports=kernel.supports_patch)
        made[direction] = Executor(schedule, workload, program, pool, transport, kernel, scale)
    return made


class Workers:
    """Threads for so many ranks, each on a stream of its own."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._device = device_of(device)
        self._work: list[SimpleQueue[Callable[[], None] | None]] = [SimpleQueue() for _ in range(count)]
        self._stuck = False
        for queue in self._work:
            threading.Thread(target=self._serve, args=(queue,), daemon=True).start()

    def _serve(self, queue: SimpleQueue[Callable[[], None] | None]) -> None:
        stream = self._device.new_stream()
        with self._device.on(stream) if stream is not None else nullcontext():
            while (work := queue.get()) is not None:
                work()

    def run(self, function: Callable[[int], T], count: int, meeting: Meeting) -> list[T]:
        """function(0), function(1), ..., at once. Raises the first error of theirs; TimeoutError where one hangs."""
        found: dict[int, T] = {}
        ended: SimpleQueue[int] = SimpleQueue()

        def one(rank: int) -> None:
            try:
                found[rank] = function(rank)
            except BaseException as error:
                meeting.fail(error)
            ended.put(rank)

        if self._stuck:
            raise TimeoutError("a rank of an earlier schedule has come to no end")
        self._device.synchronize()  # the inputs were made on another stream
        for rank in range(count):
            self._work[rank].put(partial(one, rank))
        try:
            for _ in range(count):
                ended.get(timeout=2 * WAIT_SECONDS)
        except Empty:
            self._stuck = True
            raise TimeoutError(f"some rank has come to no end within {2 * WAIT_SECONDS:g} s") from None
        self._device.synchronize()
        if meeting.error is not None:
            raise meeting.error
        return [found[rank] for rank in range(count)]

    def close(self) -> None:
        """Their threads end."""
        for queue in self._work:
            queue.put(None)


def both_passes(
    schedule: Schedule, workload: Workload, kernel: AttentionKernel, given: Tensors, workers: Workers
) -> Tensors:
    """out, dq, dk, dv over the whole sequence from q, k, v, dout [B, T, H, D]: a worker for each of its ranks."""
    ranks, device = schedule.world_size, given[0].device
    meeting = Meeting(device)
    places = [torch.tensor(schedule.q_layout.positions(rank), device=device) for rank in range(ranks)]

    def run(rank: int) -> Tensors:
        q, k, v, dout = (x.index_select(1, places[rank]) for x in given)
        bound = bind(schedule, workload, rank, kernel, VirtualTransport(meeting, rank, ranks), device)
        out, lse, kept = run_forward(bound["forward"], None, q, k, v)
        return out, *run_backward(bound["backward"], None, dout, q, k, v, out, lse, kept)

    parts = workers.run(run, ranks, meeting)
    order = torch.argsort(torch.cat(places))
    return tuple(torch.cat(each, 1).index_select(1, order) for each in zip(*parts, strict=True))
