"""The bytes that must come into groups of ranks, whatever the schedule. The derivation is in docs/bounds.md.

Two arguments, of which the larger result counts: one about pairs of which no group has both the row and the column,
one about work where each rank computes equally much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache

from tokenring.sequence.workload import Workload

MOST_WHOLE_HEADS = 128  # query heads of all batch entries, up to which every division in whole heads is tried
ROUNDING = 1e-9

Cost = Callable[[float], float]


def row_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes of all rows of one query head, and of all columns of one KV head.

    Either pass moves two tensors of each: Q and O, K and V; or, where Q, K and V were kept, dO and dQ, dK and dV. One
    of the two is as wide as keys, the other as wide as values. Latents stand in the place of K and V.
    """
    row, column = workload.qo_dim * workload.itemsize, workload.kv_dim * workload.itemsize  # of a head and batch entry
    return row * workload.q_length, column * workload.kv_length


def foreign_bytes(workload: Workload, share: float, parts: Sequence[float]) -> float:
    """Return the bytes into all groups of ranks together, for pairs whose row one of them has and whose column another.

    share: of all pairs of a head, how many these are. parts: of the ranks, that each group has. Ranks may compute
    unequally much. What a group pays for a pair is least with all rows, with all columns, or with whole heads.
    """
    q_bytes, kv_bytes = row_bytes(workload)
    columns = kv_bytes * workload.kv_heads / workload.q_heads  # for each of the query heads that share them
    least = min(parts)
    price = min(min(q_bytes / part, columns / part, (q_bytes + columns) / (1 + part - least)) for part in parts)
    return workload.batch * workload.q_heads * share * price


@lru_cache(maxsize=64)
def work_bytes(workload: Workload, share: float, group: int, ranks: int) -> float:
    """Return the bytes into a group of ranks, averaged over groups that together are all ranks.

    Each rank computes equally much. share: of all (query, key) pairs, how many are visible. A head of one batch entry
    has nothing in common with that of another: both count as heads.
    """
    part = Fraction(group, ranks)
    q_bytes, kv_bytes = row_bytes(workload)
    per_group = workload.q_heads // workload.kv_heads
    heads = workload.batch * workload.q_heads
    work = share * heads * float(part)  # in heads
    cost = _head_group_cost(per_group, q_bytes, kv_bytes, float(part))
    divide = _spread if heads <= MOST_WHOLE_HEADS else _spread_evenly
    return divide(work, workload.batch * workload.kv_heads, per_group, part, cost)


def _spread(work: float, groups: int, per_group: int, part: Fraction, cost: Cost) -> float:
    """Return the least cost of `work` (in heads) over so many KV heads.

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
    """Return a cost that is no more than `_spread`'s, and hardly less where there are many KV heads.

    It is computed as if a part of a KV head could be divided as the whole of it can. What each of them costs is then
    the convex hull of its corners.
    """
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
    """Return the work on a KV head, in heads, for which nothing has to come in."""
    return per_group * float(part) ** 2


def _corners(per_group: int, part: Fraction) -> list[int]:
    """Return where, beyond what is free, the cost of work on a KV head bends upwards; in 1 / part.denominator head."""
    heads = range(1, per_group + 1)
    points = {each * own for each in heads for own in (part.numerator, part.denominator)}
    return sorted(point for point in points if point / part.denominator > _free(per_group, part))


def _with_the_rest(
    least: Mapping[int, float], work: float, others: int, per_group: int, unit: int, free: float, cost: Cost
) -> float:
    """Return the least cost where one of `others` KV heads gets what is left, and the rest of them what is free."""
    best = math.inf
    for done, spent in least.items():
        rest = work - done / unit - max(0, others - 1) * free
        if rest <= ROUNDING:
            best = min(best, spent)
        elif others and rest <= per_group + ROUNDING:
            best = min(best, spent + cost(rest))
    return best


def _head_group_cost(per_group: int, q_bytes: float, kv_bytes: float, part: float) -> Cost:
    """Return the function from work (in heads) on a KV head and its query heads to the bytes into the group."""

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
    """Return the cost of the cheapest a × b = area with a, b at most 1: what exceeds the group's part must come in."""
    least = max(area, 0.0)
    tries = [1.0, part, least, least / part if part else 1.0, math.sqrt(kv_bytes * least / q_bytes)]
    best = math.inf
    for a in tries:
        a = min(1.0, max(a, least, 1e-300))
        b = least / a
        best = min(best, q_bytes * max(0.0, a - part) + kv_bytes * max(0.0, b - part))
    return best
