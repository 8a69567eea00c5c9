"""The statistics of rows: those that npu_fusion_attention returns, and those that its gradient takes."""

from __future__ import annotations

import torch

EMPTY = -1e30  # an lse below is that of a row with every key masked
COPIES = 8  # of each statistic, all equal


def row_lse(largest: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Return lse [...] from the eight copies [..., 8] of maximum and sum."""
    return largest[..., 0] + total[..., 0].log()


def canonical(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows with every key masked, in whichever way they came back, as out 0 and lse -inf."""
    empty = lse <= EMPTY
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, float("-inf"))


def statistics(lse: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the statistics of the whole row for the gradient: a maximum of lse and a sum of 1.

    A row that sees nothing anywhere has lse -inf, or the lowest fp32 where the device saturates (on 910A, and with
    INF_NAN_MODE_ENABLE=0): any ordinary value gives its hidden pairs exp(lowest) = 0.
    """
    finite = lse.masked_fill(lse <= EMPTY, 0.0)
    largest = finite[..., None].expand(*lse.shape, COPIES).contiguous()
    return {"softmax_max": largest, "softmax_sum": torch.ones_like(largest)}
