"""What a gradient works delta = rowsum(dout · out) out of, where delta travelled and out did not."""

from __future__ import annotations

import torch

from tokenring.backends.kernels.reference import given


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """O' with rowsum(dout · O') = delta, parallel to dout, scaled by each row's largest |dout| against overflow.

    dout [..., D], delta [...]; rows of zero dout give zero.
    """
    largest = dout.abs().amax(dim=-1, keepdim=True)
    divisor = largest.masked_fill_(largest == 0, 1.0)
    unit = dout / divisor
    square = (unit * unit).sum(dim=-1, keepdim=True)  # at least 1, but in rows of zeros
    return unit.mul_(delta[..., None] / divisor / square.clamp_min_(1.0))


def whole_out(
    dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """The merged output of whole rows, or a stand-in, which is never larger than it.

    In bf16 the stand-in carries delta to 2⁻⁸ of |delta|, and less far off the more dimensions share it; the
    merged output carries it to 2⁻⁸ of the sum of |dout · out|, which is larger.
    """
    return (given(out) if delta is None else stand_in(dout.float(), delta)).to(dtype)
