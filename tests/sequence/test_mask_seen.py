"""Chunks of which a chunk sees anything: asked together they are those whose regions are not empty."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

import tokenring as tr
from tokenring.sequence.layout import Positions

LENGTH = 96
MASKS = [
    tr.Causal() & tr.Documents([0, 5, 5, 40, 41, 90]),
    tr.Documents([0, 30, 96]),
    tr.SlidingWindow(7, 2) & tr.Documents([0, 10, 60, 96]),
    tr.SlidingWindow(12),
    tr.PrefixLM(30),
    tr.Causal() & tr.Chunks(24),
    tr.BlockCausal(16),
]


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(MASKS), st.integers(0, LENGTH - 1), st.integers(1, 40), st.lists(st.integers(1, 20), min_size=1))
def test_neighbours_are_seen_as_each_alone(mask: tr.Mask, start: int, rows: int, sizes: list[int]) -> None:
    q, chunks, at = Positions(start, min(LENGTH, start + rows)), [], 0
    for size in sizes:
        if at < LENGTH:
            chunks.append(Positions(at, min(LENGTH, at + size)))
            at += size
    alone = {number for number, kv in enumerate(chunks) if mask.region(q, kv)}
    assert mask.seen(q, chunks) == alone
    shown = {n for n, kv in enumerate(chunks) if any(mask.allows(a, b) for a in range(*q) for b in range(*kv))}
    assert alone == shown
