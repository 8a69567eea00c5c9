"""The least time of programs that wait for each other: what a simulation cannot take less than, for far less work.

Each rank's program is followed in order, once. A message sets out no earlier than both ends have posted it, those
before it between the two have arrived and its latency has passed, and then it has each of its wires to itself. What a
rank has waited for must have passed every wire one after another, and so must all that is sent. A simulation differs
in that transfers share wires, which only delays them: nothing that comes later makes anything else come earlier.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence

from tokenring.planner.simulation.in_flight import EPSILON_BYTES, Wires
from tokenring.planner.simulation.operations import Compute, Operation, SimulatedPost
from tokenring.planner.simulation.simulate import Canonical, every_transfer
from tokenring.tables.rates import Messages

EARLY_SHARE = 1e-9  # of its bytes, by which a simulated transfer may arrive early; or EPSILON_BYTES

WireSeconds = tuple[tuple[str, float], ...]  # of a way: its wires, and the seconds that a byte takes on each


class _Message:
    """A message of which one end or both are posted: when it may set out, and when it may have arrived."""

    __slots__ = ("arrival", "begin", "counted", "nbytes", "posted", "reader", "seconds", "way")

    def __init__(self, way: WireSeconds, seconds: float, nbytes: float) -> None:
        self.way, self.seconds, self.nbytes = way, seconds, nbytes
        self.begin = self.arrival = 0.0
        self.posted = 0
        self.reader = -1  # a rank that waits for its other end
        self.counted = -1  # the rank that waited last: of one of many hosts both ends may be one rank's


class _Turns:
    """Messages that pass a wire one after another, each no earlier than it sets out."""

    __slots__ = ("end", "first", "last", "seconds")

    def __init__(self) -> None:
        self.first, self.last = float("inf"), 0.0  # of all of them, when the first and the last one may set out
        self.seconds = self.end = 0.0

    def add(self, begin: float, seconds: float) -> float:
        """Add a message; return when all may have passed."""
        self.seconds += seconds
        self.first = min(self.first, begin)
        if begin >= self.last:  # the last to set out: it goes last
            self.last = begin
            self.end = max(self.end, begin) + seconds
        else:
            self.end = max(self.end, self.first + self.seconds)
        return self.end


class _Chain:
    def __init__(
        self, programs: Mapping[int, Sequence[Operation]], net: Wires, messages: Messages, canonical: Canonical,
        whole: bool, start_seconds: float,
    ) -> None:  # fmt: skip
        self.programs, self.net, self.messages, self.canonical = programs, net, messages, canonical
        self.whole, self.cap = whole, messages.flow_gbs * 1e9
        self.now = {rank: start_seconds * (rank + 1) for rank in programs}
        self.at = dict.fromkeys(programs, 0)
        self.of_message: dict[int, dict[int, _Message]] = {rank: {} for rank in programs}
        self.unmatched: dict[tuple[int, int, str, bool], deque[_Message]] = defaultdict(deque)
        self.before: dict[tuple[int, int, str], float] = {}  # when the last message of two ranks may have arrived
        self.waited: dict[int, dict[str, _Turns]] = {rank: {} for rank in programs}
        self.ways: dict[tuple[int, int], tuple[WireSeconds, float]] = {}
        self.sent: list[_Message] = []
        self.ready = deque(programs)

    def seconds(self) -> float:
        """Return when all may have ended."""
        while self.ready:
            self._go_on(self.ready.popleft())
        turns: dict[str, _Turns] = defaultdict(_Turns)
        for message in sorted(self.sent, key=lambda each: each.begin):
            for wire, each in message.way:
                turns[wire].add(message.begin, each * message.nbytes)
        ends = [*self.now.values(), *(each.end for each in turns.values()), *(each.arrival for each in self.sent)]
        return max(ends, default=0.0)

    def _go_on(self, rank: int) -> None:
        """Follow a program until it waits for a message whose other end is still to be posted."""
        program, known, post_seconds = self.programs[rank], self.of_message[rank], self.messages.post_seconds
        now = self.now[rank]
        for at in range(self.at[rank], len(program)):
            each = program[at]
            if isinstance(each, Compute):
                now = max(now, each.launched) + each.seconds
            elif isinstance(each, SimulatedPost):
                known[each.message] = self._post(rank, each, now)
                now += post_seconds
            else:
                message = known[each.message]
                if self.whole and message.posted < 2:
                    message.reader, self.at[rank], self.now[rank] = rank, at, now
                    return
                now = max(now, message.arrival)
                if message.counted != rank:
                    message.counted = rank
                    now = max(now, self._all_through(self.waited[rank], message))
        self.at[rank], self.now[rank] = len(program), now

    @staticmethod
    def _all_through(turns: dict[str, _Turns], message: _Message) -> float:
        """Return when the message and all that were waited for before it may have passed every wire."""
        begin, nbytes = message.begin, message.nbytes
        ends = [turns.setdefault(wire, _Turns()).add(begin, each * nbytes) for wire, each in message.way]
        return max(ends, default=0.0)

    def _post(self, rank: int, post: SimulatedPost, now: float) -> _Message:
        src, dst = self.canonical(*((rank, post.peer) if post.sends else (post.peer, rank)))
        other_end = self.unmatched[src, dst, post.channel, not post.sends]
        if other_end:
            message = other_end.popleft()
        else:
            way, seconds = self._way(src, dst)
            nbytes = max(0.0, post.nbytes - max(EPSILON_BYTES, EARLY_SHARE * post.nbytes))
            message = _Message(way, seconds * nbytes, nbytes)
            self.unmatched[src, dst, post.channel, post.sends].append(message)
            self.sent.append(message)
        message.posted += 1
        self._set_out(message, (src, dst, post.channel), now)
        if message.posted == 2 and message.reader >= 0:
            self.ready.append(message.reader)
        return message

    def _set_out(self, message: _Message, pair: tuple[int, int, str], now: float) -> None:
        """Note that an end was posted now."""
        latency_seconds = self.messages.latency_seconds
        message.begin = max(message.begin, now + latency_seconds)
        if message.posted == 2:  # else what is before it may not be known
            before = self.before.get(pair, 0.0)
            message.begin = max(message.begin, before if self.messages.pipelined else before + latency_seconds)
            self.before[pair] = message.begin + message.seconds
        message.arrival = message.begin + message.seconds

    def _way(self, src: int, dst: int) -> tuple[WireSeconds, float]:
        """Return the wires of a way with the seconds of a byte on each, and the most of these."""
        known = self.ways.get((src, dst))
        if known is None:
            each = tuple((wire, 1 / (self.net.gbs(wire) * 1e9)) for wire in self.net.way(src, dst))
            known = self.ways[src, dst] = each, max([1 / self.cap, *(seconds for _, seconds in each)])
        return known


def chained_seconds(
    programs: Mapping[int, Sequence[Operation]], net: Wires, messages: Messages, canonical: Canonical = every_transfer,
    start_seconds: float = 0.0, whole: bool = True,
) -> float:  # fmt: skip
    """Return what a simulated pass of these ranks' programs takes at least: never more than `simulate` returns.

    whole: these are all programs; else a message may set out once one end is posted. Others as of `simulate`. 0 where
    messages are packets, of which this does not hold.
    """
    if messages.window_bytes is not None:
        return 0.0
    return _Chain(programs, net, messages, canonical, whole, start_seconds).seconds()
