"""The kernels on one GPU: the suite of all kernels, errors beside torch's one call, and the rate of one call.

`run(report)` is for ci/gpu: `report(name, value, limit, met)` takes a line; met None is for information. Needs torch
2.11 or later and this checkout, whose tests/support/conformance.py is the suite.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "support"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from conformance import TILES, Tile, check, operands, visible
from gpu_clock import one_call_seconds
from gpu_report import Report, Shares, guarded
from oracle import attention64, relative_error

from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.reference import dense_mask
from tokenring.backends.registry import HOMES, make_kernel
from tokenring.errors import one_line
from tokenring.sequence.region import Patch

RATIO = 1.5  # × the error of torch's own call on the same tile
LENGTH, HEADS, DIM = 65536, 32, 128
ROUNDS = 3
SECONDS = 90.0  # for all lines
SLACK = 1.5  # × the suite's limits: its tiles are small for half precision, and a device adds up in its own order
HALF = (torch.bfloat16, torch.float16)
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
COMPILED = "flex"  # takes many seconds for each shape: the last, two tiles only
FEW = ("band", "unequal steps, rows see nothing")
# What schedules give kernels most, each large enough for several blocks: full, causal, before and behind, a window.
COMPARED = {
    "full": Patch(0, 700, 0, 900), "causal": Patch(0, 900, 0, 900, None, 0), "tall": Patch(0, 900, 0, 400, None, 0),
    "window": Patch(0, 900, 0, 900, -200, 0),
}  # fmt: skip


def run(report: Report, device: str = "cuda", length: int = LENGTH, seconds: float = SECONDS) -> None:
    """All of it: rates first, which take least and say most. length: of the timed sequence."""
    began = time.monotonic()
    kernels = dict(_made(report, torch.device(device)))
    compiled = kernels.pop(COMPILED, None)
    _rates(report, kernels, torch.device(device), length)
    dtypes = (*HALF, torch.float32)
    tried = [(kernel, dtype) for dtype in dtypes for kernel in kernels.values() if _takes(kernel, dtype)]
    shares = Shares(seconds - (time.monotonic() - began), 2 * len(tried) + (compiled is not None))
    for kernel, dtype in tried:
        name, share = f"{kernel.name}, {_name(dtype)}: error", shares.next()
        guarded(report, name, f"{RATIO} × torch's call", _ratio(kernel, dtype, device), share)
    for kernel, dtype in tried:
        name, share = f"{kernel.name}, {_name(dtype)}: suite of all kernels", shares.next()
        guarded(report, name, "", _suite(kernel, dtype, device, share), share)
    if compiled is not None:
        share = shares.next()
        guarded(report, f"{COMPILED}, bfloat16: two tiles", "", _suite(compiled, torch.bfloat16, device, share), share)


def _made(report: Report, device: torch.device) -> Iterator[tuple[str, AttentionKernel]]:
    for name in (name for name, home in HOMES.items() if home == "cuda"):
        try:
            yield name, make_kernel(name, device)
        except Exception as error:
            report(f"kernel {name}", f"not here: {one_line(error, 160)}", "", None)


def _takes(kernel: AttentionKernel, dtype: torch.dtype) -> bool:
    return kernel.supports(64, dtype) is None


# ---------- exactness


def _suite(
    kernel: AttentionKernel, dtype: torch.dtype, device: str, seconds: float
) -> Callable[[], tuple[str, bool | None]]:
    """The tiles that there is time for, at least one. None: they are well, but some were not tried."""

    def count() -> tuple[str, bool | None]:
        deadline = time.monotonic() + seconds
        tiles = [
            replace(tile, dtype=dtype)
            for tile in TILES
            if kernel.supports(tile.head_dim, dtype) is None and (kernel.name != COMPILED or tile.name in FEW)
        ]
        wrong, tried = [], 0
        for tile in tiles:
            if tried and time.monotonic() > deadline:
                break
            tried += 1
            try:
                check(kernel, tile, device, SLACK)
            except Exception as error:
                wrong.append(f"{tile.name}: {one_line(error, 160)}")
        told = f"; {'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}" if wrong else ""
        if tried < len(tiles):
            told += f"; no time for {len(tiles) - tried} more"
        return f"{tried - len(wrong)} of {tried} tiles{told}", False if wrong else True if tried == len(tiles) else None

    return count


shown = lru_cache(maxsize=8)(visible)  # pair by pair, which takes a while


def _ratio(kernel: AttentionKernel, dtype: torch.dtype, device: str) -> Callable[[], tuple[str, bool]]:
    def worst() -> tuple[str, bool]:
        found = {
            f"{what} of {name}": mine / one
            for name, patch in COMPARED.items()
            for what, (mine, one) in errors(kernel, Tile(name, patch, (8, 4), 128, 1, dtype), device).items()
        }
        at = max(found, key=found.__getitem__)
        return f"{found[at]:.2f} × ({at}, of {len(found)})", found[at] <= RATIO

    return worst


def errors(kernel: AttentionKernel, tile: Tile, device: str) -> dict[str, tuple[float, float]]:
    """Relative to float64: of out, dq, dk and dv by the kernel, and by torch's scaled_dot_product_attention."""
    given, scale = operands(tile, torch.device(device)), 1 / math.sqrt(tile.head_dim)
    q, k, v, dout = given.q, *given.tile, given.dout
    right = attention64(*(x.transpose(1, 2) for x in (q, k, v, dout)), shown(tile.patch).to(device), scale)
    out, lse = kernel.forward(q, k, v, patch=tile.patch, scale=scale)
    out = out.to(tile.dtype)
    mine = (out, *kernel.backward(dout, q, k, v, lse, None, out=out, patch=tile.patch, scale=scale))
    one = torchs_own(q, k, v, dout, tile.patch, scale)
    wanted = {"out": right.out, "dq": right.dq, "dk": right.dk, "dv": right.dv}
    return {
        name: tuple(relative_error(x.to(tile.dtype), y.transpose(1, 2)) for x in (a, b))  # type: ignore[misc]
        for (name, y), a, b in zip(wanted.items(), mine, one, strict=True)
    }


def torchs_own(q: Any, k: Any, v: Any, dout: Any, patch: Patch, scale: float) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv by torch: flash attention for full tiles and causal squares, others by a matrix for a mask.

    Not by its plain arithmetic, whose errors are not those of a kernel: it would take that for grouped heads beside a
    mask, so k and v are repeated.
    """
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    query, key, value = leaves[0], *(x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in leaves[1:])
    square = patch.is_causal and patch.rows == patch.cols
    mask = None if square else dense_mask(patch, q.device)
    with sdpa_kernel(FUSED):
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=square, scale=scale
        )  # fmt: skip
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


# ---------- rates


def _rates(report: Report, kernels: dict[str, AttentionKernel], device: torch.device, length: int) -> None:
    """One call over the sequence by each kernel: what the default order of order.py is an opinion about."""
    given = tuple(torch.randn(1, length, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(4))
    patch, size = Patch(0, length, 0, length, None, 0), f"{length >> 10}k, {HEADS} heads of {DIM}, bf16, causal"
    flops = HEADS * DIM * patch.pairs() / 1e12
    for name, kernel in kernels.items():

        def one(kernel: AttentionKernel = kernel) -> tuple[str, None]:
            forward, both = one_call_seconds(kernel, given, patch, DIM**-0.5, ROUNDS)
            rates = f"{4 * flops / forward:.0f} and {14 * flops / both:.0f} TFLOP/s"
            return f"{1e3 * forward:.2f} ms forward, {1e3 * both:.2f} ms both ({rates})", None

        if kernel.supports(DIM, torch.bfloat16) is None:
            guarded(report, f"one call of {name}, {size}", "", one)


# ---------- lines


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    run(lambda name, value, limit, met: print(f"{name}: {value}" + (f" (limit {limit})" if limit else ""), flush=True))
