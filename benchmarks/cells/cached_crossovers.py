"""Find where ways to attend to a KV cache cross on shaped links, beside where `tokenring plan --cached` says they do.

    sudo python benchmarks/cells/cached_crossovers.py [--out docs/cached-crossovers.csv] [--rounds 5] [--only SUBSTRING]
    python benchmarks/cells/cached_crossovers.py --table docs/cached-crossovers.csv

Three crossovers, on a mesh, a switch and two nodes of 2 to 8 ranks: from how many new tokens on the cache moves rather
than q, from how many cached ones on several ranks are faster than one, and from how many new tokens on results go in
two rounds. Each is looked for in the numbers of tokens around the predicted one: both ways are raced at each, and a
line through what their medians are to each other says where they cross. Needs root and a quiet machine. Kernels sleep.
Appends a row for each way of each number of tokens; the second command prints the crossovers.
"""

from __future__ import annotations

import argparse
import csv
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(HERE)]

import torch  # noqa: E402
from cached_cells import HEAD_DIM, NO_COMPUTE_TFLOPS, PORT_GBIT, Q_HEADS  # noqa: E402
from grid import CORES, UPLINK_SHARE, link_gbit  # noqa: E402
from run import CELL_SECONDS, measure_or_print  # noqa: E402
from shaped import all_measured  # noqa: E402

from tokenring.emulate import Emulated  # noqa: E402
from tokenring.emulate.shapes import Shape  # noqa: E402
from tokenring.planner.choosing.cached_calls import CachedCall, cached_ways, crossovers  # noqa: E402
from tokenring.planner.interconnects.emulated import interconnect_of_shape, sleeping_machine  # noqa: E402
from tokenring.sequence.workload import Workload  # noqa: E402

ONE_RANK = "one rank"
WAYS = {  # of each crossover: before it, and from it on
    "cache-moves": (("direct-q",), ("direct-kv", "ring")),
    "several": ((ONE_RANK,), ("one-shot", "two-step")),
    "two-step": (("one-shot",), ("two-step",)),
}
HOMES = {"cache-moves": "tokens", "several": "all", "two-step": "all"}
SIZES = (  # what crosses, new tokens, cached ones, kv heads; of what crosses 0
    ("cache-moves", 0, 8192, 1), ("cache-moves", 0, 4096, 4), ("two-step", 0, 8192, 1), ("several", 128, 0, 1),
)  # fmt: skip
GROUPS = (
    ("full-mesh", 2), ("full-mesh", 4), ("switch", 2), ("switch", 4), ("two-node", 4), ("switch", 8), ("full-mesh", 8),
)  # fmt: skip
WIRE_OVER_COMPUTE = {"cache-moves": 2.0, "several": 8.0, "two-step": 2.0}  # of q, or of results in one round
AROUND = (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)  # of the predicted number
SLOW_GBIT = PORT_GBIT / 16  # so that few new tokens take long on the way, whose other work all ranks do on few cores
REFERENCE_TOKENS = 512  # where nothing says how many
LAYOUT = "zigzag"  # all ranks are done with new tokens among themselves at about the same time
WITHIN = 1.25
COLUMNS = (
    "cell", "topology", "ranks", "crossover", "kv_heads", "tflops", "tokens", "cached", "way",
    "predicted_ms", "measured_ms", "min_ms", "max_ms", "rounds",
)  # fmt: skip


@dataclass(frozen=True)
class Crossing:
    """A crossover to look for. `name` is its key in the results."""

    topology: str
    ranks: int
    what: str
    tokens: int
    cached: int
    kv_heads: int

    @property
    def name(self) -> str:
        return " ".join(str(value) for value in asdict(self).values())

    @property
    def shape(self) -> Shape:
        link = link_gbit(self.topology, self.ranks, SLOW_GBIT if self.what == "several" else PORT_GBIT)
        return Shape(self.topology, self.ranks, link, link * UPLINK_SHARE if self.topology == "two-node" else None)

    @property
    def ways(self) -> tuple[str, ...]:
        before, after = WAYS[self.what]
        return before + after

    @cached_property
    def tflops(self) -> float:
        """Return the rate of each rank at which its kernels take so much less than the exchange, somewhere near."""
        tokens, cached = self.tokens or REFERENCE_TOKENS, self.cached or 16 * REFERENCE_TOKENS
        call = self.call(tokens, cached, NO_COMPUTE_TFLOPS)
        size = call.workload
        flops = 2 * size.q_heads * size.qo_dim * tokens * cached / self.ranks
        way = "direct-q" if self.what == "cache-moves" else "one-shot"
        exchange = next(each.exchange_seconds for each in cached_ways(call) if each.name == way)
        return float(f"{flops / (exchange / WIRE_OVER_COMPUTE[self.what]) / 1e12:.3g}")

    def call(self, tokens: int, cached: int, tflops: float | None = None) -> CachedCall:
        """Return the call as it is planned, with the figures of the emulation."""
        size = Workload(1, tokens, cached, Q_HEADS, self.kv_heads, HEAD_DIM, torch.float32)
        machine = sleeping_machine(tflops or self.tflops, self.shape, CORES)
        return CachedCall(size, interconnect_of_shape(self.shape), machine)

    def predicted(self, tflops: float | None = None) -> int | None:
        """Return the crossover as `tokenring plan --cached` prints it. tflops: of each rank, if not the cell's own."""
        found = crossovers(self.call(self.tokens or REFERENCE_TOKENS, self.cached or REFERENCE_TOKENS, tflops))
        return {"cache-moves": found.cache_moves, "several": found.several, "two-step": found.two_step}[self.what]

    def sizes(self, predicted: int) -> list[tuple[int, int]]:
        """Return numbers of new and of cached tokens around the crossover, which the ranks divide."""
        unit = 1 if self.what == "two-step" else 2 * self.ranks  # chunks of the layout; every rank has the former
        numbers = sorted({max(1, round(share * predicted / unit)) * unit for share in AROUND})
        return [(number, self.cached) if self.cached else (self.tokens, number) for number in numbers]


def crossings() -> list[Crossing]:
    """Return what is looked for, grouped so that an emulation is set up once for all that it is looked for on."""
    found = [Crossing(*group, *sizes) for group in GROUPS for sizes in SIZES]
    return [each for each in found if each.what != "two-step" or each.ranks > 2]  # with two ranks nothing crosses


def crossing_named(name: str) -> Crossing:
    """Return the crossing of a row of the results."""
    topology, ranks, what, *sizes = name.split()
    return Crossing(topology, int(ranks), what, *map(int, sizes))


def measure(net: Emulated, crossing: Crossing, options: argparse.Namespace) -> None:
    """Race the ways around a crossover, and write a row for each."""
    predicted = crossing.predicted()
    if predicted is None:
        print(f"{crossing.name}: the plan has no crossover", flush=True)
        return
    sizes = crossing.sizes(predicted)
    jobs: list[dict[str, Any]] = [
        {
            "name": crossing.name, "home": HOMES[crossing.what], "tokens": tokens, "cached": cached,
            "q_heads": Q_HEADS, "kv_heads": crossing.kv_heads, "head_dim": HEAD_DIM, "tflops": crossing.tflops,
            "ways": crossing.ways, "rounds": options.rounds, "topology": asdict(crossing.shape), "cores": CORES,
            "layout": LAYOUT,
        }
        for tokens, cached in sizes
    ]  # fmt: skip
    measured: list[dict[str, str]] = []
    for (tokens, cached), found in zip(sizes, all_measured(net, jobs, CELL_SECONDS, "cached_worker"), strict=True):
        seconds = {each.name: each.seconds for each in cached_ways(crossing.call(tokens, cached))}
        for way, times in found["seconds"].items():
            figures = seconds[way], statistics.median(times), min(times), max(times)
            row = (
                crossing.name, crossing.topology, crossing.ranks, crossing.what, crossing.kv_heads, crossing.tflops,
                tokens, cached, way, *(f"{1e3 * each:.3f}" for each in figures), len(times),
            )  # fmt: skip
            measured.append(dict(zip(COLUMNS, map(str, row), strict=True)))
    fresh = not options.out.exists()
    with options.out.open("a", newline="") as file:
        rows = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if fresh:
            rows.writeheader()
        rows.writerows(measured)
    print(line(measured)[0], flush=True)


def crossing_of(rows: Sequence[dict[str, str]]) -> float:
    """Return where the ways of before and those of after take equally long; inf: nowhere.

    By the line of least squares through the logarithms of the numbers and of what the medians are to each other.
    """
    before, after = WAYS[rows[0]["crossover"]]
    crosses = "cached" if rows[0]["crossover"] == "several" else "tokens"
    numbers, ratios = list[float](), list[float]()
    for number, some in groupby(rows, key=lambda row: int(row[crosses])):
        ms = {row["way"]: float(row["measured_ms"]) for row in some}
        numbers.append(math.log(number))
        ratios.append(math.log(min(ms[way] for way in after if way in ms) / min(ms[way] for way in before)))
    slope, start = statistics.linear_regression(numbers, ratios)
    return math.exp(-start / slope) if slope < 0 else math.inf


def line(rows: Sequence[dict[str, str]]) -> tuple[str, float]:
    """Return a line of the table, and measured over predicted, or its inverse: what is larger."""
    first = rows[0]
    crossing = crossing_named(first["cell"])
    predicted, found = crossing.predicted(float(first["tflops"])) or math.inf, crossing_of(rows)
    ratio = found / predicted
    name = f"{first['topology']} | {first['ranks']} | {first['crossover']} | {first['kv_heads']}"
    off = max(ratio, 1 / ratio) if ratio else math.inf
    return f"| {name} | {predicted:,} | {found:,.0f} | {ratio:.2f} |", off


def table(path: Path) -> Iterator[str]:
    """Yield a line for each crossover, and how many are near the predicted one."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    yield "| topology | ranks | crossover | kv heads | predicted tokens | measured | ratio |"
    yield "|---|---:|---|---:|---:|---:|---:|"
    ratios: dict[str, list[float]] = {what: [] for what in WAYS}
    for _, group in groupby(rows, key=lambda row: row["cell"]):
        some = list(group)
        text, off = line(some)
        ratios[some[0]["crossover"]].append(off)
        yield text
    for what, each in ratios.items():
        if each:
            near = sum(ratio <= WITHIN for ratio in each)
            yield f"\n{what}: within {WITHIN} x in {near} of {len(each)}, at most {max(each):.2f} x"


if __name__ == "__main__":
    sys.exit(measure_or_print(__doc__, "cached-crossovers.csv", 5, COLUMNS, crossings, measure, table))
