"""`tokenring bench --operator NAME`: linear layers and collectives, raced against torch.distributed's collectives."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from tokenring.cli.bench.emulate import add_options, check_options, start
from tokenring.cli.bench.results import MEASURED, PEER, Entry, RaceMachine, RaceReport, with_shape
from tokenring.cli.bench.table import GAP, bytes_text, count, machine_text, ms, shown
from tokenring.cli.call_options import add_report_options, check_rounds, check_transport, with_printed
from tokenring.cli.operator_names import COLLECTIVES, operator_name
from tokenring.cli.spelling import DTYPES, SIZES_TEXT, add_dtype, add_passes
from tokenring.display.console import Console, Ink, Parser
from tokenring.emulate.shapes import Shape
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.launch.command import Command, ranks_started
from tokenring.schedule.families.registry import is_known, parse
from tokenring.sequence.sizes import read_size

MODULE = "tokenring.cli.bench.operators_worker"
FORMAT, VERSION = "tokenring-bench-operator", 1
TORCH = "torch.distributed"
SCHEDULES = "auto,direct-q,direct-q/pieces2,direct-q/pieces4,tokenring"
OF_COLLECTIVES = "auto,direct-q,tokenring"
SEQ, FEATURES, WIDTH, BYTES = "2k", "1k", "512", "1M"


@dataclass(frozen=True)
class OperatorCase:
    """A case: tokens and features of all ranks together, or the bytes of a collective's whole tensor."""

    operator: str
    tokens: int
    features: int
    width: int
    nbytes: int
    dtype: str
    backward: bool
    transport: str
    schedules: list[str]
    rounds: int
    emulate: Shape | None = None
    compute_tflops: None = None  # products are computed

    @property
    def is_layer(self) -> bool:
        """True for a linear layer, False for a collective."""
        return self.operator not in COLLECTIVES

    @classmethod
    def of(cls, values: dict[str, Any]) -> OperatorCase:
        """Return the case whose values asdict gave."""
        return cls(**with_shape(values))


@dataclass(frozen=True)
class OperatorReport:
    """The measurements: an entry for each schedule, and one for torch.distributed."""

    case: OperatorCase
    machine: RaceMachine
    entries: list[Entry]

    @property
    def ranked(self) -> list[Entry]:
        """The entries, the fastest first; then those without times."""
        return sorted(self.entries, key=lambda each: each.median_s if each.was_timed else math.inf)

    @property
    def base(self) -> Entry | None:
        """The entry of torch.distributed, if it was measured."""
        return next((each for each in self.entries if each.kind == PEER and each.status == MEASURED), None)

    def complaint(self) -> str | None:
        """Return the sentence about a schedule of ours that is wrong or failed; None: none is."""
        return RaceReport.complaint(self)  # type: ignore[arg-type]

    def to_json(self) -> str:
        """Return the report as JSON, with a format version; NaN is null."""
        values = {"format": FORMAT, "version": VERSION, **asdict(self)}
        for entry in values["entries"]:
            found = entry["errors"].items()
            entry["errors"] = {name: error if math.isfinite(error) else None for name, error in found}
        return json.dumps(values, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> OperatorReport:
        """Read the report that to_json wrote."""
        values: dict[str, Any] = json.loads(text)
        for entry in values["entries"]:
            entry["errors"] = {name: math.nan if error is None else error for name, error in entry["errors"].items()}
        entries = [Entry(**each) for each in values["entries"]]
        return cls(OperatorCase.of(values["case"]), RaceMachine(**values["machine"]), entries)


def main(argv: list[str] | None, environment: Mapping[str, str]) -> int:
    """Run the race; return the exit code: 0, 1 (something of ours is wrong), 130 (interrupted).

    Raises ConfigurationError for options that do not fit.
    """
    outputs = {"json": OperatorReport.to_json, "save": OperatorReport.to_json}
    suffixes = {"json": (".json",), "save": (".json",)}
    case = partial(_case, ranks_started(environment) is not None)
    command = Command("bench", MODULE, _options, case, OperatorReport.from_json, outputs, _show, suffixes, start)
    return command.main(argv, environment)


def _options(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="tokenring bench --operator NAME",
        description="Race schedules of a linear layer or a collective against torch.distributed's collectives.",
        epilog="docs/bench.md says how it measures.",
    )
    add = parser.add_argument
    add("--operator", metavar="NAME", required=True, help="column, row, all-reduce, reduce-scatter or all-gather")
    add("--ranks", type=int, metavar="P", help="start so many processes on this machine, with one thread each")
    add("--seq", metavar="N", help=f"column, row: tokens of all ranks ({SEQ}), {SIZES_TEXT}")
    add("--features", metavar="N", help=f"column, row: output features of all ranks ({FEATURES})")
    add("--width", metavar="N", help=f"column, row: elements of a token ({WIDTH})")
    add("--bytes", metavar="N", help=f"collectives: the whole tensor ({BYTES})")
    add_dtype(parser, "fp32")
    add_passes(parser)
    add("--rounds", type=int, default=11, metavar="N", help="timed rounds (11)")
    add("--schedules", metavar="NAMES", help=f"where weights stay, separated by commas ({SCHEDULES})")
    add("--transport", default="auto", metavar="NAME", help="transport of the schedules (auto); torch uses Gloo")
    add_report_options(parser, "the report with every sample (docs/bench.md)", "the report")
    add_options(parser)
    return with_printed(parser.parse_args(argv))


def _case(started: bool, options: argparse.Namespace, ranks: int) -> OperatorCase:
    """Return the options as a case. Raises ConfigurationError for options that no rank could run."""
    name = operator_name(options.operator)
    layer = name not in COLLECTIVES
    for each in ("bytes",) if layer else ("seq", "features", "width"):
        if getattr(options, each) is not None:
            own = "--seq, --features, --width" if layer else "--bytes"
            raise ConfigurationError(f"--{each} does not go with --operator {name}, whose sizes are {own}")
    if options.svg is not None:
        raise ConfigurationError("--svg draws a race of attention, not of --operator NAME: leave it out")
    if options.compute is not None:
        raise ConfigurationError("--compute lets attention kernels sleep; products of --operator NAME are computed")
    if options.dtype == "fp16":
        raise UnsupportedError(f"--dtype fp16: --operator {name} takes fp32 and bf16")
    check_rounds(options)
    check_transport(options.transport)
    sizes = {each: read_size(f"--{each}", getattr(options, each) or default) for each, default in (
        ("seq", SEQ), ("features", FEATURES), ("width", WIDTH), ("bytes", BYTES))}  # fmt: skip
    for each in ("seq", "features") if layer else ():
        if sizes[each] % ranks:
            raise ConfigurationError(f"--{each} {sizes[each]}: {ranks} ranks do not divide it")
    schedules = _schedules(options.schedules or (SCHEDULES if layer else OF_COLLECTIVES))
    emulation: Any = {"transport": options.transport} | check_options(options, ranks, started)
    backward = layer and options.passes == "training"
    return OperatorCase(
        name, sizes["seq"], sizes["features"], sizes["width"], sizes["bytes"], DTYPES[options.dtype], backward,
        schedules=schedules, rounds=options.rounds, **emulation,
    )  # fmt: skip


def _schedules(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name != "auto" and not is_known(name):
            raise ConfigurationError(f"--schedules {text}: {name!r} is not the name of a schedule (docs/layer.md)")
        if name != "auto" and parse(name).family.moves != "Q":
            raise ConfigurationError(
                f"--schedules {text}: {name!r} moves weights, and torch's layers keep theirs: take those where weights "
                f"stay, as direct-q or tokenring"
            )
    return names


def _show(report: OperatorReport, options: argparse.Namespace, console: Console) -> int:
    return shown(report, operator_table(report, console.ink), options, console)


def case_text(case: OperatorCase) -> str:
    """Describe a case: column, forward, 2,048 tokens × 1,024 features of width 512, float32."""
    if not case.is_layer:
        return f"{case.operator} of {bytes_text(case.nbytes)}, {case.dtype}"
    passes = "forward and backward" if case.backward else "forward"
    sizes = f"{case.tokens:,} tokens × {case.features:,} features of width {case.width:,}"
    return f"{case.operator}, {passes}, {sizes}, {case.dtype}"


def operator_table(report: OperatorReport, ink: Ink) -> str:
    """Return the whole report as text."""
    case, base = report.case, report.base
    lines = [ink.bold(f"tokenring bench: {case_text(case)}"), ink.pale(machine_text(report.machine)), ""]
    if case.emulate is not None:
        lines.insert(2, ink.pale(f"emulated links: {case.emulate}"))
    heads = ["name", "what it is", "median ms", "min", "max", "IQR", "forward", "times as fast"]
    heads += ["busiest link", "error"]
    rows = []
    for entry in (each for each in report.ranked if each.was_timed):
        first, third = entry.quartiles_s
        times = (entry.median_s, min(entry.call_s), max(entry.call_s), third - first, entry.forward_median_s)
        faster = f"{base.median_s / entry.median_s:.2f}" if base is not None and entry.status == MEASURED else ""
        sent = "" if entry.link_bytes is None else bytes_text(entry.link_bytes)
        rows.append([entry.name, entry.what, *map(ms, times), faster, sent, f"{entry.worst_error:.1e}"])
    if rows:
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
        for row in (heads, *rows):
            cells = zip(row, widths, strict=True)
            text = GAP.join(cell.ljust(w) if at < 2 else cell.rjust(w) for at, (cell, w) in enumerate(cells))
            lines.append(text.rstrip())
    lines += [f"{each.status}: {each.name}: {each.reason}" for each in report.entries if each.status != MEASURED]
    legend = (
        f"A round's time is that of its slowest rank; medians over {count(case.rounds, 'round')}, in which everyone "
        f"has a turn, in changing order.",
        f"times as fast: the median of {TORCH} divided by this one. error: the largest relative Frobenius error of the "
        f"results against float64.",
    )
    lines += ["", *map(ink.pale, legend)]
    return "\n".join(lines) + "\n"
