"""The command `tokenring bench`: its options, and the table, picture and files of its report."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tokenring.cli.bench.emulate import add_options, check_options, start
from tokenring.cli.bench.picture import to_svg
from tokenring.cli.bench.results import RaceCase, RaceReport
from tokenring.cli.bench.table import shown, table
from tokenring.cli.call_options import (
    CACHED,
    add_cached_hint,
    add_call_options,
    add_report_options,
    check_call,
    refuse_cached,
    with_printed,
)
from tokenring.display.console import Console, Parser
from tokenring.errors import ConfigurationError
from tokenring.launch.command import Command, ranks_started
from tokenring.nearest import hint
from tokenring.schedule.families.registry import FAMILIES, family_of, forms, is_known, parse

MODULE = "tokenring.cli.bench.worker"
OPERATOR = "--operator"  # a race of its own, with options of its own


def main(argv: list[str] | None = None, environment: Mapping[str, str] = os.environ) -> int:
    """Run the benchmark; return the exit code: 0, 1 (something of ours is wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    names = {each.split("=")[0] for each in (sys.argv[1:] if argv is None else argv)}
    if CACHED in names:
        from tokenring.cli.bench.cached import main as race_cached_steps

        return race_cached_steps(argv, environment)
    if OPERATOR in names:
        from tokenring.cli.bench.operators import main as race_operators

        return race_operators(argv, environment)
    outputs = {"json": RaceReport.to_json, "save": RaceReport.to_json, "svg": to_svg}
    started = ranks_started(environment) is not None
    case = partial(_case, started)
    suffixes = {"json": (".json",), "save": (".json",), "svg": (".svg",)}
    command = Command("bench", MODULE, _options, case, RaceReport.from_json, outputs, _show, suffixes, start)
    return command.main(argv, environment)


def _show(report: RaceReport, options: argparse.Namespace, console: Console) -> int:
    return shown(report, table(report, console.ink), options, console)


# ---------- what is asked


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring bench",
        description="Race schedules, torch's plain kernel in one process, and other libraries that are installed, "
        "on the same inputs, taking turns.",
        epilog="Under torchrun, without --ranks, it runs on torchrun's processes. docs/bench.md says how it measures.",
    )
    add_call_options(parser)
    add = parser.add_argument
    add(OPERATOR, metavar="NAME",
        help="race column, row, all-reduce, reduce-scatter or all-gather: --operator column --help")  # fmt: skip
    add_cached_hint(parser, "race ways to attend to", "--cached 8k")
    add("--rounds", type=int, default=11, metavar="N", help="timed rounds (11)")
    add("--schedules", default="all", metavar="NAMES",
        help="tokenring's, separated by commas; all: the best of each family that fits, and auto (all)")  # fmt: skip
    add("--peers", default="auto", metavar="NAMES", help="other libraries, separated by commas; auto: all; none (auto)")
    add("--layout", default="zigzag", metavar="NAME",
        help="layout of tokenring's schedules, also auto (zigzag); peers have their own")  # fmt: skip
    add("--transport", default="auto", metavar="NAME", help="transport of tokenring's schedules (auto); peers use Gloo")
    add("--pieces", type=int, metavar="N", help="in how many parts each chunk moves (the schedule decides)")
    add_report_options(parser, "the report with every sample (docs/bench.md)", "the report")
    add_options(parser)
    return with_printed(parser.parse_args(argv))


def _case(started: bool, options: argparse.Namespace, ranks: int) -> RaceCase:
    """Return the options as a case. Raises ConfigurationError for options that no rank could run."""
    from tokenring.cli.bench.contenders import contenders
    from tokenring.cli.bench.peers import PEERS

    if options.operator is not None:
        raise ConfigurationError(f"write {OPERATOR} in full: it has options of its own")
    refuse_cached(options)
    call = check_call(options, ranks)
    schedules = _schedules(options.schedules)
    if options.pieces is not None and "auto" in schedules:
        raise ConfigurationError("--pieces goes with schedules by name: leave auto out")
    emulation = check_options(options, ranks, started)
    peers = _names("--peers", options.peers, {"auto": [*PEERS], "none": []}, [*PEERS])
    case = RaceCase(**{**call, "schedules": schedules, "peers": peers, **emulation})
    return case if schedules else replace(case, schedules=contenders(case, ranks))


def _schedules(text: str) -> list[str]:
    """Read schedules separated by commas, each once; none for "all". Making them shows later whether they fit."""
    if text == "all":
        return []
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if not is_known(name) and name != "auto":
            like = hint(family_of(name), ["all", "auto", *FAMILIES])
            raise ConfigurationError(f"--schedules {text}: {name!r} is not one of all, {forms()}, auto{like}")
        if name != "auto":
            parse(name)
    return names


def _names(option: str, text: str, words: Mapping[str, list[str]], known: list[str]) -> list[str]:
    """Read names separated by commas, each once; or a word that stands for several."""
    if text in words:
        return words[text]
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in known:
            listed = ", ".join([*words, *known])
            raise ConfigurationError(f"{option} {text}: {name!r} is not one of {listed}{hint(name, [*words, *known])}")
    return names
