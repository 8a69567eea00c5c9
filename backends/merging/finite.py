"""Merging partial results without an infinity in any operation: where a device's logaddexp, clamp or lerp fails there.

By CANN's documentation aclnnLogAddExp is max + log(1 + exp(-|x - y|)), which is NaN for two rows that have seen
nothing: -inf minus -inf. Here such rows take part as the finite `EMPTY`, and are told by comparison. It takes twice as
many operations as torch's merge, and temporary memory for statistics and for one output; `merging.choice` takes it
only where that one fails its trial.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenring.backends.kernels.npu_operator import EMPTY
from tokenring.backends.merging.torch_merger import TorchMerger

NOTHING = EMPTY / 2  # an lse below is of rows that have seen nothing: EMPTY + ln 2 is EMPTY


@dataclass(frozen=True)
class FiniteMerger(TorchMerger):
    """The log-sum-exp form of `torch_merger`, by a maximum, a logarithm of what is from 1 to 2, and two weights."""

    name = "finite"

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Merge into out and lse, in place; see Merger.merge_. It needs no scratch."""
        mine, theirs = (each.masked_fill(each <= EMPTY, EMPTY) for each in (lse, new_lse))
        total = torch.maximum(mine, theirs)
        total += torch.log1p(torch.exp(-(mine - theirs).abs()))
        weights = [torch.exp(each - total)[..., None] for each in (mine, theirs)]
        out.copy_(out * weights[0] + new_out.to(out.dtype) * weights[1])
        lse.copy_(total.masked_fill(total <= NOTHING, float("-inf")))

    def merge_seen_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> None:
        """Merge rows that have all seen something: the same, since torch's operators are not to be used here."""
        self.merge_(out, lse, new_out, new_lse, scratch)


def make() -> FiniteMerger:
    """Make the merger, which works on every device."""
    return FiniteMerger()
