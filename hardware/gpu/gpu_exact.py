"""Exactness: every schedule, forward and backward, against float64 and beside one call of the same kernel."""

from __future__ import annotations

import time
import traceback
from functools import partial

import torch
from gpu_clock import Tensors, one_call
from gpu_report import Report, Shares, guarded
from virtual_ranks import Workers, both_passes

from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.registry import make_kernel
from tokenring.errors import one_line
from tokenring.schedule.families import variants
from tokenring.schedule.names import named_schedule
from tokenring.sequence.layout import Positions, make_layout
from tokenring.sequence.mask import Causal
from tokenring.sequence.workload import Workload

LIMIT = 1.5  # × the error of one call
RANKS = (8, 4, 2)
DTYPES = (torch.bfloat16, torch.float16)
SECONDS = 130.0  # for all lines


def run(report: Report, seconds: float = SECONDS) -> None:
    began = time.monotonic()
    device = torch.device("cuda")
    kernel = make_kernel("auto", device)
    report("kernel of the schedules", kernel.name, "", None)
    workers = Workers(max(RANKS), device)
    cases = {dtype: Inputs(2048, 8, 4, 128, dtype, device, kernel, workers) for dtype in DTYPES}
    lines = [(ranks, dtype) for ranks in RANKS for dtype in DTYPES]
    shares = Shares(seconds - (time.monotonic() - began), len(lines))
    for ranks, dtype in lines:
        share = shares.next()
        name = f"exactness, all schedules, {str(dtype).removeprefix('torch.')}, {ranks} virtual ranks"
        guarded(report, name, f"{LIMIT} × one call", partial(line, cases[dtype], ranks, share), share)
    workers.close()


def line(case: Inputs, ranks: int, seconds: float) -> tuple[str, bool | None]:
    """The worst of the schedules that there was time for, at least one; None: it is well, but some were not tried."""
    asked, found, wrong = names(ranks, case.workload), dict[str, float](), dict[str, str]()
    deadline = time.monotonic() + seconds
    for name in asked:
        if (found or wrong) and time.monotonic() > deadline:
            break
        try:
            found[name] = case.ratio(name, ranks)
        except Exception as error:
            traceback.print_exc()
            wrong[name] = f"{type(error).__name__}: {one_line(error, 100)}"
    tried = len(found) + len(wrong)
    texts = []
    if found:
        worst = max(found, key=found.__getitem__)
        texts.append(f"{found[worst]:.2f} × ({worst}, of {len(found)} schedules)")
    if wrong:
        texts.append(f"{len(wrong)} failed: " + "; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:3]))
    if tried < len(asked):
        texts.append(f"no time for {len(asked) - tried} more")
    if wrong or max(found.values()) > LIMIT:
        return "; ".join(texts), False
    return "; ".join(texts), True if tried == len(asked) else None


def names(ranks: int, workload: Workload) -> list[str]:
    """Every family with the numbers worth trying on this many ranks."""
    return variants(ranks, workload)


class Inputs:
    """One attention call, its results in float64, and the errors of one call of the kernel."""

    def __init__(
        self, length: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, device: torch.device,
        kernel: AttentionKernel, workers: Workers,
    ) -> None:  # fmt: skip
        self.workers = workers
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
        made = self._errors(both_passes(schedule, self.workload, self.kernel, self.given, self.workers))
        return max(mine / one for mine, one in zip(made, self.errors, strict=True))

    def _errors(self, made: Tensors) -> list[float]:
        """Relative to float64, in the Frobenius norm."""
        return [
            float((x.double() - wanted).norm() / wanted.norm()) for x, wanted in zip(made, self.exact, strict=True)
        ]
