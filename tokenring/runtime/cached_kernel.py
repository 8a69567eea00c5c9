"""Attention of a few rows over keys and values that lie in a cache, heads first: one partial result.

On a CPU torch's flash attention reads keys and values once for each row and query head. So the query heads that share
a kv head go in as rows of that head, which halves the time of a decode step. Shards may be empty, and rows may see
nothing: such rows have out 0 and lse -inf.
"""

from __future__ import annotations

import torch

from tokenring.backends.widths import cut, filled

INF = float("inf")
FEW_ROWS = 32  # up to so many, a kv head's query heads go in as rows; more rows fill a tile by themselves

Partial = tuple[torch.Tensor, torch.Tensor]  # out [B, H, T, D], lse [B, H, T]


def cached_partial(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> Partial:
    """Return out [B, Hq, T, Dv] in fp32 and lse [B, Hq, T] of rows over keys, both with heads first.

    q [B, Hq, T, D], k [B, Hkv, S, D], v [B, Hkv, S, Dv], with any strides whose last is 1; S may be 0.
    visible: bool [B or 1, 1, T, S]; None: every row sees every key.
    """
    batch, heads, rows, _ = q.shape
    if k.shape[2] == 0 or rows == 0:
        return q.new_zeros(batch, heads, rows, v.shape[-1], dtype=torch.float32), _nothing(q)
    compute = _flash if q.device.type == "cpu" else _plain
    groups = heads // k.shape[1]
    if groups == 1 or rows > FEW_ROWS:
        out, lse = compute(q, k, v, visible, scale)
        return _without_empty(out, lse, visible)
    q = q.reshape(batch, k.shape[1], groups * rows, q.shape[-1])  # rows of a kv head: head by head, then token by token
    repeated = visible if visible is None or rows == 1 else visible.repeat(1, 1, groups, 1)
    out, lse = compute(q, k, v, repeated, scale)
    out, lse = out.reshape(batch, heads, rows, v.shape[-1]), lse.reshape(batch, heads, rows)
    return _without_empty(out, lse, visible)


def _nothing(q: torch.Tensor) -> torch.Tensor:
    return q.new_full(q.shape[:3], -INF, dtype=torch.float32)


def _without_empty(out: torch.Tensor, lse: torch.Tensor, visible: torch.Tensor | None) -> Partial:
    """Return results where rows that see nothing have out 0 and lse -inf."""
    if visible is None:
        return out, lse
    empty = ~visible.any(dim=-1)  # [B or 1, 1, T]
    if not bool(empty.any()):
        return out, lse
    return out.masked_fill(empty[..., None], 0.0), lse.masked_fill(empty, -INF)


def _flash(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> Partial:
    bias = None
    if visible is not None:
        bias = torch.zeros(visible.shape, dtype=torch.float32).masked_fill_(~visible, -INF)
    width = v.shape[-1]
    if width != q.shape[-1] and _begins(k, v):  # latents: all of a key is read, and the first elements of out are kept
        v = k
    elif width != q.shape[-1]:
        most = max(width, q.shape[-1])
        q, k, v = filled(q, most), filled(k, most), filled(v, most)
    if q.dtype != torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=scale
    )
    return cut(out, width), lse


def _begins(k: torch.Tensor, v: torch.Tensor) -> bool:
    """Tell whether values are the first elements of keys, in their memory."""
    return v.shape[-1] < k.shape[-1] and v.data_ptr() == k.data_ptr() and v.stride() == k.stride()


def _plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
) -> Partial:
    """Compute in fp32 by torch's operators, which every device has."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.float().repeat_interleave(groups, dim=1) if groups > 1 else x.float() for x in (k, v))
    scores = torch.matmul(q.float(), k.transpose(2, 3)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible, -INF)
    lse = torch.logsumexp(scores, dim=-1)
    shift = lse.masked_fill(lse == -INF, 0.0)
    return torch.matmul((scores - shift[..., None]).exp(), v), lse
