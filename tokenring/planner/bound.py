"""How fast any schedule could be: a lower bound on computing and on the bytes that must enter a group of ranks.

The derivation is in docs/bounds.md. It holds for every schedule that starts from a balanced sequence-sharded
layout and leaves its results there, whatever it keeps, prunes or overlaps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenring.planner.interconnect import Interconnect, Way
from tokenring.planner.rates import Rates
from tokenring.schedule.ir import Pass
from tokenring.schedule.measure import FLOPS_PER_PAIR
from tokenring.workload import Workload

MOST_RANKS = 64  # of a group that is looked at
MOST_OUTSIDE = 64  # senders that are looked at: of equal hosts a few stand for all


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


def lower_bound(
    workload: Workload, visible_pairs: int, interconnect: Interconnect, rates: Rates, passes: Sequence[Pass]
) -> Bound:
    """visible_pairs: (query, key) pairs that the mask leaves, of one head and one batch entry."""
    share = visible_pairs / (workload.q_length * workload.kv_length)
    compute = sum(_compute_seconds(workload, visible_pairs, interconnect.world_size, rates, each) for each in passes)
    best, name = 0.0, "none"
    for label, ranks in _groups(interconnect):
        nbytes = len(passes) * group_bytes(workload, share, len(ranks), interconnect.world_size)
        seconds = nbytes / (_width_into(interconnect, ranks) * 1e9)
        if seconds > best:
            best, name = seconds, label
    return Bound(compute, best, name)


def _compute_seconds(workload: Workload, pairs: int, ranks: int, rates: Rates, direction: Pass) -> float:
    """At the best rate that the table has."""
    flops = FLOPS_PER_PAIR[direction] * workload.batch * workload.q_heads * workload.head_dim * pairs
    samples = rates.forward if direction == "forward" else rates.backward
    return flops / ranks / (max(rate for _, rate in samples) * 1e12)


def group_bytes(workload: Workload, share: float, group: int, ranks: int) -> float:
    """Bytes that must come into a group of `group` ranks, of all groups of that size on average.

    share: of all (query, key) pairs, how many are visible.
    """
    part = group / ranks
    row = workload.batch * workload.head_dim * workload.itemsize  # one tensor's bytes of a token and head
    # Either pass moves two tensors of each: Q and O, K and V; or, where Q, K and V were kept, dO and dQ, dK and dV.
    q_bytes = 2 * row * workload.q_length  # of one query head, all of its rows
    kv_bytes = 2 * row * workload.kv_length
    per_group = workload.q_heads // workload.kv_heads
    work = share * workload.q_heads * part  # in heads: what the group computes when all compute alike
    return _spread(work, workload.kv_heads, per_group, part, _head_group_cost(per_group, q_bytes, kv_bytes, part))


def _spread(work: float, groups: int, per_group: int, part: float, cost: Cost) -> float:
    """The least cost of `work` over the KV heads.

    What the group itself holds of a KV head is free. Above that the cost is concave between multiples of `part` and
    whole heads, so that in the cheapest division all KV heads but one are at such a point. `least[k, n]` is the least
    cost of k · part heads of work on n KV heads.
    """
    free = per_group * part * part
    points = {heads * part for heads in range(1, per_group + 1)} | set(range(1, per_group + 1))
    steps = sorted({round(point / part) for point in points if free < point <= work})
    least: dict[tuple[int, int], float] = {(0, 0): 0.0}
    for taken in range(1, groups + 1):
        for (done, number), before in [each for each in least.items() if each[0][1] == taken - 1]:
            for step in steps:
                key = (done + step, number + 1)
                if key[0] * part <= work + 1e-9:
                    least[key] = min(least.get(key, math.inf), before + cost(step * part))
    best = math.inf
    for (done, number), spent in least.items():
        others = groups - number - 1
        rest = work - done * part - max(0, others) * free
        if others >= 0 and rest <= per_group + 1e-9:
            best = min(best, spent + cost(max(rest, 0.0)))
        elif others < 0 and rest <= 1e-9:
            best = min(best, spent)
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


def _groups(net: Interconnect) -> Iterable[tuple[str, tuple[int, ...]]]:
    """One rank; one host; and runs of neighbours of every power of two."""
    world = net.world_size
    yield "one rank", (0,)
    hosts = net.hosts
    first = tuple(rank for rank in range(min(world, MOST_RANKS)) if hosts[rank] == hosts[0])
    if len(first) < world:
        yield "one host", first
    size = 2
    while size < min(world, MOST_RANKS):
        if world % size == 0:
            yield f"{size} neighbours", tuple(range(size))
        size *= 2


def _width_into(net: Interconnect, ranks: tuple[int, ...]) -> float:
    """GB/s of a set of wires that every way into the group passes: the narrowest of a few such sets."""
    inside = set(ranks)
    outside = [rank for rank in range(net.world_size) if rank not in inside][:MOST_OUTSIDE]
    ways = [way for src in outside for dst in ranks if (way := net.way(src, dst))]
    picks: list[Callable[[Way], str]] = [lambda way: way[-1]]  # the group's own wires: whoever sends, these it passes
    if len(inside) + len(outside) == net.world_size:
        picks += [lambda way: way[0], lambda way: min(way, key=net.gbs)]
    return min(sum(map(net.gbs, set(map(pick, ways)))) for pick in picks) or math.inf
