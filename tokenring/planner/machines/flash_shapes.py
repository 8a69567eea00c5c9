"""Shapes at which flash kernels are slower, or faster, than at head dim 128 with every pair visible.

From one published set of measurements: the charts of FlashAttention-3's paper (arXiv:2407.08608), forward, H100, 16k
tokens in all, as transcribed. Those of backward were not read: the same shares are taken. `DeviceFigures` have the
rates that these are shares of. Nothing was fitted to a measurement of a whole system.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch

from tokenring.planner.machines.devices import DEVICES, DeviceFigures
from tokenring.planner.machines.machine import device_rates
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, Rates, Sample
from tokenring.tables.shaped_rates import reshaped


class FlashShape(NamedTuple):
    """widths: by head dim, the share of the rate at 128. edge: by tokens, the share that a causal call reaches."""

    widths: tuple[Sample, ...]
    edge: tuple[Sample, ...]


FLASH_2 = FlashShape(
    ((64, 324 / 370), (128, 1.0), (256, 326 / 370)),
    ((512, 191 / 309), (1024, 260 / 350), (2048, 298 / 362), (4096, 319 / 368), (8192, 333 / 370), (16384, 335 / 370)),
)
FLASH_3 = FlashShape(
    ((64, 497 / 648), (128, 1.0), (256, 756 / 648)),
    ((512, 292 / 467), (1024, 423 / 565), (2048, 521 / 625), (4096, 579 / 638), (8192, 602 / 646), (16384, 616 / 648)),
)
# The kernel that each device's share of the peak is of; no charts of others were read.
SHAPE_OF = {
    "a100-sxm": FLASH_2, "h100-sxm-fa2": FLASH_2, "l20": FLASH_2, "l40s": FLASH_2, "rtx4090": FLASH_2, "a10": FLASH_2,
    "h100-sxm": FLASH_3,
}  # fmt: skip


def width_share(shape: FlashShape, head_dim: float) -> float:
    """Return the share of the rate at head dim 128 that another head dim reaches.

    A pair's time is straight between the charts' head dims, and goes on so beyond them: the exponential of a pair costs
    the same whatever the width, so narrow heads are slow.
    """
    times = [(dim, dim / 128 / share) for dim, share in shape.widths]
    low, high = times[:2] if head_dim <= times[1][0] else times[-2:]
    slope = (high[1] - low[1]) / (high[0] - low[0])
    return head_dim / 128 / (low[1] + (head_dim - low[0]) * slope)


def device_with(rates: Rates, dtype: torch.dtype) -> DeviceFigures | None:
    """Return the device whose published figures the rates are; None: they were measured, or given."""
    own = (each for each in DEVICES.values() if each.title in rates.source)
    return next((each for each in own if device_rates(each, dtype) == rates), None)


def shaped(machine: Machine, size: Workload) -> Machine:
    """Return the machine with the rates of a call's shape, where the charts have its kernel; else as it is."""
    device = device_with(machine.rates, size.dtype)
    shape = None if device is None else SHAPE_OF.get(device.name)
    if shape is None:
        return machine
    share, rates = width_share(shape, (size.head_dim + size.value_dim) / 2), machine.rates
    made = reshaped(
        rates,
        source=f"{rates.source}; by the call's head dim and along a mask's edge as in FlashAttention-3's charts",
        forward=tuple((side, rate * share) for side, rate in rates.forward),
        backward=tuple((side, rate * share) for side, rate in rates.backward),
        edge=shape.edge,
    )
    return replace(machine, rates=made)
