"""A seeded sample of a test's rows, for tests of which all rows take long: campaigns run them all.

    @pytest.mark.sampled(12)
    @pytest.mark.parametrize("mask", MASKS)
    @pytest.mark.parametrize("ranks", RANKS)
    def test_exact(ranks: int, mask: str) -> None: ...

Of each test function 12 rows are left, in which every word of any row's id is met where 12 are enough for that: each
family, layout, mask, number of ranks. Without the mark, a test on pools of ranks has an eighth of its rows, and three
at least. TOKENRING_FULL_GRID=1 leaves all.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence, Set

import pytest

FULL_GRID = bool(os.environ.get("TOKENRING_FULL_GRID"))
MARKER = "sampled"
LEAST_ROWS, SHARE = 3, 8


def words(row: str) -> set[str]:
    """Return the words of a row's id, and of those with parameters, as usp/2, what stands before these, too."""
    found = set(re.findall(r"[\w/.]+", row))
    return found | {word.partition("/")[0] for word in found}


def drawn(rows: Sequence[str], count: int, seed: str) -> list[int]:
    """The numbers of so many rows, rising: each says as many words that were not met as any does; else by the seed."""
    left = list(range(len(rows)))
    random.Random(seed).shuffle(left)
    of_row, met, found = list(map(words, rows)), set[str](), list[int]()
    while left and len(found) < count:
        best = max(left, key=lambda at: len(of_row[at] - met))  # the first of equals
        left.remove(best)
        found.append(best)
        met |= of_row[best]
    return sorted(found)


def leave_samples(config: pytest.Config, items: list[pytest.Item], pools: Set[str]) -> None:
    """Deselect the rows of marked tests that are not drawn, and of tests that take one of these fixtures."""
    if FULL_GRID:
        return
    rows_of: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker(MARKER) is not None or not pools.isdisjoint(getattr(item, "fixturenames", ())):
            rows_of.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped = set[pytest.Item]()
    for test, rows in rows_of.items():
        marker = rows[0].get_closest_marker(MARKER)
        count = max(LEAST_ROWS, -(-len(rows) // SHARE)) if marker is None else marker.args[0]
        kept = drawn([row.nodeid.partition("[")[2] for row in rows], count, test.rpartition("/")[2])
        dropped |= set(rows) - {rows[at] for at in kept}
    if dropped:
        config.hook.pytest_deselected(items=[item for item in items if item in dropped])
        items[:] = [item for item in items if item not in dropped]
