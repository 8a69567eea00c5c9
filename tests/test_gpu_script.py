"""ci/gpu: its table and its guards, and virtual ranks, which need no GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tokenring import UnsupportedError
from tokenring.backends.kernels.cpu_flash import CpuFlash

REPO = Path(__file__).resolve().parent.parent
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "ci"))


# ---------- the script


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so() -> None:
    done = subprocess.run([sys.executable, str(REPO / "ci" / "gpu")], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("no CUDA device here: nothing was measured")


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for parts that are made up."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    for name in ("part_good", "part_raises", "part_dies", "part_hangs"):
        sys.modules.pop(name, None)


def test_no_part_loses_the_others(parts: Path) -> None:
    import gpu_report

    (parts / "part_good.py").write_text("def run(report):\n    report('a', '1 µs', '2 µs', True)\n")
    (parts / "part_raises.py").write_text(
        "def run(report):\n    report('b', '3 µs', '2 µs', False)\n    raise RuntimeError('on purpose')\n"
    )
    (parts / "part_dies.py").write_text("import os\ndef run(report):\n    os.abort()\n")
    (parts / "part_hangs.py").write_text(
        "import time\ndef run(report):\n    report('c', '4', '', None)\n    time.sleep(600)\n"
    )
    gpu_report.PARTS["part_hangs"] = 6.0
    lines = gpu_report.run_parts(["part_raises", "part_missing", "part_dies", "part_hangs", "part_good"], 60.0)
    del gpu_report.PARTS["part_hangs"]
    values = [(line.name, line.value, line.met) for line in lines]
    assert values[0] == ("b", "3 µs", False)
    assert values[1][0] == "part_raises" and "RuntimeError: on purpose" in values[1][1] and values[1][2] is False
    assert values[2] == ("part_missing", "not in this checkout", None)
    assert values[3][0] == "part_dies" and values[3][1].startswith("ended with code -6")
    assert values[4] == ("c", "4", None) and values[5][1].startswith("no end within 6 s")
    assert values[6] == ("a", "1 µs", True)
    text = gpu_report.table(lines)
    assert "b             3 µs" in text and text.splitlines()[-1].endswith("yes")


def test_no_time_is_left(parts: Path) -> None:
    import gpu_report

    (parts / "part_good.py").write_text("def run(report):\n    pass\n")
    (line,) = gpu_report.run_parts(["part_good"], 0.5)
    assert line.met is False and line.value == "no time was left"


def test_lines_are_guarded() -> None:
    import gpu_report

    seen: list[Any] = []

    def broken() -> tuple[str, bool | None]:
        raise UnsupportedError("head dim 7\nand more")

    for measure in (broken, lambda: ("fine", True)):
        gpu_report.guarded(lambda *line: seen.append(line), "x", "y", measure)
    assert seen == [("x", "UnsupportedError: head dim 7", "y", False), ("x", "fine", "y", True)]


# ---------- what can be run without a GPU


@pytest.mark.parametrize("ranks", [2, 4])
def test_exactness_of_virtual_ranks(ranks: int) -> None:
    """Threads, bf16: the ratios that ci/gpu shows; and they are large where a schedule's messages are mixed up."""
    import gpu_exact
    import virtual_ranks

    case = gpu_exact.Inputs(128, 4, 2, 16, torch.bfloat16, CPU, CpuFlash())
    names = [name for name in gpu_exact.names(ranks, case.workload) if "/" not in name]
    assert {"ring", "tokenring", "direct-q"} <= set(names)
    assert max(case.ratio(name, ranks) for name in names) < 1.5
    copy = virtual_ranks.Meeting._copy

    def twice(self: Any, way: Any, sent: Any, received: Any) -> None:
        sent.data = sent.data.roll(64)
        copy(self, way, sent, received)

    virtual_ranks.Meeting._copy = twice  # type: ignore[method-assign]
    try:
        assert case.ratio("ring", ranks) > 1.5
    finally:
        virtual_ranks.Meeting._copy = copy  # type: ignore[method-assign]


def test_sums_of_ranks_and_steps_on_a_cpu() -> None:
    """The measuring itself; the figures are those of whoever has a GPU."""
    import gpu_times

    lines: list[Any] = []
    small = {"HEADS": 8, "DIM": 16, "ROUNDS": 1}
    before = {name: getattr(gpu_times, name) for name in small}
    vars(gpu_times).update(small)
    try:
        gpu_times.sum_of_ranks(lambda *line: lines.append(line), CPU, 1024)
    finally:
        vars(gpu_times).update(before)
    assert len(lines) == 1 + len(gpu_times.SCHEDULES)
    assert all("×" in value and "Error" not in value for _, value, *_ in lines[1:]), lines
    value, _ = gpu_times.eager_step(CPU, 3)
    assert "µs forward" in value
