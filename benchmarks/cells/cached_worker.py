"""Be one rank of a race of ways to attend to a KV cache: python -m cached_worker JOB.json, in every namespace.

Rank 0 prints a line of JSON for each cell: the seconds of every round of every way, by the slowest rank, and which
way auto takes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from worker import SETTLE_SECONDS, WAIT_SECONDS

import tokenring as tr
from tokenring.cli.bench.sleeping import SleepingContext, SleepingPartial, cached_kernels
from tokenring.emulate.shapes import Shape
from tokenring.planner.interconnects.emulated import interconnect_of_shape, sleeping_machine

ONE_RANK = "one rank"


def race(cell: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of all ways of a cell, in turns, and which one auto takes."""
    shape = Shape(**cell["topology"])
    layout = cell.get("layout", "contiguous")
    net = interconnect_of_shape(shape, sleeping_machine(cell["tflops"], shape, cell["cores"]))
    cp = SleepingContext(
        cell["tflops"], transport="gloo", schedule="direct-q", layout=layout, topology=net,
        timeout_seconds=WAIT_SECONDS,
    )  # fmt: skip
    ranks, home, tokens = cp.world_size, cell["home"], cell["tokens"]
    cache = cache_of(cp, cell)
    for name in ("direct-kv", "ring"):
        cache.movers[name] = SleepingContext(
            cell["tflops"], layout=layout, schedule=name, transport=cp.transport, timeout_seconds=WAIT_SECONDS
        )
    caches = dict.fromkeys(cell["ways"], cache)
    if ONE_RANK in caches:  # rank 0 has all that is cached; the others wait for it
        lone = SleepingContext(cell["tflops"], group="self", layout=layout)
        caches[ONE_RANK] = cache_of(lone, cell) if cp.rank == 0 else None
    part = tokens // ranks if home == "tokens" else tokens
    q = torch.zeros(1, part, cell["q_heads"], cell["head_dim"])
    new = torch.zeros(1, part, cell["kv_heads"], cell["head_dim"])
    seconds: dict[str, list[float]] = {way: [] for way in cell["ways"]}
    kernel = SleepingPartial(cell["tflops"])
    with torch.inference_mode(), cached_kernels(kernel, kernel.flash):
        for turn in range(cell["rounds"] + 1):
            for way in cell["ways"]:
                took = one_call(caches[way], "auto" if way == ONE_RANK else way, home, tokens, q, new)
                if turn:  # the first makes programs and connections
                    seconds[way].append(took)
        one_call(cache, "auto", home, tokens, q, new)
    auto = next(iter(cache.choices.values()), cell["ways"][0])
    return {"cell": cell["name"], "seconds": seconds, "auto": auto}


def cache_of(cp: tr.ContextParallel, cell: dict[str, Any]) -> tr.KVCache:
    """Return a cache over these ranks that holds the cell's tokens, and has room for those of all calls."""
    capacity = cell["cached"] + 2 * (cell["rounds"] + 3) * (len(cell["ways"]) + 1) * cell["tokens"] + 4096
    cache = tr.KVCache(cp, layers=1, kv_heads=cell["kv_heads"], head_dim=cell["head_dim"], capacity=capacity, page=256)
    with cache.step(cell["cached"], "tokens") as step:
        assert step.layout is not None
        zeros = torch.zeros(1, cell["kv_heads"], cell["cached"] // cp.world_size, cell["head_dim"])
        cache.sharded(0, zeros, zeros, step.layout)
    return cache


def one_call(
    cache: tr.KVCache | None, way: str, home: str, tokens: int, q: torch.Tensor, new: torch.Tensor
) -> float:
    """Return the seconds of the slowest rank; the cache is as before afterwards. A rank without one only waits."""
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    took = 0.0
    if cache is not None:
        with cache.step(tokens, home, schedule=way):  # type: ignore[arg-type]
            began = time.perf_counter()
            tr.cached_attention(q, new, new, cache, 0, q_home=home)  # type: ignore[arg-type]
            took = time.perf_counter() - began
        cache.drop(tokens)
    slowest = torch.tensor(took, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def main() -> int:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
        result = race(cell)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Gloo's threads may outlive the group
