"""Transfers as fluids: each gets its max-min fair share of the wires it passes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from heapq import heapify, heappop, heapreplace
from itertools import permutations

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
        self._beside: list[dict[int, int]] = []  # of each wire the others that such routes pass, and how many do
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
        if not more:
            return
        before = self._takers[route]
        self._takers[route] += more
        self._touched.add(route)
        wires = self._routes[route]
        for wire in wires:
            self._load[wire] += more
            if not before:
                self._over[wire].add(route)
            elif before + more == 0:
                self._over[wire].discard(route)
        if not before or before + more == 0:
            for wire, other in permutations(wires, 2):
                beside = self._beside[wire]
                if number := beside.pop(other, 0) + (-1 if before else 1):
                    beside[other] = number

    def divide(self) -> list[int]:
        """Share out anew what is joined with routes whose takers changed; return those of another share than before."""
        found: dict[int, float] = {}
        self._fill(self._joined(), found)
        for route in self._touched:
            if not self._takers[route]:
                found[route] = 0.0
            elif not self._routes[route]:
                found[route] = self._cap
        rates = self.rates
        changed = [route for route, rate in found.items() if rate != rates[route]]
        for route in changed:
            rates[route] = found[route]
        self._touched = set()
        return changed

    def _wire(self, name: str) -> int:
        if name not in self._wires:
            self._wires[name] = len(self._widths)
            self._widths.append(self._width(name))
            self._over.append(set())
            self._beside.append({})
            self._load.append(0)
        return self._wires[name]

    def _joined(self) -> list[int]:
        """Return the wires of the routes that changed, those of taken routes that share one of them, and so on."""
        known = {wire for route in self._touched for wire in self._routes[route]}
        found = list(known)
        for wire in found:  # which grows
            if fresh := self._beside[wire].keys() - known:
                known |= fresh
                found += fresh
        return found

    def _fill(self, wires: Iterable[int], rates: dict[int, float]) -> None:
        """Divide the wires by progressive filling (Bertsekas and Gallager, Data Networks, §6.5.2)."""
        routes, takers, over, cap = self._routes, self._takers, self._over, self._cap
        left, count = self._widths.copy(), self._load.copy()  # what is not given yet, and to how many it may go
        fullest = [(left[wire] / count[wire], wire) for wire in wires if count[wire]]  # a heap; shares rise meanwhile
        heapify(fullest)
        share = 0.0
        while fullest:
            before, wire = fullest[0]
            number = count[wire]
            if not number:
                heappop(fullest)
                continue
            gets = left[wire] / number
            if gets > before * TIE:
                heapreplace(fullest, (gets, wire))
                continue
            heappop(fullest)
            if gets > share * TIE:
                share = min(gets, cap)
            for route in over[wire]:
                if route not in rates:
                    rates[route] = share
                    number = takers[route]
                    given = share * number
                    for other in routes[route]:
                        left[other] -= given
                        count[other] -= number
