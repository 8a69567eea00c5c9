"""Kernel calls under each kind of mask: disjoint, whole, and none reaches from one piece of the mask into another."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
import torch
from mask_kinds import KINDS, kind

import tokenring as tr
from tokenring.lowering.calls import _patches
from tokenring.sequence.layout import Positions, make_layout


@pytest.mark.parametrize("layout", ["zigzag", "zigzag/2", "striped", "contiguous/2"])
@pytest.mark.parametrize("name", KINDS)
def test_calls_of_chunks_that_lie_together(name: str, layout: str) -> None:
    made = kind(name, 48, 5)
    dense = made.dense()
    q_layout, kv_layout = (make_layout(layout, 2, length) for length in (made.q_length, made.kv_length))
    for q_rank, kv_rank in product(range(2), range(2)):
        q, kv = q_layout.owned_by(q_rank), kv_layout.owned_by(kv_rank)
        chunks = tuple(q_layout.chunks[each] for each in q), tuple(kv_layout.chunks[each] for each in kv)
        shown = torch.zeros(q_layout.local_length, kv_layout.local_length, dtype=torch.int64)
        for patch in _patches(made.mask, *chunks):
            for row in range(patch.rows):
                shown[patch.row0 + row, [patch.col0 + column for column in patch.columns_of(row)]] += 1
        wanted = dense[q_layout.positions(q_rank)][:, kv_layout.positions(kv_rank)]
        assert torch.equal(shown, wanted.long())


DIAGONAL = tr.SlidingWindow(0, 0)
PIECES = {
    "chunks": (DIAGONAL & tr.Chunks(12), [0, 12, 24, 36, 48]),
    "documents from a later start": (tr.Documents([0, 24, 60], q_start=12) & DIAGONAL.with_q_start(12), [0, 12, 48]),
    "spans": (DIAGONAL & tr.Bidirectional([(0, 12), (13, 30), (36, 48)]), [0, 12, 13, 30, 36, 48]),
    "spans of two that are joined": (DIAGONAL & (tr.Bidirectional([(0, 12), (13, 48)]) | tr.Chunks(5)), None),
}


@pytest.mark.parametrize("name", PIECES)
def test_the_diagonal_of_pieces(name: str) -> None:
    """It goes on from one into the next, and would be one band, in which what is hidden is NaN where a piece is."""
    mask, bounds = PIECES[name]
    chunks = (Positions(0, 12), Positions(24, 36), Positions(36, 48))
    kv = tuple(Positions(each.start + (mask.q_start or 0), each.stop + (mask.q_start or 0)) for each in chunks)
    found = _patches(mask, chunks, kv)
    rows = [at for chunk in chunks for at in range(*chunk)]
    for patch in found:
        if bounds is None:
            assert patch.row1 <= 12 or patch.row0 >= 12
            continue
        pieces = {
            index
            for at in rows[patch.row0 : patch.row1]
            for index, (a, b) in enumerate(pairwise(bounds))
            if a <= at < b
        }
        assert len(pieces) == 1


def test_what_is_in_one_piece_is_one_call() -> None:
    """The two chunks of a zigzag rank are one triangle, if all lie in one chunk of the mask or beyond its images."""
    chunks = (Positions(0, 8), Positions(24, 32))
    for mask in (tr.Causal(), tr.Causal() & tr.Chunks(64), tr.Causal() | tr.Bidirectional([(10, 14)])):
        (triangle,) = _patches(mask, chunks, chunks)
        assert triangle.is_causal and triangle.rows == 16
