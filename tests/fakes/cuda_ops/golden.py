"""What the operators compute, in float64, given which pairs are visible. [B, H, S, D] on the CPU.

Tensor cores take operands of one dtype: what is multiplied with bf16 is rounded to bf16. A row that sees nothing comes
back as each operator leaves it; the gradients recompute p from the lse that they are given, and delta from out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

ALIGNMENT = 16


class Forward(NamedTuple):
    """out [B, H, Sq, D] in q's dtype; lse [B, H, Sq] in fp32."""

    out: torch.Tensor
    lse: torch.Tensor


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float,
    empty: tuple[float, float], softcap: float = 0.0,
) -> Forward:  # fmt: skip
    """empty: out and lse of a row that sees nothing."""
    scores = _scores(q, k, visible, scale, softcap)
    lse = torch.logsumexp(scores, dim=-1)
    weights = _as_operand(torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]), q.dtype)
    out = weights @ _repeated(v, q).double()
    nothing = ~visible.any(dim=-1)
    out = out.masked_fill(nothing[:, None], empty[0])
    return Forward(out.to(q.dtype), lse.masked_fill(nothing, empty[1]).float())


def backward(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    visible: torch.Tensor, scale: float, rounds_heads: bool, softcap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """rounds_heads: dk and dv of each query head are rounded before those of one kv head are added up."""
    p = torch.exp(_scores(q, k, visible, scale, softcap) - lse.double()[..., None])
    wide_k, wide_v, wide = _repeated(k, q).double(), _repeated(v, q).double(), dout.double()
    delta = (wide * out.double()).sum(dim=-1, keepdim=True)
    ds = p * (wide @ wide_v.mT - delta)
    if softcap:  # flash_bwd_kernel.h: dtanh, before ds is rounded
        ds = ds * (1 - torch.tanh(q.double() @ wide_k.mT * scale / softcap).square())
    ds = _as_operand(ds, q.dtype) * scale
    dk, dv = ds.mT @ q.double(), _as_operand(p, q.dtype).mT @ wide
    if rounds_heads:
        dk, dv = dk.to(q.dtype).double(), dv.to(q.dtype).double()
    dk, dv = (x.reshape(*k.shape[:2], -1, *x.shape[2:]).sum(dim=2) for x in (dk, dv))
    return (ds @ wide_k).to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)


def _scores(
    q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor, scale: float, softcap: float
) -> torch.Tensor:  # fmt: skip
    if softcap:  # before it is hidden (flash_fwd_kernel.h, apply_softcap)
        return (softcap * torch.tanh(q.double() @ _repeated(k, q).double().mT * scale / softcap)).masked_fill(
            ~visible, -math.inf
        )
    # Hidden before they are scaled, as in flash attention (softmax.h, scale_apply_exp2: the maximum is that of scores
    # not scaled yet): a negative scale makes -inf to +inf, one of zero to NaN.
    return (q.double() @ _repeated(k, q).double().mT).masked_fill(~visible, -math.inf) * scale


def _repeated(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _as_operand(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if dtype == torch.float32 else x.to(dtype).double()


# ---------- masks


def band(rows: int, cols: int, left: float, right: float, corner: int) -> torch.Tensor:
    """Row i sees columns i + corner - left to i + corner + right; corner: 0 is top left, cols - rows bottom right."""
    difference = torch.arange(cols)[None, :] - torch.arange(rows)[:, None] - corner
    return (difference >= -left) & (difference <= right)


def second_version(rows: int, cols: int, causal: bool, left: int, right: int) -> torch.Tensor:
    """flash_api.cpp of version 2: mha_fwd, then set_params_fprop."""
    left, right = (-1 if side >= cols else side for side in (left, right))
    causal = causal and rows > 1
    right = 0 if causal else right
    if left < 0 and right < 0:
        return torch.ones(rows, cols, dtype=torch.bool)
    left, right = (cols if side < 0 else side for side in (left, right))
    return band(rows, cols, left, right, cols - rows)


def third_version(rows: int, cols: int, causal: bool, left: int, right: int) -> torch.Tensor:
    """hopper/flash_api.cpp."""
    left = -1 if left >= cols - 1 else left
    right = 0 if causal else -1 if right >= rows - 1 else right
    if left < 0 and right < 0:
        return torch.ones(rows, cols, dtype=torch.bool)
    return band(rows, cols, cols - 1 if left < 0 else left, rows - 1 if right < 0 else right, cols - rows)


# ---------- memory


def check_aligned(*operands: torch.Tensor) -> None:
    """What vector loads do not check and cannot read."""
    for x in operands:
        size = x.element_size()
        steps = [x.data_ptr(), *(s * size for s, n in zip(x.stride()[:-1], x.shape[:-1], strict=True) if n > 1)]
        if x.stride(-1) != 1 or any(step % ALIGNMENT for step in steps):
            raise RuntimeError(f"CUDA error: misaligned address (strides {x.stride()}, {x.dtype})")


def as_contiguous(x: torch.Tensor, *shape: int) -> torch.Tensor:
    """What an operator reads that takes an address for a contiguous tensor of this shape."""
    strides = [math.prod(shape[at + 1 :]) for at in range(len(shape))]
    if x.storage_offset() + math.prod(shape) > x.untyped_storage().nbytes() // x.element_size():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    return torch.as_strided(x, shape, strides, x.storage_offset())
