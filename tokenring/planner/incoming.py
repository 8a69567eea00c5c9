"""How many bytes must come into groups of ranks, whatever the schedule. The derivation is in docs/bounds.md.

Two arguments, of which the larger result counts: one about pairs of which no group has both the row and the column,
one about work where each rank computes equally much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from tokenring.workload import Workload

MOST_WHOLE_HEADS = 128  # query heads of all batch entries, up to which every division in whole heads is tried
ROUNDING = 1e-9

Cost = Callable[[float], float]
Point = tuple[float, float]  # work, in heads, and its cost in bytes


def row_bytes(workload: Workload) -> tuple[float, float]:
    """Of all rows of one query head, and of all columns of one KV head.

    Either pass moves two tensors of each: Q and O, K and V; or, where Q, K and V were kept, dO and dQ, dK and dV.
    """
    row = workload.head_dim * workload.itemsize  # one tensor's bytes of a token, head and batch entry
    return 2 * row * workload.q_length, 2 * row * workload.kv_length


# ---------- pairs of which no group has both


def foreign_bytes(workload: Workload, share: float, groups: int) -> float:
    """Into all of so many equal groups of ranks, for the pairs whose row one of them has and whose column another.

    share: of all pairs, how many these are. Ranks may compute unequally much. A group that gets the rows of k others
    and the columns of l others sees k · l + k + l parts of the pairs that are nobody's own, less those in which both
    are one other group's: at least k + l - (groups - 1). In between it sees no more (the cost is linear in each of
    them), and of groups that do unequally much the average costs no more (the hull is convex).
    """
    others = groups - 1
    q_bytes, kv_bytes = row_bytes(workload)
    per_group = workload.q_heads // workload.kv_heads

    def point(rows: int, columns: int) -> Point:
        parts = rows * columns + min(rows + columns, others)
        return per_group * parts / groups**2, (per_group * q_bytes * rows + kv_bytes * columns) / groups

    corners = [(0.0, 0.0), *(point(rows, others - rows) for rows in range(groups)), point(others, others)]
    each = hull_at(corners, per_group * max(0.0, share) / groups)
    return groups * workload.batch * workload.kv_heads * each


def hull_at(points: Sequence[Point], work: float) -> float:
    """The lower convex hull of some points; work: between the least and the most of them, but for rounding."""
    hull: list[Point] = []
    for each in sorted(points):
        while len(hull) > 1 and _turns_down(hull[-2], hull[-1], each):
            hull.pop()
        if not hull or each[0] > hull[-1][0]:
            hull.append(each)
    if work <= hull[0][0]:
        return hull[0][1]
    for (a, a_cost), (b, b_cost) in pairwise(hull):
        if work <= b:
            return a_cost + (b_cost - a_cost) * (work - a) / (b - a)
    return hull[-1][1]


def _turns_down(a: Point, b: Point, c: Point) -> bool:
    """Whether b lies on or above the line from a to c."""
    return (b[1] - a[1]) * (c[0] - a[0]) >= (c[1] - a[1]) * (b[0] - a[0])


# ---------- equal work


@lru_cache(maxsize=64)
def work_bytes(workload: Workload, share: float, group: int, ranks: int) -> float:
    """Into a group of ranks, on average over groups that are all ranks together, where each computes equally much.

    share: of all (query, key) pairs, how many are visible. A head of one batch entry has nothing in common with that
    of another: both count as heads.
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
    return groups * hull_at(corners, work / groups)


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
