"""Cells in which launches decide: each call of a kernel costs one, as a sleep, beside the time of what it computes.

    sudo python benchmarks/cells/run.py --launches --out launches.csv
    python benchmarks/cells/launch_cells.py launches.csv

The second command prints, for each cell, what auto takes and what is fastest, and how often auto is within 5% of that.
A launch is of a kernel alone: merges, copies and posts cost what they cost on the machine.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(Path(__file__).resolve().parent)]

from grid import Cell  # noqa: E402
from report import by_cell, read, regrets  # noqa: E402

NEAR = 1.05


@dataclass(frozen=True)
class LaunchCell(Cell):
    """A cell whose kernels' calls cost so much each."""

    launch_ms: float = 0.0

    @property
    def call_seconds(self) -> float:
        """Return the seconds of each call of a kernel, beside what it computes."""
        return self.launch_ms / 1e3


def launch_cells() -> list[Cell]:
    """Return the cells, grouped so that an emulation is set up once for all its cells."""
    factors = ("full-mesh", "switch", "ring"), ("6:6", "8:1"), ("communication", "latency"), (2.0, 20.0)
    return [
        LaunchCell(topology, 4, heads, "causal", "forward+backward", regime, launch_ms)
        for topology, heads, regime, launch_ms in product(*factors)
    ]


def table(path: Path) -> Iterator[str]:
    """Yield a line for each cell, and how often auto is near the best."""
    rows = read(path)
    ratios = regrets(rows)
    yield "| cell | auto | ms | best | ms | ratio |"
    yield "|---|---|---:|---|---:|---:|"
    for cell, group in by_cell(rows).items():
        both = next(row for row in group if row.auto), min(group, key=lambda row: row.measured)
        text = " | ".join(f"{row.schedule} | {row.measured:.0f}" for row in both)
        yield f"| {cell} | {text} | {ratios[cell]:.3f} |"
    near = sum(ratio <= NEAR for ratio in ratios.values())
    yield f"\nauto within {NEAR} x the best in {near} of {len(ratios)} cells, at most {max(ratios.values()):.3f} x"


if __name__ == "__main__":
    for line in table(Path(sys.argv[1])):
        print(line)
