"""The benchmark of advice: which rows are pairs, which are set aside, and what its page says."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs/advise.md").read_text()
FAST = ("omni-bagel-a800", "omni-layer-a800-4-f0.125", "diffusers-flux-4090", "xdit-flux-h100-compiled")


SCRIPT: Any = import_module("advise_published")
DATA: dict[str, Any] = SCRIPT.load()
BY_ID = {row["id"]: row for row in DATA["measurements"]}
PAIRS = SCRIPT.pairs_of(DATA["measurements"])


def test_pairs_differ_by_the_schedule_alone() -> None:
    ids = {(one["id"], other["id"]) for one, other in PAIRS}
    assert ("usp-a100-8h128-128k-u1-zigzag", "usp-a100-8h128-128k-u2-zigzag") in ids
    assert ("usp-a100-8h128-128k-u1-zigzag", "usp-a100-8h128-128k-u8-ulysses") in ids  # which has any layout
    assert ("usp-a100-8h128-128k-u1-basic", "usp-a100-8h128-128k-u2-zigzag") not in ids
    for one, other in PAIRS:
        assert SCRIPT.cell_of(one) == SCRIPT.cell_of(other) and SCRIPT.choice_of(one) != SCRIPT.choice_of(other)
    names = {row["id"] for pair in PAIRS for row in pair}
    assert not any("tokenring" in name or "varlen-zigzag" in name or "loongtrain" in name for name in names)


def test_every_second_row_is_set_aside() -> None:
    names = sorted({row["id"] for pair in PAIRS for row in pair})
    aside = SCRIPT.set_aside(PAIRS)
    assert [name in aside for name in names] == [bool(place % 2) for place in range(len(names))]


def test_the_faster_is_the_one_of_less_time() -> None:
    row = BY_ID["usp-a100-8h128-128k-u1-zigzag"]
    one, other = (SCRIPT.Timed(row, "ring", *times) for times in ((1.0, 3.0), (1.04, 2.0)))
    assert not SCRIPT.differ(one, other) and not SCRIPT.is_named(one, other)
    assert SCRIPT.differ(one, other._replace(published_s=1.06))
    assert SCRIPT.is_named(one, other._replace(predicted_s=4.0))


def test_a_ratio_is_a_pair() -> None:
    rows = [row for row in DATA["side_by_side"] if row["id"] == "omni-layer-a800-4-f0.125-08k"]
    ((gathered, ring),) = SCRIPT.side_by_side(rows)
    assert (gathered.schedule, ring.schedule) == ("all-gather-kv", "ring")
    assert ring.published_s / gathered.published_s == pytest.approx(1.68)
    assert SCRIPT.is_named(gathered, ring)


@pytest.mark.parametrize("name", FAST)
def test_the_faster_is_named_where_links_are_stated(name: str) -> None:
    rows = [row for row in DATA["side_by_side"] if row["id"].startswith(name)]
    apart = [pair for pair in SCRIPT.side_by_side(rows) if SCRIPT.differ(*pair)]
    assert apart and all(SCRIPT.is_named(*pair) for pair in apart)


def test_the_page_says_what_the_command_prints() -> None:
    systems = dict.fromkeys(row["system"] for row in DATA["side_by_side"])
    for name in systems:
        assert f"| {name} | " in PAGE
    rows = [row for row in DATA["side_by_side"] if row["system"] == "vllm-omni, BAGEL"]
    (_, (_, count)) = SCRIPT.more_summary(list(SCRIPT.side_by_side(rows)))
    assert f"| vllm-omni, BAGEL | {count} |" in PAGE


@pytest.mark.parametrize("script", ["advise_published", "published"])
def test_rows_that_are_no_regular_expression(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(script).main(["--rows", "("])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "argument --rows: '(' is no regular expression (missing )" in said
    assert "Traceback" not in said and import_module("published").pattern("omni.*f0").search("omni-layer-f0.1")
