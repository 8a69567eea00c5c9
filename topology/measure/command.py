"""`tokenring topology --measure`: what the user asks, and what becomes of the facts."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tokenring.console import Console, Parser
from tokenring.errors import ConfigurationError
from tokenring.follow import check_output
from tokenring.launch import Interrupts
from tokenring.ranks import Job, Tell, ranks_started, ranks_wanted
from tokenring.topology.facts import Facts
from tokenring.topology.graph import merge
from tokenring.topology.measure.worker import Case
from tokenring.topology.report import report
from tokenring.topology.schema import from_json, to_json
from tokenring.topology.verdict import classify

MODULE = "tokenring.topology.measure.worker"


@dataclass
class Measured:
    """What rank 0 comes back with."""

    facts: list[Facts]

    def to_json(self) -> str:
        return to_json(self.facts)

    @staticmethod
    def from_json(text: str) -> Measured:
        return Measured(from_json(text))


def main(argv: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Measure and report; returns the exit code: 0, 1 (a rank failed), 130 (interrupted)."""
    started = ranks_started(environment)
    interrupts = None if started else Interrupts()
    try:
        options = _parser().parse_args(argv)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    ranks = ranks_wanted(options.ranks, started)
    case = _case(options)
    if options.save is not None:
        check_output("--save", Path(options.save))
    console = Console(sys.stdout, sys.stderr, environment)

    def here(tell: Tell) -> Measured | None:
        from tokenring.topology.measure.worker import run

        measured = run(case, tell)
        return None if measured is None else Measured([measured])

    job = Job(
        command="topology",
        module=MODULE,
        case=asdict(case),
        here=here,
        read=Measured.from_json,
        files=lambda found: {Path(options.save): found.to_json()} if options.save is not None else {},
        show=lambda found: _show(found, options, console),
    )
    return job.run(ranks, console, interrupts)


def _show(found: Measured, options: argparse.Namespace, console: Console) -> int:
    if options.json:
        console.say(found.to_json().rstrip("\n"))
    elif options.save is None:
        graph = merge(found.facts)
        console.say(report(graph, classify(graph)).rstrip("\n"))
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="tokenring topology --measure",
        description="Transfers between ranks: each pair alone and both ways, rounds of pairs, one to all; and what "
        "links, ports and uplinks follow from how they slow each other down.",
        epilog="Under torchrun, without --ranks, it runs on the processes at hand.",
    )
    add = parser.add_argument
    add("--measure", action="store_true", help=argparse.SUPPRESS)
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine")
    add("--seconds", type=float, default=60.0, metavar="S", help="the longest that it may measure (60)")
    add("--transport", default="auto", metavar="NAME", help="what moves the bytes (auto)")
    add("--json", action="store_true", help="as JSON (docs/topology.md)")
    add("--save", metavar="FILE", help="write the JSON to a file, for --from and for bug reports")
    return parser


def _case(options: argparse.Namespace) -> Case:
    from tokenring.backends.registry import TRANSPORTS

    if options.seconds <= 0:
        raise ConfigurationError(f"--seconds {options.seconds:g}: use more than 0")
    if options.transport not in ("auto", *TRANSPORTS):
        known = ", ".join(TRANSPORTS)
        raise ConfigurationError(f"--transport {options.transport}: unknown; choose one of auto, {known}")
    return Case(options.seconds, options.transport)
