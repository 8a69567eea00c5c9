"""Shares of wires: cases computed by hand, and what makes any division max-min fair."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import SHAPES
from plain_fluids import plain_rates, plainly

from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.simulation.fluid import Shares
from tokenring.planner.simulation.operations import Await, Compute, Operation, SimulatedPost
from tokenring.planner.simulation.simulate import Outcome, simulate
from tokenring.tables.rates import Messages

INFINITE = float("inf")
TOLERANCE = 1e-6
Ways = dict[int, tuple[str, ...]]


def rates(ways: Ways, widths: dict[str, float], cap: float = INFINITE) -> dict[int, float]:
    shares = Shares(widths.__getitem__, cap)
    for way in ways.values():
        shares.change(shares.route(way), 1)
    shares.divide()
    return {key: shares.rates[shares.route(way)] for key, way in ways.items()}


def unfair(ways: Ways, widths: dict[str, float], cap: float, found: dict[int, float]) -> str | None:
    """Why a division is not max-min fair; None if it is."""
    if found.keys() != ways.keys():
        return "a transfer has no rate"
    load = {wire: sum(found[key] * way.count(wire) for key, way in ways.items() if wire in way) for wire in widths}
    if any(load[wire] > width * (1 + TOLERANCE) for wire, width in widths.items()):
        return "a wire carries more than it can"
    for key, way in ways.items():
        if found[key] > cap * (1 + TOLERANCE):
            return "a transfer is above the cap"
        capped = found[key] >= cap * (1 - TOLERANCE)
        limited = any(
            load[wire] >= widths[wire] * (1 - TOLERANCE)
            and all(found[key] >= found[other] * (1 - TOLERANCE) for other, its in ways.items() if wire in its)
            for wire in way
        )
        if not (capped or limited):
            return "a transfer could be faster at no slower one's cost"
    return None


CASES: dict[str, tuple[Ways, dict[str, float], float, dict[int, float]]] = {
    "alone": ({0: ("a",)}, {"a": 6}, INFINITE, {0: 6}),
    "three on one wire": ({0: ("a",), 1: ("a",), 2: ("a",)}, {"a": 6}, INFINITE, {0: 2, 1: 2, 2: 2}),
    "the narrower of two": ({0: ("a", "b")}, {"a": 6, "b": 4}, INFINITE, {0: 4}),
    # One crosses both wires and gets half of the narrow one; who shares the wide one with it takes the rest.
    "what one leaves another takes": (
        {0: ("a", "b"), 1: ("a",), 2: ("b",)}, {"a": 10, "b": 4}, INFINITE, {0: 2, 1: 8, 2: 2}
    ),
    "a chain of three": (
        {0: ("a", "b", "c"), 1: ("a",), 2: ("b",), 3: ("c",), 4: ("c",)}, {"a": 9, "b": 9, "c": 6}, INFINITE,
        {0: 2, 1: 7, 2: 7, 3: 2, 4: 2},
    ),
    "capped": ({0: ("a",), 1: ("b",), 2: ("b",)}, {"a": 6, "b": 4}, 3, {0: 3, 1: 2, 2: 2}),
    "what a capped one leaves": ({0: ("a", "b"), 1: ("a",)}, {"a": 10, "b": 1}, 3, {0: 1, 1: 3}),
    "no wire, no cap": ({0: (), 1: ("a",)}, {"a": 5}, INFINITE, {0: INFINITE, 1: 5}),
    "no wire, a cap": ({0: ()}, {}, 2.5, {0: 2.5}),
    "nothing": ({}, {}, INFINITE, {}),
    "half duplex: twice over one wire": ({0: ("a", "a"), 1: ("a",)}, {"a": 6}, INFINITE, {0: 2, 1: 2}),
}  # fmt: skip


@pytest.mark.parametrize(("ways", "widths", "cap", "wanted"), CASES.values(), ids=CASES)
def test_by_hand(ways: Ways, widths: dict[str, float], cap: float, wanted: dict[int, float]) -> None:
    assert rates(ways, widths, cap) == pytest.approx(wanted)


@st.composite
def nets(draw: st.DrawFn) -> tuple[Ways, dict[str, float], float]:
    wires = "abcdef"[: draw(st.integers(1, 6))]
    widths = {wire: draw(st.one_of(st.integers(1, 8).map(float), st.floats(1e-3, 1e9))) for wire in wires}
    way = st.lists(st.sampled_from(sorted(widths)), max_size=4, unique=True).map(tuple)
    ways = dict(enumerate(draw(st.lists(way, max_size=10))))
    cap = draw(st.sampled_from([INFINITE, INFINITE, 1.0, 2.5]))
    return ways, widths, cap


@given(nets())
def test_any_division_is_max_min_fair(net: tuple[Ways, dict[str, float], float]) -> None:
    ways, widths, cap = net
    assert unfair(ways, widths, cap, rates(ways, widths, cap)) is None


def test_the_check_refuses_what_is_unfair() -> None:
    """A check that takes everything proves nothing."""
    ways, widths, _, fair = CASES["what one leaves another takes"]
    assert unfair(ways, widths, INFINITE, fair) is None
    for wrong, why in (
        ({0: 2.0, 1: 7.9, 2: 2.0}, "could be faster"),  # wire a is not full
        ({0: 2.0, 1: 8.1, 2: 2.0}, "more than it can"),
        ({0: 1.0, 1: 9.0, 2: 3.0}, "could be faster"),  # full, but 0 is poorer than need be
        ({0: 2.0, 1: 8.0}, "no rate"),
    ):
        assert why in (unfair(ways, widths, INFINITE, wrong) or "")
    assert "above the cap" in (unfair(ways, widths, 7.0, fair) or "")


def test_order_does_not_matter() -> None:
    ways, widths, cap, _ = CASES["a chain of three"]
    turned = dict(reversed(ways.items()))
    assert rates(turned, widths, cap) == rates(ways, widths, cap)
    assert not math.isnan(sum(rates(ways, widths, cap).values()))


# ---------- what is kept from one division to the next

EXACT = 1e-9


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, float], float, list[dict[tuple[str, ...], int]]]:
    """Some wires, a cap, and how many take each route, again and again."""
    ways, widths, cap = draw(nets())
    routes = sorted(set(ways.values()) | {()}) if cap < INFINITE else sorted({way for way in ways.values() if way})
    takers = st.fixed_dictionaries({route: st.integers(0, 3) for route in routes})
    return widths, cap, draw(st.lists(takers, max_size=6))


def mistaken(shares: Shares, widths: dict[str, float], cap: float, history: list[dict[tuple[str, ...], int]]) -> bool:
    """Tell whether shares that were kept differ from those computed afresh, or a change was not named."""
    before: dict[tuple[str, ...], int] = {}
    for takers in history:
        for route, number in takers.items():
            if number != before.get(route, 0):
                shares.change(shares.route(route), number - before.get(route, 0))
        old = dict(enumerate(shares.rates))
        named = set(shares.divide())
        before = takers
        each = [route for route, number in takers.items() for _ in range(number)]
        afresh = plain_rates(dict(enumerate(each)), widths, cap)
        wanted = {route: afresh[number] for number, route in enumerate(each)}
        for route in takers:
            rate = shares.rates[shares.route(route)]
            if rate != pytest.approx(wanted.get(route, 0.0), rel=EXACT):
                return True
        if named != {number for number, rate in enumerate(shares.rates) if rate != old.get(number, 0.0)}:
            return True
    return False


@given(histories())
def test_shares_that_are_kept_are_those_computed_afresh(
    found: tuple[dict[str, float], float, list[dict[tuple[str, ...], int]]],
) -> None:
    widths, cap, history = found
    assert not mistaken(Shares(widths.__getitem__, cap), widths, cap, history)


class OnlyTheirWires(Shares):
    """A mutant: routes that meet those that changed get a new share, those that meet these do not."""

    def _joined(self) -> list[int]:
        routes = self._touched.union(*[self._over[wire] for route in self._touched for wire in self._routes[route]])
        return list({wire for route in routes for wire in self._routes[route]})


def test_what_is_joined_by_several_wires_gets_another_share() -> None:
    """Who shares wire b with the one that has to share wire a from now on gets what that leaves of b."""
    widths = {"a": 4.0, "b": 10.0, "c": 30.0}
    chain = {("a",): 0, ("a", "b"): 1, ("b", "c"): 1, ("c",): 1}
    history = [chain, {**chain, ("a",): 1}]
    assert not mistaken(Shares(widths.__getitem__), widths, INFINITE, history)
    assert mistaken(OnlyTheirWires(widths.__getitem__), widths, INFINITE, history)


# ---------- transfers


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[Interconnect, list[list[Operation]], Messages, float]:
    """Ranks that exchange messages in one order, and compute between posts and waits.

    No two sums of these figures are equal by chance: of two events at one moment, rounding would decide which is first.
    """
    ranks = 4
    net = draw(st.sampled_from(list(SHAPES.values())))(ranks)
    programs: list[list[Operation]] = [[] for _ in range(ranks)]
    waits: list[list[Operation]] = [[] for _ in range(ranks)]
    seconds = st.sampled_from([0.0, 1.0137e-4, 1.04711e-3, 2.52193e-3])
    for message in range(draw(st.integers(1, 14))):
        src, dst = draw(st.sampled_from([(a, b) for a in range(ranks) for b in range(ranks) if a != b]))
        nbytes = draw(st.sampled_from([1009, 40_013, 1_000_403, 3_001_717, 7_654_321]))
        channel = draw(st.sampled_from(["requests", "partials"]))
        for rank, peer, sends in ((src, dst, True), (dst, src, False)):
            programs[rank].append(Compute(draw(seconds), True, message, "work"))
            programs[rank].append(SimulatedPost(message, peer, channel, nbytes, sends, message, str(message)))
            waits[rank].append(Await(message))
    cap = draw(st.sampled_from([INFINITE, 0.6]))
    costs = Messages(draw(seconds) / 100, flow_gbs=cap, pair_serial=draw(st.booleans()))
    window = draw(st.sampled_from([0.0, 1.3391e-4, 1.09177e-3]))
    return net, [[*posts, *rest] for posts, rest in zip(programs, waits, strict=True)], costs, window


@settings(deadline=None)
@given(exchanges())
def test_transfers_arrive_as_if_each_were_moved_on_at_every_moment(
    found: tuple[Interconnect, list[list[Operation]], Messages, float],
) -> None:
    net, programs, messages, window = found
    made = simulate(net, programs, messages, True, sharing_seconds=window)
    wanted = plainly(net, programs, messages, window)
    assert made.seconds == pytest.approx(wanted.seconds, rel=EXACT)
    assert arrivals(made) == pytest.approx(arrivals(wanted), rel=EXACT)


def arrivals(outcome: Outcome) -> dict[str, float]:
    """When each message has arrived."""
    return {each.label: each.end_seconds for each in outcome.spans if each.what == "transfer"}
