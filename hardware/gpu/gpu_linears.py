"""Column and row linear layers of ranks on one GPU: our schedules beside torch's fused operators; for gpu_transports.

torch's are symm_mem.fused_all_gather_matmul and fused_matmul_reduce_scatter, over the same symmetric memory. Processes
share the GPU's time, and copies stay inside it: times say what is launched and waited for, not what links do. Not yet
run on a GPU.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.cli.bench.layer_race import errors_of, in_turns, layer_case
from tokenring.cli.bench.torch_layers import Layer, by_symmetric_memory, layer_of
from tokenring.errors import one_line

SCHEDULES = ("direct-q", "tokenring")  # of which the weights stay
FUSED = "torch's fused operator"
DTYPE, MOST = torch.bfloat16, 2e-2  # relative errors
CHECKED, TIMED = (64, 256, 256), (2048, 4096, 4096)  # tokens and features of a rank, and the width
ROUNDS = 5


def layer(operator: str, made: Any, device: str, timed: tuple[int, int, int] = TIMED) -> str:
    """Both passes by each way, against float64 and in turns. made: a transport. All ranks call it together.

    Raises AssertionError for an error that is none of bf16's.
    """
    rank, ranks, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    place = torch.device(device)
    checked, raced = (layer_case(operator, ranks * t, ranks * n, d, DTYPE) for t, n, d in (CHECKED, timed))
    ways: dict[str, Layer] = {}
    for name in SCHEDULES:
        tp = tr.TensorParallel(schedule=name, transport=made)
        ways[name] = partial(tr.column_linear if operator == "column" else tr.row_linear, tp=tp)
    ways[FUSED] = layer_of(operator, by_symmetric_memory(group))
    told, errors = "", dict[str, float]()
    for name in list(ways):
        try:
            errors[name] = max(errors_of(checked, ways[name], rank, ranks, place, largest).values())
        except (RuntimeError, NotImplementedError) as error:  # of torch's: it has none for this device, or no memory
            if name != FUSED:
                raise
            told = f"; {FUSED} fails: {one_line(error, 120)}"
            del ways[name]
    assert all(each <= MOST for each in errors.values()), errors
    seconds = in_turns(raced, ways, ranks, place, ROUNDS, dist.barrier, largest)
    times = [f"{name} {1e3 * each['forward']:.2f} + {1e3 * each['backward']:.2f} ms" for name, each in seconds.items()]
    return f"forward + backward: {', '.join(times)}; errors up to {max(errors.values()):.1e}{told}"


def largest(number: float) -> float:
    """Return the largest of all ranks."""
    found = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
