"""The command `tokenring topology --measure`: its options, and the output of the measured facts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from tokenring.cli.call_options import check_transport
from tokenring.cli.topology.outputs import SUFFIXES
from tokenring.display.console import Console, Parser
from tokenring.launch.command import Command, check_seconds
from tokenring.topology.measure.worker import LinksMeasured, MeasureCase
from tokenring.topology.probing.cache import keep_measured
from tokenring.topology.report.page import to_html
from tokenring.topology.report.picture import to_svg
from tokenring.topology.report.text import report

MODULE = "tokenring.topology.measure.worker"


def main(argv: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Measure and report; return the exit code: 0, 1 (a rank failed), 130 (interrupted)."""
    outputs = {"save": LinksMeasured.to_json, "svg": _picture, "html": _page}
    command = Command("topology", MODULE, _options, _case, LinksMeasured.from_json, outputs, _show, SUFFIXES)
    return command.main(argv, environment)


def _picture(found: LinksMeasured) -> str:
    return to_svg(*found.seen())


def _page(found: LinksMeasured) -> str:
    return to_html(*found.seen())


def _show(found: LinksMeasured, options: argparse.Namespace, console: Console) -> int:
    keep_measured(found.to_json(), os.environ)
    if options.json:
        console.data(found.to_json())
    elif (options.save, options.svg, options.html) == (None, None, None):
        console.say(report(*found.seen()).rstrip("\n"))
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring topology --measure",
        description="Transfers between ranks: each pair alone and both ways, rounds of pairs, one to all; and what "
        "links, ports and uplinks follow from how they slow each other down.",
        epilog="Under torchrun, without --ranks, it runs on torchrun's processes.",
    )
    add = parser.add_argument
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine")
    add("--seconds", type=float, default=60.0, metavar="S", help="the longest that it may measure (60)")
    add("--transport", default="auto", metavar="NAME", help="what moves the bytes (auto)")
    add("--json", action="store_true", help="as JSON (docs/topology.md)")
    add("--save", metavar="FILE", help="write the JSON to a file, for --from and for bug reports")
    add("--svg", metavar="FILE", help="write a picture")
    add("--html", metavar="FILE", help="write a page with the picture and the report, complete in one file")
    return parser.parse_args(argv)


def _case(options: argparse.Namespace, ranks: int) -> MeasureCase:
    check_seconds(options.seconds)
    check_transport(options.transport)
    return MeasureCase(options.seconds, options.transport)
