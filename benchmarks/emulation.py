"""Measure emulated links and compare with what was asked.

    benchmarks/emulation.py [--link-gbit 0.05 0.1 0.25] [--rounds 7] [--only ring]

For each shape and pattern of messages: the time that the most loaded wire needs for its bytes alone over the median
time measured. Exit code 1 if one is off by more than 4%. Needs root. Messages go through Gloo, all at once; a round
ends when the last has arrived at the last rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO))

from tokenring.emulate import Emulated, Shape  # noqa: E402
from tokenring.emulate.ways import heaviest  # noqa: E402

TOLERANCE = 0.04  # rates are within 2%; behind switches, all to all costs some 20 ms more, once
SETTLE_SECONDS = 0.05  # from the last rank's arrival until all begin: no message is on its way any more
MOST_GBIT_OF_8 = 0.05  # above, two cores cannot keep the links of eight ranks busy
SECONDS = 1.0  # that the most loaded wire is busy
Flows = list[tuple[int, int]]


def patterns(shape: Shape) -> Iterator[tuple[str, Flows]]:
    ranks = range(shape.ranks)
    half = shape.ranks // 2
    across = [(a, b) for a in ranks for b in ranks if (a < half) != (b < half)]
    yield "a pair alone", [(0, 1)]
    yield "a pair, both ways", [(0, 1), (1, 0)]
    if shape.kind == "switch":
        yield "one to all", [(0, other) for other in ranks if other]
        yield "all to one", [(other, 0) for other in ranks if other]
    if shape.has_uplink:
        yield "across, one way", [(a, b) for a, b in across if a < half]
        yield "across, both ways", across
    if shape.kind == "ring":
        yield "to the opposite", [(0, half)]
        yield "all to the opposite", [(rank, (rank + half) % shape.ranks) for rank in ranks]
    yield "all to all", [(a, b) for a in ranks for b in ranks if a != b]


def shapes(gbit: float) -> Iterator[Shape]:
    for ranks in (4,) if gbit > MOST_GBIT_OF_8 else (8,):
        yield Shape("full-mesh", ranks, gbit)
        yield Shape("switch", ranks, gbit)
        yield Shape("ring", ranks, gbit)
        for half in (False, True):
            yield Shape("pcie-tree", ranks, gbit, half_duplex_uplink=half)
        yield Shape("two-node", ranks, gbit, gbit / 4)
        yield Shape("two-node", ranks, gbit, gbit / 2, node_fabric="switch", half_duplex_uplink=True)
        yield Shape("two-node", ranks, gbit, gbit / 2, nic_per_rank=True)


def sizes(shape: Shape, flows: Flows) -> tuple[int, float]:
    """Bytes of each message, and the seconds that the most loaded wire needs for them."""
    load = heaviest(shape.fabric, dict.fromkeys(flows, 1_000_000))
    assert load is not None
    nbytes = round(1_000_000 * SECONDS / load.seconds)
    return nbytes, load.seconds * nbytes / 1e6


# ---------- at a rank


def start_together() -> float:
    """The moment at which all begin. They share a clock, and who leaves a barrier last would have less to wait for."""
    import torch
    import torch.distributed as dist

    moment = torch.tensor(time.perf_counter(), dtype=torch.float64)
    dist.all_reduce(moment, dist.ReduceOp.MAX)
    began = moment.item() + SETTLE_SECONDS
    time.sleep(max(0.0, began - time.perf_counter()))
    return began


def run_rank(values: dict[str, object], rounds: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, shape = dist.get_rank(), Shape(**values)  # type: ignore[arg-type]
    others = [(rank + step) % shape.ranks for step in range(1, shape.ranks)]  # not everyone to rank 0 first
    for name, flows in patterns(shape):
        nbytes, wanted = sizes(shape, flows)
        data = torch.zeros(nbytes, dtype=torch.uint8)
        landing = {a: torch.empty_like(data) for a, b in flows if b == rank}
        seconds = []
        for turn in range(rounds + 1):
            began = start_together()
            works = [dist.irecv(into, a) for a, into in landing.items()]
            works += [dist.isend(data, b) for b in others if (rank, b) in flows]
            for work in works:
                work.wait()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn:  # the first makes the connections
                seconds.append(took.item())
        if rank == 0:
            print(json.dumps([name, wanted, seconds]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---------- the command


def main(arguments: list[str]) -> int:
    if "RANK" in os.environ:
        run_rank(json.loads(arguments[0]), int(arguments[1]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link-gbit", type=float, nargs="+", default=[0.05, 0.1, 0.25])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default="", help="shapes whose text contains this")
    spec = parser.parse_args(arguments)
    worst = 0.0
    print(f"{'shape':78} {'pattern':20} {'wire ms':>8} {'median':>8} {'min':>8} {'max':>8} {'wire/median':>12}")
    for gbit in spec.link_gbit:
        for shape in shapes(gbit):
            if spec.only in str(shape):
                worst = max(worst, measure(shape, spec.rounds))
    print(f"the largest error: {worst:.1%}")
    return 1 if worst > TOLERANCE else 0


def measure(shape: Shape, rounds: int) -> float:
    """Print a shape's lines; the largest error."""
    values = dict(vars(shape))
    with Emulated(**values) as net:
        here = str(Path(__file__).resolve().parent)
        lines = net.run(
            "emulation",
            [json.dumps(values), str(rounds)],
            300,
            environment={"PYTHONPATH": here},
            show=lambda line: None,
        )
    worst = 0.0
    for name, wanted, seconds in map(json.loads, lines):
        median = statistics.median(seconds)
        figures = [1e3 * each for each in (wanted, median, min(seconds), max(seconds))]
        print(f"{f'{shape.ranks} ranks, {shape}':78} {name:20} " + " ".join(f"{each:8.1f}" for each in figures), end="")
        print(f" {wanted / median:12.3f}", flush=True)
        worst = max(worst, abs(wanted / median - 1))
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
