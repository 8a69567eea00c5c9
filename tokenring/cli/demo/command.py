"""The command `tokenring demo`: its options, the order in which results are shown, and the exit code."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tokenring.api.arguments import check_schedule_name
from tokenring.cli.demo.console import DemoConsole
from tokenring.cli.demo.report import (
    bytes_text,
    check_text,
    headline,
    schedule_text,
    section,
    setting,
    split_text,
    timeline,
    training_text,
)
from tokenring.cli.demo.results import Checked, DemoMeasured, Result, Started, Stepped, from_line, training_complaint
from tokenring.cli.spelling import SIZES_TEXT, add_seq, also
from tokenring.cli.trace.picture import to_svg
from tokenring.display.console import Parser, check_suffix, cores, machine, read_options
from tokenring.display.safe_text import plain
from tokenring.errors import ConfigurationError
from tokenring.launch.follow import CommandFailed, Failed, check, check_output, exit_code, follow, write_at_last
from tokenring.launch.limits import check_processes
from tokenring.launch.processes import Interrupts, Processes, rank_environment, torchrun_command
from tokenring.sequence.layout import make_layout

FEWEST_STEPS = 6  # three first and three last ones
TRAINING_SECONDS = 100.0  # on a slow machine training ends early
SILENCE_SECONDS = 150.0  # longer than any rank waits for another
WORKER = "tokenring.cli.demo.worker"


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit code: 0, 1 (something is wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    interrupts = Interrupts()
    options = read_options(_options, sys.argv[1:] if argv is None else argv)
    if isinstance(options, int):
        return options
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ✓ shows a ?
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = DemoConsole(sys.stdout, sys.stderr, os.environ)

    def do() -> int:
        Demo(options, console, interrupts).run()
        return 0

    return exit_code("demo", console, interrupts, do)


class Demo:
    """One run: results come in, text goes out."""

    def __init__(self, options: argparse.Namespace, console: DemoConsole, interrupts: Interrupts) -> None:
        self.options, self.console, self.interrupts = options, console, interrupts
        self.losses: list[float] = []
        self.training_seconds = 0.0
        self.measured: DemoMeasured | None = None
        self.failed = False
        self.phase = f"starting {options.ranks} ranks"

    def run(self) -> None:
        """Run all ranks and show their results. Raises Interrupted and CommandFailed, with every process ended."""
        options, say = self.options, self.console.say
        began = time.monotonic()
        say(self.console.ink.bold(headline(options.ranks, options.seq, options.layout)))
        command = torchrun_command(options.ranks, WORKER, _worker_arguments(options))
        with Processes(command, rank_environment(os.environ)) as processes:
            follow(processes, self.interrupts, self.take, self.wait, lambda: self.phase, SILENCE_SECONDS)
        if self.measured is None:
            raise CommandFailed("the ranks ended without a result")
        svg = to_svg(timeline(self.measured, self._title()))
        check(self.interrupts)
        write_at_last({Path(options.output): svg}, self.interrupts)
        say(section(4, "Timeline", self.console.ink))
        say(f"   {plain(options.output)}   (open it in a browser; every bar says what it is)")
        say("   " + self.console.ink.pale(f"everything together took {time.monotonic() - began:.0f} s"))

    def take(self, line: str) -> Failed | None:
        """Show the result in a rank's line, until a rank has failed; return the failure if the line reports one."""
        result = from_line(line)
        if isinstance(result, Failed):
            self.failed = True
            return result
        if result is not None and not self.failed:
            self.show(result)
        return None

    def wait(self, seconds: float) -> None:
        """Show that nothing new has come, so many seconds after the start."""
        if not self.losses:
            self.console.status(f"   {self.phase} … {seconds:.0f} s")

    def show(self, result: Result) -> None:
        """Print a result. Raises CommandFailed if it is not as it should be."""
        match result:
            case Started():
                self._started(result)
            case Checked():
                self._checked(result)
            case Stepped():
                self._stepped(result)
            case DemoMeasured():
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

    def _measured(self, measured: DemoMeasured) -> None:
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


def _refuse(complaint: str | None) -> None:
    if complaint is not None:
        raise CommandFailed(complaint)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring demo",
        description="Four local ranks train a small transformer on one long sequence that is split over them; "
        "first, loss and gradients are compared with one process.",
    )
    add = parser.add_argument
    add("--ranks", type=int, default=4, metavar="P", help="how many processes (default: 4)")
    add_seq(parser, default=8192, help=f"tokens of the whole sequence (8k), {SIZES_TEXT}")
    add("--steps", type=int, default=24, metavar="N", help=f"steps of training, {FEWEST_STEPS} or more (24)")
    add("--layout", default="zigzag", metavar="NAME", help="contiguous, zigzag, striped, or finer: zigzag/2 (zigzag)")
    add("--schedule", default="auto", metavar="NAME", help="auto, or a schedule's name (auto)")
    picture = add("--svg", dest="output", default="tokenring-demo.svg", metavar="FILE",
        help="the picture (./tokenring-demo.svg)")  # fmt: skip
    also(parser, picture, "--output")
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
    check_processes(options.ranks)
    check_schedule_name(options.schedule)
    layout = make_layout(options.layout, options.ranks, options.seq)
    if not layout.is_even:
        raise ConfigurationError(
            f"--seq {options.seq}: the demo needs equal parts, and layout {options.layout} does not cut so many tokens "
            f"into equal parts for {options.ranks} ranks; take a multiple of {len(layout.chunks)}"
        )
    check_suffix("--svg", options.output, ".svg")
    check_output("--svg", Path(options.output))


def _worker_arguments(options: argparse.Namespace) -> list[str]:
    named = {name: getattr(options, name) for name in ("seq", "steps", "layout", "schedule", "seed")}
    return [f"--{name}={value}" for name, value in named.items()] + [f"--training-seconds={TRAINING_SECONDS}"]
