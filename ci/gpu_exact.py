"""Exactness: every schedule, forward and backward, against float64 and beside one call of the same kernel."""

from __future__ import annotations

from functools import partial

import torch
from gpu_report import Report, guarded
from virtual_ranks import both_passes

from tokenring.backends.base import AttentionKernel
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.registry import make_kernel
from tokenring.layout import Positions, make_layout
from tokenring.mask import Causal
from tokenring.planner.pieces import named_schedule
from tokenring.region import Patch
from tokenring.schedule.families import variants
from tokenring.workload import Workload

LIMIT = 1.5  # × the error of one call
RANKS = (2, 4, 8)
DTYPES = (torch.bfloat16, torch.float16)
Tensors = tuple[torch.Tensor, ...]


def run(report: Report) -> None:
    device = torch.device("cuda")
    kernel = make_kernel("auto", device)
    report("kernel of the schedules", kernel.name, "", None)
    for dtype in DTYPES:
        case = Inputs(2048, 8, 4, 128, dtype, device, kernel)
        for ranks in RANKS:
            name = f"exactness, all schedules, {str(dtype).removeprefix('torch.')}, {ranks} virtual ranks"
            guarded(report, name, f"{LIMIT} × one call", partial(_line, case, ranks))


def _line(case: Inputs, ranks: int) -> tuple[str, bool]:
    found = {name: case.ratio(name, ranks) for name in names(ranks, case.workload)}
    worst = max(found, key=found.__getitem__)
    return f"{found[worst]:.2f} × ({worst}, of {len(found)} schedules)", found[worst] <= LIMIT


def names(ranks: int, workload: Workload) -> list[str]:
    """Every family with the numbers worth trying on this many ranks."""
    return variants(ranks, workload)


class Inputs:
    """One attention call, its results in float64, and the errors of one call of the kernel."""

    def __init__(
        self, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
        kernel: AttentionKernel,
    ) -> None:  # fmt: skip
        self.workload = Workload(1, length, length, heads, kv_heads, dim, dtype)
        self.kernel, self.scale = kernel, dim**-0.5
        random = torch.Generator().manual_seed(0)
        shapes = [(1, length, count, dim) for count in (heads, kv_heads, kv_heads, heads)]
        q, k, v, dout = (torch.randn(shape, generator=random).to(device, dtype) for shape in shapes)
        self.given = q, k, v, dout
        whole = Positions(0, length, 1)
        (self.patch,) = Causal().region(whole, whole)
        self.exact = one_call(Reference(), tuple(x.double() for x in self.given), self.patch, self.scale)
        self.errors = self._errors(one_call(kernel, self.given, self.patch, self.scale))

    def ratio(self, name: str, ranks: int) -> float:
        """The largest error of a schedule beside that of one call, over out, dq, dk and dv."""
        layout = make_layout("zigzag", ranks, self.workload.q_length)
        schedule = named_schedule(name, self.workload, layout, layout, Causal(), None)
        made = self._errors(both_passes(schedule, self.workload, self.kernel, *self.given))
        return max(mine / one for mine, one in zip(made, self.errors, strict=True))

    def _errors(self, made: Tensors) -> list[float]:
        """Relative to float64, in the Frobenius norm."""
        return [
            float((x.double() - wanted).norm() / wanted.norm()) for x, wanted in zip(made, self.exact, strict=True)
        ]


def one_call(kernel: AttentionKernel, given: Tensors, patch: Patch, scale: float) -> Tensors:
    """out, dq, dk, dv of the whole sequence in one call, in the dtype of the inputs; [B, T, H, D]."""
    q, k, v, dout = (x.transpose(1, 2) for x in given)
    out, lse = kernel.forward(q, k, v, patch=patch, scale=scale)
    out = out.to(q.dtype)
    gradients = kernel.backward(dout, q, k, v, lse, None, out=out, patch=patch, scale=scale)
    return tuple(x.to(q.dtype).transpose(1, 2) for x in (out, *gradients))
