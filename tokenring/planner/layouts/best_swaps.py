"""Assignments improved by the best of all swaps of a few ranks, several assignments side by side."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch

from tokenring.planner.layouts.assignment import Assignment, Swap
from tokenring.planner.layouts.scores import SwapScores

DRAWN, RANKS_A_DRAW = 2, 4  # ranks whose swaps are scored beside the costliest's in a step: at least, or one of so many
SCORED, PRICED = 16, 4  # swaps of a rank of which the exact cost may be asked, and of which it is
REST = 7  # steps for which a chunk that was moved stays, and up to twice as many
REPRICED = 0.9  # times the busiest port of the last prices, at which there are new ones


def improved_at_once(
    nows: Sequence[Assignment], needs: torch.Tensor, steps: int, randoms: Sequence[Random]
) -> list[list[int]]:
    """Return of each assignment the cheapest owners met on the way of the best swaps of some ranks.

    Of the costliest rank the best is taken though it costs more than nothing, but none of the chunks that were just
    moved: so the way leads out of where no swap gains. The other ranks are drawn by lot.
    """
    for now in nows:
        now.price()
    scores, ways = SwapScores(nows, needs), [_Way(*each) for each in zip(nows, randoms, strict=True)]
    for step in range(steps):
        ranks = [each.ranks() for each in ways]
        found = iter(scores.best(ranks, SCORED))
        done = [each.taken(some, [next(found) for _ in some], step) for each, some in zip(ways, ranks, strict=True)]
        if any(repriced for _, repriced in done):
            scores.price()
        changed = [some for some, _ in done]
        if step + 1 < steps and any(changed):
            scores.follow(changed)
    return [each.best for each in ways]


class _Way:
    """The way of one assignment from swap to swap, and the cheapest owners met on it."""

    def __init__(self, now: Assignment, random: Random) -> None:
        self._now, self._random = now, random
        self._priced = now.busiest_port
        self.best, self._cheapest = list(now.owners), now.cost
        self._resting: dict[int, int] = {}  # until which step a chunk stays where it is

    def ranks(self) -> list[int]:
        """Return the costliest rank, and some others drawn by lot."""
        first = self._now.costliest()
        others = [rank for rank in range(self._now.ranks) if rank != first]
        drawn = min(len(others), max(DRAWN, self._now.ranks // RANKS_A_DRAW))
        return [first, *(others.pop(int(self._random.random() * len(others))) for _ in range(drawn))]

    def taken(
        self, ranks: Sequence[int], found: Sequence[list[tuple[float, int, int]]], step: int
    ) -> tuple[list[int], bool]:
        """Take one of the swaps found for each rank, or none; return the ranks that it changed, and if prices did."""
        now, changed, repriced = self._now, set[int](), False
        for rank, some in zip(ranks, found, strict=True):
            limit = float("inf") if rank == ranks[0] else now.cost
            swap = _best_swap(now, rank, some, self._resting, step, self._cheapest, limit)
            if swap is None:
                continue
            for chunk in (now.held[at][place] for at, place in zip(swap.ranks, swap.places, strict=True)):
                self._resting[chunk] = step + REST + int(REST * self._random.random())
            now.take(swap)
            changed.update(swap.ranks)
            if now.cost < self._cheapest:
                if now.busiest_port < REPRICED * self._priced:
                    self._priced, repriced = now.busiest_port, True
                    now.price()
                self.best, self._cheapest = list(now.owners), now.cost
        return sorted(changed), repriced


def _best_swap(
    now: Assignment, rank: int, some: list[tuple[float, int, int]], resting: dict[int, int], step: int,
    cheapest: float, limit: float,
) -> Swap | None:  # fmt: skip
    """Return the cheapest of the first few of these swaps, without chunks that rest unless it is the cheapest ever."""
    best, tried = None, 0
    for score, place, chunk in some:
        if now.owners[chunk] == rank:
            continue
        rests = max(resting.get(chunk, 0), resting.get(now.held[rank][place], 0)) > step
        if rests and now.cost + score >= cheapest:
            continue
        found = now.swap(rank, place, chunk, limit)
        if found is not None:
            best, limit = found, sum(found.costs)
        tried += 1
        if tried == PRICED:
            break
    return best
