"""The table of traps in docs/ascend-emulation.md: sixteen, each with tests and mutants that are there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
PAGE = TESTS.parent / "docs" / "ascend-emulation.md"
CODE = re.compile(r"`([^`]+)`")


def wrong_in(page: str) -> list[str]:
    """What the table names that the tests do not have."""
    rows = re.findall(r"^\| ([0-9]+) \| (.+) \| (.+) \| (.+) \|$", page, re.MULTILINE)
    wrong = [] if [int(number) for number, *_ in rows] == [*range(1, 17)] else [f"{len(rows)} rows, not 1 to 16"]
    for number, _, tests, mutants in rows:
        named, found = CODE.findall(tests), set[str]()
        for each in named:
            file, _, name = each.partition("::")
            text = "".join(path.read_text(encoding="utf-8") for path in TESTS.rglob(file))
            found.add(text)
            if not re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE) or not name.startswith("test_"):
                wrong.append(f"{number}: no test {each}")
        wrong += [
            f"{number}: no mutant {each}"
            for each in CODE.findall(mutants)
            if not any(re.search(rf"\b{re.escape(each)}\b", text) for text in found)
        ]
        wrong += [] if named and CODE.findall(mutants) else [f"{number}: no test or no mutant"]
    return wrong


def test_the_table_names_what_is_there() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert wrong_in(page) == []
    for old, new, says in (
        ("::test_6_", "::test_66_", "6: no test test_ascend_traps.py::test_66_"),
        ("test_ascend_batches.py", "test_no_such.py", "10: no test test_no_such.py::"),
        ("`Needy`", "`Greedy`", "8: no mutant Greedy"),
        ("| 16 |", "| 17 |", "16 rows, not 1 to 16"),
        ("`alternating_ring`", "none", "12: no test or no mutant"),
    ):
        assert old in page and any(each.startswith(says) for each in wrong_in(page.replace(old, new))), says
