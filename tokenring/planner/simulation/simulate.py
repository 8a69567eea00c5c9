"""The simulation of the programs of all ranks on an interconnect: events in time.

A rank works off its operations in order. A transfer begins when both ends have posted it, those before it
between the same two ranks on the same channel are through, and the latency has passed; how it then moves,
in_flight.py and packets.py say. Where ranks share the cores of one machine, what they do there takes turns.
Nothing else is known of schedules here: what was lowered is what is simulated.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from tokenring.errors import ScheduleError
from tokenring.planner.simulation.in_flight import Fluids, Moving, Transfer, Wires
from tokenring.planner.simulation.operations import Await, Compute, Operation, SimulatedPost, busy_seconds
from tokenring.planner.simulation.packets import Packets
from tokenring.tables.rates import Messages

EPSILON_SECONDS = 1e-12
Queue = tuple[int, int, str]  # source, destination, channel
Canonical = Callable[[int, int], tuple[int, int]]  # of equal transfers, the one that stands for all


def every_transfer(src: int, dst: int) -> tuple[int, int]:
    """Return the pair as it is: canonical where no transfer stands for another."""
    return src, dst


class TimeSpan(NamedTuple):
    """A span of time in which a rank did something, or a transfer was on its way to it."""

    rank: int
    what: str  # "kernel", "copy", "wait", or "transfer"
    label: str
    step: int
    begin_seconds: float
    end_seconds: float
    src: int = -1  # of a transfer


class TakesLonger(Exception):
    """A pass takes longer than the caller cares for; its simulation was given up."""


@dataclass
class Outcome:
    """The result of a simulated pass."""

    seconds: float
    busy_seconds: list[float]  # of each rank: kernels, copies and posts
    wire_bytes: dict[str, float]
    spans: list[TimeSpan] = field(default_factory=list)

    @property
    def exposed_seconds(self) -> float:
        """Seconds that the busiest rank waits: communication that nothing hides."""
        return self.seconds - max(self.busy_seconds)


@dataclass(slots=True, eq=False)
class _Work:
    """A piece of work on shared cores, and the rank or the transfer that then goes on."""

    left_seconds: float
    begin: float
    rank: int
    operation: Compute | None = None
    transfer: Transfer | None = None


class Simulation:
    """One pass of one schedule. `run` once."""

    def __init__(
        self,
        interconnect: Wires,
        programs: Sequence[Sequence[Operation]],
        messages: Messages,
        record: bool = False,
        canonical: Canonical = every_transfer,
        cores: float = math.inf,
        sharing_seconds: float = 0.0,
        kernels_share: bool = False,
        start_seconds: float = 0.0,
        most_seconds: float = math.inf,
    ) -> None:
        self.net, self.messages, self.record, self.canonical = interconnect, messages, record, canonical
        self.cores, self.kernels_share, self.start_seconds = cores, kernels_share, start_seconds
        self.moving: Moving
        if messages.window_bytes is None:
            self.moving = Fluids(interconnect, self, messages.flow_gbs, sharing_seconds)
        elif canonical is every_transfer:
            self.moving = Packets(interconnect, self, messages.window_bytes)
        else:
            raise ScheduleError("packets of one host do not stand for those of others: simulate all ranks")
        self.working: list[_Work] = []
        self.programs = programs
        self.at = [0] * len(programs)
        self.busy = [0.0] * len(programs)
        self.now = 0.0
        self.events: list[tuple[float, int, int, Transfer | None]] = []  # time, tie, rank, or a transfer to begin
        self.ties = 0
        self.queues: dict[Queue, deque[Transfer]] = defaultdict(deque)
        self.unmatched: dict[tuple[Queue, bool], deque[Transfer]] = defaultdict(deque)
        self.of_message: list[dict[int, Transfer]] = [{} for _ in programs]
        self.wire_bytes: dict[str, float] = defaultdict(float)
        self.spans: list[TimeSpan] = []
        self.since = [0.0] * len(programs)  # when the current wait or work began
        self.most_seconds = most_seconds
        # Of each rank, what is left to do from each operation on; asked for only where there is a limit.
        self.rest = [_rest(each, messages.post_seconds) for each in programs] if most_seconds < math.inf else []

    def run(self) -> Outcome:
        """Run the pass. Raises ScheduleError if the programs wait for each other for ever, and TakesLonger."""
        for rank in range(len(self.programs)):
            self._at_time(self.start_seconds * (rank + 1), rank)
        while self.events or self.working or not self.moving.is_idle():
            self._next_moment()
            while self.events and self.events[0][0] <= self.now:
                _, _, rank, transfer = heapq.heappop(self.events)
                if transfer is None:
                    self._go_on(rank)
                else:
                    self._handle(transfer)
            if self.now > self.most_seconds:
                raise TakesLonger
            self.moving.settle(self.now, self.events[0][0] if self.events else math.inf)
        if stuck := [rank for rank, program in enumerate(self.programs) if self.at[rank] < len(program)]:
            raise ScheduleError(f"the programs do not end: ranks {stuck} wait for each other")
        return Outcome(self.now, self.busy, dict(self.wire_bytes), self.spans)

    # ---------- time

    def _at_time(self, when: float, rank: int, transfer: Transfer | None = None) -> None:
        self.ties += 1
        heapq.heappush(self.events, (when, self.ties, rank, transfer))

    def _next_moment(self) -> None:
        """Go to what comes first: an event, or the end of a transfer or of work."""
        then = min(self.moving.next_moment(self.now), self.events[0][0] if self.events else math.inf)
        if self.working:
            speed = self._speed()
            then = min(then, self.now + min(each.left_seconds for each in self.working) / speed)
            passed, self.now = then - self.now, then
            self._progress(passed * speed)
        self.now = then
        self.moving.advance(then)

    def _speed(self) -> float:
        """Return the cores that each piece of work on the shared cores has, at most one."""
        return min(1.0, self.cores / len(self.working))

    def _progress(self, seconds: float) -> None:
        """Do so many seconds of each piece of work, and go on with what has ended."""
        # What passes between two moments that are one as floats: else it would never end.
        least = max(EPSILON_SECONDS, 1e-15 * self.now)
        for each in self.working:
            each.left_seconds -= seconds
        ended = [each for each in self.working if each.left_seconds <= least]
        if ended:
            self.working = [each for each in self.working if each.left_seconds > least]
        for each in ended:
            if each.transfer is not None:
                self._ready(each.transfer)
                continue
            self.busy[each.rank] += self.now - each.begin
            if self.record and each.operation is not None:
                self._note(each.rank, each.operation, each.begin)
            self._at_time(self.now, each.rank)

    # ---------- transfers

    def _begin(self, transfer: Transfer) -> None:
        transfer.begin, transfer.left = self.now, transfer.nbytes * self._turns(transfer)
        for wire in transfer.way:
            self.wire_bytes[wire] += transfer.nbytes
        self.moving.begin(transfer, self.now)

    def arrived(self, transfer: Transfer) -> None:
        """Let every rank go on that waits for the transfer; see Listener."""
        transfer.done = True
        if self.record:
            self.spans.append(
                TimeSpan(
                    transfer.dst, "transfer", transfer.label, transfer.step, transfer.begin, self.now, transfer.src
                )
            )
        for rank in transfer.waiting:
            if not (transfer.sent and rank == transfer.src):
                self._at_time(self.now, rank)

    def sent(self, transfer: Transfer) -> None:
        """Let the transfer's source go on; see Listener."""
        if transfer.src in transfer.waiting:
            self._at_time(self.now, transfer.src)

    def through(self, transfer: Transfer) -> None:
        """Begin the next transfer of its queue; see Listener."""
        transfer.queue.popleft()
        self._start_next(transfer.queue)

    def _start_next(self, queue: deque[Transfer]) -> None:
        """Begin the first transfer of a queue once both ends have posted it and it is ready."""
        if not queue or queue[0].posted < 2 or queue[0].begin >= 0:
            return
        if queue[0].ready:
            self._begin(queue[0])
        elif not self.messages.pipelined:
            queue[0].begin = self.now
            self._at_time(self.now + self.messages.latency_seconds, queue[0].dst, queue[0])

    def _handle(self, transfer: Transfer) -> None:
        """Put the handling of a transfer, whose latency has passed, on the shared cores as work."""
        seconds = self.messages.handling_seconds + transfer.nbytes / (self.messages.handling_gbs * 1e9)
        if seconds > 0:
            self.working.append(_Work(seconds, self.now, transfer.dst, transfer=transfer))
        else:
            self._ready(transfer)

    def _ready(self, transfer: Transfer) -> None:
        transfer.ready = True
        if transfer.queue[0] is transfer:
            self._begin(transfer)

    def _enqueue(self, transfer: Transfer) -> None:
        transfer.queue = self.queues[self._queue_of(transfer)]
        transfer.queue.append(transfer)

    def _queue_of(self, transfer: Transfer) -> Queue:
        if self.messages.source_serial:
            return transfer.src, -1, transfer.channel if self.messages.channels > 1 else ""
        pair = transfer.src, transfer.dst
        if self.messages.pair_serial:
            pair = min(pair, self._way_back(transfer))
        return *pair, transfer.channel if self.messages.channels > 1 else ""

    def _way_back(self, transfer: Transfer) -> tuple[int, int]:
        """Return the other direction of its pair, or what stands for that."""
        return self.canonical(transfer.dst, transfer.src)

    def _turns(self, transfer: Transfer) -> int:
        """Return 2 if a transfer stands for both directions of opposite hosts in one queue, for both turns; else 1."""
        both = self.messages.pair_serial and self._way_back(transfer) == (transfer.src, transfer.dst)
        return 2 if both else 1

    # ---------- ranks

    def _go_on(self, rank: int) -> None:
        """Work off operations until one takes time."""
        program = self.programs[rank]
        if self.rest and self.now + self.rest[rank][self.at[rank]] > self.most_seconds:
            raise TakesLonger
        for at in range(self.at[rank], len(program)):
            each = program[at]
            match each:
                case Compute():
                    if (late := each.launched - self.now) > EPSILON_SECONDS:
                        self.at[rank] = at
                        self._work(rank, late)
                        return
                    if each.seconds > 0:
                        self.at[rank] = at + 1
                        self._work(rank, each.seconds, each)
                        return
                case SimulatedPost():
                    self._post(rank, each)
                    if self.messages.post_seconds > 0:
                        self.at[rank] = at + 1
                        self._work(rank, self.messages.post_seconds)
                        return
                case Await():
                    if not self._is_over(rank, self.of_message[rank][each.message]):
                        self.at[rank] = at
                        return
        self.at[rank] = len(program)

    def _is_over(self, rank: int, transfer: Transfer) -> bool:
        """Return whether a rank need not wait for a transfer any more; else it waits."""
        if not (transfer.done or (transfer.sent and rank == transfer.src)):
            if rank not in transfer.waiting:
                transfer.waiting.append(rank)
                self.since[rank] = self.now
            return False
        if self.record and rank in transfer.waiting:
            self.spans.append(TimeSpan(rank, "wait", transfer.label, transfer.step, self.since[rank], self.now))
        return True

    def _work(self, rank: int, seconds: float, each: Compute | None = None) -> None:
        """Make the rank busy: on the shared cores, if there are any, and kernels there too if they share them."""
        if self.cores < math.inf and (self.kernels_share or not (each and each.kernel)):
            self.working.append(_Work(seconds, self.now, rank, each))
            return
        self.busy[rank] += seconds
        if self.record and each is not None:
            self._note(rank, each, self.now, self.now + seconds)
        self._at_time(self.now + seconds, rank)

    def _note(self, rank: int, each: Compute, begin: float, end: float | None = None) -> None:
        what = "kernel" if each.kernel else "copy"
        self.spans.append(TimeSpan(rank, what, each.label, each.step, begin, self.now if end is None else end))

    def _post(self, rank: int, post: SimulatedPost) -> None:
        src, dst = self.canonical(*((rank, post.peer) if post.sends else (post.peer, rank)))
        other_end = self.unmatched[(src, dst, post.channel), not post.sends]
        if other_end:
            transfer = other_end.popleft()
        else:
            way = self.net.way(src, dst)
            transfer = Transfer(src, dst, float(post.nbytes), way, post.label, post.step, post.channel)
            self.unmatched[(src, dst, post.channel), post.sends].append(transfer)
            if not self.messages.source_serial:
                self._enqueue(transfer)
        if self.messages.source_serial and post.sends:
            self._enqueue(transfer)  # in the order of its source's posts, whenever its receive is posted
        transfer.posted += 1
        self.of_message[rank][post.message] = transfer
        if transfer.posted == 2 and self.messages.pipelined:
            self._at_time(self.now + self.messages.latency_seconds, transfer.dst, transfer)
        if transfer.posted == 2:
            self._start_next(transfer.queue)


def simulate(
    interconnect: Wires,
    programs: Sequence[Sequence[Operation]],
    messages: Messages,
    record: bool = False,
    canonical: Canonical = every_transfer,
    cores: float = math.inf,
    sharing_seconds: float = 0.0,
    kernels_share: bool = False,
    start_seconds: float = 0.0,
    most_seconds: float = math.inf,
) -> Outcome:
    """Simulate one pass: the operations of every rank, by rank. `record`: keep what was done when, for a timeline.

    canonical: where the programs are those of one of many equal hosts, which transfer stands for one (symmetry.py).
    cores: that all ranks share for what is not a kernel, and with kernels_share for kernels (Machine). sharing_seconds:
    so long, a transfer that has begun may wait for its share while others begin and end: far fewer times are wires
    shared out (of packets, nothing). start_seconds: of each rank, which start one after another. Raises TakesLonger as
    soon as it is known that the pass takes longer than `most_seconds`.
    """
    simulation = Simulation(
        interconnect, programs, messages, record, canonical, cores, sharing_seconds, kernels_share, start_seconds,
        most_seconds,
    )  # fmt: skip
    try:
        return simulation.run()
    finally:
        del simulation.moving  # the two know each other, and the collector of such pairs may rest


def _rest(program: Sequence[Operation], post_seconds: float) -> list[float]:
    """Return how long a rank is busy from each operation on, and 0 for the end."""
    found = list(accumulate((busy_seconds(each, post_seconds) for each in reversed(program)), initial=0.0))
    return found[::-1]
