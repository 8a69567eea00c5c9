"""What a kernel's backward must do where a gradient flows into lse: with any delta, also in rows whose dout is zero."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from conformance import LIMITS, PATCHES, REST, Operands, Tile, operands, patch
from oracle import relative_error

from tokenring.backends.kernels.delta import AnyDelta
from tokenring.backends.kernels.reference import Reference
from tokenring.sequence.region import Patch

SIZES = (0.0, 1e-3, 1.0)  # of dout, by turns from row to row
DELTAS = (3.0, 1e-7)  # as a loss that adds lse, and one that means its squares over many tokens
TILES = (
    Tile("causal", patch(40, 40, None, 0), (4, 2), 16),
    Tile("band, rows see nothing", PATCHES["lower bound, rows see nothing"], (2, 2), 64),
    Tile("one dimension", PATCHES["full"], head_dim=1),
    Tile("token-major", PATCHES["band"], (8, 2), 128, token_major=True),
)


def rows_given(tile: Tile, given: Operands, size: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dout with rows of all sizes, lse of whole rows, and delta: as large for all rows, however large dout is."""
    rows, device = tile.patch.rows, given.q.device
    sizes = torch.tensor([SIZES[row % len(SIZES)] for row in range(rows)])
    dout = (given.dout.cpu() * sizes[:, None].to(tile.dtype) * (size / max(DELTAS))).to(device)
    scale = 1 / math.sqrt(tile.head_dim)
    q, *both = (x.cpu().double() for x in (given.q, *given.tile, *given.rest))
    parts = (tile.patch, both[:2]), (Patch(0, rows, 0, REST), both[2:])
    lses = [Reference().forward(q, k, v, patch=each, scale=scale)[1] for each, (k, v) in parts]
    delta = size * torch.randn(*q.shape[:3], generator=torch.Generator().manual_seed(rows))
    return dout, torch.logaddexp(*lses).float().to(device), delta.to(device)


def check_any_delta(kernel: Any, tile: Tile, device: str = "cpu", slack: float = 1.5) -> None:
    """Each gradient, and dq of the rows of each size, against float64."""
    for size in DELTAS if tile.dtype != torch.float16 else DELTAS[:1]:
        given = operands(tile, torch.device(device))
        dout, lse, delta = rows_given(tile, given, size)
        scale = 1 / math.sqrt(tile.head_dim)
        made = AnyDelta(kernel).backward(dout, given.q, *given.tile, lse, delta, patch=tile.patch, scale=scale)
        exact = [x.cpu().double() for x in (dout, given.q, *given.tile, lse, delta)]
        right = Reference().backward(*exact, patch=tile.patch, scale=scale)
        compare(made, right, slack * LIMITS[tile.dtype][1])


def compare(
    made: Sequence[torch.Tensor], right: Sequence[torch.Tensor], limit: float, first_row: int = 0
) -> None:  # fmt: skip
    for name, x, wanted in zip(("dq", "dk", "dv"), made, right, strict=True):
        assert relative_error(x.cpu(), wanted) <= limit, (name, relative_error(x.cpu(), wanted))
    for at in range(len(SIZES)):
        size = SIZES[(first_row + at) % len(SIZES)]
        rows, wanted = made[0].cpu()[:, :, at :: len(SIZES)], right[0][:, :, at :: len(SIZES)]
        assert relative_error(rows, wanted) <= 2 * limit, (f"dq of rows of {size}", relative_error(rows, wanted))


def check_kernel(kernel: Any, device: str = "cpu") -> None:
    """All tiles, in a dtype that the kernel takes."""
    for tile in TILES:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if kernel.supports(tile.head_dim, dtype) is None:
                check_any_delta(kernel, replace(tile, dtype=dtype), device)
