"""delta = rowsum(dout · out); and the output from which a gradient computes it, where it travelled and out did not."""

from __future__ import annotations

import math

import torch

EXPONENT, UNIT = 0xFF << 23, 1 << 23  # of a number in fp32: its exponent's bits, and the least of them
LEAST_SQUARE = 2.0**-20  # what the squares of a row come to, at least, once it is scaled: 2⁻¹⁴


def row_dot(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return delta = rowsum(dout · out), in fp32 or wider (FlashAttention-2, §3.1.2)."""
    return (wide(dout) * wide(out)).sum(dim=-1)


def rows_delta(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Return delta [B, H, T] of dout and out [B, T, H, D], less the gradient of lse in rows that see something."""
    delta = row_dot(dout, out).transpose(1, 2)
    return delta if dlse is None else delta - dlse.masked_fill(lse == float("-inf"), 0.0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Make O' with rowsum(dout · O') = delta, parallel to dout.

    It is scaled by each row's largest |dout| against overflow. dout [..., D], delta [...]; rows of zero dout give zero.
    """
    largest = dout.abs().amax(dim=-1, keepdim=True)
    divisor = largest.masked_fill_(largest == 0, 1.0)
    unit = dout / divisor
    square = (unit * unit).sum(dim=-1, keepdim=True)  # at least 1, but in rows of zeros
    return unit.mul_(delta[..., None] / divisor / square.clamp_min_(1.0))


def whole_out(
    dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the merged output of whole rows, or a stand-in, which is never larger than it.

    In bf16 the stand-in carries delta to 2⁻⁸ of |delta|, and less far off the more dimensions share it; the
    merged output carries it to 2⁻⁸ of the sum of |dout · out|, which is larger.
    """
    return (given(out) if delta is None else stand_in(dout.float(), delta)).to(dtype)


def lean_out(
    dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return what `whole_out` does, in fewer passes over memory, where each of torch's operators is one pass.

    Between tensors of half precision 12 bytes an element are read and written, and 52 by `whole_out`.
    """
    if delta is None or dtype not in (torch.float16, torch.bfloat16) or dout.dtype != dtype:
        return whole_out(dout, delta, out, dtype)
    return lean_stand_in(dout, delta)


def lean_stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Make what `stand_in` makes, of and in half precision, without a tensor of that size in fp32.

    Rows are scaled by a power of two, which rounds nothing; what is computed for a row is computed in fp32, and an
    element is rounded once.
    """
    largest = torch.linalg.vector_norm(dout, math.inf, dim=-1)
    power = largest.float().view(torch.int32).bitwise_and_(EXPONENT).clamp_(UNIT, 253 * UNIT)  # up to `largest`
    scale = (254 * UNIT - power).view(torch.float32).masked_fill_(largest == 0, 0.0)  # 1 / power
    made = torch.mul(dout, scale[..., None], out=torch.empty_like(dout))
    square = torch.linalg.vector_norm(made, dim=-1, dtype=torch.float32).square_().clamp_min_(LEAST_SQUARE)
    return made.mul_((delta * scale / square)[..., None])


def given(out: torch.Tensor | None) -> torch.Tensor:
    """Return out, where a kernel was given no delta. Raises TypeError if it was given neither."""
    if out is None:
        raise TypeError("a kernel's backward needs delta or out")
    return out
