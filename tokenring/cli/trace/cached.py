"""`tokenring trace WAY --cached N`: the options of a step over a KV cache whose timeline is wanted."""

from __future__ import annotations

import argparse

from tokenring.cli.bench.results import CachedCase
from tokenring.cli.call_options import add_cached_options, cached_call_fields, refuse_uncached
from tokenring.cli.spelling import also
from tokenring.display.console import Parser
from tokenring.errors import ConfigurationError
from tokenring.nearest import hint

EXCLUDED = ("seq", "mask", "passes", "layout", "pieces")


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Add the options of what is printed and written."""
    add = parser.add_argument
    also(parser, add("--svg", metavar="FILE", help="draw all ranks on one clock"), "--picture")
    add("--chrome", metavar="FILE", help="write a trace for Perfetto and chrome://tracing, as JSON")
    add("--json", action="store_true", help="print the table as JSON (docs/trace.md)")
    add("--save", metavar="FILE", help="write the JSON to a file")


def options_of(argv: list[str]) -> argparse.Namespace:
    """Read the options of the command line."""
    parser = Parser(
        prog="tokenring trace --cached N",
        description="Take a step over a KV cache on real ranks, and show what each of them did when.",
        epilog="docs/inference.md describes the ways, docs/trace.md what is shown.",
    )
    add = parser.add_argument
    add("schedule", metavar="WAY", help="auto, one-shot, two-step, direct-q/heads, direct-q/tokens, ring, ...")
    add_cached_options(parser, EXCLUDED)
    add("--transport", default="auto", metavar="NAME", help="auto, or a transport's name (auto)")
    add("--rounds", type=int, default=5, metavar="N", help="steps to choose the one with the median time from (5)")
    add_outputs(parser)
    return parser.parse_args(argv)


def case_of(options: argparse.Namespace, ranks: int) -> CachedCase:
    """Return the options as a case. Raises ConfigurationError for options that no rank could run."""
    from tokenring.cli.bench.cached_ways import WAYS, why_not

    name = options.schedule
    refuse_uncached(options, EXCLUDED)
    if name not in WAYS:
        raise ConfigurationError(f"{name!r} --cached: choose one of {', '.join(WAYS)}{hint(name, [*WAYS])}")
    case = CachedCase(**cached_call_fields(options, ranks), schedules=[name], rounds=options.rounds)
    if (reason := why_not(case, name, ranks)) is not None:
        raise ConfigurationError(f"{name} --cached {options.cached}: {reason}")
    return case
