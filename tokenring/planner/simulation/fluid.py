"""Transfers as fluids: each gets its max-min fair share of the wires it passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

TIE = 1 + 1e-9  # shares so close are one


class Shares:
    """Bytes a second of transfers that begin and end, by the routes that they take.

    Those that pass the same wires get the same: a route has one share, however many take it. When some begin or end,
    only what is joined with them by wires is shared out anew. width: of a wire, bytes a second. cap: of any one
    transfer, which it gets where it passes no wire.
    """

    def __init__(self, width: Callable[[str], float], cap: float = math.inf) -> None:
        self._width, self._cap = width, cap
        self._numbers: dict[tuple[str, ...], int] = {}  # of routes
        self._wires: dict[str, int] = {}  # their numbers
        self._widths: list[float] = []
        self._over: list[set[int]] = []  # of each wire the routes over it that are taken
        self._load: list[int] = []  # of each wire the transfers over it, as often as they pass it
        self._routes: list[tuple[int, ...]] = []  # of each route its wires
        self._takers: list[int] = []  # of each route
        self._touched: set[int] = set()  # routes whose takers changed
        self.rates: list[float] = []  # of each route, what each transfer on it gets; 0 where there is none

    def route(self, way: tuple[str, ...]) -> int:
        """Return the number of the route over these wires; numbers rise from 0."""
        number = self._numbers.get(way)
        if number is None:
            number = self._numbers[way] = len(self._routes)
            self._routes.append(tuple(map(self._wire, way)))
            self._takers.append(0)
            self.rates.append(0.0)
        return number

    def change(self, route: int, more: int) -> None:
        """Note that so many transfers more take a route."""
        before = self._takers[route]
        self._takers[route] += more
        self._touched.add(route)
        for wire in self._routes[route]:
            self._load[wire] += more
            if not before:
                self._over[wire].add(route)
            elif before + more == 0:
                self._over[wire].discard(route)

    def divide(self) -> list[int]:
        """Share out anew what is joined with routes whose takers changed; return those of another share than before."""
        routes, wires = self._joined()
        found = dict.fromkeys(routes, 0.0)
        if routes:
            self._fill({route for route in routes if self._takers[route]}, wires, found)
        changed = [route for route, rate in found.items() if rate != self.rates[route]]
        for route in changed:
            self.rates[route] = found[route]
        self._touched = set()
        return changed

    def _wire(self, name: str) -> int:
        if name not in self._wires:
            self._wires[name] = len(self._widths)
            self._widths.append(self._width(name))
            self._over.append(set())
            self._load.append(0)
        return self._wires[name]

    def _joined(self) -> tuple[set[int], set[int]]:
        """Return the routes that changed, those that are taken and share a wire with them, and so on; and all wires."""
        routes, fresh, wires = set(self._touched), self._touched, set[int]()
        while fresh:
            met = {wire for route in fresh for wire in self._routes[route]} - wires
            wires |= met
            fresh = set().union(*[self._over[wire] for wire in met]) - routes
            routes |= fresh
        return routes, wires

    def _fill(self, waiting: set[int], wires: Iterable[int], rates: dict[int, float]) -> None:
        """Divide the wires by progressive filling (Bertsekas and Gallager, Data Networks, §6.5.2)."""
        routes, takers, over = self._routes, self._takers, self._over
        left, count, shares = {}, {}, {}  # of wires: what is not given yet, to whom it may go, and what each would get
        for wire in wires:
            if number := self._load[wire]:
                left[wire], count[wire] = self._widths[wire], number
                shares[wire] = left[wire] / number
        while waiting:
            share = min(shares.values(), default=math.inf)
            if share >= self._cap:
                rates.update(dict.fromkeys(waiting, self._cap))
                return
            most = share * TIE
            full = waiting.intersection(set().union(*[over[wire] for wire, gets in shares.items() if gets <= most]))
            touched = set[int]()
            for route in full:
                rates[route] = share
                number, wires = takers[route], routes[route]
                given = share * number
                for wire in wires:
                    left[wire] -= given
                    count[wire] -= number
                touched.update(wires)
            for wire in touched:
                if number := count[wire]:
                    shares[wire] = left[wire] / number
                else:
                    del shares[wire]
            waiting = waiting - full
