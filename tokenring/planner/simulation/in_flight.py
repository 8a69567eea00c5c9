"""Transfers on their way over wires, and when they arrive.

`Fluids`: at every moment each transfer has its fair share of its wires, as on links, switches and NICs of accelerators.
packets.py has the other way: packets of TCP that queue.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Protocol

from tokenring.planner.interconnects.interconnect import Way
from tokenring.planner.simulation.fluid import Shares

EPSILON_BYTES = 0.5
ROUNDING = 1e-15  # of a moment: two so close may be one as floats
_begun = itemgetter(0)


@dataclass(slots=True, eq=False)
class Transfer:
    """One message, or what several go as together. left: bytes to carry."""

    src: int
    dst: int
    nbytes: float
    way: tuple[str, ...]
    label: str
    step: int
    channel: str
    posted: int = 0  # ends
    ready: bool = False  # its latency has passed
    begin: float = -1.0
    left: float = 0.0
    sent: bool = False  # as its source sees it
    done: bool = False
    waiting: list[int] = field(default_factory=list)  # ranks
    queue: deque[Transfer] = field(init=False, repr=False)  # in which it stands, once it is posted


class Wires(Protocol):
    """The questions that a simulation asks of an interconnect."""

    def way(self, src: int, dst: int) -> Way:
        """Return the wires from one rank to another."""

    def gbs(self, wire: str) -> float:
        """Return the width of a wire in GB/s."""

    def burst_bytes(self, wire: str) -> float:
        """Return the bytes that pass at once over a wire that has been idle."""


class Listener(Protocol):
    """A listener to what becomes of a transfer."""

    def through(self, transfer: Transfer) -> None:
        """Note that the next transfer between its ranks may begin."""

    def sent(self, transfer: Transfer) -> None:
        """Note that its source need not wait for it any more, though it has not arrived."""

    def arrived(self, transfer: Transfer) -> None:
        """Note that all of the transfer is there."""


class Moving(Protocol):
    """All that is on its way."""

    def begin(self, transfer: Transfer, now: float) -> None:
        """Begin the transfer: it sets out."""

    def next_moment(self, now: float) -> float:
        """Return when the first transfer comes on; infinity where none is on its way, or none moves before `settle`."""

    def advance(self, now: float) -> None:
        """Move all transfers on until this moment."""

    def settle(self, now: float, next_event: float) -> None:
        """Note that all that happens at this moment has happened; what is next happens then."""

    def is_idle(self) -> bool:
        """Return whether nothing is on its way."""


@dataclass(slots=True, eq=False)
class _Route:
    """The transfers that pass the same wires: each of them gets the same, so that who lacks least arrives first.

    rate: of each, bytes a second. served: bytes that each has had since the route was taken, until `since`. wanted: a
    heap: what must be served until each has arrived, and as how many-th it began. end: when the first arrives.
    """

    rate: float = 0.0
    served: float = 0.0
    since: float = 0.0
    wanted: list[tuple[float, int, Transfer]] = field(default_factory=list)
    end: float = math.inf

    def serve(self, now: float) -> None:
        """Move all on until this moment."""
        self.served += self.rate * (now - self.since)
        self.since = now

    def arrived(self, now: float) -> list[tuple[int, Transfer]]:
        """Take those that have arrived at this moment, or all but; each with its number."""
        self.serve(now)
        ended = []
        # What passes between two moments that are one as floats: else it would never end.
        rounding = max(EPSILON_BYTES, self.rate * now * ROUNDING)
        while self.wanted and self.wanted[0][0] - self.served <= max(rounding, 1e-9 * self.wanted[0][2].nbytes):
            ended.append(heapq.heappop(self.wanted)[1:])
        if not self.wanted:
            self.rate = self.served = 0.0
        return ended


class Fluids:
    """Transfers that share wires, max-min fair. flow_gbs: the most that one gets.

    sharing_seconds: so long, a transfer that has begun may wait for its share while others begin and end. Nothing is
    reckoned of a transfer while its share stays what it is.
    """

    def __init__(self, net: Wires, listener: Listener, flow_gbs: float, sharing_seconds: float) -> None:
        self._listener, self._sharing_seconds = listener, sharing_seconds
        self._cap = flow_gbs * 1e9
        self._shares = Shares(lambda wire: net.gbs(wire) * 1e9, self._cap)
        self._routes: list[_Route] = []  # by their numbers
        self._fresh: list[tuple[int, Transfer]] = []  # have begun and have no share yet
        self._begun = self._moving = 0  # transfers so far, and now
        self._ends: list[tuple[float, int]] = []  # a heap: when the first of a route arrives, or what was said of it
        self._slowest, self._most_early_bytes = math.inf, EPSILON_BYTES  # of all so far
        self._stale_since: float | None = None  # since when transfers have begun or ended that do not share yet

    def begin(self, transfer: Transfer, now: float) -> None:
        """Begin the transfer, or end it at once if it passes no wire and has no limit; see Moving.begin."""
        if not transfer.way and self._cap == math.inf:
            self._end(transfer, now)
            return
        self._begun += 1
        self._moving += 1
        self._fresh.append((self._begun, transfer))
        self._most_early_bytes = max(self._most_early_bytes, 1e-9 * transfer.nbytes)
        self._changed(now)

    def next_moment(self, now: float) -> float:
        """Return when the first transfer ends at the rates of now; see Moving.next_moment."""
        ends = self._ends
        while ends and self._routes[ends[0][1]].end != ends[0][0]:
            heapq.heappop(ends)
        return max(now, ends[0][0]) if ends else math.inf

    def advance(self, now: float) -> None:
        """Move all transfers on by their rates until this moment, and end those that have arrived.

        See Moving.advance.
        """
        soon = now + self._most_early_bytes / self._slowest + now * ROUNDING
        ended: list[tuple[int, Transfer]] = []
        near: list[int] = []
        while self._ends and self._ends[0][0] <= soon:
            end, number = heapq.heappop(self._ends)
            route = self._routes[number]
            if end == route.end:
                route.end = math.inf  # whatever else was said of it is out of date
                near.append(number)
                arrived = route.arrived(now)
                self._shares.change(number, -len(arrived))
                ended += arrived
        for number in near:
            self._foresee(number)
        for _, each in sorted(ended, key=_begun):  # in the order in which they began
            self._moving -= 1
            self._end(each, now)

    def settle(self, now: float, next_event: float) -> None:
        """Share out wires once for all that happens within the window; see Moving.settle."""
        if self._stale_since is None or next_event < self._stale_since + self._sharing_seconds:
            return
        joined = {self._join(number, transfer, now) for number, transfer in self._fresh}
        self._fresh = []
        for number in joined.union(self._shares.divide()):
            rate, route = self._shares.rates[number], self._routes[number]
            if rate:
                route.serve(now)
                route.rate = rate
                self._slowest = min(self._slowest, rate)
                self._foresee(number)
        self._stale_since = None

    def is_idle(self) -> bool:
        """Return whether nothing is on its way; see Moving.is_idle."""
        return not self._moving

    def _join(self, begun: int, transfer: Transfer, now: float) -> int:
        """Let a transfer share its route from now on; return the route's number."""
        number = self._shares.route(transfer.way)
        if number == len(self._routes):
            self._routes.append(_Route())
        route = self._routes[number]
        route.serve(now)
        heapq.heappush(route.wanted, (route.served + transfer.left, begun, transfer))
        self._shares.change(number, 1)
        return number

    def _foresee(self, number: int) -> None:
        """Note when the first transfer on a route arrives, if its share stays what it is."""
        route = self._routes[number]
        route.end = route.since + (route.wanted[0][0] - route.served) / route.rate if route.wanted else math.inf
        if route.wanted:
            heapq.heappush(self._ends, (route.end, number))

    def _end(self, transfer: Transfer, now: float) -> None:
        self._changed(now)
        self._listener.arrived(transfer)
        self._listener.through(transfer)

    def _changed(self, now: float) -> None:
        if self._stale_since is None:
            self._stale_since = now
