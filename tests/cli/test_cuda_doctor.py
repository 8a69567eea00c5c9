"""What the doctor says of the kernels for CUDA: installed or why not, and which one a tile goes to and why."""

from __future__ import annotations

import pytest
import torch
from cuda_ops.packages import installed

from tokenring.backends import registry
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.order import default_order
from tokenring.cli.doctor.probes import _kernels
from tokenring.lowering import backend_names
from tokenring.tables.rates import Rates

CUDA = torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Choosing:
    """As on an H100: the order is its, and torch-flash has been measured."""
    table = Rates("by hand", ((128, 400.0),), ((128, 300.0),))
    chosen = Choosing(
        default_order((9, 0)), lambda name: registry.make_kernel(name, CUDA),
        lambda name, head_dim, dtype: table if name == "torch-flash" else None, "for compute capability 9.0",
    )  # fmt: skip
    monkeypatch.setattr(registry, "_choosing", lambda device: chosen)
    return chosen


def test_kernels_with_reasons(hopper: Choosing) -> None:
    with installed("2.8"):
        taken, others = _kernels(CUDA)
    assert taken == {
        "name": "torch-flash",
        "why": "400 TFLOP/s forward in tiles of 4096 by `tokenring rates`, for a bf16 tile of 4096 × 4096, "
        "head dim 128",
    }
    said = {each["name"]: each["why"] for each in others}
    assert said["torch-cudnn"] == (
        "number 1 of the default order for compute capability 9.0, not measured; available by name: "
        "ContextParallel(kernel='torch-cudnn')"
    )
    assert "available by name" in said["flash-attn"] and "available by name" in said["torch-efficient"]
    assert "cannot be imported (flash_attn_interface: No module named" in said["flash-attn-3"]
    assert "pip install flash-attn-4" in said["flash-attn-4"]
    assert "for CPU tensors" in said["cpu-flash"]
    assert said.keys() | {"torch-flash"} == backend_names.KERNELS.keys()


def test_without_any_table_or_package() -> None:
    taken, _ = _kernels(CUDA)
    assert taken is not None and taken["name"] == "torch-efficient", "no device here: the order of an old one"
    taken, _ = _kernels(torch.device("cpu"))
    assert taken == {"name": "cpu-flash", "why": "the fastest here for cpu tensors"}
