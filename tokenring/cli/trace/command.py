"""The command `tokenring trace`: its options, and the table, picture and files of the trace."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from tokenring.cli.bench.results import RaceCase
from tokenring.cli.call_options import CACHED, add_cached_hint, add_call_options, check_call, refuse_cached
from tokenring.cli.trace.cached import add_outputs, case_of, options_of
from tokenring.cli.trace.chrome import to_chrome
from tokenring.cli.trace.picture import simulation_of, timeline_of, to_svg
from tokenring.cli.trace.record import Traced
from tokenring.cli.trace.table import table, to_json
from tokenring.display.console import Console, Parser
from tokenring.display.safe_text import plain
from tokenring.errors import ConfigurationError
from tokenring.launch.command import Command

MODULE, MODULE_OF_CACHED = "tokenring.cli.trace.worker", "tokenring.cli.trace.cached_worker"


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Trace a call; return the exit code: 0, 1 (something went wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    module, options = MODULE, _options
    case: Callable[[argparse.Namespace, int], Any] = _case
    if CACHED in {each.split("=")[0] for each in (sys.argv[1:] if argv is None else argv)}:
        module, options, case = MODULE_OF_CACHED, options_of, case_of
    outputs = {
        "svg": lambda traced: to_svg(timeline_of(traced), simulation_of(traced)), "chrome": to_chrome, "save": to_json,
    }  # fmt: skip
    suffixes = {"svg": (".svg",), "chrome": (".json",), "save": (".json",)}
    return Command("trace", module, options, case, Traced.from_json, outputs, _show, suffixes).main(argv, environment)


def _show(traced: Traced, options: argparse.Namespace, console: Console) -> int:
    if options.json:
        console.data(to_json(traced))
    else:
        console.say(table(traced, console.ink).rstrip("\n"))
    notes = {options.svg: " (open it in a browser)", options.chrome: " (open it in ui.perfetto.dev)", options.save: ""}
    for path, note in notes.items() if not options.json else ():
        if path is not None:
            console.say(console.ink.pale(f"written: {plain(path)}{note}"))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring trace",
        description="Run a schedule on real ranks, and show what each of them did when.",
        epilog="Under torchrun, without --ranks, it runs on torchrun's processes. docs/trace.md says what is shown.",
    )
    add = parser.add_argument
    add("schedule", metavar="SCHEDULE", help="ring, tokenring, ..., auto, or auto:ring,tokenring")
    add_call_options(parser)
    add("--layout", default="zigzag", metavar="NAME", help="auto, contiguous, zigzag, striped, or zigzag/2 (zigzag)")
    add("--transport", default="auto", metavar="NAME", help="auto, or a transport's name (auto)")
    add("--pieces", type=int, metavar="N", help="in how many parts each chunk moves (the schedule decides)")
    add_cached_hint(parser, "trace a step over", "auto --cached 8k")
    add("--rounds", type=int, default=5, metavar="N", help="calls to choose the one with the median time from (5)")
    add_outputs(parser)
    return parser.parse_args(argv)


def _case(options: argparse.Namespace, ranks: int) -> RaceCase:
    """Return the options as a case. Raises ConfigurationError for options that no rank could run."""
    from tokenring.api.arguments import check_schedule_name

    refuse_cached(options)
    call = check_call(options, ranks)
    check_schedule_name(options.schedule)
    if options.pieces is not None and options.schedule.startswith("auto"):
        raise ConfigurationError(f"--pieces goes with a schedule by name, not with {options.schedule}")
    return RaceCase(**call, schedules=[options.schedule], peers=[])
