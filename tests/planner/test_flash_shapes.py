"""Kernel rates by head dim and along a mask's edge: as the charts have them, and for published figures alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tokenring.planner.machines.devices import DEVICES
from tokenring.planner.machines.flash_shapes import FLASH_2, FLASH_3, SHAPE_OF, device_with, shaped, width_share
from tokenring.planner.machines.machine import device_rates, machine_of_device
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Machine, constant
from tokenring.tables.shaped_rates import ShapedRates, reshaped

BF16 = torch.bfloat16
FULL, TRIANGLE = Patch(0, 4096, 0, 4096), Patch(0, 4096, 0, 4096, None, 0)
LONGER = Patch(0, 4096, 0, 12288, None, 8192)  # whole columns before the triangle
FLOPS = 4 * 128  # of a pair, forward


def call(dim: int = 128, value_dim: int | None = None) -> Workload:
    return Workload(1, 8192, 8192, 8, 8, dim, BF16, value_dim)  # type: ignore[arg-type]


def test_widths() -> None:
    assert [width_share(FLASH_3, dim) for dim in (64, 128, 256)] == pytest.approx([497 / 648, 1, 756 / 648])
    assert width_share(FLASH_2, 64) == pytest.approx(324 / 370)
    assert 0.3 < width_share(FLASH_3, 32) < width_share(FLASH_3, 64) < width_share(FLASH_3, 96) < 1
    assert 1 < width_share(FLASH_3, 192) < width_share(FLASH_3, 256)


def test_the_shape_of_a_call() -> None:
    machine = machine_of_device("h100-sxm", BF16)
    narrow = shaped(machine, call(64)).rates
    assert isinstance(narrow, ShapedRates) and narrow.edge == FLASH_3.edge and "charts" in narrow.source
    assert narrow.tflops("forward", 16384) == pytest.approx(machine.rates.tflops("forward", 16384) * 497 / 648)
    assert narrow.tflops("backward", 512) == pytest.approx(machine.rates.tflops("backward", 512) * 497 / 648)
    latent = shaped(machine, call(192, 64)).rates  # 128 on average
    assert latent.tflops("forward", 4096) == pytest.approx(machine.rates.tflops("forward", 4096))
    assert set(SHAPE_OF) <= set(DEVICES)


@pytest.mark.parametrize("device", ["910b3", "mi300x", "v100-sxm2"])
def test_kernels_without_charts_are_left_as_they_are(device: str) -> None:
    machine = machine_of_device(device, torch.float16)
    assert shaped(machine, replace(call(64), dtype=torch.float16)) is machine


def test_rates_that_were_given_or_measured_are_left_as_they_are() -> None:
    given = Machine(constant(500.0))
    assert shaped(given, call(64)) is given
    copied = replace(device_rates(DEVICES["a100-sxm"], BF16), op_seconds=1e-6)
    assert device_with(copied, BF16) is None
    assert device_with(device_rates(DEVICES["a100-sxm"], BF16), BF16) is DEVICES["a100-sxm"]


def test_the_edge_costs_a_triangle_once() -> None:
    plain = constant(100.0)
    edged = reshaped(plain, edge=((4096, 0.8),))
    seconds = [edged.kernel_seconds(each, 1, 128, 1, "forward") for each in (FULL, TRIANGLE, LONGER)]
    visible = [plain.kernel_seconds(each, 1, 128, 1, "forward") for each in (FULL, TRIANGLE, LONGER)]
    assert seconds[0] == visible[0]
    assert seconds[1] == pytest.approx(visible[1] / 0.8, rel=1e-3)
    assert seconds[2] - visible[2] == pytest.approx(seconds[1] - visible[1], rel=1e-3)
    assert reshaped(plain).kernel_seconds(TRIANGLE, 1, 128, 1, "forward") == visible[1]


def test_merges_by_several_operators() -> None:
    plain = replace(constant(100.0, copy_gbs=1000.0), op_seconds=1e-5)
    several = reshaped(plain, merge_factor=3.0, merge_operators=9)
    assert several.results_seconds(1e9, 1) == pytest.approx(3e-3 + 9e-5)
    assert several.results_seconds(1e9, 0) == plain.results_seconds(1e9, 0) == plain.copy_seconds(1e9)
    assert reshaped(plain).results_seconds(1e9, 2) == plain.results_seconds(1e9, 2)
    assert reshaped(several, edge=((1, 0.5),)).merge_factor == 3.0
