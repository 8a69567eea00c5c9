"""Running results of tiles that see the same rows of q, merged by npu_ring_attention_update, one launch a tile.

A ring's tiles go into the same rows one after another, and none of their results travels. So what npu_fusion_attention
gives is merged as it is, its statistics with it, and lse is made once, at the end; out runs in fp32, as the operator
rounds to what it is given. Rows that see nothing would give NaN (docs/ascend-emulation.md): tiles with any go alone.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import NamedTuple

import torch

from tokenring.backends.kernels.npu_operator import COPIES, Operator, row_lse
from tokenring.errors import one_line

LOG = logging.getLogger("tokenring")
OPERATOR, LAYOUT = "npu_ring_attention_update", "SBH"
LIMIT = 1e-5  # as of mergers: an operator that rounded out to bf16 would be off by 2e-3


class RunningRows(NamedTuple):
    """The result of tiles so far: out [S, B, H · D] in fp32, maximum and sum [B, H, S, 8]."""

    out: torch.Tensor
    largest: torch.Tensor
    total: torch.Tensor

    def results(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, H, S, D] in fp32 and lse [B, H, S]."""
        rows, batch, _ = self.out.shape
        out = self.out.view(rows, batch, self.largest.shape[1], -1).permute(1, 2, 0, 3)
        return out, row_lse(self.largest, self.total)


def begun(out: torch.Tensor, largest: torch.Tensor, total: torch.Tensor, layout: str) -> RunningRows:
    """Return the first tile's result, as the kernel gives it in a layout, in fp32."""
    rows = out.permute(2, 0, 1, 3) if layout == "BNSD" else out.transpose(0, 1)
    wide = rows.to(torch.float32, memory_format=torch.contiguous_format)
    return RunningRows(wide.flatten(2), largest, total)


def merged(update: Operator, before: RunningRows, after: RunningRows) -> RunningRows:
    """Merge another tile's result into what there is."""
    return RunningRows(*update(*before, *after, input_layout=LAYOUT))


def updating(device: torch.device) -> Operator | None:
    """Return the operator, if this torch_npu has it and it merges right on this device; it is tried once."""
    packet = getattr(torch.ops.npu, OPERATOR, None)
    if packet is None:
        return None
    found = Operator(packet.default, packet.default._schema)
    return found if _fault(found, device) is None else None


@lru_cache(maxsize=64)
def _fault(update: Operator, device: torch.device) -> str | None:
    """Return None, or what is wrong with the operator's results for a few rows; logged once."""
    try:
        with torch.no_grad():
            error = _error(update, device)
        reason = None if error <= LIMIT else f"its results have an error of {error:.1e}: it does not merge in fp32"
    except RuntimeError as failed:
        reason = one_line(failed)
    if reason is not None:
        LOG.info("%s on %s is not used: %s", OPERATOR, device, reason)
    return reason


def _error(update: Operator, device: torch.device) -> float:
    """Return the largest error of a merge against float64, of rows whose statistics are near and far apart."""
    random = torch.Generator().manual_seed(0)
    parts = []
    for _ in range(2):
        out = torch.randn(6, 1, 2 * 16, generator=random)
        largest = torch.randn(1, 2, 6, 1, generator=random) * 20
        total = torch.rand(1, 2, 6, 1, generator=random) * 8 + 1
        parts.append(RunningRows(out, largest.repeat(1, 1, 1, COPIES), total.repeat(1, 1, 1, COPIES)))
    moved = [RunningRows(*(x.to(device) for x in part)) for part in parts]
    found, lse = (x.cpu().double() for x in merged(update, *moved).results())
    (one, lse_one), (other, lse_other) = ((x.double() for x in part.results()) for part in parts)
    right = torch.logaddexp(lse_one, lse_other)
    out = torch.exp(lse_one - right)[..., None] * one + torch.exp(lse_other - right)[..., None] * other
    return float(max((found - out).abs().max(), (lse - right).abs().max() / right.abs().max()))
