"""Merging several partial results at once: one pass over all of them, in one order.

All ranks that merge the same partial results in the same order get the same bits.
"""

from __future__ import annotations

import torch

LOWEST = torch.finfo(torch.float32).min  # stands for -inf where -inf minus -inf would be NaN


def merge_all(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [..., D] and lse [...] in fp32, of n partial results: outs [n, ..., D], lses [n, ...] fp32.

    A row that has seen nothing in any of them gets out 0 and lse -inf.
    """
    most = lses.amax(dim=0).clamp_(min=LOWEST)
    weights = torch.sub(lses, most).exp_()
    total = weights.sum(dim=0)
    weights.div_(total.clamp(min=torch.finfo(torch.float32).tiny))
    out = (outs.float() * weights[..., None]).sum(dim=0)
    return out, most.add_(total.log_())
