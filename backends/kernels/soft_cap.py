"""Soft-capping in plain torch: where no kernel of a vendor's computes it. Some rows at a time, to bound the memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenring.backends.interfaces import AttentionKernel, CappingKernel
from tokenring.backends.kernels.reference import Reference
from tokenring.errors import UnsupportedError
from tokenring.sequence.region import Patch

MOST_SCORES = 1 << 22  # at once, of all heads: 16 MiB, and some copies


def with_cap(kernel: AttentionKernel, softcap: float) -> AttentionKernel:
    """Return a kernel with this cap. Raises UnsupportedError if it computes none."""
    if isinstance(kernel, CappingKernel):
        return kernel.capped(softcap)
    raise UnsupportedError(f"kernel {kernel.name!r} does not compute soft-capping")


class SoftCapped(Reference):
    """The reference kernel with a soft cap, in blocks of rows."""

    def __init__(self, softcap: float) -> None:
        self.softcap = softcap

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, block by block; see AttentionKernel.forward."""
        made = [
            super(SoftCapped, self).forward(q[:, :, rows], k, v, patch=part, scale=scale)
            for rows, part in _blocks(patch, q)
        ]
        outs, lses = zip(*made, strict=True)
        return (outs[0], lses[0]) if len(made) == 1 else (torch.cat(outs, dim=2), torch.cat(lses, dim=2))

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        patch: Patch,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk, dv, added up block by block; see AttentionKernel.backward."""
        dqs, dk, dv = list[torch.Tensor](), None, None
        for rows, part in _blocks(patch, q):
            dq, more_dk, more_dv = super().backward(
                dout[:, :, rows], q[:, :, rows], k, v, lse[:, :, rows], None if delta is None else delta[:, :, rows],
                out=None if out is None else out[:, :, rows], patch=part, scale=scale,
            )  # fmt: skip
            dqs.append(dq)
            dk = more_dk if dk is None else dk.add_(more_dk)
            dv = more_dv if dv is None else dv.add_(more_dv)
        assert dk is not None and dv is not None  # a patch has rows
        return dqs[0] if len(dqs) == 1 else torch.cat(dqs, dim=2), dk, dv


def _blocks(patch: Patch, q: torch.Tensor) -> Iterator[tuple[slice, Patch]]:
    """Yield blocks of a patch's rows, each with its own patch. q [B, H, rows, D]."""
    most = max(1, MOST_SCORES // (q.shape[0] * q.shape[1] * patch.cols))
    for start in range(0, patch.rows, most):
        stop, by = min(start + most, patch.rows), patch.row_step * start
        low, high = (None if bound is None else bound + by for bound in (patch.low, patch.high))
        yield slice(start, stop), patch._replace(row0=0, row1=stop - start, col0=0, col1=patch.cols, low=low, high=high)
