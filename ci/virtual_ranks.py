"""Several ranks in one process and on one device: a thread for each, with a stream of its own where there are streams.

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
from typing import Any, TypeVar

import torch

from tokenring.backends.base import AttentionKernel, Capabilities
from tokenring.backends.devices import device_of
from tokenring.runtime.autograd import run_backward, run_forward
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.schedule.ir import PASSES, Pass, Schedule
from tokenring.schedule.lower import lower
from tokenring.workload import Workload

T = TypeVar("T")
Tensors = tuple[torch.Tensor, ...]
WAIT_SECONDS = 60.0


@dataclass
class _End:
    """One end of a message: memory, and when it may be used."""

    data: torch.Tensor
    ready: Any
    met: threading.Event = field(default_factory=threading.Event)
    done: Any = None


class Meeting:
    """Where the ends of messages meet."""

    def __init__(self, device: torch.device) -> None:
        self.device = device_of(device)
        self.lock = threading.Lock()
        self.waiting: dict[tuple[int, int, str, str], deque[_End]] = defaultdict(deque)
        self.streams: dict[tuple[int, int, str], Any] = {}

    def post(self, src: int, dst: int, channel: str, kind: str, data: torch.Tensor) -> _End:
        end = _End(data, self._event())
        with self.lock:
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
        if self.end.done is not None:
            self.meeting.device.current_stream().wait_event(self.end.done)


class VirtualTransport:
    """The transport of one virtual rank."""

    capabilities = Capabilities(early_receives=True, channels=2)

    def __init__(self, meeting: Meeting, rank: int, world_size: int) -> None:
        self.meeting, self.rank, self.world_size = meeting, rank, world_size

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> _Handle:
        return _Handle(self.meeting.post(self.rank, dst, channel, "send", data), self.meeting, f"send of {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> _Handle:
        return _Handle(self.meeting.post(src, self.rank, channel, "recv", data), self.meeting, f"receive of {label}")

    def fail(self, error: BaseException) -> None:
        """Other ranks find out by their time limits."""


Bound = dict[Pass, Executor]  # the programs of one rank


def bind(
    schedule: Schedule, workload: Workload, rank: int, kernel: AttentionKernel, transport: Any, device: torch.device
) -> Bound:
    """Both passes of one rank."""
    pool, scale = Pool(device), workload.head_dim**-0.5
    made: Bound = {}
    for direction in (*PASSES, *PASSES):  # again, on the memory that the pool has grown to
        program = lower(schedule, rank, direction, workload, kernel.supports_patch, True)
        made[direction] = Executor(schedule, workload, program, pool, transport, kernel, scale)
    return made


def both_passes(
    schedule: Schedule, workload: Workload, kernel: AttentionKernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    dout: torch.Tensor,
) -> Tensors:  # fmt: skip
    """out, dq, dk, dv over the whole sequence [B, T, H, D], computed by as many threads as the schedule has ranks."""
    ranks, device = schedule.world_size, q.device
    meeting = Meeting(device)
    places = [torch.tensor(schedule.q_layout.positions(rank), device=device) for rank in range(ranks)]

    def run(rank: int) -> Tensors:
        q_, k_, v_, dout_ = (x.index_select(1, places[rank]) for x in (q, k, v, dout))
        bound = bind(schedule, workload, rank, kernel, VirtualTransport(meeting, rank, ranks), device)
        out, lse, kept = run_forward(bound["forward"], None, q_, k_, v_)
        return out, *run_backward(bound["backward"], None, dout_, q_, k_, v_, out, lse, kept)

    parts = _threads(run, ranks, device)
    order = torch.argsort(torch.cat(places))
    return tuple(torch.cat(each, 1).index_select(1, order) for each in zip(*parts, strict=True))


def _threads(run: Callable[[int], T], count: int, device: torch.device) -> list[T]:
    """run(0), run(1), ..., at once, each on a stream of its own. Raises the first error of theirs."""
    found: dict[int, T] = {}
    errors: list[BaseException] = []
    of_device = device_of(device)

    def one(rank: int) -> None:
        stream = of_device.new_stream()
        try:
            with of_device.on(stream) if stream is not None else nullcontext():
                found[rank] = run(rank)
        except BaseException as error:
            errors.append(error)

    of_device.synchronize()  # the inputs were made on another stream
    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_SECONDS)
    of_device.synchronize()
    if errors:
        raise errors[0]
    return [found[rank] for rank in range(count)]
