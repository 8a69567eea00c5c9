"""Shares of wires: cases computed by hand, and what makes any division max-min fair."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenring.planner.simulation.fluid import fair_rates

INFINITE = float("inf")
TOLERANCE = 1e-6
Ways = dict[int, tuple[str, ...]]


def rates(ways: Ways, widths: dict[str, float], cap: float = INFINITE) -> dict[int, float]:
    found = fair_rates(ways, widths.__getitem__, cap)  # type: ignore[arg-type]
    return {int(str(key)): rate for key, rate in found.items()}


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
