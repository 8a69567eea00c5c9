"""Schedules of each kind of mask as JSON and as text: they come back, the checker takes them, errors say where."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from mask_kinds import KINDS, kind

import tokenring as tr
from tokenring.errors import ScheduleError
from tokenring.ir.json import from_json, to_json
from tokenring.ir.text_parse import parse_text
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import make_layout

PAGE = Path(__file__).resolve().parents[2] / "docs" / "schedule-json.md"


@cache
def made(name: str) -> tr.Schedule:
    some = kind(name, 24, 2, {"later start": 48, "cross-attention": 36}.get(name))
    q_layout, kv_layout = (make_layout("striped", 3, length) for length in (some.q_length, some.kv_length))
    return make_schedule("direct-q", q_layout, kv_layout, some.mask)


@pytest.fixture(scope="module")
def check() -> Callable[[str], None]:
    """The checker that stands on the page."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    space: dict[str, Any] = {"__name__": "checker"}
    exec(compile(code, str(PAGE), "exec"), space)
    found: Callable[[str], None] = space["check"]
    return found


@pytest.mark.parametrize("name", KINDS)
def test_come_back(name: str) -> None:
    for again in (from_json(to_json(made(name))), parse_text(str(made(name)))):
        assert (again.mask, again.tiles, again.moves) == (made(name).mask, made(name).tiles, made(name).moves)
    assert to_json(from_json(to_json(made(name)))) == to_json(made(name))


@pytest.mark.parametrize("name", KINDS)
def test_checker_of_the_page(check: Callable[[str], None], name: str) -> None:
    document = json.loads(to_json(made(name)))
    check(json.dumps(document))
    document["tiles"] = document["tiles"][1:]
    with pytest.raises(ValueError, match=r"forward"):
        check(json.dumps(document))


def test_masks_of_three_numbers_have_three_keys() -> None:
    document = json.loads(to_json(tr.schedule("ring", 2, mask=tr.Causal() & tr.Documents([0, 9]))))
    assert document["mask"] == {"low": None, "high": 0, "cu_seqlens": [0, 9]}


def nested(depth: int) -> dict[str, Any]:
    """A mask in a mask, so many times; what stands beside each is small, or the text would double with each."""
    causal: dict[str, Any] = {"low": None, "high": 0, "cu_seqlens": None}
    mask = causal
    for size in range(depth):
        more = {"chunks": [2 * size + 3], "slices": None, "either": [[mask, causal]], "q_start": None}
        mask = {"low": None, "high": None, "cu_seqlens": None} | more
    return mask


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"slices": [[0, 5, 0, 5, None, None], [4, 9, 0, 9, None, None]]}, r"mask\.slices: slices .* overlap"),
        ({"slices": [[0, 5, 0]]}, r"mask\.slices: a slice is \(q0, q1, kv0, kv1\)"),
        ({"slices": [[5, 5, 0, 5]]}, r"mask\.slices: slice \[5, 5, 0, 5\]: ranges begin at 0 or later"),
        ({"slices": [[0, 5, 0, "a"]]}, r"mask\.slices\[0\]\[3\]: expected an integer"),
        ({"chunks": [0]}, r"mask\.chunks\[0\]: 0 is not between 1"),
        ({"q_start": -1}, r"mask\.q_start: -1 is not between 0"),
        ({"either": [[3]]}, r"mask\.either\[0\]\[0\]: expected an object"),
        ({"either": [[nested(20)]]}, r"more than 16 masks stand in each other"),
        ({"colour": 3}, r"mask: has an unknown key \"colour\""),
    ],
)
def test_what_is_wrong(change: dict[str, Any], says: str) -> None:
    document = json.loads(to_json(made("slices")))
    document["mask"] |= change
    with pytest.raises(ScheduleError, match=says):
        from_json(json.dumps(document))


@pytest.mark.parametrize("key", ["chunks", "slices", "either", "q_start"])
def test_what_is_missing(key: str) -> None:
    document = json.loads(to_json(made("slices")))
    del document["mask"][key]
    with pytest.raises(ScheduleError, match=f"mask: has no key '{key}'"):
        from_json(json.dumps(document))


def test_a_million_slices_in_a_document() -> None:
    document = json.loads(to_json(made("slices")))
    document["mask"]["slices"] = [[at, at + 1, at, at + 1, None, None] for at in range(70_000)]
    with pytest.raises(ScheduleError, match="a mask of more than 65536 slices is not supported"):
        from_json(json.dumps(document))
