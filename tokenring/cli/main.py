"""The command `tokenring`: schedules to read, prove, export and draw, and a demonstration."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from tokenring._version import __version__
from tokenring.cli.spelling import (
    DTYPES,
    PRINTED,
    SIZES_TEXT,
    add_heads,
    add_mask,
    add_seq,
    also,
    check_counts,
    heads_text,
)
from tokenring.display.console import Parser, check_suffix, read_options, write_file
from tokenring.display.safe_text import plain, plain_lines
from tokenring.display.wrapping import fitted
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.schedule.size_limits import check_size

if TYPE_CHECKING:
    from tokenring.schedule.schedule import Schedule
    from tokenring.sequence.workload import Workload

ABOUT = "Context parallelism for PyTorch: plan, prove, run and measure attention schedules."
INTERRUPTED = 130
USAGE_ERROR = 2
COMMANDS = {  # beside `schedule`: the module, whose `main` takes the arguments, and a line of help
    "demo": ("tokenring.cli.demo", "train a small model on four local processes"),
    "bench": ("tokenring.cli.bench", "race schedules, and other libraries, on the same inputs"),
    "trace": ("tokenring.cli.trace", "run a schedule and show what each rank did when"),
    "plan": ("tokenring.cli.plan.command", "choose the fastest schedule for a machine, and say why"),
    "advise": ("tokenring.cli.advise.command", "choose flags for Megatron-core or diffusers, and say why"),
    "rates": ("tokenring.cli.rates.command", "measure this machine's attention kernel, or its transports"),
    "doctor": ("tokenring.cli.doctor", "report what is installed, used by default, and missing"),
    "topology": ("tokenring.cli.topology.command", "show what links the accelerators, here or in a dump"),
}
BUILD_OPTIONS = ("ranks", "layout", "mask", "direction", "pieces", "seq")  # what a file says itself


def main(
    argv: list[str] | None = None,
    out: TextIO | None = None,
    err: TextIO | None = None,
    stdin: TextIO | None = None,
) -> int:
    """Run one command; return the exit code. `out`, `err` and `stdin` stand in for the process's own."""
    out, err, stdin = out or sys.stdout, err or sys.stderr, stdin or sys.stdin
    arguments = sys.argv[1:] if argv is None else argv
    try:
        with redirect_stdout(out), redirect_stderr(err):
            code = _run(arguments, stdin)
            print(end="", flush=True)  # also where there is no standard output
        return code
    except TokenRingError as error:
        print(f"tokenring: {plain(' '.join(str(error).split()))}", file=err)
        return USAGE_ERROR
    except (ImportError, RuntimeError) as error:  # of torch, or of what torch loads
        from tokenring.imports import import_failure

        if (known := import_failure(error)) is None:
            raise
        print(f"tokenring: {plain(str(known))}", file=err)
        return USAGE_ERROR
    except UnicodeEncodeError as error:
        print(f"tokenring: {error.encoding} has no {error.object[error.start]!a}: use PYTHONIOENCODING=utf-8", file=err)
        return USAGE_ERROR
    except KeyboardInterrupt:  # before a command has begun to look after it itself
        print("interrupted: nothing was left behind", file=err)
        return INTERRUPTED
    except BrokenPipeError:
        # Who reads us has seen enough, as `head` has; nothing may be written there when Python ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _run(argv: list[str], stdin: TextIO) -> int:
    argv = argv or ["--help"]
    if argv[0] in COMMANDS:  # its options are its own; what it imports, no other command needs
        return int(import_module(COMMANDS[argv[0]][0]).main(argv[1:]))
    options = read_options(_parser().parse_args, svg_printed(argv))
    if isinstance(options, int):
        return options
    return _schedule_command(options, stdin)


def svg_printed(argv: list[str]) -> list[str]:
    """Return the arguments, with an --svg that no .svg file follows changed to print: --svg once took no file."""
    after = [*argv[1:], ""]
    return [
        f"--svg={PRINTED}" if each == "--svg" and not after[at].lower().endswith(".svg") else each
        for at, each in enumerate(argv)
    ]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="tokenring", description=ABOUT)
    parser.add_argument("--version", action="version", version=f"tokenring {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=Parser)
    for name, (_, text) in COMMANDS.items():
        commands.add_parser(name, help=text, add_help=False)
    schedule = commands.add_parser(
        "schedule",
        help="print, prove, export or draw a schedule",
        description="Print a schedule as a grid (both passes) with a summary of one pass; or export or draw it.",
    )
    _add_schedule_options(schedule)
    return parser


def _add_schedule_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("name", metavar="NAME", help="a name (ring, usp/2: docs/schedules.md), a .json file, or - for JSON from stdin")
    add("--ranks", type=int, metavar="P", help="number of ranks")
    add("--layout", metavar="NAME", help="contiguous, zigzag, striped, or cut finer: zigzag/2 (default: zigzag)")
    add_mask(parser, None)
    add("--direction", type=int, choices=(1, -1), help="direction of a ring (default: the one that moves fewer bytes)")
    add("--pieces", type=int, metavar="N", help="in how many parts each chunk moves")
    add_seq(parser, ("--length",), help=f"tokens of the whole sequence (default: small), {SIZES_TEXT}")
    add("--pass", dest="direction_of", choices=("forward", "backward"), default="forward",
        help="the pass of the summary and of the picture")  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="the schedule as JSON (docs/schedule-json.md)")
    form.add_argument("--svg", nargs="?", const=PRINTED, metavar="FILE",
        help="draw the pass: to FILE, else to standard output")  # fmt: skip
    saved = add("--save", metavar="FILE", help="write to a file instead: .txt, .json or .svg")
    also(parser, saved, "-o", "--output")
    add_heads(parser.add_argument_group("the summary's workload"), 32, 128, "bf16")


def _schedule_command(options: argparse.Namespace, stdin: TextIO) -> int:
    if options.svg not in (None, PRINTED):  # --svg FILE is --save FILE.svg
        check_suffix("--svg", options.svg, ".svg")
        if options.save is not None:
            raise ConfigurationError(f"--svg {options.svg} and --save {options.save} are two files: leave one out")
        options.save = options.svg
    check_counts(options)
    text_of = _form(options)
    is_file = options.name == "-" or options.name.endswith(".json")
    schedule = (_read(options, stdin) if is_file else _build(options)).verify()
    text = text_of(schedule, options)
    if options.save is None:
        print(fitted(text, sys.stdout) if text_of is _report else text, end="")
    else:
        write_file(options.save, text)
    return 0


def _build(options: argparse.Namespace) -> Schedule:
    from tokenring.schedule.by_name import schedule
    from tokenring.schedule.families.registry import parse
    from tokenring.sequence.mask import parse_mask

    if options.ranks is None:
        parse(options.name)  # says what is wrong with the name
        raise ConfigurationError(f"schedule {options.name!r}: give the number of ranks, as in --ranks 4")
    if options.ranks > 0:  # else they are refused below
        check_size(options.name, options.ranks, options.layout or "zigzag", options.pieces)
    return schedule(
        options.name,
        options.ranks,
        options.layout or "zigzag",
        parse_mask(options.mask or "full"),
        options.direction,
        options.pieces,
        options.seq,
    )


def _read(options: argparse.Namespace, stdin: TextIO) -> Schedule:
    from tokenring.schedule.schedule import Schedule

    for name in BUILD_OPTIONS:
        if getattr(options, name) is not None:
            raise ConfigurationError(f"--{name} builds a schedule; {options.name!r} is read, and has its own")
    try:
        text = stdin.read() if options.name == "-" else Path(options.name).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"cannot read {options.name!r}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"cannot read {options.name!r}: it is not UTF-8 text") from None
    return Schedule.from_json(text)


def _form(options: argparse.Namespace) -> Callable[[Schedule, argparse.Namespace], str]:
    """Return the function that writes the form asked for by an option or the file's name. Raises ConfigurationError."""
    asked = ".json" if options.json else ".svg" if options.svg else None
    found = check_suffix("--save", options.save, *FORMS)
    if asked and found and asked != found:
        raise ConfigurationError(f"--{asked[1:]} and --save {options.save!r} say different things: leave one out")
    return FORMS[asked or found or ".txt"]


def _json(schedule: Schedule, options: argparse.Namespace) -> str:
    return schedule.to_json()


def _picture(schedule: Schedule, options: argparse.Namespace) -> str:
    from tokenring.ir.picture import to_svg

    return to_svg(schedule, options.direction_of)


def _report(schedule: Schedule, options: argparse.Namespace) -> str:
    """Return the grid, and the cost of one pass."""
    workload = _workload(schedule, options)
    lines = [f"{name:9} {text}" for name, text in _summary(schedule, workload, options)]
    return plain_lines("\n".join([str(schedule), "", f"{options.direction_of} pass", *lines])) + "\n"


def _workload(schedule: Schedule, options: argparse.Namespace) -> Workload:
    import torch

    from tokenring.sequence.workload import Workload

    return Workload(
        options.batch,
        schedule.q_layout.length,
        schedule.kv_layout.length,
        options.heads,
        options.heads if options.kv_heads is None else options.kv_heads,
        options.dim,
        getattr(torch, DTYPES[options.dtype]),
        options.value_dim,
    )


def _summary(schedule: Schedule, workload: Workload, options: argparse.Namespace) -> Sequence[tuple[str, str]]:
    moves = schedule.moves_in(options.direction_of)
    partials = sum(move.block.made_at is not None for move in moves)
    flops = schedule.flops(workload, options.direction_of)
    busiest, idlest = (pick(flops, key=lambda rank: flops[rank]) for pick in (max, min))
    return [
        ("verified", "yes, both passes"),
        ("workload", _workload_text(workload, options.dtype)),
        ("tiles", str(len(schedule.tiles))),
        ("moves", f"{len(moves) - partials} requests, {partials} partials"),
        *_exchanges(schedule, options),
        ("links", _links_text(schedule.link_bytes(workload, options.direction_of))),
        ("flops", f"busiest rank {busiest}: {_si(flops[busiest])}, idlest rank {idlest}: {_si(flops[idlest])}"),
    ]


def _exchanges(schedule: Schedule, options: argparse.Namespace) -> Iterable[tuple[str, str]]:
    """Return what transports with collectives move as one operation; nothing where there is none."""
    from tokenring.lowering.exchanges import exchanges
    from tokenring.lowering.storage import storage_of

    found = exchanges(storage_of(schedule), options.direction_of)
    parts = [each.label + (f" in {each.parts} parts" if each.parts > 1 else "") for each in found]
    return [("exchanges", "; ".join(parts))] if parts else []


def _workload_text(workload: Workload, dtype: str) -> str:
    lengths = str(workload.q_length)
    if workload.kv_length != workload.q_length:
        lengths += f" × {workload.kv_length}"
    dims = heads_text(workload.head_dim, workload.value_dim)
    heads = f"{workload.q_heads} heads, {workload.kv_heads} kv heads of {dims}"
    return f"batch {workload.batch}, {lengths} tokens, {heads}, {dtype}"


def _links_text(links: dict[tuple[int, int], int]) -> str:
    if not links:
        return "none"
    src, dst = max(links, key=lambda link: links[link])
    worst, total = links[src, dst], sum(links.values())
    return f"worst {src}->{dst}: {_si(worst)}B, total {_si(total)}B on {len(links)} links"


FORMS: Mapping[str, Callable[[Schedule, argparse.Namespace], str]] = {
    ".txt": _report, ".json": _json, ".svg": _picture,
}  # fmt: skip


def _si(number: int) -> str:
    """Return three or four digits and a decimal prefix: 1.05 M."""
    value, prefix = float(number), ""
    for larger in "kMGTPE":
        if value < 1000:
            break
        value, prefix = value / 1000, larger
    return f"{number} " if not prefix else f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {prefix}"
