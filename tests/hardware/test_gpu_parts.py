"""ci/gpu: the order of its parts, the time that they hand on, and parts that fail in every way. No GPU is needed."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "hardware" / "gpu"))

import gpu_child  # noqa: E402
import gpu_report  # noqa: E402
from gpu_child import Line  # noqa: E402

pytestmark = pytest.mark.timeout(300)
ORDER = ["gpu_transports", "gpu_exact", "gpu_kernels", "gpu_merge", "gpu_times"]
TAIL = "    import time\n    time.sleep(600)\n"


# ---------- the order, and the time


class Clock:
    """A monotonic clock that parts move on."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.limits: dict[str, float] = {}

    def run(self, **taken: float) -> Any:
        """A part runs for as long as is said, and no longer than it may; all others for their whole time."""

        def part(name: str, limit_seconds: float) -> Iterator[Line]:
            self.limits[name] = limit_seconds
            self.now += min(limit_seconds, taken.get(name, limit_seconds))
            yield Line(name, "fine", "", True)

        return part

    def all_parts(self, seconds: float = gpu_report.BUDGET_SECONDS, **taken: float) -> list[Line]:
        names = list(gpu_report.PARTS)
        return list(gpu_report.each_line(names, seconds, self.run(**taken), lambda: self.now))


def test_transports_come_first() -> None:
    assert list(gpu_report.PARTS) == ORDER
    clock = Clock()
    assert [line.name for line in clock.all_parts()] == ORDER


def test_what_a_part_leaves_goes_to_the_next() -> None:
    """And nothing is lost on the way: the last may take all that is left."""
    clock = Clock()
    clock.all_parts(gpu_transports=30.0, gpu_exact=20.0, gpu_kernels=10.0, gpu_merge=5.0)
    budget, least = gpu_report.BUDGET_SECONDS, gpu_report.PARTS
    assert clock.limits["gpu_transports"] == budget - sum(least[name] for name in ORDER[1:])
    assert clock.limits["gpu_exact"] == budget - 30.0 - sum(least[name] for name in ORDER[2:])
    assert clock.limits["gpu_times"] == budget - 65.0


@pytest.mark.parametrize("seconds", [gpu_report.BUDGET_SECONDS, 90.0])
def test_parts_that_hang_leave_the_others_what_they_are_sure_of(seconds: float) -> None:
    """Each gets its own, scaled where there is less time than usual, and all end in time."""
    clock = Clock()
    assert all(line.met for line in clock.all_parts(seconds))
    scale = seconds / gpu_report.BUDGET_SECONDS
    for name, limit in clock.limits.items():
        assert limit >= scale * gpu_report.PARTS[name] - 1e-6, name
    assert clock.now - 1000.0 <= seconds + 1e-6
    assert gpu_report.BUDGET_SECONDS + gpu_child.END_SECONDS < 8 * 60


def test_time_that_was_overrun_is_said() -> None:
    """A process that the driver holds takes time that nobody has given it."""
    clock = Clock()

    def stuck(name: str, limit_seconds: float) -> Iterator[Line]:
        clock.now += 500.0
        yield Line(name, "stuck", "", False)

    lines = list(gpu_report.each_line(["gpu_exact", "gpu_merge"], 100.0, stuck, lambda: clock.now))
    assert [(line.value, line.met) for line in lines] == [("stuck", False), ("no time was left", False)]


def test_a_missing_part_holds_back_no_time() -> None:
    clock, least = Clock(), gpu_report.PARTS
    names = ["gpu_exact", "gpu_of_another_checkout", "gpu_times"]
    lines = list(gpu_report.each_line(names, 465.0, clock.run(gpu_exact=10.0), lambda: clock.now))
    assert [line.name for line in lines] == names and lines[1].met is None
    assert clock.limits == {"gpu_exact": 465.0 - least["gpu_times"], "gpu_times": 455.0}


def test_shares_of_lines() -> None:
    clock = Clock()
    shares = gpu_report.Shares(60.0, 3, lambda: clock.now)
    assert shares.next() == 20.0
    clock.now += 4.0
    assert shares.next() == 28.0
    clock.now += 60.0
    assert shares.next() < 0


# ---------- parts that fail


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for parts that are made up."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


GOOD = "def run(report):\n    report('good', '1 µs', '2 µs', True)\n"
FAILING = {
    # what the part does → the beginning of its own line
    "import os, signal\ndef run(report):\n    os.kill(os.getpid(), signal.SIGSEGV)\n": "ended with code -11 (SIGSEGV)",
    "def run(report):\n    raise SystemExit(0)\n": "it left before its end",
    "import os\ndef run(report):\n    report('a', 'b', '', True)\n    os._exit(0)\n": "it left before its end",
    "def run(report):\n    raise KeyError('what')\n": "ended with code 1: KeyError: 'what'",
    "def run(report):\n    pass\n": "it measured nothing",
    "import not_there\n": "ended with code 1: ModuleNotFoundError",
    "def run(report):\n    report('a', 'b', '', 'maybe'.foo)\n": "ended with code 1: AttributeError",
}


@pytest.mark.parametrize("text", FAILING, ids=[each[:24] for each in FAILING.values()])
def test_a_part_that_fails_has_an_honest_line(text: str, parts: Path) -> None:
    """It is a failure, and the part after it is measured."""
    name = f"part_{abs(hash(text))}"
    (parts / f"{name}.py").write_text(text)
    (parts / "part_well.py").write_text(GOOD)
    *_, line, good = gpu_report.run_parts([name, "part_well"], 100.0)
    assert (line.name, line.met) == (name, False) and line.value.startswith(FAILING[text])
    assert good == Line("good", "1 µs", "2 µs", True)


def test_what_a_part_prints_spoils_no_line(parts: Path) -> None:
    """No text, no end of line, very much of it, and what looks as lines do."""
    (parts / "part_prints.py").write_text(
        "import os, sys\n"
        "def run(report):\n"
        "    os.write(1, b'\\xff\\xfe\\x00 no end of line')\n"
        "    report('a', '1\\n\\x1b[2J', '', None)\n"
        "    os.write(1, b'@gpu {broken' + b'x' * 3_000_000)\n"
        "    os.write(2, b'{\"name\": \"fake\", \"value\": \"2\", \"limit\": \"\", \"met\": true}\\n')\n"
        "    report('b', 3, '', 1)\n"
    )
    lines = gpu_report.run_parts(["part_prints"], 100.0)
    assert lines == [Line("a", "1\n\x1b[2J", "", None), Line("b", "3", "", True)]
    assert "1  [2J" in gpu_report.table(lines) and len(gpu_report.table(lines).splitlines()) == 3


def test_lines_that_cannot_be_read_are_told(parts: Path) -> None:
    """Such as half a line of a part whose pipe was written to by somebody else."""
    (parts / "part_garbles.py").write_text(
        "import gpu_child, os\n"
        "def run(report):\n"
        "    given = gpu_child.give\n"
        "    report('a', '1', '', True)\n"
        "    [os.write(int(at), b'[1, 2]\\n{\"name\"\\n') for at in os.listdir('/proc/self/fd')\n"
        "     if os.path.exists(f'/proc/self/fd/{at}') and int(at) > 2\n"
        "     and os.readlink(f'/proc/self/fd/{at}').startswith('pipe')]\n"
    )
    lines = gpu_report.run_parts(["part_garbles"], 100.0)
    assert lines[0] == Line("a", "1", "", True)
    assert lines[1].met is False and lines[1].value.startswith("2 of its lines cannot be read: '[1, 2]' is no line")


@pytest.mark.parametrize("text", ['{"name": "a", "value": "b", "limit": "", "met": 0}', "{}", '{"name": 3}', "nan", ""])
def test_no_line(text: str) -> None:
    with pytest.raises(ValueError):
        gpu_child.taken(text)


def test_all_lines_have_to_come() -> None:
    ended = gpu_child.Ended(words=["last words"])
    assert gpu_report.trouble_of(ended, 3, [3], []) == ""
    assert gpu_report.trouble_of(ended, 2, [3], []) == "2 lines came, of the 3 that it gave"
    assert gpu_report.trouble_of(ended, 2, [], []) == "it left before its end: last words"


def test_a_part_that_ends_takes_its_children_with_it(parts: Path) -> None:
    """They hold its pipes, and would hold the device."""
    (parts / "part_leaves.py").write_text(
        "import os, subprocess, sys\n"
        "def run(report):\n"
        "    made = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "    report(str(made.pid), '', '', None)\n"
        "    os.abort()\n"
    )
    first, second = gpu_report.run_parts(["part_leaves"], 500.0)
    assert second.value.startswith("ended with code -6 (SIGABRT)"), "a child was waited for"
    deadline = time.monotonic() + 60
    while is_running(int(first.name)):  # a signal takes its time
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(process: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # so it is, on purpose
def test_a_process_that_cannot_be_killed_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver in trouble holds processes: signals do not reach them."""
    spared: list[int] = []
    kill = os.killpg
    monkeypatch.setattr(gpu_child, "END_SECONDS", 0.2)
    monkeypatch.setattr(os, "killpg", lambda group, number: spared.append(group))
    command = [sys.executable, "-c", "import time; print('here', flush=True); time.sleep(600)"]
    ended = gpu_child.run_child(command, os.environ, 1.0, lambda text: None)
    kill(spared[0], 9)
    os.waitpid(spared[0], 0)
    assert ended.wrong == f"no end within 1 s, and process {spared[0]} cannot be killed: the driver holds it"


def test_a_part_is_told_its_time(parts: Path) -> None:
    (parts / "part_told.py").write_text("def run(report, seconds=0.0):\n    report('s', f'{seconds:.0f}', '', None)\n")
    (line,) = gpu_report.run_parts(["part_told"], 400.0)
    assert 1 <= float(line.value) <= 400.0 - gpu_report.LEAVE_SECONDS


def test_parts_take_their_time_as_an_argument() -> None:
    import inspect
    from importlib import import_module

    for name in ("gpu_transports", "gpu_exact", "gpu_kernels", "gpu_times"):
        assert "seconds" in inspect.signature(import_module(name).run).parameters, name


# ---------- the command


def test_the_table_comes_with_every_part_failing(
    parts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 1, and the file."""
    names = []
    for number, text in enumerate([*FAILING, f"def run(report):\n{TAIL}"]):
        names.append(f"part_f{number}")
        (parts / f"{names[-1]}.py").write_text(text)
    monkeypatch.setattr(gpu_report, "_device", lambda seconds: ("a device", ""))
    names.append(names.pop(0))  # the one that hangs is not the last, which is sure of most of the time
    monkeypatch.setattr(gpu_report, "PARTS", dict.fromkeys(names, 1.0) | {names[-1]: 72.0})
    monkeypatch.setattr(gpu_report, "BUDGET_SECONDS", 80.0)
    file = tmp_path / "table.json"
    assert gpu_report.main(["--only", ",".join(names), "--seconds", "80", "--output", str(file)]) == 1
    said = json.loads(file.read_text())
    assert said["device"] == "a device" and {line["name"] for line in said["lines"]} == {*names, "a"}
    assert all(line["met"] is False for line in said["lines"] if line["name"] != "a")
    assert capsys.readouterr().out.count("NO") >= len(names)


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        ("raise OSError('libcudart.so.12: cannot open')", "ended with code 1: OSError: libcudart.so.12: cannot open"),
        ("import os; os.abort()", "ended with code -6 (SIGABRT): it said nothing"),
        ("import time; time.sleep(600)", "no end within 2 s: it said nothing"),
    ],
)
def test_torch_that_cannot_say_is_no_missing_device(
    ask: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A driver that hangs or kills who asks it: a failure, not a machine without a GPU."""
    monkeypatch.setattr(gpu_report, "ASK", ask)
    if "600" in ask:
        monkeypatch.setattr(gpu_report, "DEVICE_SECONDS", 2.0)
    assert gpu_report.main(["--only", "gpu_merge"]) == 1
    out = capsys.readouterr().out
    assert told in out and "NO" in out and "no CUDA device here" not in out


def test_an_interrupt_shows_what_was_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def some(names: Any, seconds: float) -> Iterator[Line]:
        yield Line("a", "1", "", True)
        raise KeyboardInterrupt

    monkeypatch.setattr(gpu_report, "_device", lambda seconds: ("a device", ""))
    monkeypatch.setattr(gpu_report, "each_line", some)
    with pytest.raises(KeyboardInterrupt):
        gpu_report.main([])
    assert capsys.readouterr().out.splitlines()[-1].endswith("yes")
