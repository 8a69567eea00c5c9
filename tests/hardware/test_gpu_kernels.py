"""hardware/gpu/gpu_kernels.py without a GPU: over operators that stand in, it finds what is right and what is wrong."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from cuda_ops import aten
from cuda_ops.aten import operators
from torch.utils._python_dispatch import TorchDispatchMode

from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchFlash
from tokenring.errors import BackendUnavailable

FILE = Path(__file__).resolve().parents[2] / "hardware" / "gpu" / "gpu_kernels.py"
Lines = dict[str, tuple[str, str, "bool | None"]]


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """With few tiles and small sizes: what is tried here is the script."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_kernels", FILE)
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    few = ("full", "causal, square", "band", "8/2 heads")
    monkeypatch.setattr(module, "TILES", [tile for tile in module.TILES if tile.name in few])
    patch = module.Patch
    monkeypatch.setattr(module, "COMPARED", {"causal": patch(0, 40, 0, 40, None, 0), "full": patch(0, 30, 0, 41)})
    for name, value in {"HEADS": 2, "DIM": 16, "ROUNDS": 1}.items():
        monkeypatch.setattr(module, name, value)

    def made(name: str, device: torch.device) -> AttentionKernel:
        if name in ("torch-flash", "torch-cudnn"):
            return {"torch-flash": TorchFlash, "torch-cudnn": TorchCudnn}[name]()
        raise BackendUnavailable(f"kernel {name!r} cannot be imported")

    monkeypatch.setattr(module, "make_kernel", made)
    return module


def lines(script: Any, **changed: Any) -> Lines:
    found: Lines = {}

    def report(name: str, value: str, limit: str, met: bool | None) -> None:
        found[name] = value, limit, met

    with operators(**changed):
        script.run(report, "cpu", 64)
    return found


def test_all_is_well(script: Any) -> None:
    found = lines(script)
    assert found["kernel flash-attn-3"] == ("not here: kernel 'flash-attn-3' cannot be imported", "", None)
    for kernel in ("torch-flash", "torch-cudnn"):
        for dtype in ("bfloat16", "float16"):
            assert found[f"{kernel}, {dtype}: suite of all kernels"] == ("4 of 4 tiles", "", True)
            assert found[f"{kernel}, {dtype}: error"][2] is True, found
        value, limit, met = found[f"one call of {kernel}, 0k, 2 heads of 16, bf16, causal"]
        assert "ms forward" in value and "TFLOP/s" in value and (limit, met) == ("", None)


class Sdpa(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the attention operators that torch takes: heads of k, whether causal, whether with a mask."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, int, bool, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "scaled_dot_product" in (name := func._schema.name) and "backward" not in name:
            causal = any(value is True for value in args[3:])
            self.seen.append((name, args[1].shape[1], causal, (kwargs or {}).get("attn_mask") is not None))
        return func(*args, **(kwargs or {}))


def test_what_kernels_are_compared_with(script: Any) -> None:
    """A kernel of torch's, which takes no grouped heads beside a mask: its plain arithmetic errs less."""
    for where, causal, masked in (("full", False, False), ("causal", True, False), ("window", False, True)):
        patch = {"window": script.Patch(0, 40, 0, 40, -9, 0)} | script.COMPARED
        tile = script.Tile(where, patch[where], (8, 4), 16, 1, torch.bfloat16)
        given = script.operands(tile, torch.device("cpu"))
        with Sdpa() as mode:
            made = script.torchs_own(given.q, *given.tile, given.dout, tile.patch, 0.25)
        assert [(heads, *how) for _, heads, *how in mode.seen] == [(8, causal, masked)]
        assert "flash" in mode.seen[0][0]
        assert [x.shape for x in made] == [x.shape for x in (given.q, given.q, *given.tile)]


def test_what_is_wrong_is_seen(script: Any) -> None:
    def base_2(*given: Any, **named: Any) -> Any:
        out, lse, *rest = aten.flash_forward(*given, **named)
        return out, lse / math.log(2), *rest

    def refused(*given: Any, **named: Any) -> Any:
        raise RuntimeError("cuDNN Frontend error: No execution plans support the graph.")

    changed = {"_flash_attention_forward": base_2, "_scaled_dot_product_cudnn_attention": refused}
    found = lines(script, **changed)
    value, _, met = found["torch-flash, bfloat16: suite of all kernels"]
    assert met is False and value.startswith("0 of 4 tiles; full: lse: error")
    assert found["torch-flash, bfloat16: error"][2] is False
    value, _, met = found["torch-cudnn, float16: error"]
    assert met is False and "No execution plans support" in value
