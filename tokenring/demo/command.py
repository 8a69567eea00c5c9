"""The command: what the user asks, the order in which results are shown, and the exit code."""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from tokenring.demo.console import Console, cores, machine
from tokenring.demo.launch import Interrupts, Processes, rank_environment, torchrun_command
from tokenring.demo.report import (
    bytes_text,
    check_text,
    headline,
    schedule_text,
    section,
    setting,
    split_text,
    training_text,
)
from tokenring.demo.results import Checked, Failed, Measured, Result, Started, Stepped, from_line, training_complaint
from tokenring.demo.timeline import to_svg
from tokenring.errors import ConfigurationError
from tokenring.layout import make_layout

INTERRUPTED = 130
FEWEST_STEPS = 6  # three first and three last ones
TRAINING_SECONDS = 100.0  # on a slow machine training ends early
POLL_SECONDS = 0.1
SILENCE_SECONDS = 150.0  # longer than any rank waits for another
LAST_WORDS_SECONDS = 3.0  # after the first failure, others may say more
LOG_LINES = 20
WORKER = "tokenring.demo.worker"


class Interrupted(Exception):
    """The user has had enough."""


class DemoFailed(Exception):
    """The demo found something wrong; the message says what."""


def main(argv: list[str] | None = None) -> int:
    """Run the demo; returns the exit code: 0, 1 (something is wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    interrupts = Interrupts()
    try:
        options = _options(sys.argv[1:] if argv is None else argv)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✓ shows a ?
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(sys.stdout, sys.stderr, os.environ)
    try:
        Demo(options, console, interrupts).run()
    except Interrupted:
        console.complain("interrupted: nothing was left behind")
        return INTERRUPTED
    except DemoFailed as failure:
        console.complain(f"tokenring demo: {failure}")
        return 1
    finally:
        interrupts.close()
    return 0


class Demo:
    """One run: results come in, text goes out."""

    def __init__(self, options: argparse.Namespace, console: Console, interrupts: Interrupts) -> None:
        self.options, self.console, self.interrupts = options, console, interrupts
        self.losses: list[float] = []
        self.training_seconds = 0.0
        self.measured: Measured | None = None
        self.phase = f"starting {options.ranks} ranks"

    def run(self) -> None:
        """All of it. Raises Interrupted and DemoFailed, with every process ended."""
        options, say = self.options, self.console.say
        began = time.monotonic()
        say(self.console.ink.bold(headline(options.ranks, options.seq, options.layout)))
        command = torchrun_command(options.ranks, WORKER, _worker_arguments(options))
        with Processes(command, rank_environment(os.environ)) as processes:
            self.follow(processes)
        if self.measured is None:
            raise DemoFailed("the ranks ended without a result")
        svg = to_svg(self.measured, self._title())
        self._check_interrupts()
        write_at_last(Path(options.output), svg, self.interrupts)
        say(section(4, "Timeline", self.console.ink))
        say(f"   {options.output}   (open it in a browser; every bar says what it is)")
        say("   " + self.console.ink.pale(f"everything together took {time.monotonic() - began:.0f} s"))

    def follow(self, processes: Processes) -> None:
        """Show results until the ranks have ended. Raises Interrupted and DemoFailed."""
        heard = began = time.monotonic()
        failures: list[Failed] = []
        while True:
            self._check_interrupts()
            ended = processes.exit_code()  # asked first: what they wrote before is still read below
            lines = processes.read(POLL_SECONDS)
            now = time.monotonic()
            heard = now if lines else heard
            for line in lines:
                result = from_line(line)
                if isinstance(result, Failed):
                    failures.append(result)
                elif result is not None and not failures:
                    self.show(result)
            if lines:
                continue
            if ended is not None or (failures and now - heard > LAST_WORDS_SECONDS):
                break
            if now - heard > SILENCE_SECONDS:
                raise DemoFailed(f"no news from the ranks for {SILENCE_SECONDS:.0f} s while {self.phase}")
            if not self.losses:
                self.console.status(f"   {self.phase} … {now - began:.0f} s")
        if failures or ended:
            raise DemoFailed(failure_text(failures, ended, processes.log()))

    def show(self, result: Result) -> None:
        """Say what a result says; raises DemoFailed if it is not as it should be."""
        match result:
            case Started():
                self._started(result)
            case Checked():
                self._checked(result)
            case Stepped():
                self._stepped(result)
            case Measured():
                self._trained()
                self._measured(result)

    def _started(self, started: Started) -> None:
        ink = self.console.ink
        self.console.say(ink.pale(setting(started, machine())))
        self.console.say(section(1, "Is the split model the same model? Loss and gradients of the first batch", ink))
        self.phase = "computing one batch split, and in one process"

    def _checked(self, checked: Checked) -> None:
        ink = self.console.ink
        self.console.say(check_text(checked, self.options.ranks, ink))
        _refuse(checked.complaint())
        self.console.say(section(2, f"Training: AdamW, {self.options.steps} steps, all ranks on one sequence", ink))
        self.phase = "training"

    def _stepped(self, stepped: Stepped) -> None:
        self.losses.append(stepped.loss)
        self.training_seconds += stepped.seconds
        left = (self.options.steps - stepped.step) * self.training_seconds / stepped.step
        self.console.progress(stepped.step, self.options.steps, stepped.loss, self.options.seq / stepped.seconds, left)

    def _trained(self) -> None:
        options, ink = self.options, self.console.ink
        self.console.say(training_text(self.losses, options.seq, self.training_seconds, options.steps, ink))
        _refuse(training_complaint(self.losses))

    def _measured(self, measured: Measured) -> None:
        ink, say = self.console.ink, self.console.say
        say(section(3, "One attention call of this model, forward and backward", ink))
        say(schedule_text(measured) + "\n")
        say(bytes_text(measured, ink) + "\n")
        say(split_text(measured, self.options.ranks, cores(), ink))
        _refuse(measured.complaint())
        self.measured = measured
        self.phase = "ending"

    def _title(self) -> str:
        options = self.options
        return f"{options.seq:,} tokens over {options.ranks} ranks on {cores()} cores, layout {options.layout}"

    def _check_interrupts(self) -> None:
        if self.interrupts.seen:
            raise Interrupted


def _refuse(complaint: str | None) -> None:
    if complaint is not None:
        raise DemoFailed(complaint)


def failure_text(failures: Sequence[Failed], exit_code: int | None, log: str) -> str:
    """Why the ranks failed: what they said, or how they ended, or the end of their log.

    A rank that lost a peer knows less than the peer; torchrun's own words name the one that ended first.
    """
    first = sorted(failures, key=lambda failed: (failed.kind == "PeerLost", failed.rank))
    if died := re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", log):
        return f"rank {died[2]} was ended by {signal.Signals(int(died[1])).name}; the others were ended too"
    if not first and exit_code is not None and exit_code < 0:
        return f"torchrun was ended by {signal.Signals(-exit_code).name}; the ranks were ended too"
    if not first:
        tail = "\n".join(log.splitlines()[-LOG_LINES:])
        return f"the ranks ended with exit code {exit_code}; the end of their log:\n{tail}"
    if first[0].expected:
        return first[0].message
    tail = "\n".join(log.splitlines()[-LOG_LINES:])
    return f"rank {first[0].rank}: {first[0].kind}: {first[0].message}\n{tail}"


def write_at_last(path: Path, text: str, interrupts: Interrupts) -> None:
    """Write a file whole or not at all; with it the demo is done, and can no longer be interrupted."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        interrupts.close()
        if interrupts.seen:
            raise Interrupted
        temporary.replace(path)
    except OSError as error:
        raise DemoFailed(f"cannot write {path}: {error.strerror}") from None
    finally:
        temporary.unlink(missing_ok=True)


class _Parser(argparse.ArgumentParser):
    """Refuses as the rest of tokenring does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigurationError(f"{message}; see {self.prog} --help")


def _options(argv: list[str]) -> argparse.Namespace:
    parser = _Parser(
        prog="tokenring demo",
        description="Four local ranks train a small transformer on one long sequence that is split over them; "
        "first, loss and gradients are compared with one process.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="P", help="how many processes (default: 4)")
    add("--seq", type=int, default=8192, metavar="N", help="tokens of the whole sequence (8192)")
    add("--steps", type=int, default=24, metavar="N", help=f"steps of training, {FEWEST_STEPS} or more (24)")
    add("--layout", default="zigzag", metavar="NAME", help="contiguous, zigzag, striped, or finer: zigzag/2 (zigzag)")
    add("--schedule", default="auto", metavar="NAME", help="auto, or a schedule's name (auto)")
    add("--output", default="tokenring-demo.svg", metavar="FILE", help="the picture (./tokenring-demo.svg)")
    add("--seed", type=int, default=0, metavar="N", help="of the weights and the text's order (0)")
    options = parser.parse_args(argv)
    _check(options)
    return options


def _check(options: argparse.Namespace) -> None:
    if sys.platform != "linux":
        raise ConfigurationError(f"the demo needs Linux (process control and clocks); this is {sys.platform}")
    for name, least in (("ranks", 1), ("seq", 2), ("steps", FEWEST_STEPS)):
        if getattr(options, name) < least:
            raise ConfigurationError(f"--{name} {getattr(options, name)}: use {least} or more")
    make_layout(options.layout, options.ranks, options.seq)
    output = Path(options.output)
    if output.is_dir() or not os.access(output.absolute().parent, os.W_OK):
        raise ConfigurationError(f"--output {options.output}: not a file in a folder that can be written to")


def _worker_arguments(options: argparse.Namespace) -> list[str]:
    named = {name: getattr(options, name) for name in ("seq", "steps", "layout", "schedule", "seed")}
    return [f"--{name}={value}" for name, value in named.items()] + [f"--training-seconds={TRAINING_SECONDS}"]
