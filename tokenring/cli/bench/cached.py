"""`tokenring bench --cached N`: ways to take a step over a KV cache, raced against a few lines by hand."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any

from tokenring.cli.bench.emulate import add_options, check_options, start
from tokenring.cli.bench.picture import to_svg
from tokenring.cli.bench.results import CachedCase, CachedReport
from tokenring.cli.bench.table import shown, table
from tokenring.cli.call_options import (
    add_cached_options,
    add_report_options,
    cached_call_fields,
    refuse_uncached,
    with_printed,
)
from tokenring.display.console import Console, Parser
from tokenring.errors import ConfigurationError
from tokenring.launch.command import Command, ranks_started
from tokenring.nearest import hint

MODULE = "tokenring.cli.bench.cached_worker"
EXCLUDED = ("seq", "mask", "passes", "layout", "pieces", "peers", "operator")


def main(argv: list[str] | None, environment: Mapping[str, str]) -> int:
    """Run the race; return the exit code: 0, 1 (something of ours is wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    outputs = {"json": CachedReport.to_json, "save": CachedReport.to_json, "svg": to_svg}
    suffixes = {"json": (".json",), "save": (".json",), "svg": (".svg",)}
    case = partial(_case, ranks_started(environment) is not None)
    command: Command[Any] = Command(
        "bench", MODULE, _options, case, CachedReport.from_json, outputs, _show, suffixes, start
    )
    return command.main(argv, environment)


def _show(report: CachedReport, options: argparse.Namespace, console: Console) -> int:
    return shown(report, table(report, console.ink), options, console)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring bench --cached N",
        description="Race ways to take a step over a KV cache, and a few lines by hand, on the same cache and tokens.",
        epilog="docs/inference.md describes the ways, docs/bench.md says how it measures.",
    )
    add_cached_options(parser, EXCLUDED)
    add = parser.add_argument
    add("--rounds", type=int, default=11, metavar="N", help="timed rounds (11)")
    add("--schedules", default="all", metavar="NAMES", help="ways, separated by commas, as one-shot,ring (all)")
    add("--transport", default="auto", metavar="NAME", help="transport of the ways (auto); by hand it is Gloo")
    add_report_options(parser, "the report with every sample (docs/bench.md)", "the report")
    add_options(parser)
    return with_printed(parser.parse_args(argv))


def _case(started: bool, options: argparse.Namespace, ranks: int) -> CachedCase:
    """Return the options as a case. Raises ConfigurationError for options that no rank could run."""
    refuse_uncached(options, EXCLUDED)
    fields = cached_call_fields(options, ranks)
    emulation = check_options(options, ranks, started)
    return CachedCase(**{**fields, "schedules": _ways(options.schedules), "rounds": options.rounds, **emulation})


def _ways(text: str) -> list[str]:
    """Read names of ways separated by commas, each once; all of them for "all". Raises ConfigurationError."""
    from tokenring.cli.bench.cached_ways import WAYS

    names = [*WAYS] if text == "all" else list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in WAYS:
            known = ["all", *WAYS]
            raise ConfigurationError(
                f"--schedules {text}: {name!r} is not one of {', '.join(known)}{hint(name, known)}"
            )
    return names
