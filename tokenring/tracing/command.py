"""The command: what the user asks, and what becomes of the trace."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from tokenring.bench.results import ERROR_LIMITS, Case
from tokenring.console import Console, Parser
from tokenring.errors import ConfigurationError
from tokenring.follow import check_output
from tokenring.launch import Interrupts
from tokenring.ranks import Job, Tell, add_call_options, check_call, ranks_started, ranks_wanted
from tokenring.tracing.record import Traced

MODULE = "tokenring.tracing.worker"


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Trace a call; returns the exit code: 0, 1 (something went wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    started = ranks_started(environment)
    interrupts = None if started else Interrupts()
    try:
        options = _options(sys.argv[1:] if argv is None else argv)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    ranks = ranks_wanted(options.ranks, started)
    case = _case(options, ranks)
    _check_outputs(options)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")
        sys.stderr.reconfigure(errors="replace")  # type: ignore[union-attr]
    console = Console(sys.stdout, sys.stderr, environment)

    def here(tell: Tell) -> Traced | None:
        from tokenring.tracing.worker import run

        return run(case, tell)

    job = Job(
        command="trace",
        module=MODULE,
        case=asdict(case),
        here=here,
        read=Traced.from_json,
        files=lambda traced: _files(options, traced),
        show=lambda traced: _show(traced, options, console),
    )
    return job.run(ranks, console, interrupts)


def _files(options: argparse.Namespace, traced: Traced) -> dict[Path, str]:
    """The files that were asked for."""
    files = {}
    if options.picture is not None:
        from tokenring.tracing.picture import timeline_of, to_svg

        files[Path(options.picture)] = to_svg(timeline_of(traced))
    if options.chrome is not None:
        from tokenring.tracing.chrome import to_chrome

        files[Path(options.chrome)] = to_chrome(traced)
    return files


def _show(traced: Traced, options: argparse.Namespace, console: Console) -> int:
    from tokenring.tracing.table import table, to_json

    console.say((to_json(traced) if options.json else table(traced, console.ink)).rstrip("\n"))
    hints = ((options.picture, "open it in a browser"), (options.chrome, "open it in ui.perfetto.dev"))
    for path, hint in hints if not options.json else ():
        if path is not None:
            console.say(console.ink.pale(f"written: {path} ({hint})"))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring trace",
        description="Run a schedule on real ranks, and show what each of them did when.",
        epilog="Under torchrun, without --ranks, it runs on the processes at hand. docs/trace.md says what is shown.",
    )
    add = parser.add_argument
    add("schedule", metavar="SCHEDULE", help="ring, tokenring, ..., auto, or auto:ring,tokenring")
    add_call_options(parser, tuple(ERROR_LIMITS))
    add("--layout", default="zigzag", metavar="NAME", help="contiguous, zigzag, striped, or finer: zigzag/2 (zigzag)")
    add("--transport", default="auto", metavar="NAME", help="auto, or a transport's name (auto)")
    add("--pieces", type=int, metavar="N", help="parts of a chunk that move apart (the schedule's own choice)")
    add("--rounds", type=int, default=5, metavar="N", help="calls to choose the one with the median time from (5)")
    add("--picture", metavar="FILE", help="draw all ranks on one clock, as SVG")
    add("--chrome", metavar="FILE", help="write a trace for Perfetto and chrome://tracing, as JSON")
    add("--json", action="store_true", help="print the table as JSON (docs/trace.md)")
    return parser.parse_args(argv)


def _case(options: argparse.Namespace, ranks: int) -> Case:
    """The options as a case. Raises ConfigurationError for what no rank could run."""
    from tokenring.context import check_schedule_name

    call = check_call(options, ranks)
    check_schedule_name(options.schedule)
    if options.pieces is not None and options.schedule.startswith("auto"):
        raise ConfigurationError(f"--pieces goes with a schedule by name, not with {options.schedule}")
    return Case(**call, schedules=[options.schedule], peers=[])


def _check_outputs(options: argparse.Namespace) -> None:
    paths = {name: Path(path) for name in ("picture", "chrome") if (path := getattr(options, name)) is not None}
    for name, path in paths.items():
        check_output(f"--{name}", path)
    if len({path.absolute() for path in paths.values()}) < len(paths):
        raise ConfigurationError(f"--picture and --chrome are both {options.picture}: give each a file of its own")
