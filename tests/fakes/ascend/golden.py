"""What the attention operators compute, in float64, given which pairs are hidden.

Masking writes the lowest number of fp32, not -inf, as the hardware does; a row with every key hidden comes back in
one of two ways (`treat`). Matrix units take operands of one dtype: what is multiplied with bf16 is rounded to bf16
(ops-transformer, flash_attention_score: its stage 1 is cast before the second product). [B, N, S, D] on the CPU.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

LOWEST = float(torch.finfo(torch.float32).min)
LUCK = torch.Generator()  # apart from the numbers that tests draw
COPIES = 8  # statistics fill a block of 32 bytes


class Forward(NamedTuple):
    """out [B, N, Sq, Dv], and the maximum and sum of each row [B, N, Sq], all float64."""

    out: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor


def scores(q: torch.Tensor, k: torch.Tensor, hidden: torch.Tensor | None, scale: float) -> torch.Tensor:
    """[B, Nq, Sq, Skv] in float64; kv heads serve equally many query heads each."""
    repeats = q.shape[1] // k.shape[1]
    made = q.double() @ k.double().repeat_interleave(repeats, dim=1).transpose(-1, -2) * scale
    return made if hidden is None else made.masked_fill(hidden, LOWEST)


def as_operand(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As the matrix unit sees it: rounded to the dtype of what it is multiplied with."""
    return x if dtype == torch.float32 else x.to(dtype).double()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float, treat: bool
) -> Forward:
    """treat: rows with every key hidden give 0 and the extremes of fp32; else the mean of v and the count of keys."""
    s = scores(q, k, hidden, scale)
    largest = s.amax(dim=-1)
    weights = torch.exp(s - largest[..., None])
    total = weights.sum(dim=-1)
    weights = as_operand(weights, v.dtype)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    out = weights @ v / total[..., None]
    if hidden is not None and treat:
        empty = hidden.expand(s.shape).all(dim=-1)
        out = out.masked_fill(empty[..., None], 0.0)
        largest, total = largest.masked_fill(empty, LOWEST), total.masked_fill(empty, -LOWEST)
    return Forward(out, largest, total)


def backward(
    dy: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    statistics: tuple[torch.Tensor, torch.Tensor],
    hidden: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in float64: probabilities from the given statistics, delta from the given output."""
    largest, total = (x.double()[..., None] for x in statistics)
    p = torch.exp(scores(q, k, hidden, scale) - largest) / total
    kv_heads, repeats = k.shape[1], q.shape[1] // k.shape[1]
    wide_k, wide_v = (x.double().repeat_interleave(repeats, dim=1) for x in (k, v))
    dy = dy.double()
    delta = (dy * out.double()).sum(dim=-1, keepdim=True)
    ds = as_operand(p * (dy @ wide_v.transpose(-1, -2) - delta), q.dtype) * scale
    dq = ds @ wide_k
    dk, dv = ds.transpose(-1, -2) @ q.double(), as_operand(p, q.dtype).transpose(-1, -2) @ dy
    dk, dv = (x.view(x.shape[0], kv_heads, repeats, *x.shape[2:]).sum(dim=2) for x in (dk, dv))
    return _unsteady(dq), _unsteady(dk), _unsteady(dv)


def _unsteady(x: torch.Tensor) -> torch.Tensor:
    """The hardware adds gradients up in any order, unless asked not to: the last place of fp32 is a matter of luck."""
    if torch.are_deterministic_algorithms_enabled():
        return x
    luck = torch.rand(x.shape, dtype=x.dtype, generator=LUCK) * 2 - 1
    return x * (1 + torch.finfo(torch.float32).eps * luck)
