"""Commands whose work is done by ranks: those that torchrun has started, or those that the command starts itself."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from tokenring.display.console import Console, check_suffix, read_options
from tokenring.errors import ConfigurationError
from tokenring.launch.follow import (
    CommandFailed,
    Failed,
    Running,
    check_output,
    end_with_parent,
    exit_code,
    fail,
    follow,
    report_line,
    write_at_last,
    write_files,
)
from tokenring.launch.limits import check_processes
from tokenring.launch.processes import Interrupts, Processes, rank_environment, torchrun_command

MOST_SECONDS = 1e6  # of a measurement: clocks and limits of threads overflow far above
SILENCE_SECONDS = 900.0  # longer than any rank waits for another
PREFIX = "@tokenring "  # anything else that a rank prints is not ours

Tell = Callable[[int, int, str], None]  # steps done, steps in all, what comes next


def quiet(done: int, steps: int, what: str) -> None:
    """Ignore the progress of a rank other than 0: rank 0 speaks for all."""


class Report(Protocol):
    """The report that rank 0 returns."""

    def to_json(self) -> str:
        """Return the report as JSON, which Command.read reads."""


R = TypeVar("R", bound=Report)


# ---------- how many


def ranks_started(environment: Mapping[str, str]) -> int | None:
    """Return how many ranks torchrun has started; None if it did not start this process."""
    return int(environment["WORLD_SIZE"]) if "RANK" in environment and "WORLD_SIZE" in environment else None


def ranks_wanted(asked: int | None, started: int | None) -> int:
    """Return how many ranks there are or will be. Raises ConfigurationError if --ranks does not fit."""
    if started is not None and asked is not None:
        raise ConfigurationError(
            f"--ranks {asked} starts processes of its own, and torchrun has started {started}: leave one out"
        )
    ranks = started if started is not None else asked
    if ranks is None:
        raise ConfigurationError("say how many processes to start, as in --ranks 2, or start them with torchrun")
    if ranks < 1:
        raise ConfigurationError(f"--ranks {ranks}: use 1 or more")
    if started is None and sys.platform != "linux":
        raise ConfigurationError(f"--ranks needs Linux (process control); this is {sys.platform}: use torchrun")
    if started is None:
        check_processes(ranks)
    return ranks


# ---------- the command

Start = Callable[[Any, int, str, list[str]], AbstractContextManager[Running]]  # for a case: ranks, module, arguments


def check_seconds(seconds: float) -> None:
    """Raise ConfigurationError for a --seconds in which nothing can be measured."""
    if not 0 < seconds <= MOST_SECONDS:
        raise ConfigurationError(f"--seconds {seconds:g}: use more than 0, and a number, of {MOST_SECONDS:g} at most")


def start_torchrun(case: Any, ranks: int, module: str, arguments: list[str]) -> Processes:
    """Prepare the ranks as processes that torchrun starts on this machine; entering the result starts them."""
    return Processes(torchrun_command(ranks, module, arguments), rank_environment(os.environ))


@dataclass(frozen=True)
class Command(Generic[R]):
    """A command of the user's: its options, the work of its ranks, and the use of their report.

    module: of a rank; has `main` for one of our own and `run(case, tell)` for one that torchrun started, where rank 0
    returns the report. options and case raise ConfigurationError. outputs: for each option that names a file, what
    is written there; suffixes: how its name may end. show: prints the report, and returns the exit code. start: starts
    ranks of our own.
    """

    name: str
    module: str
    options: Callable[[list[str]], argparse.Namespace]
    case: Callable[[argparse.Namespace, int], Any]
    read: Callable[[str], R]
    outputs: Mapping[str, Callable[[R], str]]
    show: Callable[[R, argparse.Namespace, Console], int]
    suffixes: Mapping[str, tuple[str, ...]]
    start: Start = start_torchrun

    def main(self, argv: list[str] | None, environment: Mapping[str, str]) -> int:
        """Run the command; return the exit code: 0, 1 (something went wrong) or 130 (interrupted).

        Raises ConfigurationError for options that do not fit.
        """
        started = ranks_started(environment)
        interrupts = None if started else Interrupts()
        options = read_options(self.options, sys.argv[1:] if argv is None else argv)
        if isinstance(options, int):
            return options
        for name, known in self.suffixes.items():
            check_suffix(f"--{name}", getattr(options, name), *known)
        ranks = ranks_wanted(options.ranks, started)
        case = self.case(options, ranks)
        files = _outputs(options, list(self.outputs))
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")
            sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
        job = _Job(self, options, case, files)
        return job.run(ranks, Console(sys.stdout, sys.stderr, environment), interrupts)


def _outputs(options: argparse.Namespace, names: list[str]) -> dict[str, Path]:
    """Return the files that are asked for, by option; check them before any work is done. Raises ConfigurationError."""
    files = {name: Path(path) for name in names if (path := getattr(options, name)) is not None}
    for name, path in files.items():
        check_output(f"--{name}", path)
        other = next((each for each in files if each != name and files[each].absolute() == path.absolute()), None)
        if other is not None:
            raise ConfigurationError(f"--{name} and --{other} are both {path}: give each a file of its own")
    return files


@dataclass
class _Job(Generic[R]):
    """One run of a command."""

    command: Command[R]
    options: argparse.Namespace
    case: Any
    outputs: dict[str, Path]

    def run(self, ranks: int, console: Console, interrupts: Interrupts | None) -> int:
        """Run the command; return the exit code. Without `interrupts`, this process is one of the ranks."""

        def do() -> int:
            if interrupts is None:
                return self._on_these(console)
            report = self._on_own(ranks, console, interrupts)
            write_at_last(self._texts(report), interrupts)
            return self.command.show(report, self.options, console)

        return exit_code(self.command.name, console, interrupts, do)

    def _on_these(self, console: Console) -> int:
        run = import_module(self.command.module).run
        report = run(self.case, lambda done, steps, what: console.status(progress(done, steps, what)))
        if report is None:
            return 0
        write_files(self._texts(report))
        return self.command.show(report, self.options, console)

    def _texts(self, report: R) -> dict[Path, str]:
        return {path: self.command.outputs[name](report) for name, path in self.outputs.items()}

    def _on_own(self, ranks: int, console: Console, interrupts: Interrupts) -> R:
        """Start ranks, follow them, and leave none; return the report. Raises CommandFailed."""
        following = _Following(console)
        arguments = [json.dumps(asdict(self.case))]
        with self.command.start(self.case, ranks, self.command.module, arguments) as processes:
            follow(processes, interrupts, following.take, following.wait, lambda: following.phase, SILENCE_SECONDS)
        if following.report is None:
            raise CommandFailed("the ranks ended without a report")
        return self.command.read(following.report)


class _Following:
    """The messages of the ranks so far."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.report: str | None = None
        self.phase = "starting"

    def take(self, line: str) -> Failed | None:
        """Take one line of the ranks' output; return the failure that it reports, if it reports one."""
        if not line.startswith(PREFIX):
            return None
        kind, value = json.loads(line.removeprefix(PREFIX))
        if kind == "failed":
            return Failed(**value)
        if kind == "report":
            self.report = value
        if kind == "progress":
            self.phase = value[2]
            self.console.status(progress(*value))
        return None

    def wait(self, seconds: float) -> None:
        """Show how many seconds have passed while the ranks are starting."""
        if self.phase == "starting":
            self.console.status(f"starting … {seconds:.0f} s")


def progress(done: int, steps: int, what: str) -> str:
    """Return a line such as "40%  round 2 of 5"."""
    return f"{100 * done // steps:3}%  {what}"


# ---------- a rank of our own


def serve(run: Callable[[Tell], Report | None]) -> int:
    """Run the work of a rank, as its module does; report on standard output and return the exit code."""
    end_with_parent()
    try:
        report = run(lambda done, steps, what: _say("progress", [done, steps, what]))
    except Exception as error:
        return fail(error, lambda failed: _say("failed", asdict(failed)))
    if report is not None:
        _say("report", report.to_json())
    return 0


@contextmanager
def process_group(wait_seconds: float) -> Iterator[None]:
    """Hold the Gloo group of all ranks for the time of the context.

    Nothing made inside may be kept: a group that outlives this aborts the process. Its last work would be freed
    by a thread of torch while the interpreter ends (torch 2.13).
    """
    import torch.distributed as dist  # the commands themselves need no torch

    dist.init_process_group("gloo", timeout=timedelta(seconds=wait_seconds))
    yield
    gc.collect()
    dist.destroy_process_group()


def _say(kind: str, value: Any) -> None:
    report_line(PREFIX + json.dumps([kind, value]))
