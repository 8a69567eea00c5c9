"""All-pairs samples of a grid: few cases in which any two values of any two factors meet."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any

Row = tuple[Any, ...]


def sample(factors: Mapping[str, Sequence[Any]], least: int, thirds: Sequence[str] = (), tries: int = 40) -> list[Row]:
    """Rows with one value of each factor: every pair of values of two factors is in some row.

    Greedy: of `tries` random rows the one with the most new pairs, each around a pair not met yet.
    Up to `least` rows are then added that meet as many new triples of the factors `thirds` as they
    can. The same arguments give the same rows.
    """
    names, values = list(factors), list(factors.values())
    chosen = random.Random(0)
    pairs = list(combinations(range(len(names)), 2))
    missing = {(i, j, a, b) for i, j in pairs for a, b in product(range(len(values[i])), range(len(values[j])))}
    rows: list[tuple[int, ...]] = []

    def best(
        seeds: Sequence[tuple[int, int, int, int] | None], groups: Sequence[tuple[int, ...]], seen: set[Any]
    ) -> None:
        drawn = []
        for seed in seeds:
            row = [chosen.randrange(len(each)) for each in values]
            if seed is not None:
                row[seed[0]], row[seed[1]] = seed[2], seed[3]
            drawn.append(tuple(row))
        rows.append(max(drawn, key=lambda row: sum((group, *(row[i] for i in group)) not in seen for group in groups)))
        seen.update((group, *(rows[-1][i] for i in group)) for group in groups)

    met: set[Any] = set()
    while missing:
        best([min(missing)] * tries, pairs, met)
        missing -= {(i, j, rows[-1][i], rows[-1][j]) for i, j in pairs}
    triples = list(combinations([names.index(name) for name in thirds], 3))
    seen = {(group, *(row[i] for i in group)) for row in rows for group in triples}
    while len(rows) < least:
        best([None] * tries, triples, seen)
    return [tuple(values[i][index] for i, index in enumerate(row)) for row in rows]
