"""Transfers on their way over wires, and when they arrive.

`Fluids`: at every moment each transfer has its fair share of its wires, as on links, switches and NICs of accelerators.
packets.py has the other way: packets of TCP that queue.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tokenring.planner.interconnects.interconnect import Way
from tokenring.planner.simulation.fluid import fair_rates

EPSILON_BYTES = 0.5


@dataclass(slots=True, eq=False)
class Transfer:
    """One message, or what several go as together. left: bytes; rate: bytes a second."""

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
    rate: float = 0.0
    sent: bool = False  # as its source sees it
    done: bool = False
    waiting: list[int] = field(default_factory=list)  # ranks


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


class Fluids:
    """Transfers that share wires, max-min fair. flow_gbs: the most that one gets.

    sharing_seconds: so long, a transfer that has begun may wait for its share while others begin and end.
    """

    def __init__(self, net: Wires, listener: Listener, flow_gbs: float, sharing_seconds: float) -> None:
        self._net, self._listener = net, listener
        self._cap, self._sharing_seconds = flow_gbs * 1e9, sharing_seconds
        self._moving: dict[int, Transfer] = {}
        self._since = 0.0  # when they had come so far
        self._stale_since: float | None = None  # since when transfers have begun or ended that do not share yet
        self._widths: dict[str, float] = {}

    def begin(self, transfer: Transfer, now: float) -> None:
        """Begin the transfer, or end it at once if it passes no wire and has no limit; see Moving.begin."""
        if not transfer.way and self._cap == math.inf:
            self._end(transfer, now)
            return
        self._moving[id(transfer)] = transfer
        self._changed(now)

    def next_moment(self, now: float) -> float:
        """Return when the first transfer ends at the rates of now; see Moving.next_moment."""
        return now + min((each.left / each.rate for each in self._moving.values() if each.rate > 0), default=math.inf)

    def advance(self, now: float) -> None:
        """Move all transfers on by their rates until this moment, and end those that have arrived.

        See Moving.advance.
        """
        passed, self._since = now - self._since, now
        for key, each in list(self._moving.items()):
            each.left -= each.rate * passed
            # What passes between two moments that are one as floats: else it would never end.
            rounding = each.rate * now * 1e-15
            if each.left <= max(EPSILON_BYTES, 1e-9 * each.nbytes, rounding):
                del self._moving[key]
                self._end(each, now)

    def settle(self, now: float, next_event: float) -> None:
        """Share out wires once for all that happens within the window; see Moving.settle."""
        if self._stale_since is None or next_event < self._stale_since + self._sharing_seconds:
            return
        ways: dict[Hashable, Sequence[str]] = {key: each.way for key, each in self._moving.items()}
        rates = fair_rates(ways, self._width, self._cap)
        for key, each in self._moving.items():
            each.rate = rates[key]
        self._stale_since = None

    def is_idle(self) -> bool:
        """Return whether nothing is on its way; see Moving.is_idle."""
        return not self._moving

    def _end(self, transfer: Transfer, now: float) -> None:
        self._changed(now)
        self._listener.arrived(transfer)
        self._listener.through(transfer)

    def _changed(self, now: float) -> None:
        if self._stale_since is None:
            self._stale_since = now

    def _width(self, wire: str) -> float:
        known = self._widths.get(wire)
        if known is None:
            known = self._widths[wire] = self._net.gbs(wire) * 1e9
        return known
