"""What the planner predicts for measurements that others published (docs/published.json), with one set of figures.

    benchmarks/published.py [--rows REGEX] [--markdown]

A row for each measurement: published, predicted, their ratio, and the ratio where the source's own rate of one
device stands in for ours; then medians of the error, |predicted / published - 1|. All rows take about five minutes
on one core. --markdown writes the computed parts of docs/published-compared.md, between their marks. Times are of
whole calls, where a row does not say otherwise; published rates were turned into times.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(Path(__file__).parent))

from published_rows import Row, device_of, excuse, predict_row, published_seconds  # noqa: E402

BOUND = 0.25  # the error above which a row needs a word
ADDED = ("h800-8", "a800-8", "l20-pcie-8")  # presets made for this comparison, before it


class Compared(NamedTuple):
    """A row, and the planner's prediction over what was measured."""

    row: Row
    published_s: float
    predicted_s: float
    own_s: float | None

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.published_s

    @property
    def error(self) -> float:
        return abs(self.ratio - 1)

    @property
    def own_error(self) -> float | None:
        return None if self.own_s is None else abs(self.own_s / self.published_s - 1)


def load() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DOCS / "published.json").read_text())
    return found


def compare(row: Row, given: dict[str, Any]) -> Compared:
    found = predict_row(row, given)
    return Compared(row, published_seconds(row), found.seconds, found.own_seconds)


# ---------- the table

HEAD = ("id", "machine", "what", "published ms", "predicted ms", "ratio", "ratio, own rate")


def cells(each: Compared) -> tuple[str, ...]:
    """A line of the table."""
    row = each.row
    passes = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwd + bwd"}[row["passes"]]
    layout = "" if row["layout"] == "any" else f", {row['layout']}"
    what = f"{row['schedule']}{layout}; {row['mask']}, {passes}"
    if "step" in row["measured"]:
        what += f"; {row['measured']}"
    own = "" if each.own_s is None else f"{each.own_s / each.published_s:.2f}"
    return (
        row["id"], row["hardware"], what, f"{1e3 * each.published_s:.3f}", f"{1e3 * each.predicted_s:.3f}",
        f"{each.ratio:.2f}", own,
    )  # fmt: skip


def groups(found: Sequence[Compared], first: Sequence[str]) -> Iterator[tuple[str, list[Compared]]]:
    """Whose median is shown."""
    yield "all that are predicted", list(found)
    yield "the fifteen named before any prediction", [each for each in found if each.row["id"] in first]
    yield "machines of older presets", [each for each in found if _machine(each) not in ADDED]
    keys: tuple[tuple[str, Callable[[Compared], str]], ...] = (
        ("system", lambda each: str(each.row["system"])),
        ("machine", _machine),
        ("certainty", lambda each: str(each.row["certainty"])),
        ("passes", lambda each: str(each.row["passes"])),
    )
    for name, key in keys:
        for value in dict.fromkeys(map(key, found)):
            yield f"{name}: {value}", [each for each in found if key(each) == value]


def _machine(each: Compared) -> str:
    return str(each.row["hardware"]).partition("*")[0]


GROUP_HEAD = ("rows", "number", "median error", "median ratio", "within 25%", "median error, own rate")


def group_cells(name: str, members: Sequence[Compared]) -> tuple[str, ...]:
    """A line of the summary."""
    own = [each.own_error for each in members if each.own_error is not None]
    return (
        name, str(len(members)), f"{median(each.error for each in members):.1%}",
        f"{median(each.ratio for each in members):.2f}", str(sum(each.error <= BOUND for each in members)),
        f"{median(own):.1%} ({len(own)})" if own else "",
    )  # fmt: skip


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ["---"] * len(head), *lines))


# ---------- the page


def parts(found: Sequence[Compared], left: Sequence[tuple[Row, str]], first: Sequence[str]) -> dict[str, str]:
    """What is written between the page's marks."""
    worst = sorted((each for each in found if each.error > BOUND), key=lambda each: -each.error)
    names = ", ".join(f"`{each.row['id']}` {each.ratio:.2f}" for each in worst)
    return {
        "medians": table(GROUP_HEAD, (group_cells(*each) for each in groups(found, first))),
        "outside": f"{len(worst)} of {len(found)}, with their ratios: {names}.\n",
        "left": "".join(f"- `{row['id']}`: {why}\n" for row, why in left),
        "rows": table(HEAD, map(cells, found)),
    }


def between(page: str, name: str) -> str:
    """What stands between the marks of a part."""
    return page.split(f"<!-- {name} -->\n")[1]


def written(page: str, made: dict[str, str]) -> str:
    """The page with its computed parts made anew."""
    for name, text in made.items():
        mark = f"<!-- {name} -->\n"
        before, _, after = page.split(mark)
        page = before + mark + text + mark + after
    return page


def pattern(text: str) -> re.Pattern[str]:
    """Return the regular expression of ids that an option gives. Raises ArgumentTypeError for a text that is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no regular expression ({error}): give one that ids contain, such as usp-l20 or omni.*f0; "
            f"write \\( for a bracket"
        ) from None


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=pattern, default="", metavar="REGEX", help="only rows whose id contains it")
    parser.add_argument("--markdown", action="store_true", help="of all rows, into docs/published-compared.md")
    options = parser.parse_args(arguments)
    data = load()
    found, left = [], []
    for row in data["measurements"]:
        if not options.markdown and not options.rows.search(row["id"]):
            continue
        if why := excuse(row):
            left.append((row, why))
            continue
        print(f"{row['id']} ({device_of(row).name})", file=sys.stderr, flush=True)
        found.append(compare(row, data["given"]))
    if options.markdown:
        page = (DOCS / "published-compared.md").read_text()
        (DOCS / "published-compared.md").write_text(written(page, parts(found, left, data["suggested_first"])))
    else:
        print(table(HEAD, map(cells, found)))
        named = [each for each in groups(found, data["suggested_first"]) if each[1]]
        print(table(GROUP_HEAD, (group_cells(*each) for each in named)), end="")
        for row, why in left:
            print(f"not predicted: {row['id']}: {why}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
