"""ci/npu-smoke on emulated NPUs: torch's own merge, calls as models have them, both orders of packed statistics."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ascend import device
from ascend.ranks import NpuPools
from smoke_on_npus import Spoil, run

from tokenring.backends.kernels.npu_fusion import NpuFusion

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "hardware" / "npu"))

from npu_smoke import operators, shapes
from npu_smoke.unknowns import AS_ASSUMED, OTHERWISE

pytestmark = pytest.mark.timeout(600)  # ranks of their own, on a machine that is busy


# ---------- merging, shapes, refusals


def no_infinities(patched: pytest.MonkeyPatch) -> None:
    """log(exp(a) + exp(b)) as m + log(1 + exp(-|a - b|)), without a guard: CANN's document of aclnnLogAddExp."""

    def bare(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(torch.maximum(a, b) + torch.log1p(torch.exp(-(a - b).abs())))

    patched.setattr(torch, "logaddexp", bare_or_given(bare))


def bare_or_given(bare: Any) -> Any:
    """On the device alone: what is right is computed on the CPU."""
    given = torch.logaddexp
    return lambda a, b, out=None: given(a, b) if out is None else bare(a, b, out=out)


def overflows(patched: pytest.MonkeyPatch) -> None:
    """log(exp(a) + exp(b)), written so: beyond 88 exp gives infinity."""
    patched.setattr(torch, "logaddexp", bare_or_given(lambda a, b, out: out.copy_(torch.log(a.exp() + b.exp()))))


def is_dense(patched: pytest.MonkeyPatch) -> None:
    """lerp_ into a view with gaps writes where it should not: rows one after another."""
    given = torch.Tensor.lerp_

    def dense(self: torch.Tensor, *args: Any) -> torch.Tensor:
        return given(self, *args) if self.is_contiguous() else self

    patched.setattr(torch.Tensor, "lerp_", dense)


@pytest.mark.parametrize("spoil", [None, no_infinities, overflows, is_dense])
def test_torchs_own_merge(npus: NpuPools, spoil: Spoil | None) -> None:
    result, found = run(npus, 1, "torchmerge", spoil)
    assert found == {"torch-merge": AS_ASSUMED if spoil is None else OTHERWISE}
    cases = " ".join(result["wrong"])
    if spoil is no_infinities:
        assert "lse (-inf, -inf)" in cases and "(0.5, 1.5)" not in cases
    if spoil is overflows:
        assert "lse (200.0, 199.0)" in cases
    if spoil is is_dense:
        assert "records" in cases and "whole" not in cases


def wide_heads(patched: pytest.MonkeyPatch) -> None:
    """Right up to head dim 128."""
    given = NpuFusion.forward

    def forward(self: Any, q: torch.Tensor, *rest: Any, **how: Any) -> Any:
        out, lse = given(self, q, *rest, **how)
        return (out * 1.1 if q.shape[-1] > 128 else out), lse

    patched.setattr(NpuFusion, "forward", forward)


def refuses_many_heads(patched: pytest.MonkeyPatch) -> None:
    given = NpuFusion.backward

    def backward(self: Any, dout: torch.Tensor, q: torch.Tensor, *rest: Any, **how: Any) -> Any:
        if q.shape[1] == 64:
            raise RuntimeError("ERR01001 OPS invalid parameter: head_num")
        return given(self, dout, q, *rest, **how)

    patched.setattr(NpuFusion, "backward", backward)


@pytest.mark.parametrize("spoil", [None, wide_heads, refuses_many_heads])
def test_shapes(npus: NpuPools, spoil: Spoil | None) -> None:
    """One that raises is named, and all others have their errors."""
    result, found = run(npus, 1, "shapes", partial(small_shapes, then=spoil))
    assert found == {"kernel-shapes": AS_ASSUMED if spoil is None else OTHERWISE}
    names = {case.rpartition(",")[0] for case in result["errors"]}
    wanted = {*shapes.SHAPES, "96 tokens"}
    if spoil is wide_heads:
        wrong = {each.split(" of ")[1].split(",")[0] for each in result["wrong"]}
        assert wrong == {"D 192", "D 256"} and names == wanted
    if spoil is refuses_many_heads:
        assert names == wanted - {"64 heads, 8 for k and v"}
        assert len(result["wrong"]) == 2 and all("RuntimeError: ERR01001" in each for each in result["wrong"])


def small_shapes(patched: pytest.MonkeyPatch, then: Spoil | None) -> None:
    """As many heads and as large, with fewer tokens: no multiple of 16 stays one."""
    few = {name: each._replace(tokens=21 if each.tokens % 16 else 16) for name, each in shapes.SHAPES.items()}
    patched.setattr(shapes, "SHAPES", few)
    if then is not None:
        then(patched)


def lacking(direction: str, patched: pytest.MonkeyPatch) -> None:
    """A CANN without the kernel for softmax_layout in one direction, under a torch_npu whose schema has it.

    As op-plugin says it: TORCH_CHECK(softmax_layout_str == "", ...) where check_aclnn_kernel_available denies
    (FlashAttentionKernelNpuOpApi.cpp of 517f2e7d, 899-914 forward, 575-589 and 1175-1189 the gradient).
    """
    name = f"npu::npu_fusion_attention{direction}"
    given = device.operators[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("softmax_layout") or args.count("TND") > 1:  # one is how q, k and v lie
            raise RuntimeError("The param softmax_layout is not supported\n[ERROR] ERR01001 OPS invalid parameter")
        return given(*args, **kwargs)

    patched.setitem(device.operators, name, call)


PACKED = {"packed-order": AS_ASSUMED, "packed-order-tnd": AS_ASSUMED,
          "packed-gradient": AS_ASSUMED, "packed-gradient-tnd": AS_ASSUMED}  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "lost"),
    [
        (None, None), (partial(lacking, ""), "packed-order-tnd"), (partial(lacking, "_grad"), "packed-gradient-tnd"),
    ],
)  # fmt: skip
def test_both_orders_of_packed_statistics(npus: NpuPools, spoil: Spoil | None, lost: str | None) -> None:
    """Forward and gradient, each by itself: what is refused loses no other verdict."""
    result, found = run(npus, 1, "packed", spoil)
    assert found == (PACKED if lost is None else {**PACKED, lost: OTHERWISE})
    if lost is not None:
        seen = result["order" if "order" in lost else "gradient"]
        assert seen["TND"].startswith("refused: The param softmax_layout is not supported")


def other_statistics(patched: pytest.MonkeyPatch) -> None:
    """The gradient reads packed statistics in the other order."""
    given = operators._Packed._as_asked
    patched.setattr(operators._Packed, "_as_asked", lambda self, x, layout: given(self, x, "" if layout else "TND"))


def test_a_gradient_that_reads_another_order(npus: NpuPools) -> None:
    _, found = run(npus, 1, "packed", other_statistics)
    assert found == {**PACKED, "packed-gradient": OTHERWISE, "packed-gradient-tnd": OTHERWISE}
