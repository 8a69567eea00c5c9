"""Race the transports of one machine: an exchange between two ranks, both ways at once; and the call's digest.

    torchrun --nproc-per-node 2 benchmarks/transports.py [--rounds 21]
    torchrun --nproc-per-node 4 benchmarks/transports.py --digest

Prints medians of interleaved rounds (the slower rank's time) and Gloo's over shared memory's.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from tokenring.backends.registry import make_transport
from tokenring.ir.schedule_data import REQUESTS

SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 26)
NAMES = ("shm", "gloo")


def buffers(transport: Any, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One to send from and one to receive into."""
    memory = transport.allocate(2 * size) if transport.target.one_sided else None
    memory = torch.empty(2 * size, dtype=torch.uint8) if memory is None else memory
    return memory[:size].fill_(transport.rank), memory[size : 2 * size].fill_(transport.rank)


def exchange(transport: Any, sent: torch.Tensor, received: torch.Tensor, times: int) -> float:
    """Seconds for each of so many exchanges with the peer."""
    peer = 1 - transport.rank
    dist.barrier()
    began = time.perf_counter()
    for _ in range(times):
        incoming = transport.recv(received, peer, REQUESTS, "benchmark")
        outgoing = transport.send(sent, peer, REQUESTS, "benchmark")
        incoming.wait()
        outgoing.wait()
    return (time.perf_counter() - began) / times


def slowest(seconds: float) -> float:
    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def race(rounds: int) -> None:
    for size in SIZES:
        transports = {name: make_transport(name, dist.group.WORLD, 60.0) for name in NAMES}
        memory = {name: buffers(transport, size) for name, transport in transports.items()}
        repeats = max(1, min(200, (1 << 24) // size))
        times: dict[str, list[float]] = {name: [] for name in NAMES}
        for turn in range(rounds + 1):
            for name, transport in transports.items():
                seconds = slowest(exchange(transport, *memory[name], repeats))
                if turn:
                    times[name].append(seconds)
        medians = {name: statistics.median(found) for name, found in times.items()}
        if dist.get_rank() == 0:
            texts = [f"{name} {1e6 * medians[name]:10.1f} us" for name in NAMES]
            ratio = medians["gloo"] / medians["shm"]
            print(f"{size:10d} bytes: {', '.join(texts)}, gloo / shm {ratio:.2f}", flush=True)
        for transport in transports.values():
            transport.close()


def digest(rounds: int) -> None:
    """Exchanges one after the other: what a rank that is late costs the others is not the digest's."""
    repeats = 200
    transports = {name: make_transport(name, dist.group.WORLD, 60.0) for name in NAMES}
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    for turn in range(rounds + 1):
        for name, transport in transports.items():
            dist.barrier()
            began = time.perf_counter()
            for _ in range(repeats):
                transport.exchange(b"d" * 32, "benchmark")
            seconds = slowest(time.perf_counter() - began) / repeats
            if turn:
                times[name].append(seconds)
    if dist.get_rank() == 0:
        for name, found in times.items():
            low, median, high = (1e6 * each for each in (min(found), statistics.median(found), max(found)))
            print(f"digest over {name}, {dist.get_world_size()} ranks: {median:.0f} us ({low:.0f} to {high:.0f})")
    for transport in transports.values():
        transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--digest", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    (digest if options.digest else race)(options.rounds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
