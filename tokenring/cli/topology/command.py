"""`tokenring topology`: the links of this machine's accelerators, or of those in dumps from others.

Exit codes, as docs/topology.md has them: 0 a report, also where there are no accelerators; 1 nobody reads it; 2 a file
that cannot be read or written, or a wrong option; 130 interrupted.
"""

from __future__ import annotations

import sys
from argparse import SUPPRESS, Namespace

from tokenring.cli.topology.outputs import SUFFIXES
from tokenring.display.console import Parser, check_suffix, read_options, write_file
from tokenring.display.wrapping import fitted
from tokenring.errors import ConfigurationError
from tokenring.gc_pause import no_collection
from tokenring.topology.model.facts import Facts
from tokenring.topology.model.graph import merge, on_machines
from tokenring.topology.model.sanity import storable
from tokenring.topology.model.schema import to_json
from tokenring.topology.model.verdict import classify
from tokenring.topology.probing.files import read_file, read_stream
from tokenring.topology.probing.probe import probe
from tokenring.topology.report.page import to_html
from tokenring.topology.report.picture import to_svg
from tokenring.topology.report.text import report

STDIN = "-"  # of --from: the file is standard input


def main(argv: list[str]) -> int:
    """Print or write the report; return the exit code. Raises TopologyError and ConfigurationError."""
    if "--measure" in argv:
        from tokenring.cli.topology.measure import main as measure_main  # it runs on ranks, as bench does

        return measure_main(argv)
    options = read_options(_parser().parse_args, argv)
    if isinstance(options, int):
        return options
    if options.files:
        raise ConfigurationError(f"read files with --from: tokenring topology --from {' '.join(options.files)}")
    for name, known in SUFFIXES.items():
        check_suffix(f"--{name}", getattr(options, name), *known)
    with no_collection():  # a matrix of a thousand devices is half a million links, all of them needed to the end
        return _run(options)


def _run(options: Namespace) -> int:
    files = dict.fromkeys(options.source or ())  # each once
    facts = on_machines([(storable(path), _read(path)) for path in files]) if files else probe()
    if options.save is not None:
        write_file(options.save, to_json(facts))
    if options.json:
        print(to_json(facts), end="")
    if options.json and options.svg is None and options.html is None:
        return 0
    graph = merge(facts)
    verdict = classify(graph)
    if options.svg is not None:
        write_file(options.svg, to_svg(graph, verdict))
    if options.html is not None:
        write_file(options.html, to_html(graph, verdict))
    if not options.json and (options.save, options.svg, options.html) == (None, None, None):
        print(fitted(report(graph, verdict), sys.stdout), end="")
    return 0


def _read(path: str) -> list[Facts]:
    return read_stream(sys.stdin.buffer, "standard input") if path == STDIN else read_file(path)


def _parser() -> Parser:
    parser = Parser(
        prog="tokenring topology",
        description="What links the accelerators, and what follows from it.",
        allow_abbrev=False,  # of --measure, which is another command
    )
    add = parser.add_argument
    add("--from", dest="source", nargs="+", action="extend", metavar="FILE",
        help="dumps of tools (- for standard input), or a saved topology, instead of this machine; several are one "
        "machine seen by several tools, or several machines seen by one")  # fmt: skip
    add("files", nargs="*", help=SUPPRESS)  # refused, with the option that takes them
    add("--measure", action="store_true", help="transfers between ranks instead: --measure --help says more")
    add("--json", action="store_true", help="as JSON (docs/topology.md)")
    add("--save", metavar="FILE", help="write the JSON to a file, for --from and for bug reports")
    add("--svg", metavar="FILE", help="write a picture")
    add("--html", metavar="FILE", help="write a page with the picture and the report, complete in one file")
    return parser
