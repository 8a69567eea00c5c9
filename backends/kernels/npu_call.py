"""The rows of one backward call of npu-fusion: what their owner makes once, so that no tile has to make it again.

Beside q and dout a row has two numbers, which travel with it: its lse and its delta. Where nothing is made of them
beforehand, each tile away from the owner makes a whole output of delta, and statistics of an lse that may be -inf.
Here the owner gives lse as a finite number, and in delta's place the factor by which dout becomes the output that
stands in (`delta.stand_in`): as many bytes, and a tile multiplies once.
"""

from __future__ import annotations

import math

import torch

from tokenring.backends.kernels.delta import given, whole_out
from tokenring.backends.kernels.npu_operator import COPIES, EMPTY, statistics

TINY, HUGE = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


class PlainRows:
    """Rows as the interface of kernels has them."""

    def statistics(self, lse: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the statistics of whole rows; see `npu_operator.statistics`."""
        return statistics(lse)

    def out(
        self, dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the merged output of whole rows, or a stand-in; see `delta.whole_out`."""
        return whole_out(dout, delta, out, dtype)


class RowsOfCall(PlainRows):
    """Rows as their owner has prepared them; and sums of 1, made once for each shape in a call."""

    def __init__(self) -> None:
        self._ones: dict[tuple[torch.Size, torch.device], torch.Tensor] = {}

    @staticmethod
    def prepared_lse(lse: torch.Tensor) -> torch.Tensor:
        """Return lse with an ordinary value for rows that see nothing; see `npu_operator.statistics`."""
        return lse.masked_fill(lse <= EMPTY, 0.0)

    @staticmethod
    def prepared_delta(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return the factor [B, H, T] with which dout [B, T, H, D] carries delta [B, H, T]; 0 for rows of zeros."""
        largest = torch.linalg.vector_norm(dout, math.inf, dim=-1, dtype=torch.float32).clamp_min_(TINY)
        unit = dout / largest[..., None]
        square = torch.linalg.vector_norm(unit, dim=-1).square_().clamp_min_(1.0)  # at least 1, but in rows of zeros
        largest, square = largest.transpose(1, 2), square.transpose(1, 2)
        factor: torch.Tensor = (delta / largest).div_(square).div_(largest)
        return factor.clamp_(-HUGE, HUGE)

    def statistics(self, lse: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the statistics of whole rows, of a prepared lse."""
        largest = lse[..., None].expand(*lse.shape, COPIES).contiguous()
        key = largest.shape, largest.device
        if key not in self._ones:
            self._ones[key] = torch.ones_like(largest)
        return {"softmax_max": largest, "softmax_sum": self._ones[key]}

    def out(
        self, dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the merged output of whole rows, or dout times the factor, rounded once."""
        if delta is None:
            return given(out).to(dtype)
        return torch.mul(dout, delta[..., None], out=torch.empty_like(dout, dtype=dtype))
