"""Race the ways to attend to a KV cache on shaped links: what auto takes beside all that a step can ask for by name.

    sudo python benchmarks/cells/cached_cells.py [--out docs/cached-cells.csv] [--rounds 7] [--only SUBSTRING]
    python benchmarks/cells/cached_cells.py --table docs/cached-cells.csv

Appends a row for each way of each cell that is not in the file yet. Needs root and a quiet machine. Kernels sleep. The
second command prints, for each cell, what auto takes and what is fastest, and how often auto is within 5% of that.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, product
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(HERE)]

import torch  # noqa: E402
from grid import CORES, UPLINK_SHARE, link_gbit  # noqa: E402
from run import CELL_SECONDS, measure_or_print  # noqa: E402
from shaped import measured  # noqa: E402

from tokenring.emulate import Emulated  # noqa: E402
from tokenring.emulate.shapes import Shape  # noqa: E402
from tokenring.planner.choosing.cached_calls import CachedCall, CachedWay, cached_ways  # noqa: E402
from tokenring.planner.interconnects.emulated import interconnect_of_shape, sleeping_machine  # noqa: E402
from tokenring.sequence.workload import Workload  # noqa: E402

RANKS, Q_HEADS, HEAD_DIM = 4, 8, 32
PORT_GBIT = 0.3  # of a rank: what all ranks send together takes little of two cores
WAYS = {"all": ("one-shot", "two-step"), "tokens": ("direct-q", "ring", "direct-kv")}
NEAR, FAR = 1.05, 1.15
TOPOLOGIES = ("full-mesh", "switch", "two-node")
# New tokens, cached ones, kv heads.
OF_ALL = ((1, 8192, 8), (16, 8192, 1), (64, 8192, 1), (256, 65536, 1), (2048, 8192, 2))
OF_TOKENS = (
    (128, 8192, 8), (1024, 8192, 8), (2048, 8192, 2), (4096, 8192, 2), (16384, 8192, 1),
    (1024, 65536, 1), (4096, 65536, 2), (8192, 65536, 1), (16384, 65536, 1), (4096, 262144, 1),
)  # fmt: skip
WIRE_OVER_COMPUTE = (5.0, 1.0)  # of the way with q
COLUMNS = (
    "cell", "topology", "home", "tokens", "cached", "kv_heads", "tflops", "way", "auto", "predicted_ms", "measured_ms",
    "min_ms", "max_ms", "rounds",
)  # fmt: skip
NO_COMPUTE_TFLOPS = 1e6


@dataclass(frozen=True)
class CachedCell:
    """One cell. `name` is its key in the results."""

    topology: str
    home: str
    tokens: int
    cached: int
    kv_heads: int
    wire_over_compute: float

    @property
    def name(self) -> str:
        return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in asdict(self).values())

    @property
    def shape(self) -> Shape:
        link = link_gbit(self.topology, RANKS, PORT_GBIT)
        return Shape(self.topology, RANKS, link, link * UPLINK_SHARE if self.topology == "two-node" else None)

    @cached_property
    def tflops(self) -> float:
        """Return the rate of each rank at which its kernels take so much less than the exchange of q or results."""
        size = self.call(NO_COMPUTE_TFLOPS).workload
        flops = 2 * size.q_heads * size.qo_dim * size.q_length * size.kv_length / RANKS
        way = WAYS[self.home][0]
        exchange = next(each.exchange_seconds for each in self.ways(NO_COMPUTE_TFLOPS) if each.name == way)
        return float(f"{flops / (exchange / self.wire_over_compute) / 1e12:.3g}")

    def call(self, tflops: float) -> CachedCall:
        """Return the call as it is planned, with the figures of the emulation."""
        size = Workload(1, self.tokens, self.cached, Q_HEADS, self.kv_heads, HEAD_DIM, torch.float32)
        return CachedCall(size, interconnect_of_shape(self.shape), sleeping_machine(tflops, self.shape, CORES))

    def ways(self, tflops: float) -> list[CachedWay]:
        """Return the ways that a step of this home can take, the fastest first."""
        return [each for each in cached_ways(self.call(tflops)) if each.name in WAYS[self.home]]


def cells() -> list[CachedCell]:
    """Return the cells, grouped so that an emulation is set up once for all its cells."""
    homes = [*(("all", each) for each in OF_ALL), *(("tokens", each) for each in OF_TOKENS)]
    return [
        CachedCell(topology, home, *sizes, WIRE_OVER_COMPUTE[number % 2])
        for number, (topology, (home, sizes)) in enumerate(product(TOPOLOGIES, homes))
    ]


def measure(net: Emulated, cell: CachedCell, options: argparse.Namespace) -> None:
    """Race the ways of a cell, and write a row for each."""
    job = {
        "name": cell.name, "home": cell.home, "tokens": cell.tokens, "cached": cell.cached, "q_heads": Q_HEADS,
        "kv_heads": cell.kv_heads, "head_dim": HEAD_DIM, "tflops": cell.tflops, "ways": WAYS[cell.home],
        "rounds": options.rounds, "topology": asdict(cell.shape), "cores": CORES,
    }  # fmt: skip
    found = measured(net, job, CELL_SECONDS, "cached_worker")
    predicted = {each.name: each.seconds for each in cell.ways(cell.tflops)}
    fresh = not options.out.exists()
    with options.out.open("a", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        if fresh:
            rows.writerow(COLUMNS)
        for way, times in found["seconds"].items():
            figures = predicted[way], statistics.median(times), min(times), max(times)
            rows.writerow([
                cell.name, cell.topology, cell.home, cell.tokens, cell.cached, cell.kv_heads, cell.tflops, way,
                int(way == found["auto"]), *(f"{1e3 * each:.3f}" for each in figures), len(times),
            ])  # fmt: skip
    medians = {way: statistics.median(times) for way, times in found["seconds"].items()}
    took = ", ".join(f"{way} {seconds * 1e3:.1f} ms" for way, seconds in medians.items())
    print(f"{cell.name}: auto {found['auto']}; {took}", flush=True)


def table(path: Path) -> Iterator[str]:
    """Yield a line for each cell, and how often auto is near the best."""
    with path.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    yield "| topology, who has new tokens, new, cached, kv heads, wire / compute | auto | ms | best | ms | ratio |"
    yield "|---|---|---:|---|---:|---:|"
    ratios = []
    for cell, group in groupby(rows, key=lambda row: row["cell"]):
        some = list(group)
        ms = {row["way"]: float(row["measured_ms"]) for row in some}
        auto, best = next(row["way"] for row in some if row["auto"] == "1"), min(ms, key=ms.__getitem__)
        ratios.append(ms[auto] / ms[best])
        yield f"| {cell} | {auto} | {ms[auto]:.1f} | {best} | {ms[best]:.1f} | {ratios[-1]:.3f} |"
    near, far = (sum(ratio <= limit for ratio in ratios) for limit in (NEAR, FAR))
    total, most = len(ratios), max(ratios)
    yield f"\nauto within {NEAR} x the best in {near} of {total} cells, {FAR} x in {far}, at most {most:.3f} x"


if __name__ == "__main__":
    sys.exit(measure_or_print(__doc__, "cached-cells.csv", 7, COLUMNS, cells, measure, table))
