"""`tokenring doctor`: the command.

Exit codes, as docs/doctor.md has them: 0 a report, whatever it says; 2 a wrong option, or a file that cannot be
written; 130 interrupted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from tokenring.cli.doctor.examine import SECONDS, examine
from tokenring.cli.doctor.report import report
from tokenring.cli.spelling import also
from tokenring.display.console import Parser, check_suffix, read_options, write_file
from tokenring.display.wrapping import fitted
from tokenring.errors import ConfigurationError


def main(argv: list[str], environment: Mapping[str, str] = os.environ) -> int:
    """Examine this machine and print or write the report; return the exit code. Raises ConfigurationError."""
    options = read_options(_parser().parse_args, argv)
    if isinstance(options, int):
        return options
    if not 0 < options.seconds <= 3600:
        raise ConfigurationError(f"--seconds {options.seconds:g}: give a time above 0, and an hour at most")
    suffix = check_suffix("--save", options.save, ".txt", ".json")
    if options.json and suffix == ".txt":
        raise ConfigurationError(f"--json and --save {options.save!r} say different things: leave one out")
    found = examine(environment, options.seconds)
    text = found.to_json() if options.json or suffix == ".json" else report(found)
    if options.save is None:
        print(text if options.json else fitted(text, sys.stdout), end="")
    else:
        write_file(options.save, text)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="tokenring doctor",
        description="What is installed, which transport and kernel would be used, what is missing and what to do.",
    )
    add = parser.add_argument
    add("--json", action="store_true", help="as JSON (docs/doctor.md)")
    add("--seconds", type=float, default=SECONDS, metavar="N", help=f"for each import that is tried ({SECONDS:g})")
    saved = add("--save", metavar="FILE", help="write to a file instead: .txt or .json")
    also(parser, saved, "-o", "--output")
    return parser
