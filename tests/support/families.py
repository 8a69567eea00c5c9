"""Members of all schedule families that fit so many ranks and heads, and samples of them in which all pairs meet."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

from sampling import FULL_GRID

from tokenring.schedule.families import parse, variants
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Workload

HEADS = ((8, 8), (6, 6), (8, 2), (8, 1), (6, 3))
# Of all families: on five ranks there is none that there is not on three.
SOME_RANKS = (2, 3, 4, 5, 6) if FULL_GRID else (2, 3, 4, 6)
MOST_WITH_ALL = 4  # ranks
OPTIONS = ("", "/late", "/keep", "/regather")


class Point(NamedTuple):
    """A member with one option, on so many ranks, for so many heads."""

    ranks: int
    heads: tuple[int, int]
    family: str
    option: str
    name: str


@cache
def members(ranks: int, heads: tuple[int, int]) -> tuple[str, ...]:
    """Worth trying for some number of ranks a node."""
    size = Workload(1, ranks, ranks, *heads, 8)
    locals_ = [local for local in range(1, ranks + 1) if ranks % local == 0]
    return tuple(dict.fromkeys(name for local in locals_ for name in variants(ranks, size, local)))


def points(ranks: Sequence[int], options: Sequence[str] = OPTIONS) -> list[Point]:
    """All of them."""
    return [
        Point(count, heads, parse(name).family.name, option, name + option)
        for count in ranks
        for heads in HEADS
        for name in members(count, heads)
        for option in options
    ]


def one_of_each(found: Sequence[Point]) -> list[Point]:
    """Each name once, whatever the heads; of more than 4 ranks, without TOKENRING_FULL_GRID=1, one of each family."""
    few = not FULL_GRID and max(point.ranks for point in found) > MOST_WITH_ALL
    return list({(point.family, point.option) if few else point.name: point for point in found}.values())


def by_turns(circumstances: Sequence[Any], number: int) -> Sequence[Any]:
    """All of these circumstances; without TOKENRING_FULL_GRID=1 one, which goes by a member's number."""
    return circumstances if FULL_GRID else [circumstances[number // 2 % len(circumstances)]]


def sample(found: Sequence[Point], factors: Mapping[str, Sequence[Any]], tries: int = 60) -> list[tuple[Any, ...]]:
    """(point, one value of each factor): any two that fit together meet in some row; a member is met by itself.

    Of `tries` random rows the one with the most new pairs, each around a pair that was not met yet.
    """
    chosen = random.Random(0)
    rows = [(point, *map(chosen.choice, factors.values())) for point in found for _ in range(4)]
    numbers: dict[Any, int] = {}  # of a value at its place: a pair of numbers is one number, which hashes fast
    pairs = []
    for row in rows:
        places = enumerate((*row[0][:4], *row[1:]))
        pairs.append([a << 16 | b for a, b in combinations([numbers.setdefault(p, len(numbers)) for p in places], 2)])
    having: dict[int, list[int]] = {}
    for index, each in enumerate(pairs):
        for pair in each:
            having.setdefault(pair, []).append(index)
    sets = list(map(frozenset, pairs))
    picked, met = [], set[int]()
    for pair, fitting in sorted(having.items(), key=lambda item: len(item[1])):
        if pair not in met:
            some = chosen.sample(fitting, min(tries, len(fitting)))
            picked.append(max(some, key=lambda index: len(sets[index] - met)))
            met |= sets[picked[-1]]
    return [rows[index] for index in picked]


def length_of(point: Point, chunks_a_rank: int, pieces: int | None, least: int = 1) -> int:
    """A length whose chunks its pieces divide, with chunks of at least so many tokens."""
    scheme = parse(point.name).make(point.ranks, pieces=pieces)
    cut = math.lcm(scheme.q_pieces, scheme.kv_pieces)
    return point.ranks * chunks_a_rank * cut * -(-least // cut)


def make(name: str, ranks: int, layout: str, mask: Mask, length: int, pieces: int | None = None) -> Schedule:
    """A schedule by name."""
    whole = make_layout(layout, ranks, length)
    return make_schedule(name, whole, whole, mask, pieces=pieces)
