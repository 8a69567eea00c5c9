"""A benchmark's report as text."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Protocol

from tokenring.cli.bench.results import ONE, OURS, PEER, WRONG, CachedCase, Entry, RaceCase, RaceMachine, RaceReport
from tokenring.cli.spelling import heads_text, new_tokens_text
from tokenring.display.console import Console, Ink
from tokenring.display.safe_text import plain

GAP = "  "


class ShownReport(Protocol):
    """A report of a race, of any kind."""

    def to_json(self) -> str:
        """Return the report as JSON."""

    def complaint(self) -> str | None:
        """Return the sentence about what is wrong; None: nothing is."""


def shown(report: ShownReport, text: str, options: argparse.Namespace, console: Console) -> int:
    """Print a report, its text or JSON, and which files have it; return the exit code: 1 if something is wrong."""
    if options.printed:
        console.data(report.to_json())
    else:
        console.say(text.rstrip("\n"))
    for path in filter(None, (options.json, options.save, options.svg)) if not options.printed else ():
        console.say(console.ink.pale(f"written: {plain(path)}"))
    if (complaint := report.complaint()) is not None:
        console.complain(f"tokenring bench: {complaint}")
        return 1
    return 0


def case_text(case: RaceCase | CachedCase) -> str:
    """Describe a case: forward and backward, 4,096 tokens, 8 heads of 64, float32, causal.

    Of a cached step: forward, 1 new token over 8,192 cached, 8 heads of 64, float32.
    """
    passes = "forward and backward" if case.backward else "forward"
    dims = heads_text(case.head_dim, case.of_values)
    heads = f"{case.heads} heads of {dims}"
    if case.kv_heads != case.heads:
        heads = f"{case.heads} query heads on {case.kv_heads} kv heads of {dims}"
    batch = [f"batch {case.batch}"] if case.batch > 1 else []
    if isinstance(case, CachedCase):
        latents = " latents" if case.latents else ""
        new = new_tokens_text(case.tokens)
        return ", ".join([passes, f"{new} over {case.cached:,} cached{latents}", heads, case.dtype, *batch])
    return ", ".join([passes, f"{case.seq_len:,} tokens", heads, case.dtype, case.mask, *batch])


def machine_text(machine: RaceMachine) -> str:
    """Describe the machine: 2 ranks, one thread each; AMD EPYC, 2 cores; torch 2.13.0."""
    where = f"{machine.processor}, {count(machine.cores, 'core')}"
    hosts = f" on {count(machine.hosts, 'host')}" if machine.hosts > 1 else ""
    return f"{count(machine.ranks, 'rank')}{hosts}, one thread each; {where}; torch {machine.torch}"


def emulation_text(case: RaceCase | CachedCase) -> str | None:
    """Describe emulated links, or None: switch, ports of 0.1 Gbit/s; kernels sleep as if each rank had 0.05 TFLOP/s."""
    if case.emulate is None:
        return None
    sleeping = f"; kernels sleep as if each rank had {case.compute_tflops:g} TFLOP/s" if case.compute_tflops else ""
    return f"emulated links: {case.emulate}{sleeping}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun in the right form: 2 ranks."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def what_text(entry: Entry) -> str:
    """Return what an entry is, with the version of a peer."""
    if entry.kind == PEER and entry.version:
        return entry.what.replace("peer", f"peer {entry.version.partition('+')[0]}", 1)
    return entry.what


def bytes_text(size: int) -> str:
    """Return a size in three digits and a decimal unit: 12.6 MB."""
    value, units = float(size), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        del units[0]
    digits = 0 if units[0] == "B" or value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {units[0]}"


def table(report: RaceReport, ink: Ink) -> str:
    """Return the whole report as text."""
    timed = [entry for entry in report.ranked if entry.was_timed]
    where = filter(None, [machine_text(report.machine), emulation_text(report.case)])
    lines = [ink.bold(f"tokenring bench: {case_text(report.case)}"), *map(ink.pale, where), ""]
    if timed:
        lines += _grid(timed, report, ink)
    for texts in (report.reasons(), _legend(report, bool(timed))):
        lines += ["", *map(ink.pale, texts)] if texts else []
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _grid(timed: Sequence[Entry], report: RaceReport, ink: Ink) -> list[str]:
    base = report.base
    heads = ["name", "what it is", "median ms", "min", "max", "IQR"]
    heads += ["forward"] if report.case.backward else []
    heads += [f"/ {'best peer' if base and base.kind == PEER else 'fastest'}", "busiest link"]
    heads += ["wire ms", "/ wire"] if report.case.emulate else []
    heads += ["error"] if report.reference else []
    rows = [_cells(entry, report) for entry in timed]
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    lines = [ink.pale(_line(heads, widths))]
    for entry, row in zip(timed, rows, strict=True):
        text = _line(row, widths)
        if entry.status == WRONG:
            text = ink.bad(f"{text}  WRONG")
        elif entry.kind == OURS:
            text = ink.bold(text)
        lines.append(text)
    return lines


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of the table: two columns of words, the others of numbers."""
    return GAP.join(
        cell.ljust(width) if column < 2 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )


def _cells(entry: Entry, report: RaceReport) -> list[str]:
    first, third = entry.quartiles_s
    cells = [entry.name, what_text(entry)]
    cells += [ms(each) for each in (entry.median_s, min(entry.call_s), max(entry.call_s), third - first)]
    cells += [ms(entry.forward_median_s)] if report.case.backward else []
    ratio = report.ratio(entry)
    cells.append("" if ratio is None else f"{ratio:.2f}")
    cells.append("" if entry.link_bytes is None else bytes_text(entry.link_bytes))
    if report.case.emulate:
        alone = entry.wire_s
        cells.append("" if alone is None else ms(alone))
        cells.append("" if not alone else f"{entry.median_s / alone:.2f}")
    if report.reference:
        cells.append("NaN" if math.isnan(entry.worst_error) else f"{entry.worst_error:.1e}")
    return cells


def ms(seconds: float) -> str:
    """Return milliseconds with a sensible number of digits."""
    value = 1e3 * seconds
    return f"{value:,.{0 if value >= 999.5 else 1 if value >= 9.995 else 2}f}"


def _legend(report: RaceReport, timed: bool) -> list[str]:
    case, base = report.case, report.base
    parts = []
    if timed:
        parts.append(
            f"A round's time is that of its slowest rank; medians over {count(case.rounds, 'round')}, in which "
            f"everyone has a turn, in changing order. IQR: from the first to the third quartile."
        )
        if any(entry.kind == ONE for entry in report.entries if entry.was_timed):
            parts.append("one process: the whole sequence at rank 0, with more threads, while the other ranks wait.")
        if base:
            named = "best peer" if base.kind == PEER else "fastest"
            parts.append(f"/ {named}: the median divided by that of {base.name}.")
        parts.append(
            f"busiest link: bytes of {'both passes' if case.backward else 'the pass'} on the link that carries most. "
            f"{_checked(report)}"
        )
        parts += _wires(report)
    parts += [f"{note}." for note in report.notes]
    return parts


def _checked(report: RaceReport) -> str:
    if report.reference is None:
        return (
            "Results are not checked, for no kernel computes: they sleep for as long as the work would take. What "
            "merges, copies and sends is real."
        )
    results = "out, dq, dk and dv" if report.case.backward else "out"
    return f"error: the largest relative Frobenius error of {results} against {report.reference}."


def _wires(report: RaceReport) -> list[str]:
    """Return the legend about emulated links."""
    if report.case.emulate is None:
        return []
    text = "wire: what the most loaded wire of the links needs for its bytes alone, one pass after the other"
    ours = [entry for entry in report.ranked if entry.was_timed and entry.wire is not None]
    named = ", ".join(f"{entry.wire} for {entry.name}" for entry in ours)
    return [f"{text} ({named}). / wire: the median divided by that."]
