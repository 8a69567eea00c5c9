"""Every schedule that fits: exact against float64 on the CPU, forward and backward, and how long it takes.

q, k, v [B, T, H, D].
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import tokenring as tr
from npu_smoke.here import Here
from tokenring.cli.bench.reference import errors, reference
from tokenring.schedule.families.registry import misfit, variants
from tokenring.sequence.layout import make_layout
from tokenring.sequence.workload import Workload

LAYOUT = "zigzag"
LIMIT = {torch.float32: 2e-4, torch.bfloat16: 2e-2}  # relative Frobenius errors; NPUs multiply fp32 in fewer bits
ROUNDS = 3


def names(ranks: int, tokens: int, heads: int, dim: int) -> list[str]:
    """All that fit a call of this size."""
    workload = Workload(1, tokens, tokens, heads, heads, dim, torch.float32)
    layout = make_layout(LAYOUT, ranks, tokens)
    return [name for name in variants(ranks, workload) if misfit(name, ranks, workload, layout, layout) is None]


def schedule(here: Here, name: str) -> dict[str, Any]:
    """One schedule: its errors in fp32 and bf16, and its seconds forward and backward."""
    cp = tr.ContextParallel(here.group("schedules"), LAYOUT, name, _transport(here))
    found: dict[str, Any] = {"exact": True, "errors": {}}
    for dtype in (torch.float32, torch.bfloat16):
        each = _errors(here, cp, dtype)
        found["errors"][str(dtype).removeprefix("torch.")] = each
        found["exact"] &= all(error <= LIMIT[dtype] for error in each.values())  # False for NaN
    found["error"] = max(found["errors"]["float32"].values())
    found["seconds"] = _seconds(here, cp)
    return found


@cache
def transport_of(group: Any) -> Any:
    """One for all that calls over a group."""
    return tr.ContextParallel(group, timeout_seconds=60.0).transport


def _transport(here: Here) -> Any:
    """One for all schedules: each would take its own pairs of ranks else."""
    return "auto" if here.ranks == 1 else transport_of(here.group("schedules"))


def size(here: Here, which: tuple[int, int, int]) -> tuple[int, int, int]:
    """Tokens that every layout cuts evenly, heads, head dim."""
    tokens, heads, dim = which
    part = 2 * here.ranks * 4
    return -(-tokens // part) * part, -(-heads // here.ranks) * here.ranks, dim


@cache
def _inputs(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout of the whole sequence, the same on every rank, on the CPU."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, tokens, heads, dim, generator=generator).to(dtype) for _ in range(4)]


@cache
def _wanted(tokens: int, heads: int, dim: int, dtype: torch.dtype, rank: int, ranks: int) -> dict[str, torch.Tensor]:
    return reference(_inputs(tokens, heads, dim, dtype), tr.Causal(), True, rank, ranks, torch.float64)


def _errors(here: Here, cp: tr.ContextParallel, dtype: torch.dtype) -> dict[str, float]:
    tokens, heads, dim = size(here, here.sizes.check)
    wanted = _wanted(tokens, heads, dim, dtype, here.rank, here.ranks)
    positions = torch.tensor(make_layout(LAYOUT, here.ranks, tokens).positions(here.rank), dtype=torch.int64)
    parts = [x.index_select(1, positions).to(here.place) for x in _inputs(tokens, heads, dim, dtype)]
    found = _call(cp, parts)
    return errors(dict(zip(wanted, (x.cpu() for x in found), strict=True)), wanted, positions, here.ranks)


def _call(cp: tr.ContextParallel, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """out, dq, dk, dv of this rank."""
    q, k, v = (x.detach().requires_grad_() for x in parts[:3])
    out = tr.attention(q, k, v, cp, mask=tr.Causal())
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), parts[3])]


def _seconds(here: Here, cp: tr.ContextParallel) -> float:
    """Of forward and backward together, the slowest rank, in bf16 where the device is real."""
    tokens, heads, dim = size(here, here.sizes.timed)
    real = here.kind != "cpu" and not here.emulated
    dtype = torch.bfloat16 if real else torch.float32
    part = tokens if real else tokens // here.ranks  # of each rank
    parts = [torch.randn(1, part, heads, dim, dtype=dtype).to(here.place) for _ in range(4)]
    return here.timed(lambda: _call(cp, parts), ROUNDS)
