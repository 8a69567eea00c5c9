"""What came of the cells: how well predictions fit, what auto's choice cost, who won where.

    python benchmarks/cells/report.py [docs/cells.csv] [--again] [--svg docs/cells.svg]

Predictions are those that were written down when a cell was measured; --again makes them anew with the code at hand.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(HERE)]

from tokenring.display.svg import box, opening, style, text_at  # noqa: E402
from tokenring.planner.bounds.bound import is_attainable  # noqa: E402
from tokenring.sequence.mask import parse_mask  # noqa: E402

OTHERS = r"(ring|tokenring|multi-ring|ulysses)|(usp|double-ring|case-iii)/[0-9]+"
APART = 0.10  # of two measured times: closer ones are not ordered


@dataclass(frozen=True)
class Row:
    """One schedule in one cell; times in ms."""

    cell: str
    regime: str
    topology: str
    tflops: float  # of the kernels that slept
    attainable: bool  # whether the bound is known to be
    schedule: str
    auto: bool
    predicted: float
    compute: float
    bound: float
    measured: float
    best: float  # the fastest round
    within: float | None = None  # raced were schedules predicted to take so many times the best at most; None: all
    bundle_bytes: int = 0  # up to which messages went together
    link_gbit: float | None = None  # None: not written down
    ahead_bytes: int = 0  # up to which requests were received from the start


def read(path: Path) -> list[Row]:
    """The rows of a file, also of one from before the columns from `within` on."""
    with path.open(newline="") as lines:
        return [
            Row(
                row["cell"], row["regime"], row["topology"], float(row["tflops"]),
                is_attainable(parse_mask(row["mask"]), int(row["heads"].partition(":")[2]), int(row["ranks"])),
                row["schedule"], row["auto"] == "1",
                *(float(row[name]) for name in ("predicted_ms", "compute_ms", "bound_ms", "measured_ms", "min_ms")),
                float(row["within"]) if row.get("within") else None,
                int(row.get("bundle_bytes") or 0),
                float(row["link_gbit"]) if row.get("link_gbit") else None,
                int(row.get("ahead_bytes") or 0),
            )
            for row in csv.DictReader(lines)
        ]  # fmt: skip


def again(rows: Sequence[Row]) -> list[Row]:
    """The same measurements with predictions made now, also of schedules that are no candidates any more.

    Where what would be chosen now was not raced, the best of what was counts as chosen, and a line says so.
    """
    from grid import cells

    known = {cell.name: cell for cell in cells()}
    made = []
    for name, group in by_cell(rows).items():
        if name not in known or group[0].link_gbit not in (None, known[name].shape.link_gbit):
            sys.exit(f"{name}, links of {group[0].link_gbit} Gbit/s: grid.py has it no more; leave --again out")
        first, tflops = group[0], group[0].tflops
        target = replace(known[name].target, bundle_bytes=first.bundle_bytes, ahead_bytes=first.ahead_bytes)
        plan = known[name].plan(tflops, target)
        new = {each.name: each.predicted_seconds for each in plan.candidates if each.predicted_seconds is not None}
        bound = 1e3 * (plan.candidates[0].bound_seconds or 0.0)
        measured = {row.schedule for row in group}
        chosen = next((name for name in new if name in measured), None)
        if chosen != plan.name:
            print(f"{name}: {plan.name} would be chosen now, but was not raced; {chosen} counts")
        for row in group:
            seconds = new.get(row.schedule) or known[name].seconds(row.schedule, tflops, target)
            made.append(replace(row, auto=row.schedule == chosen, predicted=1e3 * seconds, bound=bound))
    return made


def by_cell(rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        found[row.cell].append(row)
    return found


def quantile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def errors(rows: Iterable[Row]) -> list[float]:
    return [abs(row.predicted / row.measured - 1) for row in rows]


def ordered_right(rows: Sequence[Row]) -> tuple[int, int]:
    """Of pairs in one cell that were measured apart: how many are predicted in that order, and how many there are."""
    right = total = 0
    for group in by_cell(rows).values():
        for a, b in combinations(group, 2):
            if max(a.measured, b.measured) > (1 + APART) * min(a.measured, b.measured):
                total += 1
                right += (a.measured < b.measured) == (a.predicted < b.predicted)
    return right, total


def regrets(rows: Sequence[Row]) -> dict[str, float]:
    """Of each cell auto's measured time over the best measured."""
    found = {}
    for name, group in by_cell(rows).items():
        chosen = [row.measured for row in group if row.auto]
        if chosen:
            found[name] = chosen[0] / min(row.measured for row in group)
    return found


def over_bound(cells: Iterable[Sequence[Row]]) -> Iterator[str]:
    """The best measured time and the best predicted one over the bound, where that can be attained and elsewhere."""
    known = [group for group in cells if group[0].bound]
    for title, some in (
        ("where it can be attained", [group for group in known if group[0].attainable]),
        ("elsewhere", [group for group in known if not group[0].attainable]),
    ):
        if some:
            measured = [min(row.measured for row in group) / group[0].bound for group in some]
            predicted = [min(row.predicted for row in group) / group[0].bound for group in some]
            yield (
                f"over the lower bound {title}, {len(some)} cells: best measured median "
                f"{statistics.median(measured):.2f}, largest {max(measured):.2f}; best predicted median "
                f"{statistics.median(predicted):.2f}, largest {max(predicted):.2f}"
            )


def over_others(cells: Mapping[str, Sequence[Row]]) -> Iterator[str]:
    """Auto's measured time over the best schedule that others ship, all in our executor, where wires decide."""
    found: dict[str, float] = {}
    for name, group in cells.items():
        if group[0].regime != "communication":
            continue
        others = [row.measured for row in group if is_shipped(row.schedule, name)]
        chosen = [row.measured for row in group if row.auto]
        if others and chosen:
            found[name] = chosen[0] / min(others)
    for title, some in (
        ("communication-bound cells", list(found.values())),
        ("of them with six heads", [value for name, value in found.items() if " 6:6 " in name]),
    ):
        if some:
            yield (
                f"auto over the best schedule that others ship, {len(some)} {title}: "
                f"geometric mean {statistics.geometric_mean(some):.3f}, largest {max(some):.3f}"
            )


def is_shipped(schedule: str, cell: str) -> bool:
    """Whether others' code has it."""
    from grid import deepspeeds

    _, ranks, heads, *_ = cell.split()
    uneven = deepspeeds(int(heads.partition(":")[2]), int(ranks))
    return schedule == uneven or re.fullmatch(OTHERS, schedule) is not None


def left_out(cells: Iterable[Sequence[Row]]) -> Iterator[str]:
    """How many cells lack schedules that were predicted to take long: who won there is known, who lost most is not."""
    counts = Counter(group[0].within for group in cells)
    for factor in sorted(factor for factor in counts if factor is not None):
        yield f"{counts[factor]} of them only with what was predicted to take at most {factor:g} times the best"


def report(rows: Sequence[Row]) -> None:
    cells = by_cell(rows)
    wrong = errors(rows)
    right, total = ordered_right(rows)
    print(f"{len(cells)} cells, {len(rows)} measurements")
    for line in left_out(cells.values()):
        print(line)
    print(f"error of predictions: median {statistics.median(wrong):.1%}, 95th percentile {quantile(wrong, 0.95):.1%}")
    print(f"pairs more than {APART:.0%} apart ordered right: {right} of {total}, {right / max(1, total):.1%}")
    regret = regrets(rows)
    values = list(regret.values())
    small = sum(value <= 1.05 for value in values) / len(values)
    print(f"regret: median {statistics.median(values):.3f}, at most 1.05 in {small:.0%}, largest {max(values):.3f}")
    for line in (*over_bound(cells.values()), *over_others(cells)):
        print(line)
    for regime in dict.fromkeys(row.regime for row in rows):
        some = [row for row in rows if row.regime == regime]
        mine = [value for name, value in regret.items() if name.endswith(regime)]
        print(
            f"  {regime:13} error {statistics.median(errors(some)):.1%}, "
            f"95th {quantile(errors(some), 0.95):.1%}, largest regret {max(mine):.3f}"
        )
    print("\ncell: best measured, auto's choice, KV ring and TokenRing over auto")
    for name, group in cells.items():
        part = "" if group[0].within is None else f" (within {group[0].within:g})"
        best = min(group, key=lambda row: row.measured)
        auto = next(row for row in group if row.auto)
        others = {row.schedule: row.measured for row in group}
        text = ", ".join(
            f"{other} {others[other] / auto.measured:.2f}" for other in ("ring", "tokenring") if other in others
        )
        print(
            f"  {name}{part}: {best.schedule} {best.measured:.1f} ms; {auto.schedule} {auto.measured:.1f} ms "
            f"({regret[name]:.3f}); {text}"
        )


COLOURS = {
    "paper": ("#ffffff", "#14181d"), "ink": ("#22282f", "#e8ecf0"), "grey": ("#66707b", "#9aa5b1"),
    "communication": ("#2f6db5", "#3f7fcb"), "balanced": ("#2f9e6b", "#3fb57f"), "latency": ("#cf4a5e", "#e8687b"),
    "sevenths": ("#b5792f", "#cf963f"),
}  # fmt: skip
LEGEND = {
    "communication": "communication-bound", "balanced": "balanced",
    "latency": "latency-bound", "sevenths": "communication-bound, lengths that 7 divides",
}  # fmt: skip
LINES = {"rule": ("#dfe4e9", "#2c333b")}
SIZE, MARGIN = 640, 70


def picture(rows: Sequence[Row]) -> str:
    """Predicted over measured, both in logarithms, a dot a measurement."""
    from math import log10

    low = min(min(row.predicted, row.measured) for row in rows)
    high = max(max(row.predicted, row.measured) for row in rows)

    def at(value: float) -> float:
        return MARGIN + log10(value / low) / log10(high / low) * (SIZE - 2 * MARGIN)

    title = f"{len(rows)} predictions in {len(by_cell(rows))} cells"
    lines = [*opening(SIZE, SIZE, title), *style(COLOURS, LINES), box(0, 0, SIZE, SIZE, "paper")]
    lines += [text_at(MARGIN, 32, title, 16, weight="bold")]
    lines += [text_at(MARGIN, SIZE - 18, "measured, ms →; predicted, ms ↑; lines: equal, and 20% off", 12, "grey")]
    for factor in (0.8, 1.0, 1.2):
        a, b = max(low, low / factor), min(high, high / factor)
        lines.append(
            f'<path class="rule" d="M{at(a):.1f} {SIZE - at(a * factor):.1f}L{at(b):.1f} {SIZE - at(b * factor):.1f}"/>'
        )
    for value in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000):
        if low <= value <= high:
            lines.append(text_at(at(value), SIZE - MARGIN + 18, str(value), 10, "grey", "middle"))
            lines.append(text_at(MARGIN - 8, SIZE - at(value) + 4, str(value), 10, "grey", "end"))
    for row in rows:
        x, y = at(row.measured), SIZE - at(row.predicted)
        lines.append(f'<circle class="{row.regime}" cx="{x:.1f}" cy="{y:.1f}" r="2" opacity="0.7"/>')
    for number, regime in enumerate(LEGEND):
        y = MARGIN + 18 * number
        lines.append(f'<circle class="{regime}" cx="{MARGIN + 10}" cy="{y}" r="4"/>')
        lines.append(text_at(MARGIN + 20, y + 4, LEGEND[regime], 12))
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=REPO / "docs" / "cells.csv")
    parser.add_argument("--again", action="store_true", help="predict anew")
    parser.add_argument("--svg", type=Path)
    options = parser.parse_args()
    rows = read(options.file)
    rows = again(rows) if options.again else rows
    report(rows)
    if options.svg is not None:
        options.svg.write_text(picture(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
