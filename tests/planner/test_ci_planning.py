"""Scripts of ci/ about planning: what they say where something fails, instead of a traceback."""

from __future__ import annotations

import csv
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tokenring.planner.choosing.auto import plan_call
from tokenring.planner.choosing.candidates import Candidate

CI = Path(__file__).resolve().parents[2] / "benchmarks"


def script(path: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A script as a module; what it adds to sys.path goes with the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location(f"ci_{Path(path).stem}", CI / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("seconds", "says"),
    [
        ({"ring": [0.2, 0.1, 0.3], "ulysses": [0.1]}, "auto ring 200.0 ms, best ulysses 100.0 ms, regret 2.000"),
        ({"ring": [], "ulysses": [0.1]}, "auto ring failed, best ulysses 100.0 ms"),
        ({"ulysses": [0.1]}, "auto ring failed, best ulysses 100.0 ms"),
        ({"ring": []}, "auto ring; none of them ran"),
        ({}, "auto ring; none of them ran"),
    ],
)
def test_cells_whose_choice_failed(
    seconds: dict[str, list[float]], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert script("cells/run.py", monkeypatch).said("ring", seconds) == says


def test_who_is_measured_how_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """All in two rounds; then what is not hopeless, then what may be the best, by the fastest round of each."""
    running = script("cells/worker.py", monkeypatch).running
    seconds = {"best": [0.20, 0.21], "stumbled": [0.90, 0.25], "close": [0.35, 0.36], "hopeless": [0.50, 0.51]}
    assert running(seconds, turn=2) == [*seconds]
    assert running(seconds, turn=3) == ["best", "stumbled", "close"]
    assert running(seconds, turn=4) == ["best", "stumbled"]
    assert running({"failed": [], "best": [0.2]}, turn=4) == ["best"]
    assert running({"failed": []}, turn=4) == ["failed"]


def test_launches_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearer each call of a kernel, the fewer pieces."""
    cells = script("cells/launch_cells.py", monkeypatch).launch_cells()
    found = {each.name: each for each in cells}
    assert len(found) == len(cells) >= 12
    cheap, dear = (f"full-mesh 4 8:1 causal forward+backward communication {launch}" for launch in (2.0, 20.0))
    assert plan_call(found[cheap].call()).name.startswith("direct-kv/pieces")
    assert plan_call(found[dear].call()).name == "all-gather-kv"


LAUNCH_ROWS = """\
cell,regime,topology,tflops,mask,heads,ranks,schedule,auto,compute_ms,bound_ms,predicted_ms,measured_ms,min_ms
a,latency,ring,1,causal,8:1,4,ring,1,1,1,90,100.0,99
a,latency,ring,1,causal,8:1,4,direct-kv,0,1,1,95,80.0,79
b,latency,ring,1,causal,8:1,4,ring,0,1,1,60,51.0,50
b,latency,ring,1,causal,8:1,4,direct-kv,1,1,1,50,50.0,49
"""


def test_how_often_the_choice_is_near_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.csv"
    path.write_text(LAUNCH_ROWS, encoding="utf-8")
    _, _, first, second, last = script("cells/launch_cells.py", monkeypatch).table(path)
    assert first == "| a | ring | 100 | direct-kv | 80 | 1.250 |"
    assert second == "| b | direct-kv | 50 | direct-kv | 50 | 1.000 |"
    assert last.strip() == "auto within 1.05 x the best in 1 of 2 cells, at most 1.250 x"


CACHED_ROWS = """\
cell,way,auto,measured_ms
a,one-shot,1,10.0
a,two-step,0,8.0
b,direct-q,0,51.0
b,direct-kv,1,50.0
"""


def test_cells_of_a_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way is the fastest of some; how often auto is near the best."""
    made = script("cells/cached_cells.py", monkeypatch)
    cells = made.cells()
    assert len({each.name for each in cells}) == len(cells) >= 24
    assert {each.ways(each.tflops)[0].name for each in cells} == {way for ways in made.WAYS.values() for way in ways}
    path = tmp_path / "cells.csv"
    path.write_text(CACHED_ROWS, encoding="utf-8")
    _, _, first, second, last = made.table(path)
    assert first == "| a | one-shot | 10.0 | two-step | 8.0 | 1.250 |"
    assert second == "| b | direct-kv | 50.0 | direct-kv | 50.0 | 1.000 |"
    assert last.strip() == "auto within 1.05 x the best in 1 of 2 cells, 1.15 x in 1, at most 1.250 x"


def test_plans_that_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first of two takes too long: a line says so, and the other one is still planned; no picture of nothing."""
    made = script("plan_scale.py", monkeypatch)
    asked: list[str] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command[5])
        if len(asked) == 1:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 0, '{"reason": "ring"}', "")

    monkeypatch.setattr(made.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["plan_scale.py", "--hosts", "1", "2"])
    assert made.main() == 0
    assert asked == ["preset:hgx-h100*1", "preset:hgx-h100*2"]
    first, second = capsys.readouterr().out.splitlines()[1:]
    assert "over 590 s" in first and "ring" in second
    asked.clear()
    monkeypatch.setattr(sys, "argv", ["plan_scale.py", "--hosts", "1", "--svg", str(tmp_path / "a.svg")])
    assert made.main() == 0 and not (tmp_path / "a.svg").exists()


def test_what_is_set_over_the_bound(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Causal masks in the layout that balances them; only full masks can attain the bound."""
    made = script("bound_gap.py", monkeypatch)
    monkeypatch.setattr(made, "MODELS", dict(list(made.MODELS.items())[:1]))
    layouts: list[str] = []

    def plan(call: Any) -> Any:
        layouts.append(call.q_layout.name)
        candidate = SimpleNamespace(predicted_seconds=2 * made.call_bound(call).seconds)
        return SimpleNamespace(name="ring", candidates=[candidate])

    monkeypatch.setattr(made, "plan_call", plan)
    assert list(made.ratios(["hgx-h100"], [1024])) == [(True, pytest.approx(2.0)), (False, pytest.approx(2.0))]
    assert layouts == ["contiguous", "zigzag"]
    full, causal = capsys.readouterr().out.splitlines()
    assert "full" in full and "attainable" in full and "causal" in causal and "attainable" not in causal


def cell_rows(report: ModuleType, cell: str, attainable: bool, times: list[tuple[float, float]]) -> list[Any]:
    """Of one cell, whose bound is 10 ms: (predicted, measured) of each schedule; the first is auto's choice."""
    return [
        report.Row(cell, "long", "switch", 1.0, attainable, f"s{n}", n == 0, predicted, 5.0, 10.0, measured, measured)
        for n, (predicted, measured) in enumerate(times)
    ]


def test_the_bound_is_compared_apart_where_it_can_be_attained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best of a cell, as measured and as predicted, which may be another one."""
    made = script("cells/report.py", monkeypatch)
    rows = cell_rows(made, "a long", True, [(11.0, 13.0), (12.0, 12.0)])
    rows += cell_rows(made, "b long", False, [(30.0, 40.0)]) + cell_rows(made, "c long", False, [(50.0, 60.0)])
    made.report(rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("over the lower bound")]
    assert lines == [
        "over the lower bound where it can be attained, 1 cells: best measured median 1.20, largest 1.20; "
        "best predicted median 1.10, largest 1.10",
        "over the lower bound elsewhere, 2 cells: best measured median 5.00, largest 6.00; "
        "best predicted median 4.00, largest 5.00",
    ]


def test_auto_is_compared_with_what_others_ship(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of ours that are nobody else's none counts; DeepSpeed's uneven heads do where there are more than ranks."""
    made = script("cells/report.py", monkeypatch)
    times = {"packed/6": 10.0, "uneven/6": 12.0, "usp/2/pieces4": 13.0, "case-iii/2": 15.0, "usp/2": 20.0}
    cells = {}
    for name in ("mesh 8 6:6 full forward communication", "mesh 4 6:6 full forward communication"):
        rows = cell_rows(made, name, True, [(1.0, measured) for measured in times.values()])
        named = zip(rows, times, strict=True)
        cells[name] = [replace(row, schedule=each, regime="communication") for row, each in named]
    cells["mesh 8 8:8 full forward latency"] = rows
    assert [line.partition("ship, ")[2] for line in made.over_others(cells)] == [
        "2 communication-bound cells: geometric mean 0.745, largest 0.833",
        "2 of them with six heads: geometric mean 0.745, largest 0.833",
    ]


MARKED = (  # each time the best prediction, over the best of all: those of three or of two are left out
    (float("inf"), ["a", "b", "c"], ""),
    (4.0, ["a", "b", "c"], ""),
    (3.0, ["a", "b"], "3"),
    (1.5, ["a"], "1.5"),
)


@pytest.mark.parametrize(("within", "raced", "marked"), MARKED)
def test_cells_that_lack_schedules_are_marked(
    within: float, raced: list[str], marked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the row is written, and as the report reads it."""
    run, report = (script(f"cells/{name}.py", monkeypatch) for name in ("run", "report"))
    predicted = {"a": 1.0, "b": 2.0, "c": 4.0, "not simulated": None}
    candidates = [Candidate(name, each, 0.5, 0.0, 1, 1, 0.5, "") for name, each in predicted.items()]
    cell = SimpleNamespace(
        name="switch 4 4:4 full forward long", topology="switch", ranks=4, heads="4:4", mask="full", passes="forward",
        regime="long", workload=SimpleNamespace(q_length=64), tflops=1.0, shape=SimpleNamespace(link_gbit=0.05),
        plan=lambda: SimpleNamespace(name="a", candidates=candidates),
        target=SimpleNamespace(bundle_bytes=4096, ahead_bytes=8192),
    )  # fmt: skip
    monkeypatch.setattr(run, "description", lambda cell, names, options: names)
    found = {"seconds": {name: [1.0] for name in raced}, "failed": {}}
    asked: list[list[str]] = []

    def measured(net: Any, names: list[str], limit_seconds: float) -> dict[str, Any]:
        asked.append(names)
        return found

    monkeypatch.setattr(run, "measured", measured)
    out = tmp_path / "cells.csv"
    run.measure(None, cell, SimpleNamespace(within=within, out=out))
    assert asked == [raced]
    with out.open(newline="") as lines:
        assert [(row["schedule"], row["within"]) for row in csv.DictReader(lines)] == [(name, marked) for name in raced]
    found_rows = {(row.within, row.bundle_bytes, row.ahead_bytes) for row in report.read(out)}
    assert found_rows == {(float(marked) if marked else None, 4096, 8192)}
    assert run.read_done(out) == {cell.name}


def test_files_from_before_cells_were_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report reads them; rows with one value more would not fit under their columns."""
    run, report = (script(f"cells/{name}.py", monkeypatch) for name in ("run", "report"))
    with (CI.parent / "docs" / "cells.csv").open(newline="") as lines:
        old = [row[: run.COLUMNS.index("within")] for row in csv.reader(lines)]
    (tmp_path / "old.csv").write_text("".join(",".join(row) + "\n" for row in old))
    assert [row.within for row in report.read(tmp_path / "old.csv")] == [None] * (len(old) - 1)
    with pytest.raises(SystemExit, match=r"old\.csv has other columns than cell, .*, ahead_bytes: give another --out"):
        run.read_done(tmp_path / "old.csv")


def test_every_cell_was_raced(monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/measurements.md says: the cells of today's grid, each with every schedule that fits, over its links."""
    made, grid = script("cells/report.py", monkeypatch), script("cells/grid.py", monkeypatch)
    rows = made.read(CI.parent / "docs" / "cells.csv")
    assert {(row.cell, row.link_gbit) for row in rows} == {(each.name, each.shape.link_gbit) for each in grid.cells()}
    assert {row.within for row in rows} == {None}


def test_rows_over_other_links_are_not_predicted_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made = script("cells/report.py", monkeypatch)
    row = made.read(CI.parent / "docs" / "cells.csv")[0]
    with pytest.raises(SystemExit, match=r"links of 0\.5 Gbit/s: grid\.py has it no more"):
        made.again([replace(row, link_gbit=0.5)])


def test_what_is_no_candidate_any_more_may_still_be_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is predicted by its name; auto's regret counts it."""
    made = script("cells/report.py", monkeypatch)
    cell = "ring 4 8:2 causal forward latency"
    rows = made.by_cell(made.read(CI.parent / "docs" / "cells.csv"))[cell]
    odd = replace(rows[0], schedule="tokenring/pieces4", predicted=0.0, measured=rows[0].measured / 2, auto=False)
    again = made.again([*rows, odd])
    assert len(again) == len(rows) + 1 and again[-1].schedule == odd.schedule
    assert again[-1].predicted > 0 and again[-1].bound == again[0].bound
    assert made.regrets(again)[cell] == pytest.approx(2 * made.regrets(again[:-1])[cell])


def test_what_the_cells_have_attained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full mask, and as many kv heads as ranks, or a multiple."""
    made = script("cells/report.py", monkeypatch)
    found = {row.cell: row.attainable for row in made.read(CI.parent / "docs" / "cells.csv")}
    assert {True, False} == set(found.values())
    for cell, attainable in found.items():
        _, ranks, heads, mask, *_ = cell.split()
        assert attainable == (mask == "full" and int(heads.partition(":")[2]) % int(ranks) == 0), cell


def test_the_picture_of_the_cells_shows_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caption counts what is drawn, and it was drawn after the last cell was measured."""
    made = script("cells/report.py", monkeypatch)
    rows = cell_rows(made, "a long", True, [(11.0, 13.0), (12.0, 12.0)])
    rows += cell_rows(made, "b long", False, [(3.0, 4.0)])
    assert "<title>3 predictions in 2 cells" in made.picture(rows)
    drawn = (CI.parent / "docs" / "cells.svg").read_text(encoding="utf-8")
    cells = {row.cell for row in made.read(CI.parent / "docs" / "cells.csv")}
    count = drawn.count(' r="2" opacity="0.7"/>')
    assert f"<title>{count} predictions in {len(cells)} cells" in drawn
