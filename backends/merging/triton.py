"""Merging partial results as one Triton kernel: one pass over both, in fp32, in place.

Both parts are weighed by exp(lse - larger lse), so that no weight overflows, and nothing is lost to the size of the
lse; rows that have seen nothing (lse -inf) weigh 0. Torch's operators read and write the rows twice as often where
they must first make them fp32, and are seven launches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

from tokenring.backends.merging.torch_merger import TorchMerger

ELEMENTS = 4096  # of a program: 16 KiB of the running output; 16 bytes a thread, 8 loads on their way
WARPS = 4


@triton.jit  # type: ignore[misc,untyped-decorator,unused-ignore]
def _merge_rows(  # type: ignore[no-untyped-def,unused-ignore]
    out, lse, new_out, new_lse, count, batch,
    out_r, out_b, out_h, out_d, lse_r, lse_b, lse_h, new_r, new_b, new_h, new_d, stat_r, stat_b, stat_h,
    HEADS: tl.constexpr, D: tl.constexpr, COLS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merge a block of ROWS of the rows · batch · HEADS = count rows.

    Strides: _r of rows, _b of batch, _h of heads, _d of columns.
    """
    index = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = index < count
    h = (index % HEADS).to(tl.int64)  # offsets may pass 2^31
    b = (index // HEADS % batch).to(tl.int64)
    r = (index // HEADS // batch).to(tl.int64)

    lse_at = lse + r * lse_r + b * lse_b + h * lse_h
    old = tl.load(lse_at, mask=there, other=float("-inf"))
    new = tl.load(new_lse + r * stat_r + b * stat_b + h * stat_h, mask=there, other=float("-inf"))
    largest = tl.maximum(old, new, propagate_nan=tl.PropagateNan.ALL)
    seen = largest != float("-inf")  # NaN is to be seen
    shift = tl.where(seen, largest, 0.0)  # -inf minus -inf would be NaN
    old_weight, new_weight = tl.exp(old - shift), tl.exp(new - shift)
    total = tl.where(seen, old_weight + new_weight, 1.0)

    d = tl.arange(0, COLS)
    here = there[:, None] & (d < D)[None, :]
    out_at = out + (r * out_r + b * out_b + h * out_h)[:, None] + (d * out_d)[None, :]
    new_at = new_out + (r * new_r + b * new_b + h * new_h)[:, None] + (d * new_d)[None, :]
    kept = tl.load(out_at, mask=here, other=0.0).to(tl.float32) * (old_weight / total)[:, None]
    come = tl.load(new_at, mask=here, other=0.0).to(tl.float32) * (new_weight / total)[:, None]

    # Several warps may hold the same rows, as where a block has fewer rows than threads: all must have read them
    # before one writes them, or the slower ones merge what is merged already (triton-lang/triton#1615).
    tl.debug_barrier()
    tl.store(lse_at, tl.where(seen, shift + tl.log(total), float("-inf")), mask=there)
    tl.store(out_at, (kept + come).to(out.dtype.element_ty), mask=here)


@dataclass(frozen=True)
class TritonMerger(TorchMerger):
    """A merger by one kernel for `out` and `lse`; needs no scratch. elements, warps: of a program."""

    elements: int = ELEMENTS
    warps: int = WARPS
    name = "triton"

    def merge_(
        self,
        out: torch.Tensor,
        lse: torch.Tensor,
        new_out: torch.Tensor,
        new_lse: torch.Tensor,
        scratch: torch.Tensor | None = None,
    ) -> None:
        """Merge into out and lse, in place; see Merger.merge_."""
        out, lse, new_out, new_lse = _four(out, 4), _four(lse, 3), _four(new_out, 4), _four(new_lse, 3)
        rows, batch, heads, head_dim = out.shape
        count, cols = rows * batch * heads, _power_of_two(head_dim)
        if count == 0:
            return
        block = max(1, self.elements // cols)
        with torch.cuda.device_of(out):  # type: ignore[no-untyped-call]  # Triton launches on the current device
            _merge_rows[(-(-count // block),)](
                out, lse, new_out, new_lse, count, batch,
                *out.stride(), *lse.stride(), *new_out.stride(), *new_lse.stride(),
                HEADS=heads, D=head_dim, COLS=cols, ROWS=block, num_warps=self.warps,
            )  # fmt: skip


def _four(x: torch.Tensor, dims: int) -> torch.Tensor:
    """Return the tensor as [rows, batch, heads, ...]: with axes of one in front where there are fewer."""
    while x.dim() < dims:
        x = x[None]
    return x


def _power_of_two(number: int) -> int:
    """Return the next power of two: a block's size."""
    return 1 << (number - 1).bit_length()


def make() -> TritonMerger:
    """Make the merger, as `merging.choice` asks for it."""
    return TritonMerger()
