"""All pairs of ranks in rounds, no rank twice in a round: a colouring of the complete graph's edges."""

from __future__ import annotations

import random

Pair = tuple[int, int]


def rounds(ranks: int) -> list[list[Pair]]:
    """Return all pairs in P - 1 rounds for an even number P of ranks, in P for an odd one: none could be fewer."""
    if ranks & (ranks - 1) == 0:
        return [[(a, a ^ mask) for a in range(ranks) if a < a ^ mask] for mask in range(1, ranks)]
    return _circle(ranks)


def _circle(ranks: int) -> list[list[Pair]]:
    """Pair the ranks by turning: the last place stays, the others turn; for an odd number it is empty."""
    even = ranks + ranks % 2
    found = []
    for turn in range(even - 1):
        seats = [(turn + k) % (even - 1) for k in range(even - 1)] + [even - 1]
        met = [(seats[0], seats[-1])] + [(seats[k], seats[even - 1 - k]) for k in range(1, even // 2)]
        found.append([(min(pair), max(pair)) for pair in met if max(pair) < ranks])
    return found


def shuffled(ranks: int, series: int) -> list[list[Pair]]:
    """Return rounds with the ranks in another order, equal on all ranks: other pairs meet in a round."""
    if series == 0:
        return rounds(ranks)
    order = list(range(ranks))
    random.Random(series).shuffle(order)
    named = [[(order[a], order[b]) for a, b in each] for each in _circle(ranks)]
    return [[(min(pair), max(pair)) for pair in each] for each in named]
