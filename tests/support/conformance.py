"""What every attention kernel must do, checked against float64: one suite for all of them.

`check(kernel, case)` raises AssertionError. The cases cover every kind of patch that a schedule can
lead to, token-major strides, grouped heads, and rows that see nothing in a tile or anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from oracle import attention64, relative_error

from tokenring.backends.interfaces import AttentionKernel
from tokenring.sequence.region import Patch

# Largest error of (out, dq, dk, dv) by the dtype of the result; lse is fp32 always.
LIMITS = {torch.float32: (2e-6, 5e-6), torch.bfloat16: (4e-3, 6e-3), torch.float16: (6e-4, 1e-3)}
LSE_LIMIT = 2e-6
REST = 5  # columns that each row sees elsewhere
Wanted = dict[str, torch.Tensor]  # results by name, in float64


@dataclass(frozen=True)
class Tile:
    """One kernel call: its patch, heads, and what else is special about it."""

    name: str
    patch: Patch
    heads: tuple[int, int] = (2, 2)
    head_dim: int = 40
    batch: int = 2
    dtype: torch.dtype = torch.float32
    token_major: bool = False  # as slots of the pool are: one record for each token, k and v in one
    scale: float | None = None
    value_dim: int | None = None  # of v and dout; None: head_dim

    def __str__(self) -> str:
        return self.name


def patch(
    rows: int, cols: int, low: int | None = None, high: int | None = None, steps: tuple[int, int] = (1, 1)
) -> Patch:
    """A patch that does not begin at 0, which must not matter."""
    return Patch(3, 3 + rows, 5, 5 + cols, low, high, *steps)


PATCHES = {
    "full": patch(13, 17),
    "causal, square": patch(16, 16, None, 0),
    "causal, tall": patch(20, 12, None, 0),
    "causal, wide": patch(12, 20, None, 0),
    "causal, large": patch(150, 150, None, 0),
    "triangle above": patch(14, 18, None, 4),
    "triangle below, rows see nothing": patch(14, 18, None, -3),
    "lower bound": patch(14, 14, -3),
    "lower bound, rows see nothing": patch(14, 14, 4),
    "band": patch(15, 15, -4, 2),
    "band above": patch(15, 19, 2, 6),
    "unequal steps": patch(8, 20, None, 5, (3, 1)),
    "unequal steps, band": patch(12, 10, -9, 4, (2, 3)),
    "unequal steps, rows see nothing": patch(7, 5, None, -4, (1, 2)),
    "equal steps of 4": patch(9, 9, None, 2, (4, 4)),
    "1 × 1": patch(1, 1),
    "1 × 1, causal": patch(1, 1, None, 0),
    "one row": patch(1, 19),
    "one column": patch(19, 1),
    "nothing at all": patch(4, 3, None, -9),
}
CAUSAL, STEPS = PATCHES["causal, square"], PATCHES["unequal steps, rows see nothing"]
TILES = (
    *(Tile(name, each) for name, each in PATCHES.items()),
    Tile("8/2 heads", CAUSAL, (8, 2)),
    Tile("8/1 heads", STEPS, (8, 1)),
    Tile("heads of 64", CAUSAL, head_dim=64),
    Tile("heads of 128", PATCHES["band"], head_dim=128),
    Tile("heads of 640", CAUSAL, head_dim=640),
    Tile("heads of 1", CAUSAL, head_dim=1),
    Tile("values narrower than keys", CAUSAL, (4, 2), 192, token_major=True, value_dim=128),
    Tile("values wider than keys", STEPS, head_dim=24, value_dim=40),
    Tile("scale 2", CAUSAL, scale=2.0),
    Tile("token-major", CAUSAL, (8, 2), token_major=True),
    Tile("token-major, rows see nothing", STEPS, (4, 4), token_major=True),
    Tile("token-major, batch 1", PATCHES["full"], (8, 8), 128, 1, token_major=True),
    Tile("bf16", CAUSAL, (8, 2), 64, dtype=torch.bfloat16),
    Tile("bf16, rows see nothing", STEPS, dtype=torch.bfloat16),
    Tile("bf16, token-major", PATCHES["full"], (8, 1), dtype=torch.bfloat16, token_major=True),
    Tile("fp16", PATCHES["band"], dtype=torch.float16),
)


def visible(patch: Patch) -> torch.Tensor:
    """The definition, pair by pair: [rows, cols]."""

    def sees(i: int, j: int) -> bool:
        difference = patch.col_step * j - patch.row_step * i
        return (patch.low is None or difference >= patch.low) and (patch.high is None or difference <= patch.high)

    return torch.tensor([[sees(i, j) for j in range(patch.cols)] for i in range(patch.rows)])


class Operands(NamedTuple):
    """q, dout [B, Hq, rows, D]; k, v of the tile and of the rest, [B, Hkv, columns, D]; of dout and v, value_dim."""

    q: torch.Tensor
    dout: torch.Tensor
    tile: tuple[torch.Tensor, torch.Tensor]
    rest: tuple[torch.Tensor, torch.Tensor]


def operands(tile: Tile, device: torch.device) -> Operands:
    random = torch.Generator().manual_seed(tile.patch.rows * 100 + tile.patch.cols)

    def pair(tokens: int, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
        dims = tile.head_dim, tile.head_dim if tile.value_dim is None else tile.value_dim
        sizes = [tile.batch * heads * dim for dim in dims]
        record = torch.randn(tokens, sum(sizes), generator=random).to(device, tile.dtype)
        first, second = (
            part.view(tokens, tile.batch, heads, dim).permute(1, 2, 0, 3)
            for part, dim in zip(torch.split(record, sizes, dim=1), dims, strict=True)
        )
        return (first, second) if tile.token_major else (first.contiguous(), second.contiguous())

    q, dout = pair(tile.patch.rows, tile.heads[0])
    return Operands(q, dout, pair(tile.patch.cols, tile.heads[1]), pair(REST, tile.heads[1]))


def check(kernel: AttentionKernel, tile: Tile, device: str = "cpu", slack: float = 1.0) -> dict[str, float]:
    """The tile alone, and as a part of longer rows. Returns the errors that it found.

    slack: what LIMITS are multiplied with, where a tile is computed in a dtype that it was not made for.
    """
    given = operands(tile, torch.device(device))
    scale = 1 / math.sqrt(tile.head_dim) if tile.scale is None else tile.scale
    errors: dict[str, float] = {}
    for parts in (1, 2):
        wanted = _reference(tile, given, scale, parts)
        if parts == 1:
            errors |= _check_forward(kernel, tile, given, wanted, scale, slack)
        for by in ("delta", "out"):
            errors |= _check_backward(kernel, tile, given, wanted, scale, parts, by, slack)
    return errors


def _reference(tile: Tile, given: Operands, scale: float, parts: int) -> Wanted:
    """Over the tile's columns, and with `parts` 2 over the rest's too, which all rows see. As kernels shape it."""
    shown, k, v = visible(tile.patch), *(x.cpu() for x in given.tile)
    if parts == 2:
        k, v = (torch.cat([x, y.cpu()], dim=2) for x, y in zip((k, v), given.rest, strict=True))
        shown = torch.cat([shown, torch.ones(tile.patch.rows, REST, dtype=torch.bool)], dim=1)
    q, dout = given.q.cpu(), given.dout.cpu()
    q, k, v, dout = (x.transpose(1, 2) for x in (q, k, v, dout))
    made = attention64(q, k, v, dout, shown, scale)
    named = {name: x if name == "lse" else x.transpose(1, 2) for name, x in made._asdict().items()}
    return named | {"delta": (named["out"] * dout.transpose(1, 2).double()).sum(dim=-1)}


def _check_forward(
    kernel: AttentionKernel, tile: Tile, given: Operands, wanted: Wanted, scale: float, slack: float
) -> dict[str, float]:
    out, lse = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=scale)
    assert lse.dtype == torch.float32, f"lse is {lse.dtype}"
    _check_new((out, lse), (given.q, *given.tile))
    limit = slack * _limits(out, tile)[0]
    return {
        "out": _within("out", out, wanted["out"], limit),
        "lse": _within("lse", lse, wanted["lse"], LSE_LIMIT),
    }


def _check_backward(
    kernel: AttentionKernel, tile: Tile, given: Operands, wanted: Wanted, scale: float, parts: int, by: str,
    slack: float,
) -> dict[str, float]:  # fmt: skip
    """With the lse of the whole rows and their delta, as they come from other ranks; or with their out."""
    lse, delta = (wanted[name].float().to(given.q.device) for name in ("lse", "delta"))
    out = None if by == "delta" else wanted["out"].to(given.q.device, tile.dtype)
    pieces = [(given.tile, tile.patch), (given.rest, Patch(0, tile.patch.rows, 0, REST))][:parts]
    made = []
    for (k, v), each in pieces:
        arguments = (given.dout, given.q, k, v, lse, delta if out is None else None)
        made.append(kernel.backward(*arguments, out=out, patch=each, scale=scale))
        _check_new(made[-1], [x for x in (*arguments, out) if x is not None])
    limit = min(_limits(x, tile)[1] for one in made for x in one)
    if out is not None:
        limit = max(limit, LIMITS[tile.dtype][1])  # delta is worked out from a rounded out
    dq = torch.stack([dq.float() for dq, _, _ in made]).sum(dim=0)
    dk, dv = (torch.cat([one[which] for one in made], dim=2) for which in (1, 2))
    gradients = {"dq": dq, "dk": dk, "dv": dv}
    least = float(given.dout.float().norm())
    return {
        f"{name} by {by}, {parts} tile(s)": _within(name, x, wanted[name], slack * limit, least)
        for name, x in gradients.items()
    }


def _limits(result: torch.Tensor, tile: Tile) -> tuple[float, float]:
    assert result.dtype in (torch.float32, tile.dtype), f"a result is {result.dtype}"
    return LIMITS[result.dtype]


def _check_new(made: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
    """The caller may change what it gets, and that must change nothing else."""
    pointers = [x.untyped_storage().data_ptr() for x in made]
    taken = {x.untyped_storage().data_ptr() for x in given}
    assert len(set(pointers)) == len(pointers), "two results share memory"
    assert not taken & set(pointers), "a result lies in an operand's memory"


def _within(name: str, got: torch.Tensor, wanted: torch.Tensor, limit: float, least: float = 0.0) -> float:
    """The relative error; of what is 0 but for rounding (dq of a row with one column), the error beside `least`."""
    error = relative_error(got.cpu(), wanted)
    if error == math.inf and float(wanted.norm()) < 1e-9 * least:
        error = float(got.double().norm()) / least
    assert error <= limit, f"{name}: error {error:.3g}, limit {limit:g}"
    return error
