"""An assignment of chunks to ranks, equally many to each, and what it costs; changed by swaps of two chunks.

A rank computes what its own queries see, so it receives the rows of kv that they need and it does not own. Moving
queries instead of keys changes which rows move, hardly how many owners take part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tokenring.planner.layouts.demand import Demand

STEEPNESS = 3  # times that the cost of a port is squared: the busiest port decides, the others guide the search
GUIDE = 0.02  # weight of a port's rows themselves, where all are far below the busiest
OVERLOAD = 400.0  # cost of a rank with twice the pairs that it may have
STALE = 10  # swaps after which they are looked for again
AFFINE = 24  # chunks that a rank would most like to have, among which a swap may choose


class Swap(NamedTuple):
    """A swap of two chunks that was found good enough, with all that it changes."""

    costs: list[float]
    ranks: tuple[int, int]
    places: tuple[int, int]
    owned: tuple[int, int]
    needed: tuple[int, int]
    loads: list[int]
    received: list[int]
    sent: list[int]
    widest: list[int]
    rows: tuple[list[int], list[int]]
    columns: list[tuple[int, int, int]]


class _PortCosts(dict[int, float]):
    """Costs of ports by their grains, worked out where they are asked for."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self._scale = scale

    def __missing__(self, grains: int) -> float:
        steep = share = grains / self._scale
        for _ in range(STEEPNESS):
            steep *= steep
        found = self[grains] = steep + GUIDE * share
        return found


class Assignment:
    """Chunks of a demand, dealt to ranks.

    `moved[q][r]` is how many grains of rank r rank q needs; `received` and `sent` are its sums. Once it has its
    prices, the cost grows with the ports' grains, steeply near the busiest, and with pairs beyond `most_pairs`.
    `links` is of how many links a port is made, one for each peer, or 1: then a port is as busy as if each of its links
    carried what the busiest does.
    """

    def __init__(
        self, demand: Demand, owners: Sequence[int], ranks: int, most_pairs: float, links: int = 1
    ) -> None:
        self.demand, self.ranks, self.most_pairs, self.links = demand, ranks, most_pairs, links
        self.owners = list(owners)
        self.held = [[chunk for chunk, owner in enumerate(owners) if owner == rank] for rank in range(ranks)]
        self.loads = [sum(demand.pairs[chunk] for chunk in held) for held in self.held]
        self.owned, self.needed = [0] * ranks, [0] * ranks
        self._own = [demand.own(chunk) for chunk in range(len(owners))]
        for chunk, owner in enumerate(owners):
            self.owned[owner] |= self._own[chunk]
            self.needed[owner] |= demand.needs[chunk]
        self.moved = [
            [(self.needed[q] & self.owned[r]).bit_count() if q != r else 0 for r in range(ranks)] for q in range(ranks)
        ]
        self.received = [sum(line) for line in self.moved]
        self.sent = [sum(line[rank] for line in self.moved) for rank in range(ranks)]
        self._widest = [max(line) for line in self.moved]  # grains that a rank receives from the one that sends most
        self._shared: list[int | None] = [None] * ranks  # grains that two or more chunks of a rank need
        self._liked: list[list[int] | None] = [None] * ranks
        self._liked_at, self.taken = [0] * ranks, 0  # swaps
        self.costs: list[float] = []

    @property
    def busiest_port(self) -> int:
        """Grains that the busiest rank sends or receives, whichever is more, or would if all its links were as busy."""
        widest = self.links * max(self._widest) if self.links > 1 else 0
        return max(*self.received, *self.sent, widest)

    def price(self) -> None:
        """Set the costs by how busy the busiest port is now; multiplied out, since all hosts must agree on them."""
        self.scale = 0.8 * max(1, self.busiest_port)
        self._port_costs = _PortCosts(self.scale)
        self.costs = self._costs_of(self.loads, self.received, self.sent, self._widest)
        self.cost = sum(self.costs)

    def _overload(self, load: float) -> float:
        return OVERLOAD * (load / self.most_pairs - 1) if load > self.most_pairs else 0.0

    def _costs_of(
        self, loads: Sequence[int], received: Sequence[int], sent: Sequence[int], widest: Sequence[int]
    ) -> list[float]:
        table, most = self._port_costs, self.most_pairs
        busy = map(max, received, sent)
        if self.links > 1:
            busy = map(max, busy, (self.links * link for link in widest))
        return [
            table[grains] + (self._overload(load) if load > most else 0.0)
            for load, grains in zip(loads, busy, strict=True)
        ]

    def costliest(self) -> int:
        """Return the rank that costs most."""
        return self.costs.index(max(self.costs))

    def liked(self, rank: int) -> list[int]:
        """Return chunks that fit to what a rank has: that it needs, or that need what it has or needs.

        They are looked for now and then: a few swaps change little of it, but some may be the rank's own by now.
        """
        found = self._liked[rank]
        if found is None or self.taken - self._liked_at[rank] > STALE:
            self._liked_at[rank] = self.taken
            needed, absent = self.needed[rank], ~(self.needed[rank] | self.owned[rank])
            needs, own = self.demand.needs, self._own
            gains = [
                ((needs[chunk] & absent).bit_count() - (needed & own[chunk]).bit_count(), chunk)
                for chunk, owner in enumerate(self.owners)
                if owner != rank
            ]
            found = self._liked[rank] = [chunk for _, chunk in sorted(gains)[:AFFINE]]
        return found

    def fitting(self, rank: int, chunk: int) -> list[int]:
        """Return the places of the rank's chunks for which it may get this one, by the work of both ranks."""
        pairs = self.demand.pairs
        spare, other = self.most_pairs - self.loads[rank], self.most_pairs - self.loads[self.owners[chunk]]
        least, most = pairs[chunk] - max(0, spare), pairs[chunk] + max(0, other)
        return [place for place, mine in enumerate(self.held[rank]) if least <= pairs[mine] <= most]

    def swap(self, rank: int, place: int, chunk: int, limit: float) -> Swap | None:
        """Return the swap of what a rank has in a place for another's chunk, if it costs less than the limit."""
        other, given = self.owners[chunk], self.held[rank][place]
        needs, pairs = self.demand.needs, self.demand.pairs
        loads = self.loads[:]
        loads[rank] += pairs[chunk] - pairs[given]
        loads[other] += pairs[given] - pairs[chunk]
        # Others could gain by a swap that costs its own two ranks more: too seldom to look for it.
        limit_here = limit - self.cost + self.costs[rank] + self.costs[other]
        least = self._overload(loads[rank]) + self._overload(loads[other])
        if least >= limit_here:
            return None
        both = self._own[given] | self._own[chunk]
        owned = self.owned[rank] ^ both, self.owned[other] ^ both
        needed = self._without(rank, needs[given]) | needs[chunk], self._without(other, needs[chunk]) | needs[given]
        first, second = (needed[0] & ~owned[0]).bit_count(), (needed[1] & ~owned[1]).bit_count()
        if least + self._port_costs[first] + self._port_costs[second] >= limit_here:
            return None
        rows = self._rows_after(rank, other, owned, needed)
        if self.links > 1:
            busy = [max(port, self.links * max(row)) for port, row in zip((first, second), rows, strict=True)]
            if least + self._port_costs[busy[0]] + self._port_costs[busy[1]] >= limit_here:
                return None
        received, sent, columns = self._moved_after(rank, other, both, owned, rows)
        received[rank], received[other] = first, second
        widest = self._widest_after(rank, other, rows, columns) if self.links > 1 else self._widest
        costs = self._costs_of(loads, received, sent, widest)
        if sum(costs) >= limit:
            return None
        places = place, self.held[other].index(chunk)
        return Swap(costs, (rank, other), places, owned, needed, loads, received, sent, widest, rows, columns)

    def _widest_after(
        self, a: int, b: int, rows: tuple[list[int], list[int]], columns: Sequence[tuple[int, int, int]]
    ) -> list[int]:
        """Return what each rank receives from the one that sends it most, once this of `moved` has changed."""
        widest = self._widest[:]
        widest[a], widest[b] = max(rows[0]), max(rows[1])
        for rank, of_a, of_b in columns:
            line, most = self.moved[rank], widest[rank]
            if most in (line[a], line[b]):
                widest[rank] = max(of_a, of_b, *(line[at] for at in range(self.ranks) if at not in (a, b)))
            else:
                widest[rank] = max(most, of_a, of_b)
        return widest

    def _rows_after(
        self, a: int, b: int, owned: tuple[int, int], needed: tuple[int, int]
    ) -> tuple[list[int], list[int]]:
        """Return what ranks a and b receive from each, once they own and need this."""
        row_a = [(needed[0] & own).bit_count() for own in self.owned]
        row_b = [(needed[1] & own).bit_count() for own in self.owned]
        row_a[a], row_a[b] = 0, (needed[0] & owned[1]).bit_count()
        row_b[b], row_b[a] = 0, (needed[1] & owned[0]).bit_count()
        return row_a, row_b

    def _moved_after(
        self, a: int, b: int, both: int, owned: tuple[int, int], rows: tuple[list[int], list[int]]
    ) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
        """Return what all receive and send once ranks a and b own and receive this, and how others' rows change."""
        row_a, row_b = rows
        received, columns = self.received[:], []
        from_a, from_b = row_b[a], row_a[b]
        for rank, need in enumerate(self.needed):
            if rank in (a, b):
                continue
            line = self.moved[rank]
            of_a, of_b = line[a], line[b]
            if need & both:
                of_a, of_b = (need & owned[0]).bit_count(), (need & owned[1]).bit_count()
                received[rank] += of_a + of_b - line[a] - line[b]
                columns.append((rank, of_a, of_b))
            from_a, from_b = from_a + of_a, from_b + of_b
        before = zip(self.sent, self.moved[a], self.moved[b], row_a, row_b, strict=True)
        sent = [had - old_a - old_b + new_a + new_b for had, old_a, old_b, new_a, new_b in before]
        sent[a], sent[b] = from_a, from_b
        return received, sent, columns

    def take(self, swap: Swap) -> None:
        """Do a swap."""
        (a, b), (place_a, place_b) = swap.ranks, swap.places
        from_a, from_b = self.held[a][place_a], self.held[b][place_b]
        self.held[a][place_a], self.held[b][place_b] = from_b, from_a
        self.owners[from_a], self.owners[from_b] = b, a
        self.owned[a], self.owned[b] = swap.owned
        self.needed[a], self.needed[b] = swap.needed
        self.loads, self.received, self.sent, self._widest = swap.loads, swap.received, swap.sent, swap.widest
        self.moved[a], self.moved[b] = swap.rows
        for rank, of_a, of_b in swap.columns:
            self.moved[rank][a], self.moved[rank][b] = of_a, of_b
        self._shared[a] = self._shared[b] = None
        self.taken += 1
        self.costs, self.cost = swap.costs, sum(swap.costs)

    def _without(self, rank: int, need: int) -> int:
        """Return the grains that a rank's other chunks need, if one of its chunks needs these."""
        shared = self._shared[rank]
        if shared is None:
            once = shared = 0
            for chunk in self.held[rank]:
                each = self.demand.needs[chunk]
                shared |= once & each
                once |= each
            self._shared[rank] = shared
        return self.needed[rank] & ~need | shared
