"""Attention and its gradient in plain torch: any device, any patch; in float64 the oracle of the tests.

The forward is softmax written out (Vaswani et al. 2017, eq. 1); the backward follows
FlashAttention-2 (Dao 2023, §3.1.2), whose delta is rowsum(dO · O).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tokenring.backends.interfaces import AttentionKernel, CappingKernel
from tokenring.backends.kernels.delta import given, row_dot, wide
from tokenring.errors import UnsupportedError
from tokenring.sequence.region import Patch

MOST_SCORES = 1 << 22  # at once, of all heads: 16 MiB, and some copies


def dense_mask(patch: Patch, device: torch.device) -> torch.Tensor | None:
    """Return [rows, cols] booleans, True where visible; None when everything is."""
    if patch.is_full:
        return None
    rows = torch.arange(patch.rows, device=device)[:, None] * patch.row_step
    cols = torch.arange(patch.cols, device=device)[None, :] * patch.col_step
    visible = torch.ones(patch.rows, patch.cols, dtype=torch.bool, device=device)
    if patch.low is not None:
        visible &= cols >= rows + patch.low  # of vectors: a matrix of differences would take eight bytes a pair
    if patch.high is not None:
        visible &= cols <= rows + patch.high
    return visible


def scores(
    q: torch.Tensor, k: torch.Tensor, patch: Patch, scale: float, softcap: float = 0.0
) -> torch.Tensor:
    """Return q kᵀ · scale, soft-capped, with hidden pairs at -inf: [B, Hkv, Hq/Hkv, Sq, Skv]."""
    made = torch.einsum("bghsd,bgtd->bghst", _grouped(q, k.shape[1]), k) * scale
    made = softcap * torch.tanh(made / softcap) if softcap else made
    visible = dense_mask(patch, q.device)
    return made if visible is None else made.masked_fill(~visible, float("-inf"))


def _grouped(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [B, Hq, ...] as [B, Hkv, Hq/Hkv, ...]."""
    return x.reshape(x.shape[0], kv_heads, x.shape[1] // kv_heads, *x.shape[2:])


class Reference:
    """A kernel in plain torch. Computes in fp32, or in float64 when given float64."""

    name = "reference"
    takes_delta = True
    softcap = 0.0

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None: it computes any head dim and dtype."""
        return None

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None: it computes values of any width."""
        return None

    def supports_patch(self, patch: Patch) -> str | None:
        """Return None: it computes any patch in one call."""
        return None

    def capped(self, softcap: float) -> AttentionKernel:
        """Return a kernel with this cap, which holds the scores of some rows at once; see CappingKernel.capped."""
        return SoftCapped(softcap)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse in fp32, or in float64 when given float64; see AttentionKernel.forward."""
        q, k, v = wide(q), wide(k), wide(v)
        s = scores(q, k, patch, scale, self.softcap)
        lse = torch.logsumexp(s, dim=-1)
        p = _probabilities(s, lse)
        out = torch.einsum("bghst,bgtd->bghsd", p, v)
        return out.flatten(1, 2), lse.flatten(1, 2)

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
        """Return dq, dk, dv in fp32, or in float64 when given float64; see AttentionKernel.backward."""
        dout, q, k, v = wide(dout), wide(q), wide(k), wide(v)
        if delta is None:
            delta = row_dot(dout, given(out))
        kv_heads = k.shape[1]
        s = scores(q, k, patch, scale, self.softcap)
        p = _probabilities(s, _grouped(lse, kv_heads))
        dout = _grouped(dout, kv_heads)
        dv = torch.einsum("bghst,bghsd->bgtd", p, dout)
        dp = torch.einsum("bghsd,bgtd->bghst", dout, v)
        ds = p * (dp - _grouped(delta, kv_heads)[..., None]) * scale
        if self.softcap:
            ds = ds * (1 - (s.masked_fill(s == float("-inf"), 0.0) / self.softcap).square())
        dq = torch.einsum("bghst,bgtd->bghsd", ds, k)
        dk = torch.einsum("bghst,bghsd->bgtd", ds, _grouped(q, kv_heads))
        return dq.flatten(1, 2), dk, dv


def _probabilities(s: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    """Return exp(s - lse); 0 in rows that see nothing, where both are -inf."""
    return torch.exp(s - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


# ---------- soft-capping: where no kernel of a vendor's computes it. Some rows at a time, to bound the memory


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
