"""Figures of devices and models, written here by hand, and the page that is written from all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_heads import MODELS
from presets_page import page

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.planner.machines.devices import DEVICES, GIB, device_figures
from tokenring.planner.machines.presets import PRESETS
from tokenring.planner.machines.sourced import Figure, unknown

DOCS = Path(__file__).resolve().parents[2] / "docs"

# ---------- devices

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# TFLOP/s of attention forward and backward in the dtype, and memory in GiB.
ATTENTION = {
    "v100-sxm2": (FP16, 62.5, 43.75, 32),
    "a100-sxm": (BF16, 227.76, 196.56, 80),
    "h100-sxm": (BF16, 647.795, 560.763, 80),
    "h100-sxm-fa2": (BF16, 346.15, 330.326, 80),
    "l20": (BF16, 87.235, 75.285, 48),
    "l40s": (BF16, 264.2965, 228.0915, 48),
    "rtx4090": (BF16, 120.5595, 104.0445, 24),
    "a10": (BF16, 91.25, 78.75, 24),
    "910a": (FP16, 110.08, 94.72, 32),
    "910b2": (BF16, 152.177, 130.943, 64),
    "910b3": (BF16, 126.807, 109.113, 64),
    "910c-die": (BF16, 152.177, 130.943, 64),
    "950dt": (BF16, 215.0, 185.0, 144),
    "mi300x": (BF16, 520.0, 390.0, 192),
}


@pytest.mark.parametrize("name", DEVICES)
def test_what_attention_reaches(name: str) -> None:
    dtype, forward, backward, gib = ATTENTION[name]
    device = device_figures(name)
    assert device.attention_tflops(dtype) == pytest.approx(forward)
    assert device.attention_tflops(dtype, "backward") == pytest.approx(backward)
    assert device.memory_bytes == gib * GIB
    assert device.memory_gbs.known() > 500


def test_every_device_of_a_preset_has_figures() -> None:
    assert list(ATTENTION) == list(DEVICES)
    assert {known.device for known in PRESETS.values()} <= DEVICES.keys()


@pytest.mark.parametrize(("name", "dtype"), [("v100-sxm2", BF16), ("910a", BF16), ("910a", FP32), ("l40s", torch.int8)])
def test_a_peak_that_is_not_known_is_refused(name: str, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=f"no peak of {name} in .* is known"):
        DEVICES[name].peak_tflops(dtype)


def test_a_device_without_figures_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="unknown device 'tpu'; choose one of v100-sxm2, "):
        device_figures("tpu")


@pytest.mark.parametrize(
    ("value", "source", "grade"),
    [(None, "x", "vendor"), (1.0, "x", "unknown"), (1.0, "", "vendor"), (0.0, "x", "vendor"), (1.0, "x", "sure")],
)
def test_figures_without_source_or_value_are_refused(value: float | None, source: str, grade: str) -> None:
    with pytest.raises(ConfigurationError):
        Figure(value, source, grade)  # type: ignore[arg-type]


def test_an_unknown_figure_says_why() -> None:
    figure = unknown("nobody measured it")
    assert figure.times(3) == figure
    with pytest.raises(ConfigurationError, match="not known: nobody measured it"):
        figure.known()


# ---------- models

# Query heads, kv heads, head dim, layers, causal.
HEADS = {
    "llama-3-8b": (32, 8, 128, 32, True),
    "llama-3-405b": (128, 8, 128, 126, True),
    "qwen2.5-7b": (28, 4, 128, 28, True),
    "deepseek-v3": (128, 128, 192, 61, True),
    "sd3.5-large": (38, 38, 64, 38, False),
    "cogvideox-2b": (30, 30, 64, 30, False),
    "flux.1": (24, 24, 128, 57, False),
    "wan2.1-14b": (40, 40, 128, 40, False),
    "glm-4-9b": (32, 2, 128, 40, True),
    "mixtral-8x7b": (32, 8, 128, 32, True),
}


@pytest.mark.parametrize("name", HEADS)
def test_head_shapes(name: str) -> None:
    model = MODELS[name]
    assert (model.q_heads, model.kv_heads, model.head_dim, model.layers, model.causal) == HEADS[name]
    work = model.workload(4096, batch=2)
    assert (work.batch, work.q_length, work.kv_length, work.dtype) == (2, 4096, 4096, model.dtype)
    assert (work.q_heads, work.kv_heads, work.head_dim) == HEADS[name][:3]


def test_there_are_ten_models_and_no_other() -> None:
    assert list(MODELS) == list(HEADS) and len(HEADS) == 10


def test_the_page_is_what_the_figures_say() -> None:
    assert (DOCS / "presets.md").read_text(encoding="utf-8") == page(), (
        "write it again: python benchmarks/presets_page.py > docs/presets.md"
    )
