"""The command: what it prints, where it writes, and how it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from argparse import Namespace
from io import StringIO
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, NoReturn

import pytest
from patience import patient

from tokenring._version import __version__
from tokenring.cli import main as cli
from tokenring.cli.main import main
from tokenring.display.console import read_options
from tokenring.ir.picture import to_svg
from tokenring.schedule.by_name import schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.mask import Causal, Documents

COMMAND = "import sys; from tokenring.cli.main import main; sys.exit(main(sys.argv[1:]))"
GIVEN = ["--ranks", "4", "--mask", "causal"]


class Result(NamedTuple):
    code: int
    out: str
    err: str


def run(*argv: str, stdin: str = "") -> Result:
    out, err = StringIO(), StringIO()
    code = main(list(argv), out, err, StringIO(stdin))
    return Result(code, out.getvalue(), err.getvalue())


class TestSchedule:
    def test_prints_the_grid_and_a_summary(self) -> None:
        result = run("schedule", "tokenring", *GIVEN)
        grid, summary = result.out.split("\n\n")
        assert (result.code, result.err) == (0, "")
        assert Schedule.parse(grid) == schedule("tokenring", ranks=4, mask=Causal())
        assert summary == SUMMARY

    def test_summary_is_of_the_pass_and_the_workload(self) -> None:
        result = run("schedule", "ring", *GIVEN, "--pass", "backward", "--kv-heads", "8", "--dtype", "fp32")
        assert result.out.split("\n\n")[1] == BACKWARD

    def test_grid_is_of_both_passes(self) -> None:
        grids = {run("schedule", "ring", *GIVEN, "--pass", way).out.split("\n\n")[0] for way in ("forward", "backward")}
        assert len(grids) == 1

    def test_options_reach_the_schedule(self) -> None:
        result = run(
            "schedule", "ring", "--ranks", "3", "--layout", "striped/2", "--mask", "causal&documents(0,7,90)",
            "--direction", "-1", "--pieces", "2", "--length", "96", "--json",
        )  # fmt: skip
        mask = Causal() & Documents([0, 7, 90])
        made = schedule("ring", ranks=3, layout="striped/2", mask=mask, direction=-1, pieces=2, length=96)
        assert Schedule.from_json(result.out) == made
        assert made != schedule("ring", ranks=3, layout="striped/2", mask=mask, direction=1, pieces=2, length=96)

    @pytest.mark.parametrize("name", ["usp/2", "tiles/2x4/late", "multi-ring", "relay/4"])
    def test_names_with_parameters(self, name: str) -> None:
        """Where 64 tokens a chunk cannot be cut as it must, there are a few more."""
        result = run("schedule", name, "--ranks", "8", "--mask", "causal")
        assert (result.code, result.err) == (0, "")
        assert Schedule.parse(result.out.split("\n\n")[0]).name == name

    def test_defaults(self) -> None:
        assert Schedule.from_json(run("schedule", "ring", "--ranks", "2", "--json").out) == schedule("ring", ranks=2)

    def test_busiest_and_idlest_rank(self) -> None:
        """Causal, contiguous: rank 3 computes 3.5 blocks of 128 × 128, rank 0 half a block (and half a diagonal)."""
        pairs = [sum(range(128 * rank + 1, 128 * rank + 129)) for rank in range(4)]
        busiest, idlest = (4 * 32 * 128 * pairs[rank] / 1e6 for rank in (3, 0))
        result = run("schedule", "ring", *GIVEN, "--layout", "contiguous", "--length", "512")
        assert result.out.endswith(f"busiest rank 3: {busiest:.0f} M, idlest rank 0: {idlest:.0f} M\n")

    def test_one_rank_has_no_links(self) -> None:
        assert "links     none\n" in run("schedule", "ring", "--ranks", "1").out

    @pytest.mark.parametrize("way", ["forward", "backward"])
    def test_draws(self, way: str) -> None:
        made = schedule("ring", ranks=4, mask=Causal())
        assert run("schedule", "ring", *GIVEN, "--svg", "--pass", way).out == to_svg(made, way)  # type: ignore[arg-type]

    @pytest.mark.parametrize("form", [[], ["--json"], ["--svg"]])
    def test_writes_files(self, tmp_path: Path, form: list[str]) -> None:
        file = tmp_path / "it"
        printed = run("schedule", "ring", *GIVEN, *form).out
        assert run("schedule", "ring", *GIVEN, *form, "-o", str(file)) == Result(0, "", "")
        assert file.read_text(encoding="utf-8") == printed

    def test_reads_files(self, tmp_path: Path) -> None:
        file = tmp_path / "it.json"
        run("schedule", "direct-q", *GIVEN, "--json", "-o", str(file))
        assert run("schedule", str(file)) == run("schedule", "direct-q", *GIVEN)
        assert run("schedule", "-", stdin=file.read_text()) == run("schedule", "direct-q", *GIVEN)


SUMMARY = """\
forward pass
verified  yes, both passes
workload  batch 1, 512 tokens, 32 heads, 32 kv heads of 128, bf16
tiles     16
moves     18 requests, 18 partials
links     worst 1->0: 3.68 MB, total 19.0 MB on 12 links
flops     busiest rank 0: 538 M, idlest rank 0: 538 M
"""
BACKWARD = """\
backward pass
verified  yes, both passes
workload  batch 1, 512 tokens, 32 heads, 8 kv heads of 128, fp32
tiles     16
moves     18 requests, 21 partials
links     worst 1->0: 5.77 MB, total 20.4 MB on 4 links
flops     busiest rank 0: 1.34 G, idlest rank 0: 1.34 G
"""


class TestRefusals:
    @pytest.mark.parametrize(
        "argv, says",
        [
            (["schedule", "rings", "--ranks", "4"], "unknown schedule 'rings'; choose one of "),
            (["schedule", "ring"], "schedule 'ring': give the number of ranks, as in --ranks 4"),
            (["schedule", "ring", "--ranks", "four"], "argument --ranks: invalid int value: 'four'; see tokenring s"),
            (["schedule", "ring", "--ranks", "0"], "ranks=0: give a positive integer"),
            (["schedule", "ring", *GIVEN, "--mask", "casual"], "unknown mask 'casual'; write full, causal"),
            (["schedule", "ring", *GIVEN, "--layout", "zag"], "unknown layout 'zag'; choose one of contiguous"),
            (["schedule", "ring", *GIVEN, "--length", "0"], "argument --length: '0' is not a number of tokens"),
            (["schedule", "ring", *GIVEN, "--pieces", "3"], "schedule 'ring': 3 pieces do not divide chunks of 64"),
            (["schedule", "ring", *GIVEN, "--direction", "2"], "argument --direction: invalid choice: 2"),
            (["schedule", "ring", *GIVEN, "--kv-heads", "5"], "32 query heads are not a multiple of 5 kv heads"),
            (["schedule", "ring", *GIVEN, "--kv-heads", "0"], "--kv-heads 0: use 1 or more"),
            (["schedule", "ring", *GIVEN, "--json", "--svg"], "argument --svg: not allowed with argument --json"),
            (["schedule", "ring", *GIVEN, "-o", "/nowhere/it"], "cannot write '/nowhere/it': No such file"),
            (["schedule", "none.json"], "cannot read 'none.json': No such file or directory"),
            (["schedule", "none.json", "--ranks", "4"], "--ranks builds a schedule; 'none.json' is read, and has its"),
            (["schedule", "-"], "document: not JSON: Expecting value: line 1 column 1 (char 0)"),
            (["sched"], "argument COMMAND: invalid choice: 'sched' (choose from "),
        ],
    )
    def test_is_one_line(self, argv: list[str], says: str) -> None:
        result = run(*argv)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith(f"tokenring: {says}")
        assert result.err.count("\n") == 1

    def test_of_a_file_that_is_no_text(self, tmp_path: Path) -> None:
        file = tmp_path / "it.json"
        file.write_bytes(b"\xff")
        assert run("schedule", str(file)).err == f"tokenring: cannot read {str(file)!r}: it is not UTF-8 text\n"

    def test_of_a_schedule_that_proves_nothing(self) -> None:
        """What is read is proved before anything is made of it."""
        text = schedule("tokenring", ranks=2).to_json()
        mutant = "\n".join(line for line in text.split("\n") if '"tiles": [' in line or '"rank": 1' not in line)
        mutant = mutant.replace("},\n  ],", "}\n  ],")
        result = run("schedule", "-", "--svg", stdin=mutant)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("tokenring: tokenring, forward: step 1, rank 1: sends o0@1 to rank 0 but holds")

    def test_of_a_screen_without_the_letters(self) -> None:
        command = [sys.executable, "-c", COMMAND, "schedule", "ring", "--ranks", "2"]
        env = os.environ | {"PYTHONIOENCODING": "ascii"}
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=patient(60))
        assert result.returncode == 2
        assert result.stderr == "tokenring: ascii has no '\\xd7': use PYTHONIOENCODING=utf-8\n"


def test_version() -> None:
    assert run("--version") == Result(0, f"tokenring {__version__}\n", "")


def test_help() -> None:
    result = run("schedule", "--help")
    assert result.code == 0
    assert "--ranks P" in result.out


COMMANDS = ("schedule", "demo", "bench", "trace", "plan", "rates", "doctor", "topology", "topology --measure")


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command(command: str) -> None:
    """Said, and nothing else done: no SystemExit leaves `main`."""
    result = run(*command.split(), "--help")
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"usage: tokenring {command.split()[0]}")


@pytest.mark.parametrize(("code", "wanted"), [(None, 0), (0, 0), (3, 3)])
def test_what_parsers_exit_with_is_the_exit_code(code: int | None, wanted: int) -> None:
    def leave(argv: list[str]) -> NoReturn:
        sys.exit(code)

    assert read_options(leave, []) == wanted
    options = Namespace(ranks=2)
    assert read_options(lambda argv: options, []) is options


def test_demo_gets_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def demo(argv: list[str]) -> int:
        print("demo", argv)
        return 3

    module = ModuleType("tokenring.cli.demo")
    monkeypatch.setattr(module, "main", demo, raising=False)
    monkeypatch.setitem(sys.modules, "tokenring.cli.demo", module)
    assert run("demo", "--ranks", "2", "--help") == Result(3, "demo ['--ranks', '2', '--help']\n", "")


@pytest.mark.parametrize("argv", [["--version"], ["schedule", "ring", "--ranks", "2", "--json"]])
def test_reader_that_has_gone(argv: list[str]) -> None:
    """As in `tokenring ... | true`: no traceback, neither from us nor from Python as it ends."""
    reading, writing = os.pipe()
    os.close(reading)
    # Unbuffered, Python itself drops what a pipe did not take.
    env = os.environ | {"PYTHONUNBUFFERED": ""}
    command = [sys.executable, "-c", COMMAND, *argv]
    result = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=env, timeout=patient(60))
    os.close(writing)
    assert (result.returncode, result.stderr) == (1, b"")


def test_no_standard_output_at_all() -> None:
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", COMMAND, "schedule", "ring", *GIVEN]
    done = subprocess.run(closed, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stderr) == (0, "")


def test_interrupt_before_a_command_looks_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    err = StringIO()
    assert cli.main(["demo"], err=err) == 130
    assert err.getvalue() == "interrupted: nothing was left behind\n"


def test_alone_it_shows_its_help() -> None:
    assert run() == run("--help") and run().code == 0


@pytest.mark.parametrize("name", ["ring", "tokenring", "direct-kv", "ulysses", "tiles/2x2", "packed/2", "relay/2"])
def test_schedules_whose_last_ranks_have_no_tokens(name: str) -> None:
    given = ("schedule", name, "--ranks", "4", "--seq", "3", "--mask", "causal")
    shown = run(*given)
    assert shown.code == 0 and "verified  yes, both passes" in shown.out
    made = Schedule.from_json(run(*given, "--json").out)
    assert made.q_layout.length == 3 and Schedule.parse(shown.out.split("\n\n")[0]) == made
    assert run(*given, "--svg").out == to_svg(made, "forward")
    assert run(*given, "--svg", "--pass", "backward").out == to_svg(made, "backward")


def test_plans_whose_last_ranks_have_no_tokens(tmp_path: Path) -> None:
    given = ("plan", "--topology", "preset:a10-pix-4", "--seq", "3", "--heads", "4", "--no-cache")
    files = ("--timeline", str(tmp_path / "a.svg"), "--mask-svg", str(tmp_path / "b.svg"))
    shown = run(*given, "--schedules", "ring", *files)
    assert (shown.code, shown.err) == (0, "") and "nan" not in shown.out
    assert all("nan" not in path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    assert run(*given, "--explain", "ring").code == 0
    assert run(*given, "--layout", "auto").code == 0
