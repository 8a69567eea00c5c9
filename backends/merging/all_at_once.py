"""Merging several partial results at once: one pass over all of them, in one order.

All ranks that merge the same partial results in the same order get the same bits.
"""

from __future__ import annotations

import torch

LOWEST = torch.finfo(torch.float32).min  # stands for -inf where -inf minus -inf would be NaN


def merge_all(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [..., D] and lse [...] in fp32, of n partial results: outs [n, ..., D], lses [n, ...] fp32.

    outs are 0 where lses are -inf: a row that has seen nothing in any of them gets out 0 and lse -inf.
    """
    return merge_outs(outs, lses), torch.logsumexp(lses, dim=0)


def merge_outs(outs: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """Return out alone of `merge_all`."""
    weights = torch.clamp(lses, min=LOWEST).softmax(dim=0)
    return torch.mul(outs, weights[..., None]).sum(dim=0)  # in fp32, as weights are
