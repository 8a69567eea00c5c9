"""One rank of a cell's race: python -m worker JOB.json, as the campaign starts it in every namespace.

Rank 0 prints a line of JSON for each cell: the seconds of every round of every schedule, by the slowest rank.
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

import tokenring as tr
from tokenring.cli.bench.sleeping import SleepingContext
from tokenring.errors import TokenRingError
from tokenring.runtime.agreement import agree  # noqa: F401 (loaded before any clock runs)
from tokenring.sequence.mask import parse_mask

SETTLE_SECONDS = 0.03  # from the last rank's arrival until all begin: nothing is on its way any more
LEAST_ROUNDS = 3  # of what may be the best, even where they take longer than the cell may
CONTENDING = 1.3  # times the fastest: what takes longer is measured in LEAST_ROUNDS rounds
HOPELESS, STEADY_SECONDS = 2.0, 0.3  # what takes so many times as long and more than this, is measured in FEWEST_ROUNDS
FEWEST_ROUNDS = 2  # of anything: a machine may stumble once
WAIT_SECONDS = 120.0


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    base = tr.ContextParallel(transport="gloo", timeout_seconds=WAIT_SECONDS)
    for cell in job["cells"]:
        result = race(cell, base)
        if dist.get_rank() == 0:
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def race(cell: dict[str, Any], base: tr.ContextParallel) -> dict[str, Any]:
    """All schedules of a cell, in turns."""
    ranks = dist.get_world_size()
    grad = cell["passes"] == "forward+backward"
    local = cell["tokens"] // ranks
    torch.manual_seed(dist.get_rank())
    q = torch.randn(1, local, cell["q_heads"], cell["head_dim"], requires_grad=grad)
    k, v = (torch.randn(1, local, cell["kv_heads"], cell["head_dim"], requires_grad=grad) for _ in range(2))
    mask = parse_mask(cell["mask"])
    contexts: dict[str, SleepingContext] = {}
    for name in cell["schedules"]:
        contexts[name] = SleepingContext(
            cell["tflops"], cell.get("call_seconds", 0.0), layout=cell["layout"], schedule=name,
            transport=base.transport, timeout_seconds=WAIT_SECONDS,
        )  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    failed: dict[str, str] = {}
    spent = 0.0  # on contenders; the same on every rank, since each call's time is
    for turn in range(cell["rounds"] + 1):
        if turn > LEAST_ROUNDS and spent > cell["seconds"]:
            break
        for name in contexts if cell["all_rounds"] else running(seconds, turn):
            if name in failed:
                continue
            cp = contexts[name]
            try:
                took = one_call(cp, mask, grad, q, k, v)
            except TokenRingError as error:  # the same on every rank: nothing was sent
                failed[name] = str(error)
                continue
            spent += took if turn > LEAST_ROUNDS else 0.0
            if turn:  # the first makes plans, programs and connections
                seconds[name].append(took)
    return {"cell": cell["name"], "seconds": seconds, "failed": failed}


def running(seconds: dict[str, list[float]], turn: int) -> list[str]:
    """Who has a call in this turn. After some rounds only those that may still be the best: the same on every rank."""
    if turn <= FEWEST_ROUNDS or not any(seconds.values()):
        return [*seconds]
    best = {name: min(some) for name, some in seconds.items() if some}
    fastest = min(best.values())
    most = max(STEADY_SECONDS, HOPELESS * fastest) if turn <= LEAST_ROUNDS else CONTENDING * fastest
    return [name for name, each in best.items() if each <= most]


def one_call(
    cp: tr.ContextParallel, mask: tr.Mask, grad: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> float:
    """Seconds of the slowest rank."""
    dist.barrier()
    time.sleep(SETTLE_SECONDS)
    began = time.perf_counter()
    with torch.set_grad_enabled(grad):
        out = tr.attention(q, k, v, cp, mask=mask)
        if grad:
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    slowest = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Gloo's threads may outlive the group
