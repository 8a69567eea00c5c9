"""Searches of generate() replayed from their scores: two of them agree, or part where two ways on are as good.

A search keeps some beams (greedy search: one): of all ways on it takes the best, by the sum of their scores, which are
logarithms of probability; of one beam the logits do. In fp32 two of these may be the same to rounding, and then which
one is taken is chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

TIE, TIE_A_SUM = 4e-6, 3e-7  # how far apart two ways on may be that are as good: in scores, and of their sum
LIMIT = 1e-4  # how far scores may be apart

Beam = tuple[int, ...]  # its tokens


class Replayed(NamedTuple):
    """What two searches of one row have in common.

    error: how far their scores are apart, of the same beams, in the steps that were compared. tied: the step of which
    two ways on were as good, and after which the searches part. parted: the step at which they part without a reason.
    """

    error: float
    tied: int | None = None
    parted: int | None = None


def replayed(found: torch.Tensor, wanted: torch.Tensor) -> Replayed:
    """Compare the searches of one row by their scores [steps, beams, vocabulary]."""
    searches, error, tied = (_Search(found), _Search(wanted)), 0.0, None
    for step in range(len(wanted)):
        rows = [search.rows(step) for search in searches]
        now = max((_apart(rows[0][beam], rows[1][beam]) for beam in rows[0].keys() & rows[1]), default=0.0)
        if rows[0].keys() != rows[1].keys() or now > LIMIT:
            recent = tied is not None and tied >= step - 1
            return Replayed(error, tied) if recent else Replayed(max(error, now), None, step)
        error = max(error, now)
        gaps = [search.go_on(step) for search in searches]
        if min(gaps) <= 0.0:
            tied = step
    return Replayed(error)


def rows_of(scores: torch.Tensor, beams: int) -> Sequence[torch.Tensor]:
    """Return the scores of each row of a batch: [steps, beams, vocabulary] of [steps, rows · beams, vocabulary]."""
    return scores.view(len(scores), -1, beams, scores.shape[-1]).unbind(1)


class _Search:
    """The beams of one search, step by step."""

    def __init__(self, scores: torch.Tensor) -> None:
        self._scores = scores
        self._beams: list[Beam] = [()]
        self._sums = scores.new_zeros(1)  # the others begin as copies of the first that count for nothing

    def rows(self, step: int) -> dict[Beam, torch.Tensor]:
        """Return the scores of each beam."""
        return dict(zip(self._beams, self._scores[step], strict=False))

    def go_on(self, step: int) -> float:
        """Take the best ways on; return by how much more than a tie each is better than the next, at least."""
        scores, count = self._scores[step], self._scores.shape[1]
        sums = (scores[: len(self._beams)] + self._sums[:, None]).flatten()
        best, places = sums.topk(count + 1)
        ways = [divmod(place, scores.shape[1]) for place in places[:count].tolist()]
        self._beams = [(*self._beams[beam], token) for beam, token in ways]
        self._sums = best[:count]
        if count == 1:
            self._sums = torch.zeros_like(self._sums)  # logits do not add up
        return float((best[:-1] - best[1:] - TIE_A_SUM * best[1:].abs()).min()) - TIE


def _apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return how far scores are apart at most; -inf in one of them alone is infinitely far."""
    return float(torch.where(found == wanted, 0.0, (found - wanted).abs()).nan_to_num(torch.inf, torch.inf).max())
