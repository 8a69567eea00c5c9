"""`tokenring rates --transports`: the time of messages over each transport among which "auto" chooses.

Exit codes: 0 measured and kept; 1 a rank failed, or there are no two transports to choose among; 2 a wrong option;
130 interrupted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from tokenring.backends.devices import accelerator_types, has_device
from tokenring.cli.rates.transports_worker import TransportCase, TransportMeasured
from tokenring.display.console import Console, Parser
from tokenring.errors import ConfigurationError
from tokenring.launch.command import Command, check_seconds
from tokenring.tables.transport_choice import PAIRS
from tokenring.tables.transport_times import keep, table, to_json

MODULE = "tokenring.cli.rates.transports_worker"


def main(argv: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Measure, report and keep; return the exit code."""
    command = Command("rates", MODULE, _options, _case, TransportMeasured.from_json, {}, _show, {})
    return command.main(argv, environment)


def _show(found: TransportMeasured, options: argparse.Namespace, console: Console) -> int:
    for name, why in found.left_out.items():
        (console.complain if options.json else console.say)(f"{name} is left out: {why}\n")
    if len(found.transfers.samples) < 2:
        console.say("nothing to choose among, so nothing was measured: `auto` takes what there is")
        return 1
    path = keep(found.key, found.transfers)
    if options.json:
        console.data(to_json(found.key, found.transfers))
        return 0
    console.say("\n".join([str(found.key), "", *table(found.key, found.transfers)]))
    console.say("\nnot kept: there is no home folder" if path is None else f"\nkept in {path}")
    return 0


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring rates --transports",
        description="Measure messages between ranks over each transport among which transport='auto' chooses, and "
        "keep the table: it then takes the faster one, between as many ranks of such devices.",
        epilog="Under torchrun, without --ranks, it runs on torchrun's processes.",
    )
    add = parser.add_argument
    add("--transports", action="store_true", help=argparse.SUPPRESS)
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine")
    add("--json", action="store_true", help="print the table that is kept, as JSON")
    add("--device", metavar="TYPE", help="cpu, cuda (cuda if there is one, else cpu)")
    add("--seconds", type=float, default=0.5, metavar="S", help="no larger messages once one takes longer (0.5)")
    return parser.parse_args(argv)


def _case(options: argparse.Namespace, ranks: int) -> TransportCase:
    check_seconds(options.seconds)
    if ranks < 2:
        raise ConfigurationError(f"{ranks} rank moves nothing: use 2 or more")
    kind = options.device or next((each for each in accelerator_types() if each in PAIRS), "cpu")
    if kind not in PAIRS:
        raise ConfigurationError(f"--device {kind}: `auto` chooses among transports for {' and '.join(PAIRS)} alone")
    if not has_device(kind):
        raise ConfigurationError(f"--device {kind}: torch finds none here; `tokenring doctor` says what is missing")
    return TransportCase(kind, options.seconds)
