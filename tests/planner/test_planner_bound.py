"""The lower bound: under everything that any family can do, and equal to what is known in closed form."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from families import members
from nets import BOTH, SHAPES, call, clusters, named, setting, two_node, with_network, workload

import tokenring as tr
from tokenring.planner.bounds.bound import lower_bound
from tokenring.planner.bounds.mask_density import own_pairs, visible_pairs
from tokenring.planner.choosing.auto import call_bound
from tokenring.planner.interconnects.interconnect import (
    Interconnect,
    LinkFabric,
    full_mesh,
    of_one_host,
    switch,
)
from tokenring.planner.interconnects.interconnect import mesh_fabric as mesh
from tokenring.planner.simulation.predict import Setting, busiest, least_seconds, predict
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Rates, constant

FREE = constant(1e9)
HEADS = ((8, 8), (6, 6), (8, 2), (8, 1))


def bound_of(asked: Setting, mask: Mask, layout: str | None = None) -> float:
    """layout: None for one that holds for all."""
    size, net = asked.workload, asked.interconnect
    whole = None if layout is None else make_layout(layout, net.world_size, size.q_length)
    own = None if whole is None else partial(own_pairs, mask, whole, whole)
    pairs = visible_pairs(mask, size.q_length, size.kv_length)
    return lower_bound(size, pairs, net, asked.machine.rates, asked.passes, own).seconds


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
        (shape, direction): bound_of(setting(net(ranks), size, (direction,)), mask, "zigzag")
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
    return busiest(schedule, asked).seconds


@pytest.mark.parametrize("mask", [tr.Full(), tr.Causal()], ids=["full", "causal"])
@pytest.mark.parametrize("heads", HEADS, ids=lambda heads: f"{heads[0]}:{heads[1]}")
def test_no_prediction_is_below(heads: tuple[int, int], mask: Mask) -> None:
    """With kernels that count."""
    size = workload(4, heads, 96)
    for number, (shape, net) in enumerate(SHAPES.items()):
        asked = setting(net(4), size, BOTH, tflops=0.05)
        bound = bound_of(asked, mask, "zigzag")
        for name in members(4, heads)[number % 6 :: 6]:  # each on some shape
            assert predict(named(name, 4, size.q_length, mask, "zigzag"), asked).seconds >= bound * (1 - 1e-4), shape


@pytest.mark.parametrize(
    ("shape", "schedule"),
    [("full mesh", "ulysses"), ("switch", "ulysses"), ("two nodes", "ulysses"), ("two nodes", "tiles/2x4")],
)
def test_a_bound_that_is_a_fiftieth_higher_would_be_beaten(shape: str, schedule: str) -> None:
    """It is tight where the schedules attain it: the test above can fail. What is left are the row statistics."""
    size = workload(8, (8, 8))
    asked = setting(SHAPES[shape](8), size)
    found = least_seconds(named(schedule, 8, size.q_length), asked).seconds
    assert bound_of(asked, tr.Full()) <= found < 1.02 * bound_of(asked, tr.Full())


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
    # With many query heads a KV head it may be cheaper to gather all KV.
    assert port == pytest.approx(min(2 * x + y, 8 * y) * 7 / 8)
    assert link == pytest.approx(port / 7)
    best = min(
        least_seconds(named(name, 8, size.q_length), setting(full_mesh(8, 1.0), size)).seconds * 1e9
        for name in ("ulysses", "direct-kv")
    )
    assert link <= best <= 1.02 * link


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


@pytest.mark.parametrize("shape", ["two nodes", "a NIC each", "ring"])
def test_a_causal_mask_needs_half_across(shape: str) -> None:
    """Half of each two groups' pairs are seen in a layout that balances them; in others more may be a group's own."""
    asked = setting(SHAPES[shape](8), workload(8, (8, 8)))
    full, causal, of_any = (
        bound_of(asked, mask, layout)
        for mask, layout in ((tr.Full(), "zigzag"), (tr.Causal(), "zigzag"), (tr.Causal(), None))
    )
    assert causal == pytest.approx(full / 2, rel=0.01)
    assert of_any < 0.9 * causal
    assert call_bound(call(asked, tr.Causal(), "zigzag")).seconds == causal


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
    slow = of_one_host("uneven", LinkFabric(4, whole.ways, gbs))
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


# ---------- cuts


def test_links_that_forward_are_cut_where_all_ways_pass() -> None:
    """Into half of a ring lead two links; none of the ways into it begins or ends with the same one for all."""
    size = workload(8, (8, 8))
    found = lower_bound(size, size.q_length**2, SHAPES["ring"](8), FREE, ("forward",))
    assert found.cut == "4 neighbours"
    x = x_bytes(size, 8)
    crossing = 8 * x  # of half of the heads Q, O, K and V of half of the rows
    assert found.transfer_seconds * 1e9 == pytest.approx(crossing / 2)


def test_what_passes_at_once_is_not_charged() -> None:
    size, whole = workload(4, (4, 4)), mesh(4, 1.0)
    bursty = replace(whole, burst_bytes=dict.fromkeys(whole.gbs, 1000.0))
    plain, less = (
        lower_bound(size, size.q_length**2, of_one_host("mesh", fabric), FREE, BOTH).transfer_seconds
        for fabric in (whole, bursty)
    )
    assert plain - less == pytest.approx(2 * 1000 / 1e9)
