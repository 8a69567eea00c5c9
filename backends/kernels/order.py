"""The order of kernels for a tile, where there are several: a pure function of what is installed and measured.

`tokenring rates` keeps a table of TFLOP/s for each kernel. The kernel with the highest rate for a tile's shorter side
comes first; those without a table follow in the default order, which is an opinion for each generation of chips:
what is made for the chip before what runs on it, what torch brings before what somebody installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from tokenring.backends.kernels.flash_common import named
from tokenring.ir.schedule_data import Pass
from tokenring.sequence.region import Patch

LAST = ("torch-efficient", "flex", "reference")  # fp32 and everything else; compiled; any device
ORDERS: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (  # from this compute capability on
    ((10, 0), ("flash-attn-4", "torch-cudnn", "torch-flash", "flash-attn")),
    ((9, 0), ("flash-attn-3", "torch-cudnn", "flash-attn-4", "torch-flash", "flash-attn")),
    ((8, 0), ("torch-flash", "flash-attn", "torch-cudnn")),
    ((0, 0), ()),
)


Operands = tuple[int, torch.dtype] | tuple[int, torch.dtype, int]  # head dim, dtype, and that of values if another


class TileCall(NamedTuple):
    """A kind of call, on which the order of kernels depends.

    side: of the tile, rounded down to a power of two. deterministic: torch.use_deterministic_algorithms is on.
    value_dim: the head dim of v and out; None: that of q and k.
    """

    direction: Pass
    side: int
    head_dim: int
    dtype: torch.dtype
    deterministic: bool
    value_dim: int | None = None

    @staticmethod
    def of(
        direction: Pass, side: int, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> TileCall:  # fmt: skip
        """Return the kind of a call, as torch is set now; side, in tokens, is rounded down to a power of two."""
        deterministic = torch.are_deterministic_algorithms_enabled()
        value_dim = None if value_dim == head_dim else value_dim
        return TileCall(direction, 1 << (max(side, 1).bit_length() - 1), head_dim, dtype, deterministic, value_dim)

    @staticmethod
    def of_tile(
        direction: Pass, patch: Patch, head_dim: int, dtype: torch.dtype, value_dim: int | None = None
    ) -> TileCall:
        """Return the kind of call of a tile, by its shorter side, as torch is set now."""
        return TileCall.of(direction, min(patch.rows, patch.cols), head_dim, dtype, value_dim)

    @property
    def operands(self) -> Operands:
        """The operands, by which kernels refuse, are tried and are measured."""
        return (self.head_dim, self.dtype) if self.value_dim is None else (self.head_dim, self.dtype, self.value_dim)

    @property
    def widths(self) -> str:
        """The head dims as text."""
        return f"head dim {self.head_dim}" + ("" if self.value_dim is None else f" ({self.value_dim} of values)")

    def __str__(self) -> str:
        return f"{named((self.dtype,))}, {self.widths}"


class KernelTable(Protocol):
    """A table of measured rates of one kernel, as tables.rates.Rates."""

    def tflops(self, direction: Pass, side: int) -> float:
        """Return the rate, in TFLOP/s, of a tile whose shorter side has so many tokens."""


class Pick(NamedTuple):
    """A kernel in its place, and why it stands there."""

    name: str
    why: str


def default_order(capability: tuple[int, int]) -> tuple[str, ...]:
    """Return kernels by name for a chip of this compute capability, the first to be taken first."""
    return next(order for least, order in ORDERS if capability >= least) + LAST


def ranked(
    order: Sequence[str], tables: Mapping[str, KernelTable], direction: Pass, side: int, where: str = "here"
) -> list[Pick]:
    """Return the kernels of `order`, those with a table first and by their rate."""
    rates = {name: tables[name].tflops(direction, side) for name in order if name in tables}
    measured = sorted(rates, key=lambda name: -rates[name])
    picks = [
        Pick(name, f"{rates[name]:.3g} TFLOP/s {direction} in tiles of {side} by `tokenring rates`")
        for name in measured
    ]
    others = [name for name in order if name not in rates]
    return picks + [
        Pick(name, f"number {place} of the default order {where}{', not measured' if rates else ''}")
        for place, name in enumerate(others, 1)
    ]
