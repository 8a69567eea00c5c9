"""Ten kinds of masks: what any two chunks see of each other is what the kind's definition says, pair by pair."""

from __future__ import annotations

import json
import pickle
from functools import partial
from operator import and_, or_

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mask_kinds import KINDS, Kind, kind
from oracle import allowed

import tokenring as tr
from tokenring.ir.json import from_json, to_json
from tokenring.planner.bounds.mask_density import visible_pairs
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import Layout, Positions, make_layout
from tokenring.sequence.mask import of_numbers, parse_mask

STEADY = settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
LENGTH = 24
kinds = st.builds(kind, st.sampled_from(KINDS), st.just(LENGTH), st.integers(0, 10**6))
of_one_length = st.builds(
    partial(kind, kv_length=LENGTH), st.sampled_from(KINDS), st.just(LENGTH), st.integers(0, 10**6)
)
layouts = st.sampled_from(["contiguous", "zigzag", "striped", "zigzag/2", "striped/3"])


def shown(mask: tr.Mask, q: Positions, kv: Positions) -> torch.Tensor:
    """How often patches show each pair of two chunks."""
    counts = torch.zeros(len(q), len(kv), dtype=torch.int64)
    for patch in mask.region(q, kv):
        for row in range(patch.rows):
            counts[patch.row0 + row, [patch.col0 + column for column in patch.columns_of(row)]] += 1
    return counts


def check(mask: tr.Mask, dense: torch.Tensor, q_layout: Layout, kv_layout: Layout) -> None:
    for q in q_layout.chunks:
        seen = mask.seen(q, kv_layout.chunks)
        for number, kv in enumerate(kv_layout.chunks):
            wanted = dense[q.start : q.stop : q.step, kv.start : kv.stop : kv.step]
            assert torch.equal(shown(mask, q, kv), wanted.long())
            assert (number in seen) == bool(wanted.any()) == mask.visible(q, kv)


def both_ways(a: Kind, b: Kind, join: object) -> tuple[tr.Mask, torch.Tensor]:
    made = join(a.mask.with_q_start(None), b.mask.with_q_start(None))  # type: ignore[operator]
    dense = join(stripped(a), stripped(b))  # type: ignore[operator]
    return made, dense


def stripped(some: Kind) -> torch.Tensor:
    """The definition with q from 0 on; a later start is no more than a shift of rows."""
    return allowed(some.mask.with_q_start(None), LENGTH, LENGTH)


class TestRegion:
    @pytest.mark.parametrize("name", KINDS)
    @STEADY
    @given(data=st.data())
    def test_is_the_definition(self, name: str, data: st.DataObject) -> None:
        ranks = data.draw(st.sampled_from([1, 2]))
        made = kind(name, LENGTH, data.draw(st.integers(0, 10**6)))
        layout = [make_layout(data.draw(layouts), ranks, length) for length in (made.q_length, made.kv_length)]
        dense = made.dense()
        assert torch.equal(allowed(made.mask, made.q_length, made.kv_length), dense), "the oracle"
        check(made.mask, dense, *layout)
        assert visible_pairs(made.mask, made.q_length, made.kv_length) == int(dense.sum())

    @STEADY
    @given(kinds, st.integers(0, LENGTH - 1), st.integers(0, LENGTH - 1))
    def test_one_pair(self, made: Kind, q: int, kv: int) -> None:
        assert made.mask.allows(q, kv) == made.sees(q, kv)

    @STEADY
    @given(kinds, layouts, st.integers(1, 30))
    def test_of_q_that_begins_later(self, made: Kind, layout: str, start: int) -> None:
        mask = made.mask.with_q_start(start)
        wanted = torch.zeros(LENGTH, made.kv_length, dtype=torch.bool)
        whole = allowed(made.mask.with_q_start(None), LENGTH + start, made.kv_length)
        wanted |= whole[start:]
        check(mask, wanted, make_layout(layout, 2, LENGTH), make_layout("contiguous", 2, made.kv_length))


class TestJoined:
    @pytest.mark.parametrize("join", [and_, or_])
    @STEADY
    @given(of_one_length, of_one_length, layouts)
    def test_is_what_both_say(self, join: object, a: Kind, b: Kind, layout: str) -> None:
        made, dense = both_ways(a, b, join)
        check(made, dense, make_layout(layout, 2, LENGTH), make_layout("contiguous", 2, LENGTH))
        assert made == both_ways(b, a, join)[0]
        assert parse_mask(str(made)) == made

    @STEADY
    @given(of_one_length, of_one_length, of_one_length)
    def test_of_three(self, a: Kind, b: Kind, c: Kind) -> None:
        one, both = both_ways(a, b, or_)
        made, dense = one & c.mask.with_q_start(None), both & stripped(c)
        check(made, dense, make_layout("zigzag", 2, LENGTH), make_layout("zigzag", 2, LENGTH))
        assert parse_mask(str(made)) == made

    @STEADY
    @given(of_one_length)
    def test_with_itself(self, a: Kind) -> None:
        assert a.mask & a.mask == a.mask == a.mask | a.mask
        assert a.mask & tr.Full() == a.mask
        assert (a.mask | tr.Full()).is_full


class TestForms:
    @STEADY
    @given(kinds)
    def test_text_numbers_and_pickles(self, made: Kind) -> None:
        mask = made.mask
        assert parse_mask(str(mask)) == mask
        assert pickle.loads(pickle.dumps(mask)) == mask and hash(parse_mask(str(mask))) == hash(mask)
        assert mask.numbers is None or of_numbers(mask.numbers) == mask

    @pytest.mark.parametrize("name", KINDS)
    def test_json(self, name: str) -> None:
        made = kind(name, LENGTH)
        q_layout, kv_layout = (make_layout("contiguous", 2, n) for n in (made.q_length, made.kv_length))
        schedule = make_schedule("ring", q_layout, kv_layout, made.mask)
        assert from_json(to_json(schedule)).mask == made.mask
        assert json.loads(to_json(schedule))["mask"].keys() >= {"low", "high", "cu_seqlens"}

    @pytest.mark.parametrize(
        ("mask", "text"),
        [
            (tr.PrefixLM(5), "documents(0,5)|causal"),
            (tr.PrefixLM([2, 3], [0, 5, 9]), "documents(0,5,9)&(bidirectional(0,2;5,8)|causal)"),
            (tr.PrefixLM(2, [0, 5, 9]), "documents(0,5,9)&(bidirectional(0,2;5,7)|causal)"),
            (tr.PrefixLM(0), "causal"),
            (tr.Causal() | tr.Bidirectional([(8, 10), (3, 6)]), "bidirectional(3,6;8,10)|causal"),
            (tr.BlockCausal(4), "chunks(4)|causal"),
            (tr.BlockCausal(1), "causal"),
            (tr.Chunks(8) & tr.Causal(), "causal&chunks(8)"),
            (tr.Chunks(8) & tr.Chunks(4) & tr.Chunks(6), "chunks(4)&chunks(6)"),
            (tr.PrefixTree([4, 3, 5], [None, 0, 0]), "slices(0,4,0,4,,0;4,7,0,7,,0;7,12,0,4,,;7,12,7,12,,0)"),
            (tr.Documents([0, 5, 9], windows=[(2, 0), (1, 1)]), "slices(0,5,0,5,-2,0;5,9,5,9,-1,1)"),
            (tr.Documents([0, 5, 9], windows=[(2, 0), (2, 0)]), "window(2,0)&documents(0,5,9)"),
            (tr.Documents([0, 5, 9], [0, 2, 12]), "slices(0,5,0,2,,;5,9,2,12,,)&start(0)"),
            (tr.Documents([0, 5, 5, 9], [0, 2, 3, 12]), "slices(0,5,0,2,,;5,9,3,12,,)&start(0)"),
            (tr.Causal(q_start=7), "causal&start(7)"),
            (tr.SlidingWindow(3, q_start=7), "window(3,0)&start(7)"),
            (tr.Documents([0, 5], q_start=2), "documents(0,5)&start(2)"),
            (tr.Full().with_q_start(3), "full"),
            (tr.Slices([(0, 4, 0, 4), (4, 9, 4, 9)]), "documents(0,4,9)&start(0)"),
            (tr.Slices([(0, 4, 0, 4, -9, 9), (4, None, 0, None, None, 0)]), "slices(0,4,0,4,,;4,,0,,,0)&start(0)"),
            (tr.Causal() | tr.SlidingWindow(0, -1), "full"),
            (tr.SlidingWindow(2) | tr.SlidingWindow(-1, -1), "full"),
            (tr.SlidingWindow(2) & tr.Causal() | tr.Mask(low=1, high=3), "window(2,3)"),
        ],
    )
    def test_one_form(self, mask: tr.Mask, text: str) -> None:
        assert str(mask) == text
        assert parse_mask(text) == mask

    def test_words_that_are_short(self) -> None:
        assert parse_mask("prefix(5)") == tr.PrefixLM(5)
        assert parse_mask("blockcausal(4)") == tr.BlockCausal(4)
        assert parse_mask("tree(4,3,5;,0,0)") == tr.PrefixTree([4, 3, 5], [None, 0, 0])
        assert parse_mask(" ( causal | bidirectional( 3 , 6 ; 8 , 10 ) ) & documents(0,9)") == (
            (tr.Causal() | tr.Bidirectional([(3, 6), (8, 10)])) & tr.Documents([0, 9])
        )

    def test_what_looks_back(self) -> None:
        back = [tr.Causal(), tr.PrefixTree([4, 3], [None, 0]), tr.Causal() & tr.Chunks(4), tr.Causal(q_start=4)]
        back.append(tr.Chunks(4) & (tr.Causal() | tr.Slices([(4, 8, 0, 4)])))
        assert all(mask.looks_back for mask in back)
        assert not any(mask.looks_back for mask in (tr.PrefixLM(4), tr.BlockCausal(3), tr.Chunks(3), tr.Full()))


def test_prefix_tree_of_eight_leaves() -> None:
    """What is computed is at most 1.05 of what is visible."""
    lengths, parents = [64], [None]
    for level in range(3):
        first = len(lengths) - 2**level
        for parent in range(first, first + 2**level):
            lengths += [16 + parent, 24]
            parents += [parent, parent]  # type: ignore[list-item]
    mask, length = tr.PrefixTree(lengths, parents), sum(lengths)
    size = tr.Workload(1, length, length, 1, 1, 64)
    assert len(parents) == 15
    visible = int(allowed(mask, length, length).sum())
    whole = make_layout("contiguous", 1, length)
    flops = make_schedule("ring", whole, whole, mask).flops(size)[0]
    assert flops <= 1.05 * visible * 4 * 64
