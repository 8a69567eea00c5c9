"""Both passes of whole programs over a transport, beside one call in float64 on the CPU: for parts of ci/gpu."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tokenring import Causal, ContextParallel, attention, shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))

from oracle import allowed, attention64, relative_error

TOKENS, HEADS, DIM = 256, 4, 64  # of each rank
MOST = 1e-5  # fp32
TIMES = 3


def worst_error(moved: Any, device: str, schedules: Iterable[str]) -> float:
    """The largest relative error of out, dq, dk, dv, of each schedule some times over. All ranks call it together.

    moved: the transport. Raises AssertionError for an error that is none of fp32's.
    """
    generator, worst = torch.Generator().manual_seed(0), 0.0
    length = TOKENS * dist.get_world_size()
    q, k, v, dout = (torch.randn(1, length, HEADS, DIM, generator=generator) for _ in range(4))
    wanted = attention64(q, k, v, dout, allowed(Causal(), length, length))
    for schedule in schedules:
        with ContextParallel(schedule=schedule, transport=moved, kernel="reference") as cp:
            for _ in range(TIMES):
                mine = [shard(x, cp).to(device).requires_grad_(at < 3) for at, x in enumerate((q, k, v, dout))]
                out = attention(mine[0], mine[1], mine[2], cp, Causal())
                grads = torch.autograd.grad(out, mine[:3], mine[3])
                pairs = zip((out, *grads), (wanted.out, wanted.dq, wanted.dk, wanted.dv), strict=True)
                errors = [relative_error(x.detach().cpu(), shard(y, cp)) for x, y in pairs]
                assert max(errors) < MOST, (schedule, errors)
                worst = max(worst, *errors)
    return worst
