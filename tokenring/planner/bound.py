"""How fast any schedule could be: a lower bound on computing and on the bytes that must enter a group of ranks.

The derivation is in docs/bounds.md. It holds for every schedule that starts from a balanced sequence-sharded
layout, leaves its results there and computes equally much on every rank, whatever it keeps, prunes or overlaps, and
whether or not it splits the batch. `uneven/G` does not, and may go below where all ranks share one wire.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tokenring.mask import Full, Mask
from tokenring.planner.interconnect import Interconnect
from tokenring.planner.rates import Rates
from tokenring.schedule.ir import Pass
from tokenring.schedule.measure import FLOPS_PER_PAIR
from tokenring.workload import Workload

MOST_RANKS = 64  # of a group that is looked at, and of all where hosts differ
MOST_OUTSIDE = 64  # senders that are looked at: of equal hosts a few stand for all
MOST_WHOLE_HEADS = 128  # query heads of all batch entries, up to which every division in whole heads is tried
ROUNDING = 1e-9


Cost = Callable[[float], float]


@dataclass(frozen=True)
class Bound:
    """The bound of some passes together. `cut`: the group of ranks whose wires are the narrowest."""

    compute_seconds: float
    transfer_seconds: float
    cut: str

    @property
    def seconds(self) -> float:
        """With everything hidden behind everything."""
        return max(self.compute_seconds, self.transfer_seconds)


def is_attainable(mask: Mask, kv_heads: int, ranks: int) -> bool:
    """Whether it is known that some schedule attains the bound where wires allow it: docs/bounds.md, Known values."""
    return mask == Full() and kv_heads % ranks == 0


def lower_bound(
    workload: Workload, visible_pairs: int, interconnect: Interconnect, rates: Rates, passes: Sequence[Pass]
) -> Bound:
    """visible_pairs: (query, key) pairs that the mask leaves, of one head and one batch entry."""
    share = visible_pairs / (workload.q_length * workload.kv_length)
    compute = sum(_compute_seconds(workload, visible_pairs, interconnect.world_size, rates, each) for each in passes)
    sizes: dict[int, float] = {}  # bytes into a group of so many ranks
    best, name = 0.0, "none"
    for label, groups in _partitions(interconnect):
        for size in {len(each) for each in groups} - sizes.keys():
            sizes[size] = len(passes) * group_bytes(workload, share, size, interconnect.world_size)
        nbytes = sum(sizes[len(each)] for each in groups)
        seconds = nbytes / (_width_into(interconnect, groups) * 1e9)
        if seconds > best:
            best, name = seconds, label
    return Bound(compute, best, name)


def _compute_seconds(workload: Workload, pairs: int, ranks: int, rates: Rates, direction: Pass) -> float:
    """At the best rate that the table has."""
    flops = FLOPS_PER_PAIR[direction] * workload.batch * workload.q_heads * workload.head_dim * pairs
    samples = rates.forward if direction == "forward" else rates.backward
    return flops / ranks / (max(rate for _, rate in samples) * 1e12)


def group_bytes(workload: Workload, share: float, group: int, ranks: int) -> float:
    """Bytes that must come into a group of `group` ranks, on average over groups that are all the ranks together.

    share: of all (query, key) pairs, how many are visible. A head of one batch entry has nothing in common with that
    of another: both count as heads.
    """
    part = Fraction(group, ranks)
    row = workload.head_dim * workload.itemsize  # one tensor's bytes of a token, head and batch entry
    # Either pass moves two tensors of each: Q and O, K and V; or, where Q, K and V were kept, dO and dQ, dK and dV.
    q_bytes = 2 * row * workload.q_length  # of one query head, all of its rows
    kv_bytes = 2 * row * workload.kv_length
    per_group = workload.q_heads // workload.kv_heads
    heads = workload.batch * workload.q_heads
    work = share * heads * float(part)  # in heads: what the group computes when all compute alike
    cost = _head_group_cost(per_group, q_bytes, kv_bytes, float(part))
    divide = _spread if heads <= MOST_WHOLE_HEADS else _spread_evenly
    return divide(work, workload.batch * workload.kv_heads, per_group, part, cost)


def _spread(work: float, groups: int, per_group: int, part: Fraction, cost: Cost) -> float:
    """The least cost of `work` (in heads) over so many KV heads.

    What the group of ranks itself holds of a KV head is free. Above that the cost is concave between multiples of
    `part` and whole heads, so that in the cheapest division all KV heads but one are at such a point.
    `least[n][done]` is the least cost of `done` / part.denominator heads of work on n KV heads.
    """
    unit, free = part.denominator, _free(per_group, part)
    steps = {point: cost(point / unit) for point in _corners(per_group, part) if point / unit <= work + ROUNDING}
    least: dict[int, float] = {0: 0.0}
    best = math.inf
    for taken in range(groups + 1):
        best = min(best, _with_the_rest(least, work, groups - taken, per_group, unit, free, cost))
        after: dict[int, float] = {}
        for done, before in least.items():
            for step, more in steps.items():
                if (done + step) / unit <= work + ROUNDING:
                    after[done + step] = min(after.get(done + step, math.inf), before + more)
        least = after
    return best


def _spread_evenly(work: float, groups: int, per_group: int, part: Fraction, cost: Cost) -> float:
    """No more than `_spread`, and hardly less where there are many KV heads: as if a part of a KV head could be divided
    as the whole of it can. What each of them costs is then the convex hull of its corners."""
    corners = [(_free(per_group, part), 0.0)]
    corners += [(point / part.denominator, cost(point / part.denominator)) for point in _corners(per_group, part)]
    each = work / groups
    if each <= corners[0][0]:
        return 0.0
    return groups * min(
        (a_cost + (b_cost - a_cost) * (each - a) / (b - a) if b > a else min(a_cost, b_cost))
        for a, a_cost in corners
        for b, b_cost in corners
        if a <= each <= b
    )


def _free(per_group: int, part: Fraction) -> float:
    """Work on a KV head, in heads, for which nothing has to come in."""
    return per_group * float(part) ** 2


def _corners(per_group: int, part: Fraction) -> list[int]:
    """Beyond what is free, where the cost of work on a KV head bends upwards; in 1 / part.denominator of a head."""
    heads = range(1, per_group + 1)
    points = {each * own for each in heads for own in (part.numerator, part.denominator)}
    return sorted(point for point in points if point / part.denominator > _free(per_group, part))


def _with_the_rest(
    least: Mapping[int, float], work: float, others: int, per_group: int, unit: int, free: float, cost: Cost
) -> float:
    """The least cost where one of `others` KV heads gets what is left, and the rest of them what is free."""
    best = math.inf
    for done, spent in least.items():
        rest = work - done / unit - max(0, others - 1) * free
        if rest <= ROUNDING:
            best = min(best, spent)
        elif others and rest <= per_group + ROUNDING:
            best = min(best, spent + cost(rest))
    return best


def _head_group_cost(per_group: int, q_bytes: float, kv_bytes: float, part: float) -> Cost:
    """Bytes into the group for so much work (in heads) on one KV head and the query heads that share it."""

    def cost(work: float) -> float:
        return min(
            (
                _rectangle(work / heads, heads * q_bytes, kv_bytes, part)
                for heads in range(1, per_group + 1)
                if work <= heads + 1e-9
            ),
            default=math.inf,
        )

    return cost


def _rectangle(area: float, q_bytes: float, kv_bytes: float, part: float) -> float:
    """The cheapest a × b = area with a, b at most 1: what exceeds the group's own part must come in."""
    least = max(area, 0.0)
    tries = [1.0, part, least, least / part if part else 1.0, math.sqrt(kv_bytes * least / q_bytes)]
    best = math.inf
    for a in tries:
        a = min(1.0, max(a, least, 1e-300))
        b = least / a
        best = min(best, q_bytes * max(0.0, a - part) + kv_bytes * max(0.0, b - part))
    return best


# ---------- groups of ranks, and what can come into them


Groups = Sequence[tuple[int, ...]]


def _partitions(net: Interconnect) -> Iterator[tuple[str, Groups]]:
    """The ranks in groups: each for itself; hosts; and runs of neighbours of every power of two.

    Where all hosts are equal, one host, or one group of hosts, stands for the others.
    """
    world, alike = net.world_size, _hosts_alike(net)
    if world < 2 or (alike is None and world > MOST_RANKS):
        return
    yield "one rank", [(rank,) for rank in range(alike or world)]
    if len(net.fabrics) > 1:
        hosts = [tuple(rank for rank in range(world) if net.hosts[rank] == host) for host in range(len(net.fabrics))]
        yield "one host", hosts[:1] if alike else [each for each in hosts if each]
    size = 2
    while size < min(world, MOST_RANKS):
        if world % size == 0 and (alike is None or alike % size == 0 or size % alike == 0):
            stop = max(alike, size) if alike else world
            yield f"{size} neighbours", [tuple(range(first, first + size)) for first in range(0, stop, size)]
        size *= 2


def _hosts_alike(net: Interconnect) -> int | None:
    """Ranks a host, where all hosts are equal."""
    first = net.fabrics[0]
    same = net.local is not None and all(each is first or each == first for each in net.fabrics)
    in_order = all(device == rank % (net.local or 1) for rank, (_, device) in enumerate(net.places))
    return net.local if same and in_order else None


def _width_into(net: Interconnect, groups: Groups) -> float:
    """GB/s of a set of wires of which every way into one of the groups passes one: the narrowest of a few such sets.

    Infinite where a way passes no wire, as between ranks that share a device: what comes by it takes no time.
    """
    picks: dict[str, set[str]] = {"last": set(), "first": set(), "narrowest": set()}
    for group in groups:
        inside = set(group)
        for src in _outside(net, inside):
            for dst in group:
                way = net.way(src, dst)
                if not way:
                    return math.inf
                picks["last"].add(way[-1])
                picks["first"].add(way[0])
                picks["narrowest"].add(min(way, key=net.gbs))
    complete = net.world_size - len(groups[0]) <= MOST_OUTSIDE
    wires = picks.values() if complete else [picks["last"]]
    return min(sum(map(net.gbs, each)) for each in wires)


def _outside(net: Interconnect, inside: set[int]) -> list[int]:
    """The ranks outside a group, or enough of them to know its own wires: all of its hosts, and of the next."""
    if net.world_size - len(inside) <= MOST_OUTSIDE:
        return [rank for rank in range(net.world_size) if rank not in inside]
    near = {net.hosts[rank] for rank in inside}
    near.add(next(host for host in net.hosts if host not in near))
    return [rank for rank, host in enumerate(net.hosts) if host in near and rank not in inside]
