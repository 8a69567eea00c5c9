"""ci/gpu: its table and its guards, and virtual ranks, which need no GPU."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from patience import patient
from symm_ranks import ThreadDevice

from tokenring import UnsupportedError
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.lowering.program import Attend, Merge, Recv, Send

REPO = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPO / "hardware" / "gpu"))


# ---------- the script


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_without_a_gpu_it_says_so(warm: str) -> None:
    command = [warm, str(REPO / "ci" / "gpu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(100))
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


def test_no_part_loses_the_others(parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_report

    (parts / "part_good.py").write_text("def run(report):\n    report('a', '1 µs', '2 µs', True)\n")
    (parts / "part_raises.py").write_text(
        "def run(report):\n    report('b', '3 µs', '2 µs', False)\n    raise RuntimeError('on purpose')\n"
    )
    (parts / "part_dies.py").write_text("import os\ndef run(report):\n    os.abort()\n")
    (parts / "part_hangs.py").write_text(
        "import subprocess, sys, time\ndef run(report):\n    report('c', '4', '', None)\n"
        "    made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"  # it holds our stdout
        "    report('d', str(made.pid), '', None)\n    time.sleep(600)\n"
    )
    monkeypatch.setattr(gpu_report, "BUDGET_SECONDS", 60.0)
    monkeypatch.setattr(gpu_report, "PARTS", {"part_hangs": 6.0, "part_good": 54.0})  # the last is sure of its time
    began = time.monotonic()
    lines = gpu_report.run_parts(["part_raises", "part_missing", "part_dies", "part_hangs", "part_good"], 60.0)
    assert time.monotonic() - began < 45, "a child of a part that hangs was waited for"
    values = [(line.name, line.value, line.met) for line in lines]
    assert values[0] == ("b", "3 µs", False)
    assert values[1][0] == "part_raises" and "RuntimeError: on purpose" in values[1][1] and values[1][2] is False
    assert values[2] == ("part_missing", "not in this checkout", None)
    assert values[3][0] == "part_dies" and values[3][1].startswith("ended with code -6")
    assert values[4] == ("c", "4", None) and values[6][1].startswith("no end within 6 s")
    assert not is_running(int(values[5][1]))
    assert values[7] == ("a", "1 µs", True)
    text = gpu_report.table(lines)
    assert "b             3 µs" in text and text.splitlines()[-1].endswith("yes")


def is_running(process: int) -> bool:
    """A child of a process that is gone; one that nobody has waited for yet is none."""
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return False


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


@contextmanager
def exactness(kernel: CpuFlash, ranks: int) -> Iterator[Any]:
    """The part's inputs in bf16, small."""
    import gpu_exact
    import virtual_ranks

    workers = virtual_ranks.Workers(ranks, CPU)
    yield gpu_exact.Inputs(128, 4, 2, 16, torch.bfloat16, CPU, kernel, workers)
    workers.close()


@pytest.mark.parametrize("ranks", [2, 4])
def test_exactness_of_virtual_ranks(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads, bf16: the ratios that ci/gpu shows; and they are large where a schedule's messages are mixed up."""
    import gpu_exact
    import virtual_ranks

    with exactness(CpuFlash(), ranks) as case:
        names = [name for name in gpu_exact.names(ranks, case.workload) if "/" not in name]
        assert {"ring", "tokenring", "direct-q"} <= set(names)
        assert max(case.ratio(name, ranks) for name in names) < 1.5
        copy = virtual_ranks.Meeting._copy

        def twice(self: Any, way: Any, sent: Any, received: Any) -> None:
            sent.data = sent.data.roll(64)
            copy(self, way, sent, received)

        monkeypatch.setattr(virtual_ranks.Meeting, "_copy", twice)
        assert case.ratio("ring", ranks) > 1.5
        value, met = gpu_exact.line(case, ranks, 0.0)
        assert met is False and "no time for" in value


class Watched(CpuFlash):
    """Notes the threads that it runs in; raises in some."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.breaks = False

    def forward(self, *given: Any, **named: Any) -> Any:
        self.threads.add(threading.get_ident())
        if self.breaks and threading.get_ident() == min(self.threads):
            raise MemoryError("no room at one rank")
        return super().forward(*given, **named)


def test_ranks_keep_their_threads() -> None:
    """cuDNN keeps its plans for each thread."""
    with exactness(kernel := Watched(), 4) as case:
        kernel.threads.clear()
        for name in ("ring", "tokenring", "direct-q"):
            case.ratio(name, 4)
        assert len(kernel.threads) == 4


def test_one_rank_that_fails_ends_the_waits_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says of which schedule, those after it are tried, and time that is up is no failure."""
    import gpu_exact

    monkeypatch.setattr(gpu_exact, "names", lambda ranks, workload: ["ring", "tokenring"])
    with exactness(kernel := Watched(), 4) as case:
        kernel.threads.clear()
        assert gpu_exact.line(case, 4, 60.0)[1] is True
        value, met = gpu_exact.line(case, 4, 0.0)
        assert met is None and value.endswith("(ring, of 1 schedules); no time for 1 more")
        kernel.breaks, began = True, time.monotonic()
        value, met = gpu_exact.line(case, 4, 60.0)
        assert time.monotonic() - began < 20, "the others waited for the one that failed"
        assert met is False and value.startswith("2 failed: ring: MemoryError: no room at one rank; tokenring: Mem")
        kernel.breaks = False
        assert gpu_exact.line(case, 4, 60.0)[1] is True


def test_sums_of_ranks_and_steps_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measuring itself; the figures are those of whoever has a GPU. Ranks compute with what somebody wrote."""
    import gpu_times

    lines: list[Any] = []
    for name, small in {"HEADS": 8, "DIM": 16, "ROUNDS": 1}.items():
        monkeypatch.setattr(gpu_times, name, small)
    passes, read = gpu_times._passes, list[torch.Tensor]()

    def watched(bound: Any, *given: Any) -> None:
        read.extend(executor.views.base.view(torch.bfloat16).float().clone() for executor in bound.values())
        passes(bound, *given)

    monkeypatch.setattr(gpu_times, "_passes", watched)
    gpu_times.sum_of_ranks(lambda *line: lines.append(line), CPU, 1024)
    assert len(lines) == 1 + len(gpu_times.SCHEDULES)
    assert all("×" in value and "Error" not in value for _, value, *_ in lines[1:]), lines
    assert read and all(x.numel() == 0 or (0.5 < float(x.std()) < 2 and bool(x.isfinite().all())) for x in read[:2])
    assert lines[0][0].startswith("one call of the fastest kernel here") and "by cpu-flash" in lines[0][1]


class Named(CpuFlash):
    """One that is slow, in one of the passes."""

    def __init__(self, name: str, forward_seconds: float, backward_seconds: float) -> None:
        self.name, self.slow = name, (forward_seconds, backward_seconds)

    def forward(self, *given: Any, **how: Any) -> Any:
        time.sleep(self.slow[0])
        return super().forward(*given, **how)

    def backward(self, *given: Any, **how: Any) -> Any:
        time.sleep(self.slow[1])
        if self.slow[1] > 1:
            raise RuntimeError("out of memory")
        return super().backward(*given, **how)


@pytest.mark.parametrize("turned", [False, True])
def test_ranks_are_compared_with_the_fastest_kernel(turned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever comes first, and whichever the ranks compute with; one that fails is named and loses nothing."""
    import gpu_times

    lines: list[Any] = []
    for name, small in {"HEADS": 8, "DIM": 16, "ROUNDS": 1, "SCHEDULES": ("ring",)}.items():
        monkeypatch.setattr(gpu_times, name, small)
    kernels = [Named("a", 0.0, 0.6), Named("b", 0.3, 0.0), Named("c", 0.0, 1.1)]
    monkeypatch.setattr(gpu_times, "candidates", lambda *_: kernels[::-1] if turned else kernels)
    gpu_times.sum_of_ranks(lambda *line: lines.append(line), CPU, 256)
    said = lines[0][1]
    assert "ms by a forward" in said and "ms by b both" in said and "c fails: out of memory" in said
    assert not lines[1][1].startswith("RuntimeError")


def test_the_fastest_of_each_way() -> None:
    import gpu_times

    assert gpu_times.fastest({"a": (1.0, 3.0), "b": (2.0, 2.0)}) == {False: ("a", 1.0), True: ("b", 2.0)}
    with pytest.raises(RuntimeError, match="no kernel has computed the call"):
        gpu_times.fastest({})


# ---------- the host's share of a step


class OnHost:
    """As OwnMemory's verbs, counted: a word must be clear whenever it is waited for, or a GPU would wait for ever."""

    def __init__(self, words: int) -> None:
        self.words, self.done = [0] * words, Counter[str]()

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        assert data.numel() and data.is_contiguous()
        self.done["put"] += 1
        self.signal(peer, word)

    def signal(self, peer: int, word: int) -> None:
        self.done["signal"] += 1
        assert self.words[word] == 0

    def wait(self, word: int) -> None:
        self.done["wait"] += 1
        assert self.words[word] == 0

    def release(self) -> None:
        """Nothing waits."""


class Counting(CpuFlash):
    def __init__(self) -> None:
        self.tiles = 0

    def forward(self, *given: Any, **how: Any) -> Any:
        self.tiles += 1
        return super().forward(*given, **how)


def test_a_step_has_its_tiles_and_moves() -> None:
    """Three rounds of forward: every message is put, signalled and waited for, every tile computed."""
    import gpu_own_puts
    import gpu_times

    memory, kernel = OnHost(gpu_own_puts.words_of(gpu_times.STEP_RANKS).count), Counting()
    moved = gpu_own_puts.OwnPuts(memory, ThreadDevice(lambda: None), gpu_times.STEP_RANKS)  # type: ignore[arg-type]
    made = gpu_times.first_rank(kernel, moved, CPU)
    del made.bound["backward"]
    gpu_times.eager_step(made, CPU, 3)
    program = made.bound["forward"].program.instructions
    posts = Counter(type(each) for each in program)
    assert posts[Send] and posts[Recv] and posts[Attend] and posts[Merge]
    assert (memory.done["put"], kernel.tiles) == (3 * posts[Send], 3 * posts[Attend])
    assert memory.done["signal"] == memory.done["wait"] == 3 * (posts[Send] + posts[Recv])


def test_lines_say_what_is_in_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without puts the line says so and has no limit; the executor by itself stands beside."""
    import gpu_times

    lines: list[Any] = []
    made = gpu_times.steps(CPU)
    monkeypatch.setattr(gpu_times, "captured_step", lambda passes, device: [9.0, 1.0])
    monkeypatch.setattr(gpu_times, "eager_step", partial(gpu_times.eager_step, rounds=3))
    gpu_times.host_times(lambda *line: lines.append(line), made, CPU)
    assert [(name, limit, met) for name, _, limit, met in lines] == [
        ("host time of a step (executor, tile, merge; no move: no CUDA device), eager", "", None),
        ("host time of a step (executor, merge), eager", "", None),
        ("host time of a step (executor, tile, merge; no move: no CUDA device), in a captured graph", "", None),
        ("host time of a step (executor, merge), in a captured graph", "", None),
    ]
    assert all("µs forward" in value for _, value, *_ in lines)
    made[0].limited = True
    gpu_times.host_times(lambda *line: lines.append(line), made[:1], CPU)
    assert lines[-1][1:] == ("9.0 µs forward, 1.0 µs backward", "5 µs", False)


def test_what_fails_as_a_step_is_made_is_told_in_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of the driver that are not to be had: the other step is measured, and the part goes on."""
    import gpu_times

    def refuses(device: torch.device, words: int) -> None:
        raise RuntimeError("no stream memory operations")

    lines: list[Any] = []
    for name in ("eager_step", "captured_step"):
        monkeypatch.setattr(gpu_times, name, lambda passes, device: [9.0, 1.0])
    monkeypatch.setattr(gpu_times, "without_puts", lambda device: None)
    monkeypatch.setattr(gpu_times, "OwnMemory", refuses)
    gpu_times.host_times(lambda *line: lines.append(line), gpu_times.steps(CPU), CPU)
    failed, measured = "RuntimeError: no stream memory operations", "9.0 µs forward, 1.0 µs backward"
    assert [(value, limit, met) for _, value, limit, met in lines] == [
        (failed, "40 µs", False), (measured, "", None), (failed, "5 µs", False), (measured, "", None),
    ]  # fmt: skip
    assert "(executor, move, tile, merge), eager" in lines[0][0]
