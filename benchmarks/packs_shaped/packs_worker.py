"""One rank of a pack's race: python -m packs_worker JOB.json, as the campaign starts it in every namespace.

Rank 0 prints a line of JSON: by layout, the seconds of every round, of the slowest rank.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from worker import WAIT_SECONDS, one_call

import tokenring as tr
from tokenring.cli.bench.sleeping import SleepingContext
from tokenring.sequence.layout import Layout, Positions
from tokenring.sequence.mask import parse_mask


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    base = tr.ContextParallel(transport="gloo", timeout_seconds=WAIT_SECONDS)
    found = race(job, base)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def race(job: dict[str, Any], base: tr.ContextParallel) -> dict[str, list[float]]:
    """Run each layout with its schedule, in turns."""
    rank, grad = dist.get_rank(), job["passes"] == "forward+backward"
    mask, contexts, tensors = parse_mask(job["mask"]), {}, {}
    for name, each in job["runs"].items():
        layout = layout_of(each, job["length"])
        contexts[name] = SleepingContext(
            job["tflops"], layout=layout, schedule=each["schedule"], transport=base.transport,
            timeout_seconds=WAIT_SECONDS,
        )  # fmt: skip
        tokens = sum(len(layout.chunks[chunk]) for chunk in layout.owned_by(rank))
        heads = (job["q_heads"], job["kv_heads"], job["kv_heads"])
        tensors[name] = [torch.zeros(1, tokens, some, job["head_dim"], requires_grad=grad) for some in heads]
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for turn in range(job["rounds"] + 1):
        for name, cp in contexts.items():
            took = one_call(cp, mask, grad, *tensors[name])
            if turn:  # the first makes plans, programs and connections
                seconds[name].append(took)
    return seconds


def layout_of(each: dict[str, Any], length: int) -> Layout:
    """Return the layout that the campaign wrote down."""
    chunks = tuple(Positions(*ends) for ends in each["chunks"])
    return Layout(each["layout"], dist.get_world_size(), length, chunks, tuple(each["owners"]))


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # Gloo's threads may outlive the group
