"""What must come into groups of ranks: both arguments of docs/bounds.md against all divisions of small cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import cache

import pytest
import torch
from nets import named, setting, workload

import tokenring as tr
from tokenring.planner.bounds.cut import _head_group_cost, _spread, _spread_evenly, foreign_bytes, work_bytes
from tokenring.planner.bounds.mask_density import own_pairs, visible_pairs
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.simulation.predict import wire_bytes
from tokenring.sequence.layout import Layout, Positions, make_layout
from tokenring.sequence.mask import Mask, parse_mask
from tokenring.sequence.workload import Workload

# ---------- the division of work over heads

STEPS = 24  # of the work of one query head


def by_force(work: float, groups: int, per_group: int, part: Fraction, q: float, kv: float) -> float:
    """The least cost over every division in small steps, each KV head with every number of its query heads."""
    known = costs_by_force(per_group, part, q, kv)
    total = round(work * STEPS)
    least = [0.0] + [math.inf] * total
    for _ in range(groups):
        least = [
            min(least[done - units] + known[units] for units in range(min(done, per_group * STEPS) + 1))
            for done in range(total + 1)
        ]
    return least[total]


@cache
def costs_by_force(per_group: int, part: Fraction, q: float, kv: float) -> list[float]:
    """Return the least of one KV head with so many steps of work, over all numbers of its query heads, and sides."""

    def kv_part(b: float) -> float:
        return kv * max(0.0, b - float(part))

    def cost(units: int) -> float:
        amount = units / STEPS
        best = math.inf
        for heads in range(1, per_group + 1):
            if amount <= heads:
                area = amount / heads
                sides = [area + (1 - area) * i / 200 for i in range(201)] + [float(part)]
                best = min(
                    best, *(heads * q * max(0.0, a - part) + kv_part(area / a) for a in sides if a >= area and a > 0)
                )
        return 0.0 if units == 0 else best

    return [cost(units) for units in range(per_group * STEPS + 1)]


TINY: Sequence[tuple[int, int, Fraction, Fraction]] = [
    (groups, per_group, part, work)
    for groups, per_group in ((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (1, 3))
    for part in (Fraction(1, 2), Fraction(1, 3), Fraction(1, 4), Fraction(3, 8))
    for work in (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(3, 2))
    if work <= groups * per_group
]  # fmt: skip


@pytest.mark.parametrize(("groups", "per_group", "part", "work"), TINY)
def test_the_division_by_force(groups: int, per_group: int, part: Fraction, work: Fraction) -> None:
    """Never above what some division costs; and not far below the best of those that were tried."""
    for q, kv in ((1.0, 1.0), (1.0, 3.0)):
        cost = _head_group_cost(per_group, q, kv, float(part))
        found = _spread(float(work), groups, per_group, part, cost)
        forced = by_force(float(work), groups, per_group, part, q, kv)
        assert found <= forced + 1e-9
        assert found == pytest.approx(forced, rel=0.1, abs=0.03)  # its steps are coarse
        assert _spread_evenly(float(work), groups, per_group, part, cost) <= found + 1e-9


@pytest.mark.parametrize("per_group", [1, 4])
def test_many_heads_are_divided_as_their_hull(per_group: int) -> None:
    """The hull of what one KV head costs is reached where there are many, and is never above."""
    part, groups = Fraction(1, 8), 24
    cost = _head_group_cost(per_group, 1.0, 1.0, float(part))
    for share in (0.1, 0.3, 0.5, 1.0):
        work = share * groups * per_group / 8
        hull, wholes = (divide(work, groups, per_group, part, cost) for divide in (_spread_evenly, _spread))
        assert 0.7 * wholes <= hull <= wholes + 1e-9


def test_more_work_never_costs_less() -> None:
    size = workload(8, (8, 2))
    for group in (1, 2, 4):
        costs = [work_bytes(size, share / 20, group, 8) for share in range(1, 21)]
        assert all(a <= b + 1e-6 for a, b in itertools.pairwise(costs))


# ---------- pairs of which no group has both


def least_by_force(groups: Sequence[Sequence[int]], per_group: int, seen: Sequence[tuple[int, int]]) -> float:
    """Bytes into all groups: the cheapest way to give each visible part of a KV head's query heads to some group.

    A part: the rows of one rank with the columns of another, in units of what one tensor's part of a rank takes.
    """
    group_of = {rank: number for number, group in enumerate(groups) for rank in group}
    parts = [(head, row, column) for head in range(per_group) for row, column in seen]
    best = math.inf
    for places in itertools.product(range(len(groups)), repeat=len(parts)):
        rows = {(head, row, at) for (head, row, _), at in zip(parts, places, strict=True) if group_of[row] != at}
        columns = {(column, at) for (_, _, column), at in zip(parts, places, strict=True) if group_of[column] != at}
        best = min(best, 2 * len(rows) + 2 * len(columns))
    return best


def crossing(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    """All parts of which no group has both."""
    ranks = sorted(rank for group in groups for rank in group)
    return [
        (row, column)
        for row, column in itertools.permutations(ranks, 2)
        if not any(row in group and column in group for group in groups)
    ]


EQUAL: Sequence[tuple[Sequence[Sequence[int]], int]] = [
    ([(0,), (1,)], 1), ([(0,), (1,)], 3), ([(0,), (1,), (2,)], 1), ([(0, 1), (2, 3)], 1),
]  # fmt: skip
UNEQUAL: Sequence[tuple[Sequence[Sequence[int]], int]] = [
    ([(0,), (1, 2)], 1),
    ([(0,), (1, 2)], 2),
    ([(0, 1), (2,), (3,)], 1),
]


@pytest.mark.parametrize(("groups", "per_group"), [*EQUAL, *UNEQUAL], ids=str)
def test_pairs_of_which_no_group_has_both_by_force(groups: Sequence[Sequence[int]], per_group: int) -> None:
    """No division is cheaper, whatever is seen; where all is and groups are equal, one of those costs as much."""
    ranks, tokens, kv_heads = sum(map(len, groups)), 4, 3
    size = Workload(1, ranks * tokens, ranks * tokens, per_group * kv_heads, kv_heads, 8, torch.float32)
    unit = tokens * 8 * 4 * kv_heads
    parts = [len(group) / ranks for group in groups]
    whole = crossing(groups)
    for seen in (whole, [(row, column) for row, column in whole if row > column], whole[:1]):
        found = foreign_bytes(size, len(seen) / ranks**2, parts) / unit
        forced = least_by_force(groups, per_group, seen)
        assert 0 < found <= forced + 1e-9
        if (groups, per_group) in EQUAL and seen == whole:
            assert found == pytest.approx(forced)


@pytest.mark.parametrize("name", ["uneven/6", "packed/6", "sub-sharded/2x2x2", "direct-q", "ring"])
@pytest.mark.parametrize("mask", [tr.Full(), tr.Causal()], ids=["full", "causal"])
def test_pairs_of_which_no_group_has_both_need_no_equal_work(name: str, mask: Mask) -> None:
    """All bytes of a schedule, as over one wire for all: `uneven` sends fewer than equal work would need."""
    size = workload(8, (6, 6))
    schedule = named(name, 8, size.q_length, mask, "zigzag")
    pairs, everything = visible_pairs(mask, size.q_length, size.kv_length), size.q_length**2
    own = own_pairs(mask, schedule.q_layout, schedule.kv_layout, [(rank,) for rank in range(8)])
    net = setting(full_mesh(8, 1.0), size)
    sent = sum(wire_bytes(schedule, net, "forward").values())
    least = foreign_bytes(size, (pairs - own) / everything, [1 / 8] * 8)
    assert least <= sent
    if name == "uneven/6" and mask == tr.Full():
        assert sent == pytest.approx(least, rel=0.02)
        assert sent < 8 * work_bytes(size, 1.0, 1, 8)


def test_own_pairs() -> None:
    """Against all pairs, one by one."""
    for name, mask in (("zigzag", tr.Causal()), ("contiguous", tr.Causal()), ("striped", parse_mask("window(5,0)"))):
        layout = make_layout(name, 4, 32)
        owner = {at: rank for rank in range(4) for at in positions_of(layout, rank)}
        for groups in ([(0,), (1,), (2,), (3,)], [(0, 1), (2, 3)], [(0, 3), (1, 2)]):
            group = {rank: number for number, some in enumerate(groups) for rank in some}
            seen = [
                (q, kv)
                for q in range(32)
                for kv in range(32)
                if group[owner[q]] == group[owner[kv]] and mask.visible(Positions(q, q + 1), Positions(kv, kv + 1))
            ]
            assert own_pairs(mask, layout, layout, groups) == len(seen), (name, groups)


def positions_of(layout: Layout, rank: int) -> list[int]:
    return [at for chunk in layout.owned_by(rank) for at in range(*layout.chunks[chunk])]


def test_of_many_chunks_all_pairs_count() -> None:
    """Each pair of chunks would take its time; more is on the safe side."""
    layouts = [make_layout("zigzag", ranks, 4 * ranks) for ranks in (64, 128)]
    few, many = (own_pairs(tr.Causal(), each, each, [(0,)]) for each in layouts)
    assert few < 16 == many
