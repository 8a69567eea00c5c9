"""Measure every cell with every schedule that fits, on shaped links; resumable.

    sudo python benchmarks/cells/run.py [--out docs/cells.csv] [--rounds 9] [--seconds 60] [--only SUBSTRING]
        [--limit N] [--within FACTOR] [--launches]

Appends a row for each schedule of each cell that is not in the file yet. Needs root and a quiet machine.
benchmarks/cells/report.py says what came of it. With --launches the cells are those of launch_cells.py: each call of a
kernel costs a launch, as a sleep.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(HERE)]

from grid import Cell, cells  # noqa: E402
from launch_cells import launch_cells  # noqa: E402
from shaped import measured  # noqa: E402

from tokenring.emulate import Emulated  # noqa: E402
from tokenring.planner.choosing.plan import Plan  # noqa: E402

COLUMNS = (
    "cell", "topology", "ranks", "heads", "mask", "passes", "regime", "tokens", "tflops", "schedule", "auto",
    "predicted_ms", "compute_ms", "bound_ms", "measured_ms", "min_ms", "max_ms", "rounds",
    "within",  # --within, where it left schedules out; else empty
    "bundle_bytes",  # up to which messages went together; empty: each by itself
    "link_gbit",
    "ahead_bytes",  # up to which requests were received from the start
)  # fmt: skip
CELL_SECONDS = 900.0
T = TypeVar("T", bound=Any)  # a cell, which has a name and a shape


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "docs" / "cells.csv")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=60.0, help="of a cell, on rounds after the third")
    parser.add_argument("--only", default="", help="cells whose name contains this")
    within = "only schedules predicted to take at most so many times as long as the best"
    parser.add_argument("--within", type=float, default=float("inf"), metavar="FACTOR", help=within)
    parser.add_argument("--limit", type=int, default=10**6, help="measure at most so many cells")
    parser.add_argument("--launches", action="store_true", help="cells in which each kernel call costs a launch")
    options = parser.parse_args()
    done = read_done(options.out)
    asked = launch_cells() if options.launches else cells()
    waiting = [cell for cell in asked if cell.name not in done and options.only in cell.name][: options.limit]
    print(f"{len(waiting)} cells to measure, {len(done)} are in {options.out}", flush=True)
    measure_all(waiting, measure, options)
    return 0


def measure_all(
    waiting: Iterable[T], measure: Callable[[Emulated, T, argparse.Namespace], None], options: argparse.Namespace
) -> None:
    """Measure cells, each on the links of its shape; neighbours of one shape have them together."""
    for shape, group in groupby(waiting, key=lambda cell: cell.shape):
        with Emulated(shape.kind, shape.ranks, shape.link_gbit, **options_of(shape)) as net:
            for cell in group:
                measure(net, cell, options)


def measure_or_print(
    description: str | None, out: str, rounds: int, columns: tuple[str, ...], cells: Callable[[], Sequence[T]],
    measure: Callable[[Emulated, T, argparse.Namespace], None], table: Callable[[Path], Iterator[str]],
) -> int:  # fmt: skip
    """Be the command that measures those cells that are not in a file yet, or prints the table of one.

    out, rounds: what holds where the command says nothing; out is a file of docs/.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=REPO / "docs" / out)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", default="", help="cells whose name contains this")
    parser.add_argument("--table", type=Path, metavar="CSV", help="print what came of it")
    options = parser.parse_args()
    if options.table:
        print(*table(options.table), sep="\n")
        return 0
    done = read_done(options.out, columns)
    waiting = [cell for cell in cells() if cell.name not in done and options.only in cell.name]
    print(f"{len(waiting)} cells to measure", flush=True)
    measure_all(waiting, measure, options)
    return 0


def options_of(shape: object) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(shape).items()
        if name not in ("kind", "ranks", "link_gbit") and value not in (None, False)
    }


def read_done(path: Path, columns: tuple[str, ...] = COLUMNS) -> set[str]:
    """Return the cells in a file, to which rows will be added: it has these columns, or this ends here."""
    if not path.exists():
        return set()
    with path.open(newline="") as lines:
        rows = csv.DictReader(lines)
        if tuple(rows.fieldnames or ()) != columns:
            sys.exit(f"{path} has other columns than {', '.join(columns)}: give another --out")
        return {row["cell"] for row in rows}


def measure(net: Emulated, cell: Cell, options: argparse.Namespace) -> None:
    began = time.monotonic()
    plan = cell.plan()
    seconds = {each.name: each.predicted_seconds for each in plan.candidates if each.predicted_seconds is not None}
    names = [name for name, some in seconds.items() if some <= options.within * min(seconds.values())]
    found = measured(net, description(cell, names, options), CELL_SECONDS)
    write(options.out, cell, plan, found["seconds"], options.within if len(names) < len(seconds) else None)
    for name, why in found["failed"].items():
        print(f"  {name} failed: {why}", flush=True)
    took = f"{len(names)} schedules in {time.monotonic() - began:.0f} s"
    print(f"{cell.name}: {took}; {said(plan.name, found['seconds'])}", flush=True)


def said(name: str, seconds: dict[str, list[float]]) -> str:
    """How auto's choice did beside the best; either may have failed."""
    medians = {each: statistics.median(times) for each, times in seconds.items() if times}
    if not medians:
        return f"auto {name}; none of them ran"
    best = min(medians, key=lambda each: (medians[each], each))
    rest = f"best {best} {medians[best] * 1e3:.1f} ms"
    if name not in medians:
        return f"auto {name} failed, {rest}"
    return f"auto {name} {medians[name] * 1e3:.1f} ms, {rest}, regret {medians[name] / medians[best]:.3f}"


def description(cell: Cell, names: list[str], options: argparse.Namespace) -> dict[str, object]:
    size = cell.workload
    return {
        "name": cell.name, "tokens": size.q_length, "q_heads": size.q_heads, "kv_heads": size.kv_heads,
        "head_dim": size.head_dim, "mask": cell.mask, "passes": cell.passes, "layout": cell.layout.name,
        "tflops": cell.tflops, "call_seconds": cell.call_seconds, "schedules": names, "rounds": options.rounds,
        "seconds": options.seconds, "all_rounds": False,
    }  # fmt: skip


def write(path: Path, cell: Cell, plan: Plan, seconds: dict[str, list[float]], within: float | None) -> None:
    """All rows of a cell at once: a cell is in the file whole, or not at all.

    within: so many times the best prediction is the most of those that were measured; None: all were.
    """
    fresh = not path.exists()
    with path.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if fresh:
            rows.writerow(COLUMNS)
        for each in plan.candidates:
            times = seconds.get(each.name)
            if not times:
                continue
            figures = (each.predicted_seconds, each.compute_seconds, each.bound_seconds, statistics.median(times),
                       min(times), max(times))  # fmt: skip
            rows.writerow([
                cell.name, cell.topology, cell.ranks, cell.heads, cell.mask, cell.passes, cell.regime,
                cell.workload.q_length, cell.tflops, each.name, int(each.name == plan.name),
                *(f"{1e3 * (value or 0.0):.3f}" for value in figures), len(times),
                "" if within is None else f"{within:g}", cell.target.bundle_bytes or "",
                f"{cell.shape.link_gbit:g}", cell.target.ahead_bytes or "",
            ])  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
