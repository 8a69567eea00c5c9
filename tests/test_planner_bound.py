"""The lower bound: under everything that any family can do, equal to what is known in closed form, its DP by force."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import pytest
from families import members
from nets import BOTH, SHAPES, clusters, named, setting, workload

import tokenring as tr
from tokenring.mask import Mask
from tokenring.planner.bound import _head_group_cost, _spread, _spread_evenly, group_bytes, lower_bound
from tokenring.planner.interconnect import (
    Fabric,
    Interconnect,
    full_mesh,
    of_one_host,
    switch,
    two_node,
    with_network,
)
from tokenring.planner.interconnect import mesh_fabric as mesh
from tokenring.planner.predict import Setting, least_seconds, predict
from tokenring.planner.rates import Rates, constant
from tokenring.planner.visible import visible_pairs
from tokenring.workload import Workload

FREE = constant(1e9)
HEADS = ((8, 8), (6, 6), (8, 2), (8, 1))


def bound_of(asked: Setting, mask: Mask) -> float:
    size = asked.workload
    pairs = visible_pairs(mask, size.q_length, size.kv_length)
    return lower_bound(size, pairs, asked.interconnect, asked.machine.rates, asked.passes).seconds


# ---------- nothing is faster


@pytest.mark.parametrize("mask", [tr.Full(), tr.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}:{heads[1]}")
@pytest.mark.parametrize("ranks", [4, 8])
def test_no_wire_of_any_schedule_is_below(ranks: int, heads: tuple[int, int], mask: Mask) -> None:
    """The busiest wire of every member, with what forward gathered kept and without, on every shape, both passes.

    What is predicted is never below its busiest wire (test_planner_simulate), so no prediction is below the bound.
    """
    size = workload(ranks, heads, 336)  # chunks of 168 = 3 · 7 · 8 tokens: all pieces divide them
    bounds = {
        (shape, direction): bound_of(setting(net(ranks), size, (direction,)), mask)
        for shape, net in SHAPES.items()
        for direction in BOTH
    }
    for name in members(ranks, heads):
        for option in ("", "/keep"):
            schedule = named(name + option, ranks, size.q_length, mask, "zigzag")
            for (shape, direction), bound in bounds.items():
                least = least_wires(schedule, setting(SHAPES[shape](ranks), size, (direction,)))
                assert least >= bound * (1 - 1e-9), f"{name}{option}, {shape}, {direction}"


def least_wires(schedule: tr.Schedule, asked: Setting) -> float:
    from tokenring.planner.predict import busiest

    return busiest(schedule, asked).seconds


@pytest.mark.parametrize("mask", [tr.Full(), tr.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}:{heads[1]}")
def test_no_prediction_is_below(heads: tuple[int, int], mask: Mask) -> None:
    """With kernels that count."""
    size = workload(4, heads, 96)
    for shape, net in SHAPES.items():
        asked = setting(net(4), size, BOTH, tflops=0.05)
        bound = bound_of(asked, mask)
        for name in members(4, heads)[::3]:
            assert predict(named(name, 4, size.q_length, mask, "zigzag"), asked).seconds >= bound * (1 - 1e-4), shape


def test_a_bound_that_is_a_tenth_higher_would_be_beaten() -> None:
    """It is tight where the schedules attain it: the test above can fail."""
    size = workload(8, (8, 8))
    asked = setting(full_mesh(8, 1.0), size)
    found = least_seconds(named("ulysses", 8, size.q_length), asked).seconds
    assert bound_of(asked, tr.Full()) <= found < 1.1 * bound_of(asked, tr.Full())


# ---------- closed forms


def x_bytes(size: Workload, ranks: int) -> float:
    """Of a rank's Q."""
    return size.batch * size.q_length / ranks * size.q_heads * size.head_dim * size.itemsize


@pytest.mark.parametrize("heads", [(8, 8), (16, 8), (64, 8), (64, 64)], ids=lambda heads: f"{heads[0]}:{heads[1]}")
def test_where_ranks_divide_the_kv_heads(heads: tuple[int, int]) -> None:
    """A port must carry (2X + Y)(P-1)/P, a mesh link (2X + Y)/P, which Ulysses attains but for the lse."""
    size = workload(8, heads)
    x = x_bytes(size, 8)
    y = 2 * x * heads[1] / heads[0]
    port, link = (bound_of(setting(net, size), tr.Full()) * 1e9 for net in (switch(8, 1.0), full_mesh(8, 1.0)))
    # The bound lets what a rank has of a head's rows save more than Ulysses, which takes whole heads, can save.
    near = 0.92 if heads[0] == heads[1] == 8 else 0.88
    assert near * (2 * x + y) * 7 / 8 <= port <= (2 * x + y) * 7 / 8
    assert link == pytest.approx(port / 7)
    ulysses = least_seconds(named("ulysses", 8, size.q_length), setting(full_mesh(8, 1.0), size)).seconds * 1e9
    assert link <= ulysses <= link * 1.01 / near


def test_many_query_heads_a_kv_head() -> None:
    """At most Y a link: direct KV attains it."""
    size = workload(8, (64, 1))
    y = 2 * x_bytes(size, 8) / 64
    assert bound_of(setting(full_mesh(8, 1.0), size), tr.Full()) * 1e9 == pytest.approx(y, rel=1e-6)


def test_between_two_nodes() -> None:
    """Half of the ranks are a tile of all heads and half of Q, or half of the heads: all KV but their own comes in."""
    size = workload(8, (8, 1))
    y = 2 * x_bytes(size, 8) / 8
    found = lower_bound(size, size.q_length**2, two_node(8, 1.0, 0.25), FREE, ("forward",))
    assert found.cut == "one host"
    assert found.transfer_seconds * 1e9 == pytest.approx(4 * y / 0.25)


def test_a_causal_mask_needs_less() -> None:
    size = workload(8, (8, 8))
    full, causal = (bound_of(setting(full_mesh(8, 1.0), size), mask) for mask in (tr.Full(), tr.Causal()))
    assert 0.5 * full < causal < 0.7 * full


def test_both_passes() -> None:
    size, net = workload(8, (8, 8)), full_mesh(8, 1.0)
    both, one = (lower_bound(size, size.q_length**2, net, FREE, passes) for passes in (BOTH, ("forward",)))
    assert both.transfer_seconds == pytest.approx(2 * one.transfer_seconds)


def test_compute_is_divided_evenly_at_the_best_rate() -> None:
    size = workload(4, (4, 4), 256)
    rates = Rates("test", ((1, 1.0), (1024, 4.0)), ((1, 2.0),))
    found = lower_bound(size, 1000, full_mesh(4, 1.0), rates, BOTH)
    flops = 1000 * 4 * 64 / 4
    assert found.compute_seconds == pytest.approx(flops * 4 / 4e12 + flops * 10 / 2e12)
    assert found.seconds == max(found.compute_seconds, found.transfer_seconds)


def test_one_rank_moves_nothing() -> None:
    size = workload(1)
    assert lower_bound(size, size.q_length**2, full_mesh(1, 1.0), FREE, ("forward",)).transfer_seconds == 0


def test_giving_each_rank_a_batch_entry() -> None:
    """No schedule of ours does it; it is one head of eight: 7/8 of its Q, K and V come in, and of its O go out."""
    size = replace(workload(8, (1, 1)), batch=8)
    head = 4 * size.q_length * size.head_dim * size.itemsize * 7 / 8
    for net, wires in ((switch(8, 1.0), 1), (full_mesh(8, 1.0), 7)):
        found = bound_of(setting(net, size), tr.Full()) * 1e9
        assert 0.8 * head / wires <= found <= head / wires


@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}:{heads[1]}")
@pytest.mark.parametrize("batch", [2, 64])
def test_no_wire_of_any_schedule_of_a_batch_is_below(heads: tuple[int, int], batch: int) -> None:
    """As above; and a batch needs at least as much as one entry, and no more than each of them."""
    one = workload(8, heads, 336)
    size = replace(one, batch=batch)
    asked = [setting(net(8), size) for net in SHAPES.values()]
    bounds = [bound_of(each, tr.Full()) for each in asked]
    for each, bound in zip(asked, bounds, strict=True):
        single = bound_of(replace(each, workload=one), tr.Full())
        assert single <= bound <= batch * single * (1 + 1e-9)
    for name in members(8, heads)[::4]:
        schedule = named(name, 8, size.q_length)
        for each, bound in zip(asked, bounds, strict=True):
            assert least_wires(schedule, each) >= bound * (1 - 1e-9), f"{name}, {each.interconnect.name}"


# ---------- widths


def test_ranks_that_share_a_device() -> None:
    """What passes between them passes no wire: divided into single ranks, they would be charged for it."""
    fabric = mesh(2, 1.0)
    net = Interconnect("pairs on devices", (fabric,), ((0, 0), (0, 0), (0, 1), (0, 1)))
    size = workload(4, (4, 1))
    asked = setting(net, size)
    found = lower_bound(size, size.q_length**2, net, FREE, ("forward",))
    assert found.cut == "2 neighbours"
    assert found.transfer_seconds > 0
    for name in members(4, (4, 1)):
        assert least_wires(named(name, 4, size.q_length), asked) >= found.transfer_seconds * (1 - 1e-9), name
    alone = Interconnect("one device", (mesh(1, 1.0),), ((0, 0), (0, 0)))
    assert lower_bound(size, size.q_length**2, alone, FREE, ("forward",)).transfer_seconds == 0


def test_unequal_ranks_are_averaged() -> None:
    """Rank 0 has narrow links, the others could take its work in: its own width alone would bound too high."""
    whole = mesh(4, 1.0)
    gbs = {wire: 0.01 if wire.endswith(">0") else width for wire, width in whole.gbs.items()}
    slow = of_one_host("uneven", Fabric(4, whole.ways, gbs))
    size = workload(4, (4, 4))
    even, uneven = (bound_of(setting(net, size), tr.Full()) for net in (full_mesh(4, 1.0), slow))
    assert even < uneven <= even * 12 / 9


def test_unequal_hosts() -> None:
    """Two and four ranks; whatever the schedule, no wire of it is below."""
    fabrics = tuple(with_network(mesh(count, 1.0), 0.2) for count in (2, 4))
    net = Interconnect("uneven", fabrics, tuple((h, d) for h, count in enumerate((2, 4)) for d in range(count)))
    size = workload(6, (6, 6), 120)
    bound = bound_of(setting(net, size), tr.Full())
    assert bound > 0
    for name in members(6, (6, 6)):
        assert least_wires(named(name, 6, size.q_length), setting(net, size)) >= bound, name


def test_equal_hosts_stand_for_one_another() -> None:
    """The bound of eight hosts by one of them is that by all of them."""
    net = clusters(8)
    apart = Interconnect("apart", tuple(with_network(mesh(4, 1.0 + 1e-9 * i), 0.25) for i in range(8)), net.places)
    size = workload(32, (8, 8))
    one, other = (bound_of(setting(each, size), tr.Full()) for each in (net, apart))
    assert one == pytest.approx(other, rel=1e-6)


# ---------- the division of work over heads


def by_force(work: float, groups: int, per_group: int, part: Fraction, q: float, kv: float) -> float:
    """The least cost over every division in small steps, each KV head with every number of its query heads."""
    steps = 24

    def kv_part(b: float) -> float:
        return kv * max(0.0, b - float(part))

    def cost(units: int) -> float:
        amount = units / steps
        best = math.inf
        for heads in range(1, per_group + 1):
            if amount <= heads:
                area = amount / heads
                sides = [area + (1 - area) * i / 200 for i in range(201)] + [float(part)]
                best = min(
                    best, *(heads * q * max(0.0, a - part) + kv_part(area / a) for a in sides if a >= area and a > 0)
                )
        return 0.0 if units == 0 else best

    known = [cost(units) for units in range(per_group * steps + 1)]
    total = round(work * steps)
    least = [0.0] + [math.inf] * total
    for _ in range(groups):
        least = [
            min(least[done - units] + known[units] for units in range(min(done, per_group * steps) + 1))
            for done in range(total + 1)
        ]
    return least[total]


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
        costs = [group_bytes(size, share / 20, group, 8) for share in range(1, 21)]
        assert all(a <= b + 1e-6 for a, b in itertools.pairwise(costs))
