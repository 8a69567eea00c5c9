"""torch's own flash attention for the CPU, forward and backward.

Its ways, normalised here: causal is top-left aligned; other patches go in as an additive mask; a
row that sees nothing comes back with lse 0; a zero-length q or kv crashes it, so it never gets
one (patches are never empty). It computes bf16 and fp16 tiles in fp32: twice as fast on machines
without matrix units for them, and exact. Its backward wants O: it gets a stand-in that carries
delta, because O does not travel. It wants values as wide as keys: the narrower get zeros, which
cost less than kernels that take both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from tokenring.backends.kernels.delta import whole_out
from tokenring.sequence.region import Patch

BAND_ROWS = 128  # bands are cut down to so many rows before half a tile is wasted
KEPT_MASKS, KEPT_PAIRS = 256, 1 << 16  # of so many pairs at most: making a small mask takes longer than using it


class CpuFlash:
    """A kernel of aten::_scaled_dot_product_flash_attention_for_cpu and its backward."""

    name = "cpu-flash"

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None: it computes any head dim and dtype."""
        return None

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None: it computes values of any width."""
        return None

    @staticmethod
    def supports_patch(patch: Patch) -> str | None:
        """Return None, or that more than half of a patch is hidden, so that it should be cut."""
        if patch.is_full or patch.is_causal or patch.rows <= BAND_ROWS:
            return None
        if 2 * patch.pairs() >= patch.rows * patch.cols:
            return None
        return f"more than half of its {patch.rows} × {patch.cols} rectangle is hidden"

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse in fp32, at any input dtype; see AttentionKernel.forward."""
        mask, value_dim = _additive(patch), v.size(-1)
        if uneven := value_dim != q.size(-1):
            q, k, v = _equally_wide(q, k, v)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q.float(), k.float(), v.float(), 0.0, patch.is_causal, attn_mask=mask.bias, scale=scale
        )
        if mask.empty is not None:
            lse = lse.masked_fill(mask.empty, float("-inf"))
            out = out.masked_fill(mask.empty[:, None], 0.0)
        return out[..., :value_dim] if uneven else out, lse

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
        """Return dq, dk, dv of the tile; see AttentionKernel.backward."""
        dout = dout.float()
        o = whole_out(dout, delta, out, dout.dtype)
        head_dim, value_dim = q.size(-1), v.size(-1)
        if uneven := value_dim != head_dim:
            dout, q, k, v, o = _equally_wide(dout, q, k, v, o)
        # Rows that see nothing anywhere have lse -inf: any finite value gives their hidden pairs exp(-inf) = 0.
        lse = lse.masked_fill(lse == float("-inf"), 0.0)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q.float(), k.float(), v.float(), o, lse, 0.0, patch.is_causal,
            attn_mask=_additive(patch).bias, scale=scale,
        )  # fmt: skip
        return (dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]) if uneven else (dq, dk, dv)


def _equally_wide(*operands: torch.Tensor) -> list[torch.Tensor]:
    """Return the operands, the narrower ones with zeros."""
    from tokenring.backends.widths import filled

    width = max(x.shape[-1] for x in operands)
    return [filled(x, width) for x in operands]


class _Mask(NamedTuple):
    """bias [rows, cols]: 0 where visible, -inf where not. empty [rows]: which see nothing. None: there is no need."""

    bias: torch.Tensor | None = None
    empty: torch.Tensor | None = None


def _additive(patch: Patch) -> _Mask:
    if patch.is_full or patch.is_causal:
        return _Mask()
    alike = patch._replace(row0=0, row1=patch.rows, col0=0, col1=patch.cols)  # wherever it lies
    return _kept(alike) if patch.rows * patch.cols <= KEPT_PAIRS else _make(alike)


def _make(patch: Patch) -> _Mask:
    from tokenring.backends.kernels.reference import dense_mask

    visible = dense_mask(patch, torch.device("cpu"))
    assert visible is not None  # only full patches have none
    bias = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, float("-inf"))
    empty = ~visible.any(dim=-1)
    return _Mask(bias, empty if bool(empty.any()) else None)


@lru_cache(maxsize=KEPT_MASKS)
def _kept(patch: Patch) -> _Mask:
    with torch.inference_mode(False):  # it outlives the call, and later calls may want gradients
        return _make(patch)
