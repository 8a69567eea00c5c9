"""Masks: the region of any two chunks is what the definition says, pair by pair."""

from __future__ import annotations

import re
from functools import reduce
from operator import and_

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenring.errors import ConfigurationError
from tokenring.layout import Positions
from tokenring.mask import Causal, Documents, Full, Mask, SlidingWindow, parse_mask
from tokenring.region import Region

STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
END = 40
windows = st.builds(SlidingWindow, st.integers(-1, END), st.integers(-1, END))
documents = st.lists(st.integers(0, END), min_size=1, max_size=6).map(lambda ends: Documents([0, *sorted(ends)]))
simple = st.one_of(st.just(Full()), st.just(Causal()), windows, documents)
masks = st.lists(simple, min_size=1, max_size=3).map(lambda parts: reduce(and_, parts))


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
    @given(masks)
    def test_reads_back(self, mask: Mask) -> None:
        assert parse_mask(str(mask)) == mask

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
            (Documents(torch.tensor([0, 5], dtype=torch.int32)), "documents(0,5)"),  # type: ignore[arg-type]
            (Causal() & Documents([0, 7]), "causal&documents(0,7)"),
            (SlidingWindow(4, 2) & Causal() & Documents([0, 7]) & Documents([0, 3, 9]), "window(4,0)&documents(0,3,7)"),
        ],
    )
    def test_prints(self, mask: Mask, text: str) -> None:
        assert str(mask) == text
        assert parse_mask(text) == mask

    @pytest.mark.parametrize(
        "text", ["", "diagonal", "causal(1)", "window(1,2,3)", "window(a)", "window(-2,0)", "documents(0)", "causal&"]
    )
    def test_refuses(self, text: str) -> None:
        says = f"unknown mask {text.split('&')[-1]!r}; write full, causal, window(left,right), documents(0,end,...)"
        with pytest.raises(ConfigurationError, match=re.escape(says)):
            parse_mask(text)


class TestRefusals:
    @pytest.mark.parametrize(("left", "right"), [(-2, 0), (0, -2)])
    def test_window(self, left: int, right: int) -> None:
        says = re.escape(f"SlidingWindow({left}, {right}): use 0 or more, or -1 for unbounded")
        with pytest.raises(ConfigurationError, match=says):
            SlidingWindow(left, right)

    @pytest.mark.parametrize("bounds", [[], [0], [1, 5], [0, 5, 3], [0, -1]])
    def test_documents(self, bounds: list[int]) -> None:
        says = f"Documents wants [0, end of the first, ..., end of the last]; got {bounds}"
        with pytest.raises(ConfigurationError, match=re.escape(says)):
            Documents(bounds)

    def test_many_documents_are_shortened(self) -> None:
        with pytest.raises(ConfigurationError, match=re.escape("got [9, 8, 7, 6, 5, 4, 3, 2, ...]")):
            Documents(range(9, 0, -1))

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
