"""The samples of rows that the suite runs: small, the same each time, and with every word of what is left out."""

from __future__ import annotations

from itertools import product

import pytest
from sampling import FULL_GRID, drawn, words

FAMILIES = ("ring", "usp/2", "usp/4", "tiles/2x2")
ROWS = [" ".join(row) for row in product(FAMILIES, ("zigzag", "striped"), ("full", "causal", "window both ways"))]


def test_words_of_a_row() -> None:
    assert words("16 ranks, usp/2, window both ways, None]") == {
        "16", "ranks", "usp/2", "usp", "window", "both", "ways", "None",
    }  # fmt: skip


@pytest.mark.parametrize("seed", ["a", "b", "c"])
def test_every_word_is_met(seed: str) -> None:
    kept = drawn(ROWS, len(FAMILIES), seed)
    assert len(kept) == len(FAMILIES) and kept == sorted(set(kept))
    assert set().union(*(words(ROWS[at]) for at in kept)) == set().union(*map(words, ROWS))


def test_by_the_seed_alone() -> None:
    assert drawn(ROWS, 6, "a") == drawn(ROWS, 6, "a") != drawn(ROWS, 6, "b")


def test_families_come_before_their_members() -> None:
    """As many rows as families are enough for one of each."""
    kept = drawn(ROWS, 3, "a")
    assert {"ring", "usp", "tiles"} <= set().union(*(words(ROWS[at]) for at in kept))


def test_all_where_there_are_no_more() -> None:
    assert drawn(ROWS, len(ROWS), "a") == drawn(ROWS, 1000, "a") == list(range(len(ROWS)))
    assert drawn([], 3, "a") == []


@pytest.mark.skipif(FULL_GRID, reason="all rows are run")
def test_marked_tests_run_so_many_rows(request: pytest.FixtureRequest) -> None:
    """No marked test of this very session has more rows than its mark says."""
    rows: dict[str, int] = {}
    for item in request.session.items:
        if (marker := item.get_closest_marker("sampled")) is not None:
            name = item.nodeid.partition("[")[0]
            rows[name] = rows.get(name, 0) + 1
            assert rows[name] <= marker.args[0], name
