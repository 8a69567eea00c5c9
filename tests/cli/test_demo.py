"""The demo: what it shows, what it refuses, and that it leaves nothing behind however it ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from patience import patient
from ranks import Here, RankPools

import tokenring as tr
from tokenring.cli.demo.check import check
from tokenring.cli.demo.command import main
from tokenring.cli.demo.data import Text, TextBatch, text_tokens
from tokenring.cli.demo.model import ModelConfig, Transformer
from tokenring.cli.demo.results import Checked
from tokenring.cli.demo.train import split_attention
from tokenring.errors import ConfigurationError
from tokenring.launch.follow import CommandFailed, Interrupted, write_at_last
from tokenring.launch.processes import Interrupts

MARKER = "TOKENRING_DEMO_TEST"
# A shell starts what runs in the background with Ctrl-C ignored, and so its tests.
CODE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from tokenring.cli.main import main
sys.exit(main())
"""
# Starts torchrun with another Python than its own.
WARM_CODE = CODE.replace("sys.exit(main())", "sys.executable = sys.argv.pop(1)\nsys.exit(main())")
SMALL = ["--ranks", "2", "--seq", "512"]
START_SECONDS = 60.0  # until the first line: the machine may be busy
END_SECONDS = 40.0

# ---------- the command


@dataclass
class Running:
    """A demo in a folder and with a TMPDIR of its own, whose processes can be told by their environment."""

    process: subprocess.Popen[str]
    mark: str
    folder: Path
    temporary: Path

    def wait_for(self, pattern: str, stream: str = "out") -> None:
        """Until a line of the output matches; the streams go to files, so nobody blocks."""
        deadline = time.monotonic() + patient(START_SECONDS)
        while not re.search(pattern, self.text(stream)):
            assert self.process.poll() is None, f"ended early: {self.text('out')}{self.text('err')}"
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text(stream)!r}"
            time.sleep(0.02)

    def text(self, stream: str) -> str:
        return (self.folder.parent / stream).read_text()

    def end(self) -> int:
        """The exit code, once it has ended by itself."""
        return self.process.wait(patient(END_SECONDS))

    def processes(self) -> dict[int, dict[str, str]]:
        """All processes of this demo, with their environments."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                text = Path("/proc", entry, "environ").read_bytes().decode(errors="replace")
                environment = dict(line.partition("=")[::2] for line in text.split("\0"))
                if environment.get(MARKER) == self.mark:
                    found[int(entry)] = environment
        return found

    def assert_nothing_left(self) -> None:
        assert self.processes() == {}
        assert list(self.temporary.iterdir()) == []
        assert list(self.folder.iterdir()) == []


Starter = Callable[..., Running]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Starter]:
    """Starts demos, and kills what is left of them."""
    started = []

    def starter(*arguments: str, ranks_by: str | None = None) -> Running:
        """ranks_by: the Python of torchrun and ranks, where it is not that of the command."""
        command = [sys.executable, "-c", CODE] if ranks_by is None else [sys.executable, "-c", WARM_CODE, ranks_by]
        folder, temporary, mark = tmp_path / "folder", tmp_path / "temporary", uuid.uuid4().hex
        for each in (folder, temporary):
            each.mkdir()
        with open(tmp_path / "out", "w") as out, open(tmp_path / "err", "w") as err:
            process = subprocess.Popen(
                [*command, "demo", *SMALL, *arguments],
                cwd=folder,
                env=os.environ | {MARKER: mark, "TMPDIR": str(temporary)},
                stdout=out,
                stderr=err,
                text=True,
                start_new_session=True,
            )
        started.append(Running(process, mark, folder, temporary))
        return started[-1]

    yield starter
    for running in started:
        for process in running.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        running.process.wait(patient(END_SECONDS))


@pytest.mark.slow
def test_whole_run(start: Starter, warm: str) -> None:
    running = start("--steps", "24", "--output", "picture.svg", ranks_by=warm)
    assert running.end() == 0, running.text("out") + running.text("err")
    out, err = running.text("out"), running.text("err")
    headings = [
        "512 tokens, split over 2 ranks (zigzag)",
        "1  Is the split model the same model?",
        "gradients   of 21 parameters, worst ",
        "2  Training",
        "3  One attention call",
        "schedule   ",
        "why        ",
        "bytes, forward ",
        "bytes, backward ",
        "exposed communication",
        "4  Timeline",
    ]
    places = [out.find(each) for each in headings]
    assert -1 not in places and places == sorted(places), out
    assert "✗" not in out
    assert out.count("✓") == 2 + 1 + 2 * 2 + 1, "loss, gradients; training; each link of each pass; the legend"
    fall = re.search(r"loss (\d\.\d+) → (\d\.\d+) \(means", out)
    assert fall and 5.6 > float(fall[1]) > float(fall[2]) + 1
    assert err.splitlines()[0].startswith("   step  1/24   loss 5.") and "step 24/24" in err
    assert "\x1b" not in out + err, "colours and bars are for terminals"
    picture = ElementTree.parse(running.folder / "picture.svg")
    texts = {each.text for each in picture.iter("{http://www.w3.org/2000/svg}text")}
    assert {"rank 0", "rank 1"} <= texts
    (running.folder / "picture.svg").unlink()
    running.assert_nothing_left()


@pytest.mark.parametrize(
    ("seconds", "number"),
    [(0.2, signal.SIGINT), (1.0, signal.SIGTERM), (2.5, signal.SIGINT)],
    ids=["0.2-INT", "1.0-TERM", "2.5-INT"],
)
def test_interrupt(start: Starter, seconds: float, number: signal.Signals) -> None:
    """While torchrun starts, and while ranks import."""
    running = start("--steps", "1000000")
    running.wait_for("tokenring demo")
    time.sleep(seconds)
    interrupt(running, number)


def test_interrupt_of_the_training(start: Starter) -> None:
    running = start("--steps", "1000000")
    running.wait_for("step ", "err")
    interrupt(running, signal.SIGINT)


def interrupt(running: Running, number: signal.Signals) -> None:
    """A second one changes nothing."""
    os.killpg(running.process.pid, number)  # as a terminal does it: to the group
    time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal.SIGINT)
    assert running.end() == 130
    assert "Traceback" not in running.text("err")
    assert running.text("err").endswith("interrupted: nothing was left behind\n")
    running.assert_nothing_left()


def test_interrupt_of_the_first_imports(start: Starter) -> None:
    """Before any of our code runs, Python ends itself by the signal; shells say 130 of both."""
    running = start()
    time.sleep(0.2)
    running.process.send_signal(signal.SIGINT)
    assert running.end() in (130, -signal.SIGINT)
    running.assert_nothing_left()


def test_a_rank_that_is_killed(start: Starter, warm: str) -> None:
    running = start("--steps", "1000000", ranks_by=warm)
    running.wait_for("step ", "err")
    ranks = {
        environment["RANK"]: process for process, environment in running.processes().items() if "RANK" in environment
    }
    assert sorted(ranks) == ["0", "1"]
    os.kill(ranks["1"], signal.SIGKILL)
    assert running.end() == 1
    assert running.text("err").endswith("rank 1 was ended by SIGKILL; the others were ended too\n")
    running.assert_nothing_left()


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--ranks", "0"], "--ranks 0: use 1 or more"),
        (["--steps", "5"], "--steps 5: use 6 or more"),
        (["--seq", "8190"], "8190"),
        (["--layout", "zagzig"], "unknown layout 'zagzig'"),
        (["--output", "/no/such/folder/x.svg"], "not a file in a folder that can be written to"),
        (["--rank"], "see tokenring demo --help"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        main(arguments)


def test_importing_tokenring_leaves_the_demo_alone() -> None:
    code = "import sys, tokenring.cli.main; sys.exit(any('tokenring.cli.demo' in name for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], timeout=patient(60)).returncode == 0


# ---------- the check


def correct(whole: TextBatch, part: TextBatch, cp: tr.ContextParallel) -> tuple[TextBatch, tr.Mask]:
    return part, tr.Causal()


def contiguous_positions(whole: TextBatch, part: TextBatch, cp: tr.ContextParallel) -> tuple[TextBatch, tr.Mask]:
    """Rotary angles as if every rank held neighbouring tokens."""
    return replace(part, positions=whole.positions.chunk(cp.world_size)[cp.rank]), tr.Causal()


def local_positions(whole: TextBatch, part: TextBatch, cp: tr.ContextParallel) -> tuple[TextBatch, tr.Mask]:
    return replace(part, positions=torch.arange(part.tokens.shape[1])), tr.Causal()


def wrong_mask(whole: TextBatch, part: TextBatch, cp: tr.ContextParallel) -> tuple[TextBatch, tr.Mask]:
    """One token of the past is missing."""
    return part, tr.SlidingWindow(whole.tokens.shape[1] - 2, 0)


def local_targets(whole: TextBatch, part: TextBatch, cp: tr.ContextParallel) -> tuple[TextBatch, tr.Mask]:
    """The next token of the part, where that of the sequence is another rank's."""
    return replace(part, targets=part.tokens.roll(-1, dims=1)), tr.Causal()


Variant = Callable[[TextBatch, TextBatch, tr.ContextParallel], tuple[TextBatch, tr.Mask]]
MUTANTS = (contiguous_positions, local_positions, wrong_mask, local_targets)


def checked_on_rank(here: Here, variants: tuple[Variant, ...]) -> list[Checked | None]:
    cp = here.cp(layout="zigzag")
    model = Transformer(ModelConfig(layers=1), seed=1)
    whole = Text(text_tokens(), 256, seed=1).batch()
    results = []
    for variant in variants:
        part, mask = variant(whole, whole.shard(cp), cp)
        results.append(check(model, whole, part, split_attention(cp, mask)))
    return results


def test_check_accepts_the_model_and_refuses_mutants(ranks: RankPools) -> None:
    at_0, at_1 = ranks(2)(checked_on_rank, (correct, *MUTANTS))
    assert at_1 == [None] * len(at_0)
    complaints = [checked.complaint() for checked in at_0 if checked is not None]
    assert complaints[0] is None, complaints
    for mutant, complaint in zip(MUTANTS, complaints[1:], strict=True):
        assert complaint is not None, f"{mutant.__name__} was accepted"


# ---------- the last step


@pytest.mark.usefixtures("own_signals")
class TestWriteAtLast:
    def test_writes(self, tmp_path: Path) -> None:
        (tmp_path / "x.svg").write_text("old")
        write_at_last({tmp_path / "x.svg": "new"}, Interrupts())
        assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("x.svg", "new")]

    def test_leaves_all_as_it_was_when_interrupted(self, tmp_path: Path) -> None:
        (tmp_path / "x.svg").write_text("old")
        interrupts = Interrupts()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted):
            write_at_last({tmp_path / "x.svg": "new"}, interrupts)
        assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("x.svg", "old")]

    def test_says_what_it_cannot_write(self, tmp_path: Path) -> None:
        with pytest.raises(CommandFailed, match="No such file or directory"):
            write_at_last({tmp_path / "none" / "x.svg": "new"}, Interrupts())
