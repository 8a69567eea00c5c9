"""The demand of a mask: how much work the queries of each chunk are, and which rows of kv they need.

Rows are counted in grains, of which each chunk has the same number, and sets of grains are the bits of an integer: one
operation then compares all rows of a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

from tokenring.sequence.layout import Positions
from tokenring.sequence.mask import Mask


class Demand(NamedTuple):
    """The demand of neighbouring chunks of equal length, in sequence order."""

    pairs: tuple[int, ...]  # (query, key) pairs that the queries of each chunk see
    needs: tuple[int, ...]  # the grains of which they see anything, as bits
    grains: int  # in each chunk

    def own(self, chunk: int) -> int:
        """Return the grains of the chunk itself, as bits."""
        return ((1 << self.grains) - 1) << (chunk * self.grains)

    def coarser(self, factor: int) -> Demand:
        """Return the demand of chunks that are each so many of these; their number must divide by it."""
        groups = range(0, len(self.pairs), factor)
        needs = []
        for first in groups:
            joined = 0
            for need in self.needs[first : first + factor]:
                joined |= need
            needs.append(joined)
        pairs = tuple(sum(self.pairs[first : first + factor]) for first in groups)
        return Demand(pairs, tuple(needs), self.grains * factor)


def demand_of(mask: Mask, length: int, chunks: int, grains: int) -> Demand:
    """Return the demand of a sequence cut into so many equal chunks, of so many grains each; length divides by both."""
    rows, whole = length // chunks, Positions(0, length)
    grain_rows = rows // grains
    pairs, needs = [], []
    for chunk in range(chunks):
        seen, need = 0, 0
        for patch in mask.region(Positions(chunk * rows, (chunk + 1) * rows), whole):
            seen += patch.pairs()
            need |= (1 << -(-patch.col1 // grain_rows)) - (1 << patch.col0 // grain_rows)
        pairs.append(seen)
        needs.append(need)
    return Demand(tuple(pairs), tuple(needs), grains)
