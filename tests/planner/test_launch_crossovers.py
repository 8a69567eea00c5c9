"""The benchmark of crossovers: what launches decide, and what docs/planner.md shows of it."""

from __future__ import annotations

import argparse
from pathlib import Path

from launch_crossovers import table

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_launches_decide_what_is_taken() -> None:
    asked = argparse.Namespace(preset="atlas-800t-a2", ranks=[8], svg=None)
    (*_, line) = table(asked, 4096, 4096)
    assert line in (DOCS / "planner.md").read_text(encoding="utf-8").splitlines()
    assert line.endswith("| `ulysses` | 1.20 |")


def test_where_kernels_hide_them_the_choice_is_the_same() -> None:
    asked = argparse.Namespace(preset="atlas-800t-a2", ranks=[4], svg=None)
    (*_, line) = table(asked, 65536, 65536)
    assert line.endswith("| the same | |")
