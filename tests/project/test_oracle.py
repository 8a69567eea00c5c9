"""The oracle itself: against the mask's definition, finite differences and torch; and that its error sees errors."""

from __future__ import annotations

import math

import pytest
import torch
from gradient_errors import largest_error
from oracle import allowed, attention64, error_of_terms, relative_error, whole_sdpa

from tokenring import Causal, Documents, Full, Mask, SlidingWindow

MASKS = [
    Full(),
    Causal(),
    SlidingWindow(3),
    SlidingWindow(2, 4),
    SlidingWindow(-1, 2),
    Documents([0, 4, 5, 11]),
    Causal() & Documents([0, 4, 5, 11]),
    SlidingWindow(2) & Documents([0, 7, 9]),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_allowed_is_the_definition(mask: Mask) -> None:
    visible = allowed(mask, 13, 13)
    assert visible.tolist() == [[mask.allows(q, kv) for kv in range(13)] for q in range(13)]


def inputs(kv_length: int = 9) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, length, heads, 5) for length, heads in ((9, 4), (kv_length, 2), (kv_length, 2), (9, 4))]


def test_gradients_are_those_of_finite_differences() -> None:
    q, k, v, dout = (x.double() for x in inputs())
    visible = allowed(SlidingWindow(2) & Documents([0, 4, 7]), 9, 9)
    made = attention64(q, k, v, dout, visible)
    for name, x in (("dq", q), ("dk", k), ("dv", v)):
        direction = torch.randn_like(x)
        step = 1e-6 * direction
        ends = []
        for sign in (1, -1):
            moved_q, moved_k, moved_v = (y + sign * step if y is x else y for y in (q, k, v))
            ends.append(attention64(moved_q, moved_k, moved_v, dout, visible).out)
        up, down = ends
        slope = float(((up - down) * dout).sum()) / 2e-6
        assert slope == pytest.approx(float((getattr(made, name) * direction).sum()), rel=1e-6)


@pytest.mark.parametrize(("mask", "kv_length"), [(Full(), 9), (Full(), 6), (Causal(), 9)])
def test_agrees_with_torch(mask: Mask, kv_length: int) -> None:
    q, k, v, dout = inputs(kv_length)
    ours = attention64(q, k, v, dout, allowed(mask, 9, kv_length))
    theirs = whole_sdpa(q, k, v, dout, None, mask == Causal())
    for name in ("out", "dq", "dk", "dv"):
        assert relative_error(getattr(theirs, name), getattr(ours, name)) < 1e-6, name


def test_rows_that_see_nothing() -> None:
    q, k, v, dout = inputs()
    visible = allowed(Documents([0, 5]), 9, 9)
    for made in (attention64(q, k, v, dout, visible), whole_sdpa(q, k, v, dout, visible, False)):
        for name in ("out", "dq", "dk", "dv"):
            part = getattr(made, name)
            assert bool((part[:, 5:] == 0).all()) and bool((part[:, :5] != 0).any()), name
    lse = attention64(q, k, v, dout, visible).lse
    assert bool((lse[..., 5:] == -math.inf).all()) and bool(lse[..., :5].isfinite().all())


@pytest.mark.parametrize(
    ("got", "error"),
    [
        ([3.0, 4.0, -math.inf], 0.0),
        ([3.0, 5.0, -math.inf], 0.2),
        ([3.0, 4.0, -1e30], math.inf),
        ([3.0, -math.inf, -math.inf], math.inf),
        ([3.0, math.nan, -math.inf], math.inf),
        ([3.0, math.inf, -math.inf], math.inf),
        ([3.0, 4.0], math.inf),
    ],
)
def test_relative_error(got: list[float], error: float) -> None:
    assert relative_error(torch.tensor(got), torch.tensor([3.0, 4.0, -math.inf])) == pytest.approx(error)


def test_error_of_terms() -> None:
    terms = torch.tensor([3.0, 4.0])
    for got, error in (([0.0, 0.0], 0.0), ([0.0, 5e-6], 1e-6), ([math.nan, 0.0], math.inf), ([0.0], math.inf)):
        assert error_of_terms(torch.tensor(got), torch.zeros(2), terms) == pytest.approx(error)
    assert error_of_terms(terms, torch.zeros(2), torch.zeros(2)) == math.inf
    assert error_of_terms(terms[:0], terms[:0], terms[:0]) == 0.0


def test_relative_error_of_nothing() -> None:
    zero = torch.zeros(2)
    assert relative_error(zero, zero) == 0.0
    assert relative_error(torch.tensor([0.0, 1e-30]), zero) == math.inf


def test_errors_that_are_no_numbers_are_seen() -> None:
    wanted = {name: torch.ones(3) for name in "abc"}
    found = {**wanted, "b": torch.tensor([1.0, float("nan"), 1.0])}
    assert largest_error(found, wanted) == (float("inf"), "b")
    assert largest_error(wanted, wanted)[0] == 0.0
