"""Compare attention of all ranks with float64 of the whole, relative to the size of each result."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist


def causal_float64(whole: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return out, dq, dk and dv [B, T, H, D] of causal attention; whole: q, k, v and the gradient of out, the same."""
    q, k, v = of = [each.double().transpose(1, 2).requires_grad_() for each in whole[:3]]
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    grads = torch.autograd.grad(out, of, whole[3].double().transpose(1, 2))
    return [each.transpose(1, 2).contiguous() for each in (out.detach(), *grads)]


def relative_errors(found: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> list[float]:
    """Return the error of each result over all ranks, of which each has its part. All ranks call it together."""
    squares = torch.tensor([
        [float((a.double() - b).square().sum()), float(b.square().sum())] for a, b in zip(found, right, strict=True)
    ], dtype=torch.float64)  # fmt: skip
    dist.all_reduce(squares)
    return list((squares[:, 0] / squares[:, 1]).sqrt().tolist())
