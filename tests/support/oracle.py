"""What everything is compared with: attention over the whole sequence in float64, in one process.

Written apart from the library: the mask from its definition, pair by pair, and the gradients by
autograd. A row that sees nothing has out 0, lse -inf and gradient 0.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch

from tokenring import Mask


class Attention(NamedTuple):
    """out, dq [B, T, Hq, D]; dk, dv [B, T', Hkv, D]; lse [B, Hq, T]."""

    out: torch.Tensor
    lse: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


@lru_cache(maxsize=64)
def allowed(mask: Mask, q_length: int, kv_length: int) -> torch.Tensor:
    """mask.allows for all pairs: booleans [q_length, kv_length]. test_oracle compares the two."""
    q, kv = torch.arange(q_length)[:, None] + (mask.q_start or 0), torch.arange(kv_length)[None, :]
    visible = torch.ones(q_length, kv_length, dtype=torch.bool)
    if mask.low is not None:
        visible &= kv - q >= mask.low
    if mask.high is not None:
        visible &= kv - q <= mask.high
    if mask.cu_seqlens is not None:
        together = torch.zeros_like(visible)
        for start, stop in pairwise(mask.cu_seqlens):
            together |= (start <= q) & (q < stop) & (start <= kv) & (kv < stop)
        visible &= together
    for size in mask.chunks:
        visible &= q // size == kv // size
    if mask.slices is not None:
        shown = torch.zeros_like(visible)
        for q0, q1, kv0, kv1, low, high in mask.slices:
            window = (kv - q >= (-math.inf if low is None else low)) & (kv - q <= (math.inf if high is None else high))
            shown |= (q0 <= q) & (q < q1) & (kv0 <= kv) & (kv < kv1) & window
        visible &= shown
    for masks in mask.either:
        longest = q_length + (mask.q_start or 0)
        seen = [allowed(each, longest, kv_length)[longest - q_length :] for each in masks]
        visible &= torch.stack(seen).any(dim=0)
    return visible


def cached64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, q_at: torch.Tensor,
    window: int | None = None, starts: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """out [B, T, Hq, Dv] and lse [B, Hq, T] in float64 of rows at positions q_at [T], which see kv up to their own.

    window: how many of these at most. starts: the first position of each batch entry, before which there is padding.
    """
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    q_at, kv_at = q_at[:, None], torch.arange(k.shape[1])[None]
    seen = (kv_at <= q_at)[None].repeat(q.shape[0], 1, 1)
    if window is not None:
        seen &= kv_at > q_at - window
    if starts is not None:
        seen &= kv_at >= torch.tensor(starts)[:, None, None]
    scores = scores.masked_fill(~seen[:, None], -math.inf)
    lse = torch.logsumexp(scores, -1)
    weights = (scores - lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def attention64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None = None,
) -> Attention:
    """All of it in float64. q, dout [B, T, Hq, D]; k, v [B, T', Hkv, D]; visible [T, T']."""
    return variant64(q, k, v, dout, None, visible, scale)[0]


def variant64(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    visible: torch.Tensor,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Attention, torch.Tensor | None]:
    """Also with a gradient dlse [B, Hq, T] of lse, sinks [Hq] and scores c · tanh(s / c): and the sinks' gradient.

    A sink is one more column, with its logit as it is, and with a v of zeros.
    """
    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    repeats = q.shape[2] // k.shape[2]
    k_all, v_all = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = torch.einsum("bshd,bthd->bhst", q, k_all) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    if sinks is not None:
        leaves.append(sinks.detach().double().requires_grad_())
        scores = torch.cat([scores, leaves[3][:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
        v_all = torch.cat([v_all, torch.zeros_like(v_all[:, :1])], dim=1)
        visible = torch.cat([visible, torch.ones_like(visible[:, :1])], dim=1)
    seen = visible.any(dim=-1)
    # Rows that see nothing get scores without -inf, so that nothing becomes NaN, and are cleared after.
    hidden = ~visible & seen[:, None]
    scores = scores.masked_fill(hidden, -math.inf)
    probabilities = torch.softmax(scores, dim=-1) * seen[:, None]
    out = torch.einsum("bhst,bthd->bshd", probabilities, v_all)
    lse = torch.logsumexp(scores, dim=-1)
    dlse = torch.zeros_like(lse) if dlse is None else dlse.double().masked_fill(~seen, 0.0)
    dq, dk, dv, *dsinks = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    made = Attention(out.detach(), lse.detach().masked_fill(~seen, -math.inf), dq, dk, dv)
    return made, dsinks[0] if dsinks else None


def whole_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    visible: torch.Tensor | None,
    causal: bool,
    scale: float | None = None,
) -> Attention:
    """torch's own kernel over the whole sequence, in the inputs' dtype, with its autograd; lse is empty.

    visible None: everything, or causal. Rows that see nothing come back as zeros, whatever torch made of them.
    """
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    seen = torch.ones(q.shape[2], dtype=torch.bool) if visible is None else visible.any(dim=-1)
    dq, dk, dv = (x.transpose(1, 2) for x in torch.autograd.grad(out, (q, k, v), dout.transpose(1, 2) * seen[:, None]))
    out = out.detach().transpose(1, 2).masked_fill(~seen[:, None, None], 0.0)
    return Attention(out, torch.empty(0), dq.masked_fill(~seen[:, None, None], 0.0), dk, dv)


def relative_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """‖got - want‖ / ‖want‖ (Frobenius); infinite unless shapes and the places of -inf agree and nothing is NaN."""
    if got.shape != want.shape:
        return math.inf
    got, want = got.detach().double(), want.detach().double()
    empty = want == -math.inf
    if not torch.equal(got == -math.inf, empty):
        return math.inf
    got, want = got.masked_fill(empty, 0.0), want.masked_fill(empty, 0.0)
    if not bool(got.isfinite().all()):
        return math.inf
    error, size = float((got - want).norm()), float(want.norm())
    if size == 0:
        return 0.0 if error == 0 else math.inf
    return error / size


def error_of_terms(got: torch.Tensor, want: torch.Tensor, terms: torch.Tensor) -> float:
    """‖got - want‖ / ‖terms‖; terms: sums of the sizes of what was added up, so that what cancels is no error."""
    got, want, terms = (x.detach().double() for x in (got, want, terms))
    if got.shape != want.shape or not bool(got.isfinite().all()):
        return math.inf
    error, size = float((got - want).norm()), float(terms.norm())
    return error / size if size else 0.0 if error == 0 else math.inf
