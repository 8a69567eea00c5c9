"""Rates of a kernel that is slower along a mask's edge than elsewhere, and of code that merges by more operators."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from tokenring.sequence.region import Patch
from tokenring.tables.rates import Rates, Sample, interpolate


@dataclass(frozen=True)
class ShapedRates(Rates):
    """Rates as of `Rates`, and what the shape of a patch and the way of merging change.

    edge: the share of the rates that a triangle reaches, by its side, ascending. A kernel computes the whole of the
        small tiles that an edge crosses, and its blocks of rows differ in length. What a triangle loses, a longer patch
        with such an edge loses once.
    merge_factor: bytes that merging by log-sum-exp touches, over those that one operator touches which reads both
        results and writes one. merge_operators: the operators that do it.
    """

    edge: tuple[Sample, ...] = ((1, 1.0),)
    merge_factor: float = 1.0
    merge_operators: int = 1

    def pairs(self, patch: Patch) -> float:
        """Return the pairs that a kernel takes the time of: those that are visible, and some of the edge again."""
        visible = patch.pairs()
        if patch.is_full:
            return visible
        hidden = patch.rows * patch.cols - visible  # of a triangle, as many as are visible
        share = interpolate(self.edge, min(patch.rows, patch.cols))
        return visible + min(visible, hidden) * (1 / share - 1)

    def results_seconds(self, nbytes: float, merges: int) -> float:
        """Return the seconds of copying results, or merging them by all the operators."""
        if not merges:
            return super().results_seconds(nbytes, merges)
        return super().results_seconds(nbytes * self.merge_factor, merges) + (
            (self.merge_operators - 1) * self.op_seconds
        )


def reshaped(rates: Rates, **changes: Any) -> ShapedRates:
    """Return the rates with other fields of ShapedRates."""
    kept = {each.name: getattr(rates, each.name) for each in fields(rates)}
    return ShapedRates(**{**kept, **changes})
