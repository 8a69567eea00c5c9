"""Auto against other people's code on the same emulated links, in cells of the campaign.

    sudo python benchmarks/cells/peers.py [--out FILE] [--rounds 9] [--only SUBSTRING] [--regime communication]
        [--real]

Each cell is one run of `tokenring bench --emulate ... --peers auto`: ring-flash-attn (zigzag, stripe, ring, llama3),
yunchang (Ulysses, USP) and torch (ring with all-gather and all-to-all) where they are installed and fit, in turns with
auto. All kernels sleep, at the rate by which the cell is what it is called (grid.py); with --real they compute, eight
processes on however many cores there are. What others ship but cannot run here runs in ours: the paper's TokenRing and
case III, MindSpeed's double ring, TASP's rings, DeepSpeed's uneven heads (more than ranks). A cell that is in the file
is not measured again. Needs root and a quiet machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests" / "support"), str(HERE)]

from grid import Cell, cells, deepspeeds  # noqa: E402

from tokenring.errors import ConfigurationError  # noqa: E402
from tokenring.schedule.families.registry import misfit, parse  # noqa: E402

SHIPPED = ("ring", "tokenring", "double-ring/2", "case-iii/2", "double-ring/4", "case-iii/4", "multi-ring")
COLUMNS = ("cell", "heads", "schedule", "kind", "status", "median_ms", "min_ms", "max_ms", "what")
CELL_SECONDS = 900


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="docs/cells-peers.csv; with --real docs/cells-peers-real.csv")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="")
    parser.add_argument("--regime", default="communication")
    parser.add_argument("--real", action="store_true", help="kernels compute")
    options = parser.parse_args()
    if options.out is None:
        options.out = REPO / "docs" / f"cells-peers{'-real' if options.real else ''}.csv"
    wanted = [cell for cell in cells() if cell.regime == options.regime and options.only in cell.name]
    for name in ("ring_flash_attn", "yunchang"):
        if find_spec(name) is None:
            parser.error(f"{name} is not installed: see docs/bench.md, Peers on a CPU")
    done = {row["cell"] for row in read(options.out)}
    for cell in wanted:
        if cell.name not in done:
            race(cell, options)
    report(read(options.out))
    return 0


def read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def shipped(cell: Cell) -> list[str]:
    """What others ship but cannot run here."""
    uneven = deepspeeds(cell.workload.kv_heads, cell.ranks)
    return [*SHIPPED, *([uneven] if uneven else [])]


def race(cell: Cell, options: argparse.Namespace) -> None:
    size, shape = cell.workload, cell.shape
    ours = [name for name in shipped(cell) if fits(name, cell)]
    command = [
        sys.executable, "-m", "tokenring", "bench", "--emulate", shape.kind, "--ranks", str(cell.ranks),
        "--link-gbit", str(shape.link_gbit), "--seq-len", str(size.q_length), "--heads", str(size.q_heads),
        "--kv-heads", str(size.kv_heads), "--head-dim", str(size.head_dim), "--mask", cell.mask,
        "--layout", "zigzag" if cell.mask == "causal" else "contiguous", "--rounds", str(options.rounds),
        "--schedules", ",".join(["auto", *ours]), "--peers", "auto",
    ]  # fmt: skip
    if not options.real:
        command += ["--compute", str(cell.tflops)]
    if len(cell.directions) == 1:
        command.append("--forward-only")
    if shape.uplink_gbit is not None:
        command += ["--uplink-gbit", str(shape.uplink_gbit), *(["--nic-per-rank"] if shape.nic_per_rank else [])]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "race.json"
        # A cache of its own: what somebody measured here is not for this race.
        environment = {**os.environ, "XDG_CACHE_HOME": folder}
        try:
            done = subprocess.run(
                [*command, "--json", str(file)], cwd=REPO, capture_output=True, text=True, timeout=CELL_SECONDS,
                env=environment,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{cell.name}: not done in {CELL_SECONDS} s", flush=True)
            return
        if not file.exists():
            print(f"{cell.name}: failed: {done.stderr.strip()[-300:]}", flush=True)
            return
        entries = json.loads(file.read_text())["entries"]
    if not any(entry["name"] == "auto" and entry["status"] == "measured" for entry in entries):
        print(f"{cell.name}: auto could not be measured: {entries[0]['reason']}", flush=True)
        return
    rows = []
    for entry in entries:
        if entry["kind"] == "one process":
            continue
        times = [1e3 * seconds for seconds in entry["call_s"]] if entry["status"] == "measured" else []
        figures = [statistics.median(times), min(times), max(times)] if times else []
        texts = [f"{value:.3f}" for value in figures] or [""] * 3
        why = entry["what"] if times else entry["reason"]
        rows.append([cell.name, cell.heads, entry["name"], entry["kind"], entry["status"], *texts, why])
    fresh = not options.out.exists()
    with options.out.open("a", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerows([COLUMNS, *rows] if fresh else rows)
    print(f"{cell.name}: {len(rows)} raced", flush=True)


def fits(name: str, cell: Cell) -> bool:
    """Whether a schedule can be made for the cell's ranks."""
    try:
        parse(name)
        return misfit(name, cell.ranks) is None
    except ConfigurationError:
        return False


def report(rows: list[dict[str, str]]) -> None:
    """Auto's time over that of the best of the others, cell by cell, and for each regime; below 1 auto is faster."""
    ratios: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row["cell"] for row in rows):
        mine = [row for row in rows if row["cell"] == name and row["status"] == "measured"]
        some = {row["schedule"]: float(row["median_ms"]) for row in mine}
        auto = some.pop("auto", None)
        if auto is None or not some:
            print(f"{name}: nothing to compare")
            continue
        best = min(some, key=lambda each: some[each])
        peers = [row["schedule"] for row in mine if row["kind"] == "peer"]
        theirs = min(peers, key=lambda each: some[each], default=None)
        ratio = ratios.setdefault(name.split()[-1], {})[name] = auto / some[best]
        text = f"{name}: auto {auto:.1f} ms, best shipped {best} {some[best]:.1f} ms ({ratio:.3f})"
        if theirs is not None:
            text += f"; of peers' own code {theirs} {some[theirs]:.1f} ms ({auto / some[theirs]:.3f})"
        print(text)
    for regime, found in ratios.items():
        print(f"\n{regime}: auto over the best of the others: largest {max(found.values()):.3f} in {len(found)} cells, "
              f"geometric mean {statistics.geometric_mean(found.values()):.3f}")  # fmt: skip
        if of_six := [1 / ratio for name, ratio in found.items() if " 6:6 " in name]:
            print(f"with 6 heads auto is {statistics.geometric_mean(of_six):.2f} × faster (geometric mean)")


if __name__ == "__main__":
    sys.exit(main())
