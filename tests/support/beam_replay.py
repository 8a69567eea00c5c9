"""Searches of generate() replayed from their scores: two of them agree, or part where two ways on are as good.

A search keeps some beams (greedy search: one): of all ways on it takes the best, by the sum of their scores, which are
logarithms of probability; of one beam the logits do. In fp32 two of these may be the same to rounding, and then which
one is taken is chance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

TIE, TIE_A_SUM = 4e-6, 3e-7  # how far apart two ways on may be that are as good: in scores, and of their sum
LIMIT = 1e-4  # how far scores may be apart

Beam = tuple[int, ...]  # its tokens


class Replayed(NamedTuple):
    """The outcome of comparing two searches of one row.

    error: how far their scores are apart, of the same beams, in the steps that were compared. tied: the step of which
    two ways on were as good, and after which the searches part. parted: the step at which they part without a reason.
    """

    error: float
    tied: int | None = None
    parted: int | None = None


def replayed(found: torch.Tensor, wanted: torch.Tensor) -> Replayed:
    """Compare the searches of one row by their scores [steps, beams, vocabulary]."""
    if found.shape != wanted.shape:
        return Replayed(math.inf, parted=0)
    searches, error, gap = (_Search(found), _Search(wanted)), 0.0, math.inf
    for step in range(len(wanted)):
        ours, theirs = (search.rows(step) for search in searches)
        now = max((float(apart(ours[beam], theirs[beam]).max()) for beam in ours.keys() & theirs), default=0.0)
        if ours.keys() != theirs.keys() or now > LIMIT:
            return Replayed(error, tied=step - 1) if gap <= 0.0 else Replayed(max(error, now), parted=step)
        error = max(error, now)
        gap = min([search.go_on(step) for search in searches])
    return Replayed(error)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return how far each two scores are apart; -inf in one of them alone is infinitely far."""
    return torch.where(found == wanted, 0.0, (found - wanted).abs()).nan_to_num(torch.inf, torch.inf)


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
