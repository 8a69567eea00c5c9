"""Transfers as fluids in the plainest way: at every moment each is moved on, each time all wires are shared out anew.

What the simulator does more cleverly must come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.simulation.in_flight import Listener, Transfer
from tokenring.planner.simulation.operations import Operation
from tokenring.planner.simulation.simulate import Outcome, Simulation
from tokenring.tables.rates import Messages

TIE = 1 + 1e-9


def plain_rates(ways: dict[int, tuple[str, ...]], widths: dict[str, float], cap: float = math.inf) -> dict[int, float]:
    """Return the bytes a second of each transfer, by progressive filling, transfer by transfer."""
    left, rates = dict(widths), dict[int, float]()
    while waiting := [key for key in ways if key not in rates]:
        count = {wire: sum(ways[key].count(wire) for key in waiting) for wire in widths}
        shares = {wire: left[wire] / number for wire, number in count.items() if number}
        share = min([cap, *shares.values()])
        full = {wire for wire, gets in shares.items() if gets <= share * TIE}
        for key in [key for key in waiting if share >= cap or full.intersection(ways[key])]:
            rates[key] = share
            for wire in ways[key]:
                left[wire] -= share
    return rates


class PlainFluids:
    """As `Fluids`."""

    def __init__(self, net: Interconnect, listener: Listener, flow_gbs: float, sharing_seconds: float) -> None:
        self.net, self.listener, self.cap, self.window = net, listener, flow_gbs * 1e9, sharing_seconds
        self.moving: list[Transfer] = []
        self.rates: dict[int, float] = {}
        self.since = 0.0
        self.stale_since: float | None = None

    def begin(self, transfer: Transfer, now: float) -> None:
        if not transfer.way and self.cap == math.inf:
            self.end(transfer, now)
            return
        self.moving.append(transfer)
        self.changed(now)

    def next_moment(self, now: float) -> float:
        return now + min(
            (each.left / self.rates[id(each)] for each in self.moving if id(each) in self.rates), default=math.inf
        )

    def advance(self, now: float) -> None:
        passed, self.since = now - self.since, now
        for each in list(self.moving):
            rate = self.rates.get(id(each), 0.0)
            each.left -= rate * passed
            if each.left <= max(0.5, 1e-9 * each.nbytes, rate * now * 1e-15):
                self.moving.remove(each)
                self.end(each, now)

    def settle(self, now: float, next_event: float) -> None:
        if self.stale_since is None or next_event < self.stale_since + self.window:
            return
        ways = {id(each): each.way for each in self.moving}
        wires = {wire for way in ways.values() for wire in way}
        self.rates = plain_rates(ways, {wire: self.net.gbs(wire) * 1e9 for wire in wires}, self.cap)
        self.stale_since = None

    def is_idle(self) -> bool:
        return not self.moving

    def end(self, transfer: Transfer, now: float) -> None:
        self.changed(now)
        self.listener.arrived(transfer)
        self.listener.through(transfer)

    def changed(self, now: float) -> None:
        self.stale_since = now if self.stale_since is None else self.stale_since


def plainly(
    net: Interconnect, programs: Sequence[Sequence[Operation]], messages: Messages, sharing_seconds: float = 0.0
) -> Outcome:
    """Simulate as `simulate` does, with transfers in the plainest way."""
    simulation = Simulation(net, programs, messages, record=True)
    simulation.moving = PlainFluids(net, simulation, messages.flow_gbs, sharing_seconds)
    return simulation.run()
