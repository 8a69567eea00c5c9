"""The order of kernels for a tile, where there are several: a pure function of what is installed and measured.

`tokenring rates` keeps a table of TFLOP/s for each kernel. The kernel with the highest rate for a tile's shorter side
comes first; those without a table follow in the default order, which is an opinion for each generation of chips:
what is made for the chip before what runs on it, what torch brings before what somebody installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from tokenring.ir.schedule_data import Pass

LAST = ("torch-efficient", "flex", "reference")  # fp32 and everything else; compiled; any device
ORDERS: tuple[tuple[tuple[int, int], tuple[str, ...]], ...] = (  # from this compute capability on
    ((10, 0), ("flash-attn-4", "torch-cudnn", "torch-flash", "flash-attn")),
    ((9, 0), ("flash-attn-3", "torch-cudnn", "flash-attn-4", "torch-flash", "flash-attn")),
    ((8, 0), ("torch-flash", "flash-attn", "torch-cudnn")),
    ((0, 0), ()),
)


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
