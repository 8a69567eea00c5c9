"""The kernels on one GPU: the suite of all kernels, errors beside torch's one call, and the sum of a schedule's tiles.

`run(report)` is for ci/gpu: `report(name, value, limit, met)` takes a line; met None is for information. Needs torch
2.11 or later and this checkout, whose tests/conformance.py is the suite.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from conformance import TILES, Tile, check, operands, visible
from gpu_report import Report, guarded
from oracle import attention64, relative_error

from tokenring.backends.base import AttentionKernel, Tiles
from tokenring.backends.devices import device_of
from tokenring.backends.kernels.reference import dense_mask
from tokenring.backends.registry import HOMES, make_kernel
from tokenring.errors import one_line
from tokenring.region import Patch
from tokenring.runtime.masking import held

Call = Callable[[], object]
RATIO = 1.5  # × the error of torch's own call on the same tile
FORWARD, BOTH = 1.05, 1.08  # × one call over the sequence
RANKS, LENGTH, HEADS, DIM = 8, 65536, 32, 128
ROUNDS = 3
SLACK = 1.5  # × the suite's limits: its tiles are small for half precision, and a device adds up in its own order
HALF = (torch.bfloat16, torch.float16)
COMPILED = "flex"  # takes many seconds for each shape: the last, two tiles only
FEW = ("band", "unequal steps, rows see nothing")
# What schedules give kernels most, each large enough for several blocks: full, causal, before and behind, a window.
COMPARED = {
    "full": Patch(0, 700, 0, 900), "causal": Patch(0, 900, 0, 900, None, 0), "tall": Patch(0, 900, 0, 400, None, 0),
    "window": Patch(0, 900, 0, 900, -200, 0),
}  # fmt: skip


def run(report: Report, device: str = "cuda", length: int = LENGTH) -> None:
    """All of it. length: of the timed sequence."""
    kernels = dict(_made(report, torch.device(device)))
    compiled = kernels.pop(COMPILED, None)
    for kernel in kernels.values():
        for dtype in _dtypes(kernel):
            guarded(report, f"{kernel.name}, {_name(dtype)}: suite of all kernels", "", _suite(kernel, dtype, device))
            limit = f"{RATIO} × torch's call"
            guarded(report, f"{kernel.name}, {_name(dtype)}: error", limit, _ratio(kernel, dtype, device))
    _times(report, kernels, torch.device(device), length)
    if compiled is not None:
        guarded(report, f"{COMPILED}, bfloat16: two tiles", "", _suite(compiled, torch.bfloat16, device))


def _made(report: Report, device: torch.device) -> Iterator[tuple[str, AttentionKernel]]:
    for name in (name for name, home in HOMES.items() if home == "cuda"):
        try:
            yield name, make_kernel(name, device)
        except Exception as error:
            report(f"kernel {name}", f"not here: {one_line(error, 160)}", "", None)


def _dtypes(kernel: AttentionKernel) -> list[torch.dtype]:
    return [dtype for dtype in (*HALF, torch.float32) if kernel.supports(64, dtype) is None]


# ---------- exactness


def _suite(kernel: AttentionKernel, dtype: torch.dtype, device: str) -> Callable[[], tuple[str, bool]]:
    def count() -> tuple[str, bool]:
        tiles = [
            replace(tile, dtype=dtype)
            for tile in TILES
            if kernel.supports(tile.head_dim, dtype) is None and (kernel.name != COMPILED or tile.name in FEW)
        ]
        wrong = []
        for tile in tiles:
            try:
                check(kernel, tile, device, SLACK)
            except Exception as error:
                wrong.append(f"{tile.name}: {one_line(error, 160)}")
        told = f"; {'; '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}" if wrong else ""
        return f"{len(tiles) - len(wrong)} of {len(tiles)} tiles{told}", not wrong

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
    """out, dq, dk, dv by torch, whose mask is a matrix where the patch is not full."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    mask = dense_mask(patch, q.device)
    out = torch.nn.functional.scaled_dot_product_attention(
        *leaves, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )  # fmt: skip
    return (out.detach(), *torch.autograd.grad(out, leaves, dout))


# ---------- times


def _times(report: Report, kernels: dict[str, AttentionKernel], device: torch.device, length: int) -> None:
    """One call over the sequence by each kernel; the tiles and merges of all ranks by the fastest."""
    q, k, v, dout = (torch.randn(1, HEADS, length, DIM, device=device, dtype=torch.bfloat16) for _ in range(4))
    given, patch, scale = (q, k, v, dout), Patch(0, length, 0, length, None, 0), DIM**-0.5
    size = f"{length >> 10}k, {HEADS} heads of {DIM}, bf16, causal"
    found: dict[str, tuple[float, float]] = {}
    for name, kernel in kernels.items():
        if kernel.supports(DIM, torch.bfloat16) is not None:
            continue

        def one(kernel: AttentionKernel = kernel, name: str = name) -> tuple[str, None]:
            found[name] = seconds(one_call(kernel, given, patch, scale), device)
            flops = HEADS * DIM * patch.pairs() / 1e12
            rates = 4 * flops / found[name][0], 14 * flops / found[name][1]
            return f"{_ms(found[name])} ({rates[0]:.0f} and {rates[1]:.0f} TFLOP/s)", None

        guarded(report, f"one call of {name}, {size}", "", one)
    if not found:
        return
    best = min(found, key=lambda name: found[name][1])

    def tiles() -> tuple[str, bool]:
        ranks = [seconds(tiles_of_rank(kernels[best], given, rank, scale), device) for rank in range(RANKS)]
        sums = [sum(each[way] for each in ranks) / found[best][way] for way in (0, 1)]
        return f"{sums[0]:.3f} ×, {sums[1]:.3f} ×", sums[0] <= FORWARD and sums[1] <= BOTH

    limit = f"{FORWARD} × forward, {BOTH} × both"
    guarded(report, f"all tiles and merges of {RANKS} virtual ranks by {best}, {size}", limit, tiles)


def one_call(kernel: AttentionKernel, given: tuple[torch.Tensor, ...], patch: Patch, scale: float) -> tuple[Call, Call]:
    """Forward; forward and backward."""
    q, k, v, dout = given
    kernel = held(kernel, Tiles((patch,), "forward", q.shape[-1], q.dtype, q.device))

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return kernel.forward(q, k, v, patch=patch, scale=scale)

    def both() -> None:
        out, lse = forward()
        kernel.backward(dout, q, k, v, lse, None, out=out.to(q.dtype), patch=patch, scale=scale)

    return forward, both


def tiles_of_rank(
    kernel: AttentionKernel, given: tuple[torch.Tensor, ...], rank: int, scale: float
) -> tuple[Call, Call]:
    """What a rank computes of a causal ring in zigzag: its triangle, and of each other rank what it sees of it."""
    rows = given[0].shape[2] // RANKS
    half = rows // 2
    q, k, v, dout = (x[:, :, :rows] for x in given)
    pieces = [(slice(0, rows), slice(0, rows), Patch(0, rows, 0, rows, None, 0))]
    pieces += [(slice(0, rows), slice(0, half), Patch(0, rows, 0, half))] * rank
    pieces += [(slice(half, rows), slice(0, rows), Patch(0, half, 0, rows))] * (RANKS - 1 - rank)
    kernel = held(kernel, Tiles(tuple(patch for *_, patch in pieces), "forward", q.shape[-1], q.dtype, q.device))
    out = torch.zeros(rows, 1, q.shape[1], q.shape[3], device=q.device)
    lse = torch.zeros(rows, 1, q.shape[1], device=q.device)
    merge, scratch = _merge(q), torch.zeros(2, *lse.shape, device=q.device)

    def forward() -> None:
        for at, cols, patch in pieces:
            made, made_lse = kernel.forward(q[:, :, at], k[:, :, cols], v[:, :, cols], patch=patch, scale=scale)
            news = made.permute(2, 0, 1, 3), made_lse.permute(2, 0, 1)
            merge(out[at], lse[at], *news, scratch[:, : news[1].shape[0]])

    whole, whole_lse = torch.zeros_like(q), torch.full(q.shape[:3], 9.0, device=q.device)
    totals = [torch.zeros(x.shape, device=q.device) for x in (q, k, v)]

    def both() -> None:
        forward()
        for at, cols, patch in pieces:
            operands = dout[:, :, at], q[:, :, at], k[:, :, cols], v[:, :, cols], whole_lse[:, :, at]
            made = kernel.backward(*operands, None, out=whole[:, :, at], patch=patch, scale=scale)
            for total, where, new in zip(totals, (at, cols, cols), made, strict=True):
                total[:, :, where] += new

    return forward, both


def _merge(q: torch.Tensor) -> Callable[..., None]:
    """What merges partials on this device."""
    try:
        from tokenring.backends.mergers import choose_merger
    except ImportError:
        from tokenring.runtime.merge import merge_

        return merge_
    merge: Callable[..., None] = choose_merger(q.device, q.shape[-1]).merger.merge_
    return merge


def seconds(calls: tuple[Call, Call], device: torch.device) -> tuple[float, float]:
    """Of forward, and of both passes: medians of some rounds after one to warm up."""
    clock, found = device_of(device).clock, []
    for call in calls:
        times = []
        for _ in range(ROUNDS + 1):
            began = clock()
            call()
            times.append(clock() - began)
        found.append(statistics.median(times[1:]))
    return found[0], found[1]


# ---------- lines


def _ms(pair: tuple[float, float]) -> str:
    return f"{1e3 * pair[0]:.2f} ms forward, {1e3 * pair[1]:.2f} ms both"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    run(lambda name, value, limit, met: print(f"{name}: {value}" + (f" (limit {limit})" if limit else ""), flush=True))
