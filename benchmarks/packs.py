"""Layouts of packed documents: how even the work is, and how many rows the busiest port moves, beside MagiAttention's.

    python benchmarks/packs.py [--packs 50] [--ranks 4,8,16] [--length 65536] [--lengths NAMES] [--rows]

Packs of documents are drawn from several distributions of lengths (no document longer than a quarter of the pack), and
masked causally. Of each pack it looks at `layout="auto"`, the usual layouts, and, where MAGI_SRC names an unpacked
`magi_attention` folder, the layouts of MagiAttention's own solver (MinHeap and ToppHeap, chunks of 512 and 1,024 rows).
The rows that a rank receives are those of kv that its queries see and it does not own, each once: both sides could move
exactly these. Prints for each distribution and number of ranks the imbalance (pairs of the busiest rank over the mean),
the busiest port of auto over that of the best of Magi's settings that is as balanced, and the seconds of the search.
With --rows it counts, on the layouts of Magi's MinHeap, the rows that our schedule direct-kv moves, over those of which
queries elsewhere see anything, each once: what Magi's own exchange moves.
"""

from __future__ import annotations

import argparse
import csv
import importlib.abc
import importlib.machinery
import os
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

from tokenring.planner.layouts.balanced import balanced_layout, imbalance  # noqa: E402
from tokenring.schedule.names import named_schedule  # noqa: E402
from tokenring.sequence.layout import Layout, Positions, zigzag  # noqa: E402
from tokenring.sequence.mask import Causal, Documents, Mask  # noqa: E402
from tokenring.sequence.workload import Workload  # noqa: E402

BALANCED = 1.05  # an imbalance up to here counts as balanced
LONGEST = 4  # a document has at most this part of the pack
CHUNK_ROWS = (512, 1024)
TOP_P = (0.25, 0.5, 0.75)
TABLE = "../exps/dist_attn/benchmark/datasets/default/doc_length_distribution.csv"  # from MAGI_SRC


# ---------- packs


def from_table(path: Path) -> Callable[[Random], int]:
    """Return a draw of lengths from a table of ranges and how many documents have such a length."""
    with path.open() as file:
        lines = list(csv.DictReader(file))
    ranges = [tuple(int(end) for end in line["range"].strip("[]").split(",")) for line in lines]
    counts = [int(line["number"]) for line in lines]

    def draw(random: Random) -> int:
        low, high = random.choices(ranges, counts)[0]
        return random.randint(max(1, low), high)

    return draw


def chats(random: Random) -> int:
    """Draw one of many short documents, or one of a few long ones."""
    return random.randint(8192, 16384) if random.random() < 0.05 else random.randint(50, 600)


DRAWS: dict[str, Callable[[Random], int]] = {
    "log-normal": lambda random: int(random.lognormvariate(6.5, 1.3)) + 1,
    "uniform": lambda random: random.randint(1, 8192),
    "chats": chats,
}


def pack(draw: Callable[[Random], int], length: int, seed: int) -> Mask:
    """Return the mask of causal documents that fill a sequence; the last one is cut."""
    random, bounds = Random(seed), [0]
    while bounds[-1] < length:
        rows = draw(random)
        if rows <= length // LONGEST:
            bounds.append(min(length, bounds[-1] + rows))
    return Causal() & Documents(bounds)


# ---------- what moves


def busiest_port(mask: Mask, layout: Layout) -> int:
    """Return the rows that the busiest rank sends or receives."""
    sent, received = ports(mask, layout)
    return max(*sent, *received)


def ports(mask: Mask, layout: Layout) -> tuple[list[int], list[int]]:
    """Return the rows that each rank sends, and those that each receives."""
    sent, received, whole = [0] * layout.world_size, [0] * layout.world_size, Positions(0, layout.length)
    for rank in range(layout.world_size):
        needed = [
            (patch.col0, patch.col1)
            for chunk in layout.owned_by(rank)
            for patch in mask.region(layout.chunks[chunk], whole)
        ]
        for low, high in joined(needed):
            for chunk in range(low // layout.chunk_length, -(-high // layout.chunk_length)):
                at, owner = layout.chunks[chunk], layout.owners[chunk]
                if owner != rank:
                    rows = min(high, at.stop) - max(low, at.start)
                    received[rank] += rows
                    sent[owner] += rows
    return sent, received


def moved_rows(mask: Mask, layout: Layout) -> tuple[int, int]:
    """Return the rows of kv that direct-kv moves in a forward pass, and those that have to."""
    size = Workload(1, layout.length, layout.length, 8, 8, 128, torch.bfloat16)
    schedule = named_schedule("direct-kv/pieces1", size, layout, layout, mask)
    row_bytes = size.kv_heads * size.kv_dim * size.itemsize
    return sum(schedule.link_bytes(size, "forward").values()) // row_bytes, sum(ports(mask, layout)[1])


def joined(intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the intervals that together cover the same, disjoint and in order."""
    found: list[tuple[int, int]] = []
    for low, high in sorted(intervals):
        if found and low <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], high)
        else:
            found.append((low, high))
    return found


# ---------- MagiAttention's solver


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands in for packages of kernels that the solver's modules import and the solver does not use."""

    packages = ("triton", "debugpy", "flash_attn", "cutlass", "cuda", "einops", "tvm_ffi", "jinja2", "rich", "filelock")

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        found = name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__getattr__ = _anything  # type: ignore[method-assign]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        """Leave the module empty."""


def _anything(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *given, **_: given[0] if given and callable(given[0]) else (lambda function: function)


def magi_solver(folder: Path) -> Callable[[Mask, int, int], Iterator[tuple[str, Layout]]]:
    """Return a function of mask, length and ranks that yields the layouts of MagiAttention's settings."""
    os.environ["MAGI_ATTENTION_CPP_BACKEND"] = "0"
    package = types.ModuleType("magi_attention")
    package.__path__ = [str(folder)]
    package.__spec__ = importlib.machinery.ModuleSpec("magi_attention", None, is_package=True)
    sys.modules["magi_attention"] = package
    sys.meta_path.append(_Absent())

    def none(*_: object, **__: object) -> None:
        """Do nothing, as where there is no GPU."""

    torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = none, none
    torch.cuda.current_device, torch.cuda.synchronize = (lambda: "cpu"), none  # type: ignore[assignment, return-value]
    from magi_attention.common import AttnRanges  # type: ignore[import-not-found]
    from magi_attention.common.enum import AttnMaskType  # type: ignore[import-not-found]
    from magi_attention.meta import _make_dispatch_meta as made_by  # type: ignore[import-not-found]
    from magi_attention.meta.solver import dispatch_solver as solver  # type: ignore[import-not-found]

    algorithms = {"MinHeap": solver.MinHeapDispatchAlg()}
    algorithms |= {f"ToppHeap {p}": solver.ToppHeapDispatchAlg(p) for p in TOP_P}

    def layouts(mask: Mask, length: int, ranks: int) -> Iterator[tuple[str, Layout]]:
        ranges = AttnRanges.from_ranges([list(ends) for ends in pairwise(mask.cu_seqlens or ())])
        for rows in CHUNK_ROWS:
            bucket = made_by.make_global_bucket_from_qk_ranges(
                q_ranges=ranges, k_ranges=ranges, num_chunks=length // rows, chunk_size=rows, chunk_actual_sizes=None,
                attn_mask_type=[AttnMaskType.CAUSAL] * len(ranges), sort=False,
            )  # fmt: skip
            near = [solver.IOUAffinity.from_ranges(chunk.k_ranges) for chunk in bucket.q_chunks]
            for name, algorithm in algorithms.items():
                jobs = solver.DispatchJob.from_job_list(bucket.areas, near if "Topp" in name else None)
                data = solver.DispatchData(jobs=jobs, num_buckets=ranks, sample_areas=None)
                parts = solver.DispatchSolver(alg=algorithm).solve(dispatch_data=data).bucket_partitions
                owners = {chunk: rank for rank, part in enumerate(parts) for chunk in part}
                chunks = tuple(Positions(at * rows, (at + 1) * rows) for at in range(length // rows))
                dealt = tuple(owners[at] for at in range(len(chunks)))
                yield f"{name}, {rows}", Layout(name, ranks, length, chunks, dealt)

    return layouts


# ---------- the comparison


class Found(NamedTuple):
    """What one pack showed."""

    imbalance: float
    usual: float  # the imbalance of zigzag
    port: int
    peer: int | None  # the busiest port of the best of the peer's settings that is as balanced
    seconds: float


def look_at(mask: Mask, length: int, ranks: int, magi: Any) -> Found:
    began = time.process_time()
    layout = balanced_layout(mask, length, ranks)
    seconds, uneven = time.process_time() - began, imbalance(mask, layout)
    peer = None
    if magi is not None:
        tried = [each for _, each in magi(mask, length, ranks)]
        peer = min((busiest_port(mask, x) for x in tried if imbalance(mask, x) <= max(BALANCED, uneven)), default=None)
    return Found(uneven, imbalance(mask, zigzag(ranks, length)), busiest_port(mask, layout), peer, seconds)


def share(values: Sequence[float], part: float) -> float:
    """Return the value that this part of all do not exceed."""
    return sorted(values)[max(0, round(part * len(values)) - 1)]


def _print_rows(options: argparse.Namespace, draw: Callable[[Random], int], magi: Any) -> int:
    """Print the rows that move on the layouts of Magi's MinHeap; return the exit code."""
    if magi is None:
        print("--rows needs MAGI_SRC", file=sys.stderr)
        return 2
    for ranks in map(int, options.ranks.split(",")):
        for seed in range(options.packs):
            mask = pack(draw, options.length, seed)
            for name, layout in magi(mask, options.length, ranks):
                if name.startswith("MinHeap"):
                    ours, needed = moved_rows(mask, layout)
                    found = f"{ours} of {needed} rows, {ours / needed:.4f}"
                    print(f"{ranks} ranks, pack {seed}, {name}: {found}", flush=True)
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packs", type=int, default=50, help="of each distribution")
    parser.add_argument("--ranks", default="4,8,16")
    parser.add_argument("--length", type=int, default=65536, help="positions in a pack")
    parser.add_argument("--lengths", default="", help="distributions of lengths, joined by commas; all")
    parser.add_argument("--rows", action="store_true", help="count what moves on Magi's layouts instead")
    options = parser.parse_args()
    folder, draws = os.environ.get("MAGI_SRC"), dict(DRAWS)
    magi = magi_solver(Path(folder)) if folder else None
    if folder and (Path(folder) / TABLE).exists():
        draws = {"Magi's table": from_table(Path(folder) / TABLE), **draws}
    if options.rows:
        return _print_rows(options, next(iter(draws.values())), magi)
    wanted = options.lengths.split(",") if options.lengths else list(draws)
    print("lengths, ranks: imbalance of zigzag and auto (median, 95%, most); auto's busiest port over Magi's "
          "(median, 95%, most; share <= 0.75); search, ms of the processor (median, 95%)")
    for name in wanted:
        for ranks in map(int, options.ranks.split(",")):
            found = [
                look_at(pack(draws[name], options.length, seed), options.length, ranks, magi)
                for seed in range(options.packs)
            ]
            uneven, taken = [each.imbalance for each in found], [1e3 * each.seconds for each in found]
            ratios = [each.port / each.peer for each in found if each.peer]
            line = f"{name}, {ranks}: {statistics.median(each.usual for each in found):.2f}"
            line += f" -> {statistics.median(uneven):.3f}, {share(uneven, 0.95):.3f}, {max(uneven):.3f}; "
            if ratios:
                line += f"{statistics.median(ratios):.2f}, {share(ratios, 0.95):.2f}, {max(ratios):.2f}; "
                line += f"{sum(each <= 0.75 for each in ratios) / len(ratios):.0%}; "
            print(line + f"{statistics.median(taken):.0f}, {share(taken, 0.95):.0f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
