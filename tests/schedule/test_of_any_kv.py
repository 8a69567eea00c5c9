"""Schemes that place tiles whoever owns their kv: made by rows, their schedules are those made tile by tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tokenring.schedule.families.change import arranged
from tokenring.schedule.families.registry import parse
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
    assert scheme.of_any_kv
    turned: list[Scheme] = [scheme, arranged(scheme, [*range(1, ranks), 0])]
    for each in turned:
        assert build(each, whole, whole, seen) == build(replace(each, of_any_kv=False), whole, whole, seen)
