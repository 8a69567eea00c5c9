"""Merging partial results by npu_attention_update of torch_npu, where that costs nothing more than torch's operators.

It merges lists of lse [M] and outs [M, D] of one dtype, contiguous, into new tensors (docs/ascend.md, "Merging", says
what that means). Given fp32 it keeps fp32; the choice (`merging.choice`) tries that before it is used. It knows no
-inf: the lowest fp32 stands for it on the way in and on the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tokenring.backends.kernels.npu_operator import EMPTY
from tokenring.backends.merging.torch_merger import LOWEST, TorchMerger
from tokenring.errors import BackendUnavailable

OPERATOR = "npu_attention_update"
TAKES = ["lse", "local_out", "update_type"]
WITH_LSE = 1  # update_type: both results count; with 0 only out does
LARGEST_HEAD_DIM, HEAD_DIM_UNIT = 512, 8


@dataclass(frozen=True)
class UpdateMerger(TorchMerger):
    """A merger by the operator where the accumulator is replaceable fp32 and nothing is copied more; else by torch.

    In place it is torch: the operator's result would have to be copied back.
    """

    call: Callable[..., Any]
    name = "npu-update"

    def supports(self, head_dim: int) -> str | None:
        """Return None, or why it cannot merge rows of this head dim; see Merger.supports."""
        if head_dim % HEAD_DIM_UNIT or head_dim > LARGEST_HEAD_DIM:
            return f"{OPERATOR} takes head dimensions that are multiples of 8 up to 512, not {head_dim}"
        return None

    def merged(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, new tensors where the operator merges them; see Merger.merged."""
        order = memory_order(out)
        if not _fits(out, new_out, order):
            return super().merged(out, lse, new_out, new_lse, scratch)
        rows, new_rows = out.permute(*order, -1), new_out.permute(*order, -1)
        held = scratch.view(2, *rows.shape[:-1])  # the memory is what counts: it is one block
        for kept, given in zip(held, (lse, new_lse), strict=True):
            torch.clamp(given.permute(order), min=LOWEST, out=kept)
        wide = new_rows.to(torch.float32, memory_format=torch.contiguous_format)
        made, total = self.call(
            [each.flatten() for each in held], [rows.flatten(0, -2), wide.flatten(0, -2)], WITH_LSE
        )  # fmt: skip
        total = torch.threshold(total, EMPTY, float("-inf")).view(rows.shape[:-1])
        back = [order.index(axis) for axis in range(len(order))]
        return made.view(rows.shape).permute(*back, -1), total.permute(back)


def memory_order(out: torch.Tensor) -> list[int]:
    """Return the axes before the last as they lie in memory: the outermost first."""
    return sorted(range(out.dim() - 1), key=lambda axis: (out.shape[axis] > 1, out.stride(axis)), reverse=True)


def _fits(out: torch.Tensor, new_out: torch.Tensor, order: list[int]) -> bool:
    """Return True if both are [M, D] in one order but for a conversion that torch's merge makes as well."""
    if out.dtype != torch.float32 or not out.permute(*order, -1).is_contiguous():
        return False
    return new_out.dtype != torch.float32 or new_out.permute(*order, -1).is_contiguous()


def make() -> UpdateMerger:
    """Make the merger by what this torch_npu has, whatever its version says. Raises BackendUnavailable."""
    packet = getattr(torch.ops.npu, OPERATOR, None)
    if packet is None:
        raise BackendUnavailable(f"torch.ops.npu has no {OPERATOR}: this torch_npu lacks it, or is not imported")
    taken = [each.name for each in packet.default._schema.arguments]
    if taken != TAKES:
        raise BackendUnavailable(f"{OPERATOR} takes ({', '.join(TAKES)}) as documented, here ({', '.join(taken)})")
    return UpdateMerger(packet.default)
