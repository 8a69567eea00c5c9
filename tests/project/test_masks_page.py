"""docs/masks.md: each line of Python makes the mask whose text stands beside it, and every constructor is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tokenring as tr
from tokenring.sequence.mask import MASKS, TABLES, parse_mask

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "masks.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| [^|]+ \| `(tr\.(?:[^`|]|\\\|)+)` \| `((?:[^`|]|\\\|)+)` \|$", re.MULTILINE)
ROWS = [(code.replace("\\|", "|"), text.replace("\\|", "|")) for code, text in ROW.findall(PAGE)]
CONSTRUCTORS = (
    "Full", "Causal", "SlidingWindow", "Documents", "PrefixLM", "Bidirectional", "BlockCausal", "Chunks", "PrefixTree",
    "Slices",
)  # fmt: skip


@pytest.mark.parametrize(("code", "text"), ROWS)
def test_line(code: str, text: str) -> None:
    mask = eval(code, {"tr": tr})
    assert str(mask) == text
    assert parse_mask(text) == mask


def test_all_are_there() -> None:
    assert len(ROWS) == 14
    assert all(any(f"tr.{name}(" in code for code, _ in ROWS) for name in CONSTRUCTORS)
    assert all(hasattr(tr, name) for name in CONSTRUCTORS)
    words = {*MASKS, *TABLES} - {"band"}  # which Mask(low, high) prints
    assert not [word for word in words if f"`{word}" not in PAGE and f"&{word}" not in PAGE and f"({word}" not in PAGE]
