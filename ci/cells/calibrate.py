"""What eight ranks on this machine's cores add to the time that links need: the constants of grid.py.

    sudo python ci/cells/calibrate.py [--ranks 8]

Prints, for ranks in namespaces with links so wide that they do not count: the time of a small message from post to
arrival, of a post, of a kernel call that sleeps for next to nothing, of a small merge, and the bytes a second of
copies while all ranks copy. Medians over rounds of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPO = HERE.parent.parent
sys.path[:0] = [str(REPO), str(HERE)]

WIDE_GBIT = 2.0
ROUNDS = 15
COPY_BYTES = 1 << 20
MANY = 16  # messages to each peer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    options = parser.parse_args()
    from tokenring.emulate import Emulated

    with Emulated("full-mesh", options.ranks, WIDE_GBIT) as net:
        paths = ":".join(map(str, (REPO, HERE)))
        environment = {"PYTHONPATH": paths, "TORCH_CPP_LOG_LEVEL": "ERROR", "CALIBRATE": "1"}
        lines = net.run("calibrate", [], 300.0, environment=environment, show=lambda line: None)
    found = json.loads(next(line for line in lines if line.startswith("{")))
    for name, value in found.items():
        print(f"{name:40} {value:.4g}")
    return 0


def on_a_rank() -> None:
    import torch
    import torch.distributed as dist

    import tokenring as tr
    from tokenring.bench.sleeping import Sleeping
    from tokenring.region import Patch
    from tokenring.runtime.merge import merge_

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    transport = tr.ContextParallel(transport="gloo").transport
    assert transport is not None
    kernel = Sleeping(1e6)

    def median(run: Callable[[], float]) -> float:
        """Of the slowest rank."""
        took = []
        for _ in range(ROUNDS):
            dist.barrier()
            time.sleep(0.02)
            seconds = torch.tensor(run(), dtype=torch.float64)
            dist.all_reduce(seconds, dist.ReduceOp.MAX)
            took.append(float(seconds))
        return statistics.median(took)

    small = {peer: torch.zeros(256) for peer in range(ranks)}
    into = {peer: torch.zeros(256) for peer in range(ranks)}
    peers = [(rank + step) % ranks for step in range(1, ranks)]

    def to_all() -> float:
        """Many small messages to and from every peer at once; what a post takes of it."""
        began = time.perf_counter()
        waits = [transport.recv(into[peer], peer, "requests", "calibrating") for peer in peers for _ in range(MANY)]
        waits += [transport.send(small[peer], peer, "requests", "calibrating") for peer in peers for _ in range(MANY)]
        for wait in waits:
            wait.wait()
        return (time.perf_counter() - began) / len(waits)

    def to_next() -> float:
        """One to the next rank, all ranks at once."""
        began = time.perf_counter()
        waits = [transport.recv(into[peers[-1]], peers[-1], "requests", "calibrating")]
        waits.append(transport.send(small[peers[0]], peers[0], "requests", "calibrating"))
        for wait in waits:
            wait.wait()
        return time.perf_counter() - began

    q = torch.zeros(1, 8, 64, 64)

    def call() -> float:
        began = time.perf_counter()
        kernel.forward(q, q, q, patch=Patch(0, 64, 0, 64), scale=1.0)
        return time.perf_counter() - began

    out, lse, scratch = torch.zeros(64, 1, 8, 64), torch.zeros(64, 1, 8), torch.zeros(2, 64, 1, 8)

    def merge() -> float:
        began = time.perf_counter()
        merge_(out, lse, out, lse, scratch)
        return time.perf_counter() - began

    source, target = torch.zeros(COPY_BYTES // 4), torch.zeros(COPY_BYTES // 4)

    def copy() -> float:
        began = time.perf_counter()
        target.copy_(source)
        return time.perf_counter() - began

    found = {
        "a message to the next rank, seconds": median(to_next),
        "a post, of many to all, seconds": median(to_all),
        "a kernel call, seconds": median(call),
        "a merge of 64 tokens (0.4 MB), seconds": median(merge),
        "copying, GB/s read and written": 2 * COPY_BYTES / median(copy) / 1e9,
    }
    if rank == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    if os.environ.get("CALIBRATE"):
        on_a_rank()
        sys.stdout.flush()
        os._exit(0)
    sys.exit(main())
