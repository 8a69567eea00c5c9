"""Masks: the region of any two chunks is what the definition says, pair by pair."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from operator import and_
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Positions
from tokenring.sequence.mask import LIMIT, WORDS, Causal, Documents, Full, Mask, SlidingWindow, parse_mask
from tokenring.sequence.region import Region

STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
END = 40
windows = st.builds(SlidingWindow, st.integers(-1, END), st.integers(-1, END))
documents = st.lists(st.integers(0, END), min_size=1, max_size=6).map(lambda ends: Documents([0, *sorted(ends)]))
simple = st.one_of(st.just(Full()), st.just(Causal()), windows, documents)
masks = st.lists(simple, min_size=1, max_size=3).map(lambda parts: reduce(and_, parts))
bounds = st.none() | st.integers(-END, END) | st.integers(-LIMIT, LIMIT)
every = st.builds(  # whatever can be constructed
    Mask,
    bounds,
    bounds,
    st.none() | st.lists(st.integers(0, END), min_size=1, max_size=5).map(lambda ends: (0, *sorted(ends))),
)


def chunks(steps: st.SearchStrategy[int]) -> st.SearchStrategy[Positions]:
    return st.builds(
        lambda start, count, step: Positions(start, start + (count - 1) * step + 1, step),
        st.integers(0, END),
        st.integers(1, 12),
        steps,
    )


def pairs_of(region: Region) -> list[tuple[int, int]]:
    """Every (row, column) that some patch shows; twice if two patches do."""
    return [(p.row0 + i, p.col0 + j) for p in region for i in range(p.rows) for j in p.columns_of(i)]


def check_region(mask: Mask, q: Positions, kv: Positions) -> None:
    region = mask.region(q, kv)
    found = pairs_of(region)
    assert len(found) == len(set(found)), "two patches show one pair"
    wanted = {(i, j) for i, a in enumerate(range(*q)) for j, b in enumerate(range(*kv)) if mask.allows(a, b)}
    assert set(found) == wanted
    assert mask.visible(q, kv) == bool(wanted)
    assert sum(patch.pairs() for patch in region) == len(wanted)
    for patch in region:
        assert 0 <= patch.row0 < patch.row1 <= len(q) and 0 <= patch.col0 < patch.col1 <= len(kv)
        if patch.row_step == patch.col_step == 1:
            seen = pairs_of((patch,))
            assert {i for i, _ in seen} == set(range(patch.row0, patch.row1)), "a row is empty"
            assert {j for _, j in seen} == set(range(patch.col0, patch.col1)), "a column is empty"
        if patch.pairs() == patch.rows * patch.cols:
            assert patch.is_full, "a patch that shows everything has bounds"


class TestRegion:
    @STEADY
    @given(masks, chunks(st.just(1)), chunks(st.just(1)))
    def test_of_unit_steps(self, mask: Mask, q: Positions, kv: Positions) -> None:
        check_region(mask, q, kv)

    @STEADY
    @given(masks, st.data(), st.integers(2, 5))
    def test_of_equal_steps(self, mask: Mask, data: st.DataObject, step: int) -> None:
        q, kv = data.draw(chunks(st.just(step))), data.draw(chunks(st.just(step)))
        check_region(mask, q, kv)
        assert all(patch.row_step == patch.col_step == 1 for patch in mask.region(q, kv))

    @STEADY
    @given(masks, chunks(st.integers(1, 5)), chunks(st.integers(1, 5)))
    def test_of_unequal_steps(self, mask: Mask, q: Positions, kv: Positions) -> None:
        check_region(mask, q, kv)

    def test_by_hand(self) -> None:
        first, second = Positions(0, 4), Positions(4, 8)
        assert Causal().region(first, second) == ()
        (full,) = Causal().region(second, first)
        assert full.is_full and not full.is_causal
        (triangle,) = Causal().region(second, second)
        assert triangle.is_causal and not triangle.is_full
        assert triangle.pairs() == 10
        packed = Documents([0, 3, 6]).region(Positions(0, 8), Positions(0, 8))
        assert [(patch.row0, patch.row1, patch.col0, patch.col1) for patch in packed] == [(0, 3, 0, 3), (3, 6, 3, 6)]


class TestConjunction:
    @STEADY
    @given(simple, simple, st.integers(0, END), st.integers(0, END))
    def test_allows_what_both_allow(self, a: Mask, b: Mask, q: int, kv: int) -> None:
        assert (a & b).allows(q, kv) == (a.allows(q, kv) and b.allows(q, kv))

    def test_of_documents_with_different_ends(self) -> None:
        """What is padding in one of them is padding."""
        assert Documents([0, 5]) & Documents([0, 3, 9]) == Documents([0, 3, 5])

    @STEADY
    @given(simple, simple)
    def test_commutes(self, a: Mask, b: Mask) -> None:
        assert a & b == b & a

    @STEADY
    @given(masks)
    def test_full_changes_nothing(self, mask: Mask) -> None:
        assert mask & Full() == mask == mask & mask


class TestText:
    @STEADY
    @given(masks | every)
    def test_reads_back(self, mask: Mask) -> None:
        assert parse_mask(str(mask)) == mask
        assert parse_mask(str(mask).replace(",", " , ").replace("&", " & ")) == mask

    @pytest.mark.parametrize(
        ("mask", "text"),
        [
            (Full(), "full"),
            (Causal(), "causal"),
            (SlidingWindow(-1, 0), "causal"),
            (SlidingWindow(-1, -1), "full"),
            (SlidingWindow(128), "window(128,0)"),
            (SlidingWindow(-1, 3), "window(-1,3)"),
            (Documents([0, 7, 7, 9]), "documents(0,7,9)"),
            (Documents([0, 0]), "documents(0,0)"),
            (Mask(high=-1), "band(,-1)"),
            (Mask(low=1), "band(1,)"),
            (Mask(low=2, high=5), "band(2,5)"),
            (Mask(low=3, high=-1), "band(3,-1)"),
            (Mask(low=-1, high=0), "window(1,0)"),
            (Mask(cu_seqlens=(0, 0, 9, 9, 100)), "documents(0,9,100)"),
            (Mask(0, cu_seqlens=[0, 5]), "window(0,-1)&documents(0,5)"),  # type: ignore[arg-type]
            (Documents(numpy.array([0, 5])), "documents(0,5)"),  # type: ignore[arg-type]
            (Documents([numpy.int64(0), torch.tensor(5)]), "documents(0,5)"),  # type: ignore[list-item]
            (SlidingWindow(numpy.int32(3)), "window(3,0)"),
            (Documents(torch.tensor([0, 5], dtype=torch.int32)), "documents(0,5)"),  # type: ignore[arg-type]
            (Causal() & Documents([0, 7]), "causal&documents(0,7)"),
            (SlidingWindow(4, 2) & Causal() & Documents([0, 7]) & Documents([0, 3, 9]), "window(4,0)&documents(0,3,7)"),
        ],
    )
    def test_prints(self, mask: Mask, text: str) -> None:
        assert str(mask) == text
        assert parse_mask(text) == mask

    @pytest.mark.parametrize(
        "text",
        [
            "", "diagonal", "causal(1)", "causal(", "causal)", "window", "window(1,2,3)", "window(a)", "window(-2,0)",
            "window(3,4", "window(3,4))", "window(1 2)", "window(,0)", "window(1_0)", "window(+1)", "window(1.0,0)",
            "window(99999999999999999,0)", "documents(0)", "documents(0,,9)", "documents(5,9)", "band(1)", "causal&",
            "cau sal",
        ],
    )  # fmt: skip
    def test_refuses(self, text: str) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            parse_mask(text)
        assert str(refusal.value).partition("; did you mean")[0] == (
            f"unknown mask {text.split('&')[-1]!r}; write {WORDS}"
        )


class TestRefusals:
    @pytest.mark.parametrize(
        ("left", "right"), [(-2, 0), (0, -2), (2.5, 0), ("3", 0), (True, 0), (None, 0), (1, 2**60)]
    )
    def test_window(self, left: Any, right: Any) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            SlidingWindow(left, right)
        advice = f"use integers, 0 or more (at most {LIMIT}), or -1 for unbounded"
        assert str(refusal.value) == f"SlidingWindow({left!r}, {right!r}): {advice}"

    @pytest.mark.parametrize(
        ("bounds", "shown"),
        [
            ([], "[]"),
            ([0], "[0]"),
            ([1, 5], "[1, 5]"),
            ([0, 5, 3], "[0, 5, 3]"),
            ([0, -1], "[0, -1]"),
            ([0, 2.5], "[0, 2.5]"),
            ([0, 5.0], "[0, 5.0]"),
            ([False, True], "[False, True]"),
            ([0, None], "[0, None]"),
            ([0, 2**60], f"[0, {2**60}]"),
            ("05", "'05'"),
            (7, "7"),
            (None, "None"),
            (torch.tensor([0.0, 5.0]), "[0.0, 5.0]"),
            (torch.tensor([[0, 5], [0, 9]]), "[[0, 5], [0, 9]]"),
            (torch.tensor(5), "5"),
            (range(9, 0, -1), "[9, 8, 7, 6, 5, 4, 3, 2, ...]"),
            ("a" * 200, "'" + "a" * 76 + "..."),
        ],
    )
    def test_documents(self, bounds: Any, shown: str) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            Documents(bounds)
        wants = "Documents wants [0, end of the first, ..., end of the last], integers that do not decrease"
        assert str(refusal.value) == f"{wants}; got {shown}"
        if bounds is not None:
            with pytest.raises(ConfigurationError, match=re.escape(wants)):
                Mask(cu_seqlens=bounds)

    @pytest.mark.parametrize("bound", [1.5, "1", True, 2**53, -(2**53)])
    @pytest.mark.parametrize("name", ["low", "high"])
    def test_bounds(self, name: str, bound: Any) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            Mask(**{name: bound})
        says = f"bounds of kv - q are integers from -{LIMIT} to {LIMIT}, or None for unbounded"
        assert str(refusal.value) == f"Mask({name}={bound!r}): {says}"

    @pytest.mark.parametrize(
        ("join", "found"),
        [
            (lambda: and_(Causal(), 3), "one of type int"),
            (lambda: and_(None, Causal()), "one of type NoneType"),
            (lambda: and_(Causal, Documents([0, 5])), "Causal without ()"),
            (lambda: and_(Causal(), torch.ones(2, 2)), "one of type Tensor"),
        ],
    )
    def test_what_is_joined(self, join: Callable[[], object], found: str) -> None:
        with pytest.raises(ConfigurationError) as refusal:
            join()
        assert str(refusal.value) == f"& joins a mask and a mask, as in Causal() & Documents(...); found {found}"

    def test_documents_beyond_the_sequence(self) -> None:
        mask = Documents([0, 5, 9])
        mask.check_length(9)
        Full().check_length(0)
        with pytest.raises(ConfigurationError, match="Documents end at 9, but the sequence has 8 positions"):
            mask.check_length(8)


@pytest.mark.parametrize(
    ("mask", "needs"), [(Full(), False), (Causal(), True), (SlidingWindow(3), True), (Documents([0, 3]), True)]
)
def test_only_full_lets_lengths_differ(mask: Mask, needs: bool) -> None:
    assert mask.needs_equal_lengths == needs
