"""Schemes that place tiles by their q: made by rows, and turned, their schedules are those made tile by tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenring.schedule.families.change import arranged
from tokenring.schedule.families.registry import parse
from tokenring.schedule.names import make_schedule, moved_tokens, moves_least
from tokenring.schedule.scheme import Scheme, build
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask

LENGTH = 192
CASES = [
    ("packed/8", 16), ("packed/3", 8), ("packed/5", 4), ("packed/4/pieces2", 8), ("packed/4/late", 8), ("packed/2", 1),
    ("ulysses", 8), ("ulysses/2", 4), ("ulysses/pieces4", 8), ("uneven/6", 8), ("sub-sharded/2x2x2", 8),
    ("sub-sharded/1x4x2", 8), ("sub-sharded/1x1x8", 8),
]  # fmt: skip


@pytest.mark.parametrize(("name", "ranks"), CASES)
@pytest.mark.parametrize("mask", ["full", "causal", "documents(0,50,192)"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_as_tile_by_tile(name: str, ranks: int, mask: str, layout: str) -> None:
    whole, seen, scheme = make_layout(layout, ranks, LENGTH), parse_mask(mask), parse(name).make(ranks)
    assert scheme.placed_by_q and scheme.timed_by_q
    turned: list[Scheme] = [scheme, arranged(scheme, [*range(1, ranks), 0])]
    for each in turned:
        assert build(each, whole, whole, seen) == build(replace(each, timed_by_q=False), whole, whole, seen)


@pytest.mark.parametrize("name", ["ring", "bidirectional", "direct-kv", "all-gather-kv", "usp/2", "mesh-kv/2x4"])
def test_placed_by_q(name: str) -> None:
    whole, scheme = make_layout("zigzag", 8, LENGTH), parse(name).make(8)
    assert scheme.placed_by_q
    one_by_one = build(replace(scheme, placed_by_q=False), whole, whole, parse_mask("causal"))
    assert build(scheme, whole, whole, parse_mask("causal")) == one_by_one


@pytest.mark.parametrize("name", ["ring", "ring/pieces2", "usp/2", "usp/4", "double-ring/2", "usp/2/pieces2"])
@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("length", [192, 150])
def test_directions_without_making_both(name: str, mask: str, layout: str, length: int) -> None:
    """Whose routes carry fewest tokens is known without its tiles, and at a tie it is the first."""
    whole, seen = make_layout(layout, 8, length), parse_mask(mask)
    both = [parse(name).make(8, way) for way in (1, -1)]
    made = [build(each, whole, whole, seen) for each in both]
    told = moves_least(both, whole, whole, seen)
    assert told is not None
    assert build(told, whole, whole, seen) == min(made, key=moved_tokens) == make_schedule(name, whole, whole, seen)
