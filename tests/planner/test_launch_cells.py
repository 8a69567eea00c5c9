"""The cells of benchmarks/cells in which launches decide, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import pytest

CELLS = Path(__file__).resolve().parents[2] / "benchmarks" / "cells"
ROWS = """cell,schedule,auto,measured_ms
a,ring,1,100.0
a,direct-kv,0,80.0
b,ring,0,51.0
b,direct-kv,1,50.0
"""


def test_launches_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CELLS))
    from launch_cells import launch_cells

    from tokenring.planner.choosing.auto import plan_call

    found = {each.name: each for each in launch_cells()}
    assert len(found) == len(launch_cells()) >= 12
    cheap, dear = (f"full-mesh 4 8:1 causal forward+backward communication {launch}" for launch in (2.0, 20.0))
    assert plan_call(found[cheap].call()).name.startswith("direct-kv/pieces")
    assert plan_call(found[dear].call()).name == "all-gather-kv"


def test_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(CELLS))
    from launch_cells import table

    path = tmp_path / "cells.csv"
    path.write_text(ROWS, encoding="utf-8")
    _, _, first, second, last = table(path)
    assert first == "| a | ring | 100 | direct-kv | 80 | 1.250 |"
    assert second == "| b | direct-kv | 50 | direct-kv | 50 | 1.000 |"
    assert last.strip() == "auto within 1.05 x the best in 1 of 2 cells, at most 1.250 x"
