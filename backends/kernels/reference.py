"""Attention and its gradient in plain torch: any device, any patch; in float64 the oracle of the tests.

The forward is softmax written out (Vaswani et al. 2017, eq. 1); the backward follows
FlashAttention-2 (Dao 2023, §3.1.2), whose delta is rowsum(dO · O).
"""

from __future__ import annotations

import torch

from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.delta import given, row_dot, wide
from tokenring.sequence.region import Patch


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
        from tokenring.backends.kernels.soft_cap import SoftCapped

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
