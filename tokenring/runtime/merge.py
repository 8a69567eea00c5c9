"""Merging partial attention results, in fp32 and in place.

out = Σ exp(lse_i - lse) out_i with lse = log Σ exp(lse_i): the log-sum-exp form of online softmax
(Milakov and Gimelshein 2018; ring-flash-attention). Rows that have seen nothing (lse -inf) are
neutral, and stay out 0, lse -inf when nothing comes.
"""

from __future__ import annotations

import torch

LOWEST = torch.finfo(torch.float32).min  # stands for -inf where -inf minus -inf would be NaN


def merge_(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Merge (new_out, new_lse) into (out, lse).

    out, new_out [..., D]; lse, new_lse [...] fp32; scratch [2, ...] fp32, overwritten.
    """
    total, weight = scratch[0], scratch[1]
    torch.logaddexp(lse, new_lse, out=total)
    torch.clamp(total, min=LOWEST, out=weight)
    torch.sub(new_lse, weight, out=weight).exp_()
    out.lerp_(new_out.to(out.dtype), weight[..., None])  # the two weights add up to 1
    lse.copy_(total)
