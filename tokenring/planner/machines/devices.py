"""Compute rates of accelerators, from published figures: the planner's fallback where nothing was measured.

One fixed set, written down before anything was compared with a published measurement of whole systems, and not
fitted to one. A rate for attention is peak x share: the share of the peak that a published measurement of a flash
kernel reaches on long sequences, head dim 128, every pair visible. FLOPs are counted as the kernels' authors do:
4 for each visible pair, head and channel forward, 2.5 times as many backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import Pass
from tokenring.nearest import hint
from tokenring.planner.machines.sourced import Figure, unknown

GIB = 1 << 30
EAGER = Figure(8.0, "our estimate of a launch from Python, for every device; no measurement was read", "assumed")
NOT_COUNTED = unknown("launches are not counted: each instruction counts as one operation")


@dataclass(frozen=True)
class DeviceFigures:
    """One accelerator, as a rank sees it: a GPU, or a die.

    *_tflops: dense peak. memory_gbs: its own memory. forward, backward: share of the bf16 or fp16 peak that
    attention reaches. kernel_us, operator_us: of an attention kernel, and of a copy or another small operator, beside
    what it computes and moves. launch_us: of the host for each operator that it launches, where all are counted.
    """

    name: str
    title: str
    fp32_tflops: Figure
    bf16_tflops: Figure
    fp16_tflops: Figure
    memory_gbs: Figure
    memory_gib: Figure
    forward: Figure
    backward: Figure
    kernel_us: Figure = EAGER
    operator_us: Figure = EAGER
    launch_us: Figure = NOT_COUNTED

    @property
    def memory_bytes(self) -> int:
        """Memory of the device in bytes. Raises ConfigurationError if it is not known."""
        return int(self.memory_gib.known() * GIB)

    def peak_tflops(self, dtype: torch.dtype) -> float:
        """Return the dense peak in TFLOP/s; fp32 without tf32. Raises UnsupportedError where the device has none."""
        peaks = {torch.float32: self.fp32_tflops, torch.bfloat16: self.bf16_tflops, torch.float16: self.fp16_tflops}
        figure = peaks.get(dtype)
        if figure is None or figure.value is None:
            name = str(dtype).removeprefix("torch.")
            why = figure.source if figure is not None else "attention runs in float32, bfloat16 and float16"
            raise UnsupportedError(f"no peak of {self.name} in {name} is known ({why}); name another dtype or device")
        return figure.value

    def attention_tflops(self, dtype: torch.dtype, direction: Pass = "forward") -> float:
        """Return the TFLOP/s of attention; fp32 is taken to reach the same share: no measurement was looked for."""
        share = self.forward if direction == "forward" else self.backward
        return self.peak_tflops(dtype) * share.known()

    def figures(self) -> dict[str, Figure]:
        """Return the figures by the names of the fields."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}


# ---------- sources

_BOOK = "the accelerator chapter of the book ML Engineering, tables of peaks and memory"
_V100 = "NVIDIA's V100 data sheet, as quoted in catalogues"
_A10 = "NVIDIA's A10 data sheet, as quoted in catalogues"
_L40S = "NVIDIA's L40S data sheet (without sparsity), as quoted by a dealer"
_L20 = "NVIDIA's L20 data sheet (without sparsity), as quoted in catalogues"
_4090 = "WareDB's page on the GeForce RTX 4090 (dense, 16-bit with fp32 accumulation)"
_MSMODELING = "Ascend's msmodeling, device profiles"
_950 = "texts on the vendor's announcement: 950DT, 144 GB at 4 TB/s, 1 PFLOP/s in FP8"
_950_HALF = "half of the 1 PFLOP/s announced for FP8; no figure for 16-bit formats was found"
_910A = "a text on the Ascend 910's announcement: 256 TFLOP/s fp16"

_FA2 = "FlashAttention-2's paper, A100: from 50% of the peak, and up to"
FA2_FORWARD = Figure(0.73, f"{_FA2} 73% forward", "measured")
FA2_BACKWARD = Figure(0.63, f"{_FA2} 63% backward; quoted from memory", "repeated")
_FA3 = "FlashAttention-3's paper, its figure for head dim 128 and fp16, H100, 16k, as transcribed:"
FA3_FORWARD = Figure(0.655, f"{_FA3} 648 of 989", "measured")
FA3_BACKWARD = Figure(0.567, f"{_FA3} 561 of 989", "measured")
FA2_FORWARD_H100 = Figure(0.35, "FlashAttention-3's abstract: FlashAttention-2 reaches 35% of H100's peak", "measured")
FA2_BACKWARD_H100 = Figure(
    0.334, "FlashAttention-2's paper, H100, both passes: up to 335 of 989; forward subtracted at 0.35", "measured"
)
_LIKE_A100 = "FlashAttention-2's share on A100; no measurement on this device was read"
LIKE_A100 = (Figure(0.73, _LIKE_A100, "assumed"), Figure(0.63, _LIKE_A100, "assumed"))
_OLD = "FlashAttention-2 does not run on V100, and no measurement was read: our estimate"
OLD_KERNEL = (Figure(0.5, _OLD, "assumed"), Figure(0.35, _OLD, "assumed"))
_CDNA3 = "no measurement of AMD's kernels was found; our estimate, well below FlashAttention-2 on A100"
CDNA3 = (Figure(0.4, _CDNA3, "assumed"), Figure(0.3, _CDNA3, "assumed"))
_TORCH_NPU = "README of Huawei's pto-isa: torch_npu's fused attention on 910B2, 151 of 354 at 32k, one head of 128"
NPU_FORWARD = Figure(0.43, _TORCH_NPU, "measured")
NPU_OTHER = Figure(0.43, "as on 910B2; no measurement was found", "assumed")
_STATIC = "Ascend's msmodeling, static costs of ATLAS_800:"
_AS_910B = "as on 910B; no figure was found"
_HOST = "torch_npu's operator queue, estimated at 10 to 20 from its code; no measurement was read"
NPU_LAUNCH = Figure(10.0, _HOST, "assumed")
NPU_OPERATORS = (
    Figure(5.0, f"{_STATIC} 5 us per matrix operation", "vendor"),
    Figure(2.0, f"{_STATIC} 2 us per other operation", "vendor"),
    NPU_LAUNCH,
)
NPU_OPERATORS_TAKEN = (Figure(5.0, _AS_910B, "assumed"), Figure(2.0, _AS_910B, "assumed"), NPU_LAUNCH)
NPU_BACKWARD = Figure(0.37, "forward times FlashAttention-2's ratio of the passes; no measurement was found", "assumed")

_ALL = (
    DeviceFigures(
        "v100-sxm2", "NVIDIA V100 SXM2 32 GB",
        Figure(15.7, _V100, "repeated"), unknown("V100 has no bf16"),
        Figure(125, _V100, "repeated"), Figure(900, _V100, "repeated"), Figure(32, _V100, "repeated"), *OLD_KERNEL,
    ),
    DeviceFigures(
        "a100-sxm", "NVIDIA A100 SXM 80 GB",
        Figure(19.5, _BOOK, "table"), Figure(312, _BOOK, "table"),
        Figure(312, _BOOK, "table"), Figure(2000, _BOOK, "table"), Figure(80, _BOOK, "table"),
        FA2_FORWARD, FA2_BACKWARD,
    ),
    DeviceFigures(
        "h100-sxm", "NVIDIA H100 SXM 80 GB",
        Figure(67, _BOOK, "table"), Figure(989, _BOOK, "table"),
        Figure(989, _BOOK, "table"), Figure(3350, _BOOK, "table"), Figure(80, _BOOK, "table"),
        FA3_FORWARD, FA3_BACKWARD,
    ),
    DeviceFigures(
        "h100-sxm-fa2", "NVIDIA H100 SXM 80 GB with FlashAttention-2, whose kernels target A100",
        Figure(67, _BOOK, "table"), Figure(989, _BOOK, "table"),
        Figure(989, _BOOK, "table"), Figure(3350, _BOOK, "table"), Figure(80, _BOOK, "table"),
        FA2_FORWARD_H100, FA2_BACKWARD_H100,
    ),
    DeviceFigures(
        "l20", "NVIDIA L20 48 GB",
        Figure(59.35, _L20, "repeated"), Figure(119.5, _L20, "repeated"),
        Figure(119.5, _L20, "repeated"), Figure(864, _L20, "repeated"), Figure(48, _L20, "repeated"), *LIKE_A100,
    ),
    DeviceFigures(
        "l40s", "NVIDIA L40S 48 GB",
        Figure(91.6, _L40S, "table"), Figure(362.05, _L40S, "table"),
        Figure(362.05, _L40S, "table"), Figure(864, _L40S, "table"), Figure(48, _L40S, "table"), *LIKE_A100,
    ),
    DeviceFigures(
        "rtx4090", "NVIDIA GeForce RTX 4090 24 GB",
        Figure(82.58, _4090, "table"), Figure(165.15, _4090, "table"),
        Figure(165.15, _4090, "table"), Figure(1008, _4090, "table"), Figure(24, _4090, "table"), *LIKE_A100,
    ),
    DeviceFigures(
        "a10", "NVIDIA A10 24 GB",
        Figure(31.2, _A10, "repeated"), Figure(125, _A10, "repeated"),
        Figure(125, _A10, "repeated"), Figure(600, _A10, "repeated"), Figure(24, _A10, "repeated"), *LIKE_A100,
    ),
    DeviceFigures(
        "910a", "Huawei Ascend 910A 32 GB",
        unknown("no figure found"), unknown("910A has no bf16"),
        Figure(256, _910A, "repeated"), Figure(1200, "catalogues", "repeated"), Figure(32, "catalogues", "repeated"),
        NPU_OTHER, NPU_BACKWARD, *NPU_OPERATORS_TAKEN,
    ),
    DeviceFigures(
        "910b2", "Huawei Ascend 910B2 64 GB (24 cores)",
        Figure(99.5, _MSMODELING, "vendor"), Figure(353.9, _MSMODELING, "vendor"),
        Figure(376, _MSMODELING, "vendor"), Figure(1600, _MSMODELING, "vendor"), Figure(64, _MSMODELING, "vendor"),
        NPU_FORWARD, NPU_BACKWARD, *NPU_OPERATORS,
    ),
    DeviceFigures(
        "910b3", "Huawei Ascend 910B3 64 GB (20 cores)",
        Figure(83, _MSMODELING, "vendor"), Figure(294.9, _MSMODELING, "vendor"),
        Figure(313, _MSMODELING, "vendor"), Figure(1600, _MSMODELING, "vendor"), Figure(64, _MSMODELING, "vendor"),
        NPU_OTHER, NPU_BACKWARD, *NPU_OPERATORS,
    ),
    DeviceFigures(
        "910c-die", "Huawei Ascend 910C, one die of two, 64 GB",
        Figure(99.5, _MSMODELING, "vendor"), Figure(353.9, _MSMODELING, "vendor"),
        Figure(376, _MSMODELING, "vendor"), Figure(1600, _MSMODELING, "vendor"), Figure(64, _MSMODELING, "vendor"),
        NPU_OTHER, NPU_BACKWARD, *NPU_OPERATORS,
    ),
    DeviceFigures(
        "950dt", "Huawei Ascend 950DT 144 GB",
        unknown("no figure found"),
        Figure(500, _950_HALF, "assumed"), Figure(500, _950_HALF, "assumed"),
        Figure(4000, _950, "table"), Figure(144, _950, "table"), NPU_OTHER, NPU_BACKWARD,
        *NPU_OPERATORS_TAKEN,
    ),
    DeviceFigures(
        "mi300x", "AMD Instinct MI300X 192 GB",
        Figure(163.4, _BOOK, "table"), Figure(1300, _BOOK, "table"),
        Figure(1300, _BOOK, "table"), Figure(5300, _BOOK, "table"), Figure(192, _BOOK, "table"), *CDNA3,
    ),
)  # fmt: skip

DEVICES: Mapping[str, DeviceFigures] = MappingProxyType({each.name: each for each in _ALL})


def device_figures(name: str) -> DeviceFigures:
    """Return the figures of a device by its name. Raises ConfigurationError for an unknown name."""
    if name not in DEVICES:
        known = ", ".join(DEVICES)
        raise ConfigurationError(f"unknown device {name[:40]!r}; choose one of {known}{hint(name, DEVICES)}")
    return DEVICES[name]
