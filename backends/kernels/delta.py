"""delta = rowsum(dout · out); and the output from which a gradient computes it, where it travelled and out did not.

Also the gradient of lse, by any kernel: it arrives as a part of delta, which is no more of what dout and out can make.
With p of whole rows and dp = dout · vᵀ, a tile's gradient is ds = p · (dp - delta), and a gradient of lse is taken from
delta: ds = p · (dp - (delta - dlse)). Kernels that take delta as it is compute that. The others take delta as
rowsum(dout · out) of an output that stands in (`stand_in`), and there is none where dout is zero, or far too small. So
what a row's dout does not carry goes through a second call: with 1 as the first value of every column and 0 as its
others, and with the row's rest as the first entry of its dout, dp is that rest in every column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from tokenring.backends.interfaces import TakesDelta
from tokenring.sequence.region import Patch

EXPONENT, UNIT = 0xFF << 23, 1 << 23  # of a number in fp32: its exponent's bits, and the least of them
LEAST_SQUARE = 2.0**-20  # what the squares of a row come to, at least, once it is scaled: 2⁻¹⁴
MOST_CARRIED = 64.0  # delta, beside the largest |dout| of its row: an ordinary output carries as much
Made = tuple[torch.Tensor, ...]


def row_dot(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Return delta = rowsum(dout · out), in fp32 or wider (FlashAttention-2, §3.1.2)."""
    return (wide(dout) * wide(out)).sum(dim=-1)


def rows_delta(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Return delta [B, H, T] of dout and out [B, T, H, D], less the gradient of lse in rows that see something."""
    delta = row_dot(dout, out).transpose(1, 2)
    return delta if dlse is None else delta - dlse.masked_fill(lse == float("-inf"), 0.0)


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, or in float64 if it is."""
    return x if x.dtype == torch.float64 else x.float()


def stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Make O' with rowsum(dout · O') = delta, parallel to dout.

    It is scaled by each row's largest |dout| against overflow. dout [..., D], delta [...]; rows of zero dout give zero.
    """
    largest = dout.abs().amax(dim=-1, keepdim=True)
    divisor = largest.masked_fill_(largest == 0, 1.0)
    unit = dout / divisor
    square = (unit * unit).sum(dim=-1, keepdim=True)  # at least 1, but in rows of zeros
    return unit.mul_(delta[..., None] / divisor / square.clamp_min_(1.0))


def whole_out(
    dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return the merged output of whole rows, or a stand-in, which is never larger than it.

    In bf16 the stand-in carries delta to 2⁻⁸ of |delta|, and less far off the more dimensions share it; the
    merged output carries it to 2⁻⁸ of the sum of |dout · out|, which is larger.
    """
    return (given(out) if delta is None else stand_in(dout.float(), delta)).to(dtype)


def lean_out(
    dout: torch.Tensor, delta: torch.Tensor | None, out: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """Return what `whole_out` does, in fewer passes over memory, where each of torch's operators is one pass.

    Between tensors of half precision 12 bytes an element are read and written, and 52 by `whole_out`.
    """
    if delta is None or dtype not in (torch.float16, torch.bfloat16) or dout.dtype != dtype:
        return whole_out(dout, delta, out, dtype)
    return lean_stand_in(dout, delta)


def lean_stand_in(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Make what `stand_in` makes, of and in half precision, without a tensor of that size in fp32.

    Rows are scaled by a power of two, which rounds nothing; what is computed for a row is computed in fp32, and an
    element is rounded once.
    """
    largest = torch.linalg.vector_norm(dout, math.inf, dim=-1)
    power = largest.float().view(torch.int32).bitwise_and_(EXPONENT).clamp_(UNIT, 253 * UNIT)  # up to `largest`
    scale = (254 * UNIT - power).view(torch.float32).masked_fill_(largest == 0, 0.0)  # 1 / power
    made = torch.mul(dout, scale[..., None], out=torch.empty_like(dout))
    square = torch.linalg.vector_norm(made, dim=-1, dtype=torch.float32).square_().clamp_min_(LEAST_SQUARE)
    return made.mul_((delta * scale / square)[..., None])


def given(out: torch.Tensor | None) -> torch.Tensor:
    """Return out, where a kernel was given no delta. Raises TypeError if it was given neither."""
    if out is None:
        raise TypeError("a kernel's backward needs delta or out")
    return out


# ---------- a gradient of lse


class AnyDelta:
    """The backward pass of a kernel, with any delta, of whatever size beside dout."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

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
    ) -> Made:
        """Return dq, dk, dv of a tile; see AttentionKernel.backward."""
        kernel = self._kernel
        if delta is None or isinstance(kernel, TakesDelta):
            made: Made = kernel.backward(dout, q, k, v, lse, delta, out=out, patch=patch, scale=scale)
            return made
        carried, rest = divided(dout, delta)
        made = kernel.backward(dout, q, k, v, lse, carried, patch=patch, scale=scale)
        if _nothing(rest):
            return made
        given, size = _of_rest(rest, v, q.dtype)
        more = kernel.backward(given[0], q, k, given[1], lse, None, out=given[2], patch=patch, scale=scale)
        return _added(made, more, size)

    def backward_packed(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        patches: Sequence[Patch],
        scale: float,
    ) -> list[Made]:
        """Return (dq, dk, dv) of each patch; see PackingKernel.backward_packed."""
        kernel = self._kernel
        if delta is None or isinstance(kernel, TakesDelta):
            all_made: list[Made] = kernel.backward_packed(
                dout, q, k, v, lse, delta, out=out, patches=patches, scale=scale
            )
            return all_made
        carried, rest = divided(dout, delta)
        all_made = kernel.backward_packed(dout, q, k, v, lse, carried, patches=patches, scale=scale)
        rest = _rows_of(patches, rest)  # others may be still to come
        if _nothing(rest):
            return all_made
        given, size = _of_rest(rest, v, q.dtype)
        more = kernel.backward_packed(
            given[0], q, k, given[1], lse, None, out=given[2], patches=patches, scale=scale
        )
        return [_added(made, new, size) for made, new in zip(all_made, more, strict=True)]


def divided(dout: torch.Tensor, delta: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return delta as two: of the rows whose dout carries it, and of the others. dout [..., D], delta [...], fp32."""
    largest = torch.linalg.vector_norm(dout, float("inf"), dim=-1).float()
    fits = delta.abs() <= largest * MOST_CARRIED
    return delta.masked_fill(~fits, 0.0), delta.masked_fill(fits, 0.0)


def _nothing(rest: torch.Tensor) -> bool:
    """Tell whether nothing is left, where the host need not wait to know; elsewhere False."""
    return rest.device.type == "cpu" and not bool(rest.any())


def _rows_of(patches: Sequence[Patch], rest: torch.Tensor) -> torch.Tensor:
    """Return what is left of delta [B, H, S] in the rows of these patches, and 0 in others."""
    found = torch.zeros_like(rest)
    for patch in patches:
        found[:, :, patch.row0 : patch.row1] = rest[:, :, patch.row0 : patch.row1]
    return found


def _of_rest(
    rest: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor | None]:
    """Return dout, v and out of the second call, and the size by which its results are multiplied; None: 1.

    In half precision the rest is divided by the power of two above its largest, so that fp16 holds it, and what is
    rounded off goes into a second column.
    """
    rows = (*rest.shape, v.shape[-1])
    dout, ones, out = (_zeros(shape, dtype, v.device) for shape in (rows, tuple(v.shape), rows))
    ones[..., 0] = 1.0
    if dtype.itemsize > 2:
        dout[..., 0] = -rest
        return (dout, ones, out), None
    size = torch.exp2(rest.abs().amax().clamp(2.0**-100, 2.0**100).log2().ceil())
    wanted = rest / -size
    dout[..., 0] = wanted
    if v.shape[-1] > 1:
        ones[..., 1] = 1.0
        dout[..., 1] = wanted - dout[..., 0]
    return (dout, ones, out), size


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros [B, H, S, D] that lie in memory as slots do: all heads of a token together."""
    b, h, s, d = shape
    return torch.zeros(b, s, h, d, dtype=dtype, device=device).transpose(1, 2)


def _added(made: Made, more: Made, size: torch.Tensor | None) -> Made:
    """Return dq and dk of both calls together, in fp32, and dv of the first: the second had other values."""
    dq, dk = (
        a.float() + (b.float() if size is None else b.float() * size) for a, b in zip(made[:2], more[:2], strict=True)
    )
    return dq, dk, made[2]
