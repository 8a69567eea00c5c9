"""Score what `tokenring advise` says of choices that others timed side by side (docs/published.json).

    benchmarks/advise_published.py [--rows REGEX] [--all] [--planner]

A pair is two rows of one machine, with the same sizes, mask, passes and layout, that differ by the schedule. Each row
is priced as `tokenring advise` prices a choice. Every second row, by the order of the ids, is set aside: no parameter
is fitted to these, but what advise adds was looked for after a comparison of all pairs, theirs too. Rows of
"side_by_side" came after all prices: steps of whole models, of which attention is a part, and ratios of two times. Of
them the order is compared, and no time. --all also lists the pairs; --planner leaves out what advice adds to the
planner's prices.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

from published import load, pattern, table
from published_rows import FA3, Row, call_of, excuse, published_seconds

from tokenring.cli.advise.pricing import (
    BY_OPERATORS,
    BY_OPERATORS_GATHERED,
    BY_OPERATORS_WAITED,
    FUSED,
    GATHER,
    Merging,
    as_run,
    choice_seconds,
)
from tokenring.planner.choosing.auto import make
from tokenring.planner.simulation.predict import predict

APART = 0.05  # by which two measurements differ at least, for the faster one to be named
BOUND = 0.25  # of a predicted time's error
# Of a system, by the first words of its name: the schedule that its ring is, and how it merges. Others are
# ring-flash-attention's code. The rings of xDiT and diffusers gather; MagiAttention's baselines merge by one kernel.
HOW: dict[str, tuple[str, Merging]] = {
    "xDiT": (GATHER, BY_OPERATORS_GATHERED), "diffusers": (GATHER, BY_OPERATORS_WAITED), FA3: ("ring", FUSED),
}  # fmt: skip
SCHEDULES = ("ring", "ulysses", "all-gather-kv")


class Timed(NamedTuple):
    """A row that an engine's choice stands for: the schedule that moves its blocks, measured and predicted seconds."""

    row: Row
    schedule: str
    published_s: float
    predicted_s: float

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.predicted_s / self.published_s


def choice_of(row: Row) -> str | None:
    """Return the schedule by which `tokenring advise` prices the row's choice; None: no engine of its offers that."""
    if excuse(row) or "one step" in row["measured"]:
        return None
    match = re.fullmatch(r"usp ulysses=([0-9]+) ring=[0-9]+", row["schedule"])
    if match:
        return f"usp/{match[1]}"
    return row["schedule"] if row["schedule"] in SCHEDULES else None


def cell_of(row: Row) -> tuple[object, ...]:
    """Return what two rows share that differ by their schedules only, beside the layout."""
    names = ("hardware", "world_size", "seq_len", "batch", "q_heads", "kv_heads", "head_dim", "dtype", "mask", "passes")
    return tuple(row[name] for name in names)


def are_choices(one: Row, other: Row) -> bool:
    """Return True if two rows are choices for one call. Ulysses has any layout: it holds whole sequences."""
    layouts = {one["layout"], other["layout"]} - {"any"}
    return cell_of(one) == cell_of(other) and choice_of(one) != choice_of(other) and len(layouts) <= 1


def pairs_of(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Return the pairs of rows that are choices for one call, in the order of their ids."""
    known = sorted((row for row in rows if choice_of(row)), key=lambda row: str(row["id"]))
    return [pair for pair in combinations(known, 2) if are_choices(*pair)]


def set_aside(pairs: Sequence[tuple[Row, Row]]) -> set[str]:
    """Return the ids of every second row of those in pairs, in the order of the ids."""
    return set(sorted({row["id"] for pair in pairs for row in pair})[1::2])


def timed(row: Row, planner: bool = False) -> Timed:
    """Price a row as `tokenring advise` prices a choice; planner: without what it adds to the planner's prices."""
    schedule = choice_of(row)
    assert schedule is not None
    ring, merging = HOW.get(row["system"].partition(",")[0], ("ring", BY_OPERATORS))
    call, published = call_of(row), published_seconds(row)
    if planner:
        return Timed(row, schedule, published, predict(make(call, schedule), call.setting).seconds)
    priced = ring if schedule == "ring" else schedule
    return Timed(row, schedule, published, choice_seconds(as_run(call), priced, merging))


def side_by_side(rows: Sequence[Row], planner: bool = False) -> Iterator[tuple[Timed, Timed]]:
    """Price the pairs of rows of which only the order can be compared; of a ratio the second time is 1."""
    for row in rows:
        if row["quantity"] == "ratio":
            other = timed({**row, "quantity": "seconds", "schedule": row["versus"]}, planner)
            yield timed({**row, "quantity": "seconds", "value": other.published_s / row["value"]}, planner), other
    whole = [row for row in rows if row["quantity"] == "seconds"]
    found = {row["id"]: timed(row, planner) for row in whole}
    for one, other in pairs_of(whole):
        if one["measured"] == other["measured"]:
            yield found[one["id"]], found[other["id"]]


def is_named(one: Timed, other: Timed) -> bool:
    """Return True if the faster of two is predicted to be the faster one."""
    return (one.predicted_s < other.predicted_s) == (one.published_s < other.published_s)


def differ(one: Timed, other: Timed) -> bool:
    """Return True if the measured times differ by more than APART of the shorter one."""
    times = one.published_s, other.published_s
    return max(times) / min(times) - 1 > APART


# ---------- what is printed


def verdict(name: str, pairs: Sequence[tuple[Timed, Timed]], rows: Sequence[Timed]) -> tuple[str, ...]:
    """Return a line of the summary."""
    apart = [pair for pair in pairs if differ(*pair)]
    named = sum(is_named(*pair) for pair in apart)
    within = sum(abs(each.ratio - 1) <= BOUND for each in rows)
    worst = max(rows, key=lambda each: abs(each.ratio - 1))
    return (
        name, f"{named} of {len(apart)}", f"{within} of {len(rows)}", f"{median(each.ratio for each in rows):.2f}",
        f"{worst.ratio:.2f} ({worst.row['id']})",
    )  # fmt: skip


MORE_HEAD = ("side by side", "faster named, of pairs > 5% apart")


def more_summary(pairs: Sequence[tuple[Timed, Timed]]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the rows of which only the order is compared: by system, and all."""
    for name in (*dict.fromkeys(one.row["system"] for one, _ in pairs), "all"):
        apart = [pair for pair in pairs if name in ("all", pair[0].row["system"]) and differ(*pair)]
        yield name, f"{sum(is_named(*pair) for pair in apart)} of {len(apart)}"


HEAD = ("rows", "faster named, of pairs > 5% apart", "times within 25%", "median ratio", "worst ratio")


def summary(found: dict[str, Timed], pairs: Sequence[tuple[Row, Row]], aside: set[str]) -> Iterator[tuple[str, ...]]:
    """Yield the lines of the summary: rows that were set aside, those that were not, and pairs of one of each."""
    for name, inside in (("set aside", 2), ("not set aside", 0), ("one of each", 1)):
        some = [pair for pair in pairs if sum(row["id"] in aside for row in pair) == inside]
        rows = {row["id"] for pair in some for row in pair}
        if rows:
            priced = [(found[one["id"]], found[other["id"]]) for one, other in some]
            yield verdict(name, priced, [found[each] for each in sorted(rows)])


def pair_cells(one: Timed, other: Timed, aside: set[str]) -> tuple[str, ...]:
    """Return a line of the list of pairs."""
    inside = sum(each.row["id"] in aside for each in (one, other))
    said = "" if not differ(one, other) else "named" if is_named(one, other) else "MISSED"
    return (
        one.row["id"], other.row["id"], f"{one.published_s / other.published_s:.2f}",
        f"{one.predicted_s / other.predicted_s:.2f}", f"{one.ratio:.2f}", f"{other.ratio:.2f}", str(inside), said,
    )  # fmt: skip


PAIR_HEAD = ("one", "other", "measured", "predicted", "ratio of one", "of other", "set aside", "")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pattern, default="", metavar="REGEX", help="only rows whose id contains it")
    parser.add_argument("--all", action="store_true", help="list the pairs as well")
    parser.add_argument("--planner", action="store_true", help="with the planner's prices alone")
    options = parser.parse_args(arguments)
    pairs = pairs_of(load()["measurements"])
    aside = set_aside(pairs)
    pairs = [pair for pair in pairs if all(options.rows.search(row["id"]) for row in pair)]
    found: dict[str, Timed] = {}
    for row in (row for pair in pairs for row in pair):
        if row["id"] not in found:
            print(row["id"], file=sys.stderr, flush=True)
            found[row["id"]] = timed(row, options.planner)
    others = [row for row in load()["side_by_side"] if options.rows.search(row["id"])]
    more = list(side_by_side(others, options.planner))
    if options.all:
        priced = [(found[a["id"]], found[b["id"]]) for a, b in pairs]
        print(table(PAIR_HEAD, (pair_cells(one, other, aside) for one, other in priced + more)))
    print(table(HEAD, summary(found, pairs, aside)))
    print(table(MORE_HEAD, more_summary(more)), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
