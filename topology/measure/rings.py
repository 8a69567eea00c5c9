"""A ring: the ranks that share the first link from each rank, and an order in which neighbours disturb no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenring.topology.measure.lab import Flow, Lab, Race
from tokenring.topology.measure.survey import Tables, least_disturbed, totals

SHARED = 0.75  # of the rate alone: two flows with one link have half each
CARRIED = 0.85  # by all links at once, of what they carry alone
MOST_ORDERS = 24  # that are tried
Sides = dict[int, tuple[frozenset[int], ...]]  # of each rank: the others, by the link that leads to them


@dataclass(frozen=True)
class Ring:
    """The order of the ranks, and which way round each reaches the others."""

    order: tuple[int, ...]
    sides: Sides

    def way(self, a: int, b: int) -> list[int]:
        """Return the ranks that a flow passes, on by one link at each. A way that turns back takes the shorter one."""
        ranks, place = len(self.order), self.order.index
        ahead = (place(b) - place(a)) % ranks
        next_rank = self.order[(place(a) + 1) % ranks]
        forward = 2 * ahead < ranks or (
            2 * ahead == ranks and any({next_rank, b} <= side or next_rank == b for side in self.sides[a])
        )
        step, hops = (1, ahead) if forward else (-1, ranks - ahead)
        return [self.order[(place(a) + step * hop) % ranks] for hop in range(hops + 1)]


def find_ring(tables: Tables, lab: Lab) -> Ring | None:
    """Find the ring; None if this is no ring."""
    sides = _sides(tables, lab)
    if any(len(each) != 2 for each in sides.values()):
        return None
    for number, order in enumerate(orders(sides)):
        if number == MOST_ORDERS:
            break
        neighbours = [(rank, order[(at + 1) % len(order)]) for at, rank in enumerate(order)]
        flows: tuple[Flow, ...] = tuple(flow for a, b in neighbours for flow in ((a, b), (b, a)))
        (outcome,) = totals(lab, [Race(flows, total=True)], "an order of the ring")
        if outcome.total >= CARRIED * sum(min(tables.alone[flow], tables.both[flow]) for flow in flows):
            return Ring(order, sides)
    return None


def _sides(tables: Tables, lab: Lab) -> Sides:
    """Find the sides of each rank: two flows from it slow each other down if they begin with one link."""
    sides: Sides = {}
    for rank in range(tables.ranks):
        first, *others = [other for other in range(tables.ranks) if other != rank]
        races = [Race(((rank, first), (rank, other))) for other in others]
        found = least_disturbed(lab, tables.alone, races, "which flows share a link", sure=1)
        same = {first}
        for other, rates in zip(others, found, strict=True):
            if any(gbs < SHARED * tables.alone[flow] for flow, gbs in rates.items()):
                same.add(other)
        rest = frozenset(others) - same
        sides[rank] = (frozenset(same), rest) if rest else (frozenset(same),)
    return sides


def orders(sides: Sides) -> Iterator[tuple[int, ...]]:
    """Yield orders that the sides allow: a rank's neighbours are on its two sides, each before all others there."""
    around = {rank: {other for other in sides if _may_follow(sides, rank, other)} for rank in sides}
    start = min(sides)

    def extend(path: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        at = path[-1]
        if len(path) == len(sides):
            closes = start in around[at] and _apart(sides, at, path[-2], start) and _apart(sides, start, at, path[1])
            if closes and path[1] < at:  # each order comes in both directions
                yield path
            return
        for after in sorted(around[at] - set(path)):
            if len(path) == 1 or _apart(sides, at, path[-2], after):
                yield from extend((*path, after))

    return extend((start,))


def _may_follow(sides: Sides, a: int, b: int) -> bool:
    return a != b and _leads_on(sides, a, b) and _leads_on(sides, b, a)


def _leads_on(sides: Sides, a: int, b: int) -> bool:
    """Return whether what lies behind b, seen from a, is on one side of b."""
    behind = next(side for side in sides[a] if b in side) - {b}
    return any(behind <= side for side in sides[b])


def _apart(sides: Sides, rank: int, one: int, other: int) -> bool:
    return not any({one, other} <= side for side in sides[rank])
