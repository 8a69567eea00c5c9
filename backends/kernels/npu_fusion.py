"""npu_fusion_attention of torch_npu, forward and backward, by its documented contract.

Its ways, normalised here: the statistics are a maximum and a sum for each row, in eight equal copies; a row with
every key masked comes back as (0, lowest, highest) or as the mean of v, with a maximum of the lowest fp32 either
way; masks hide where they are True. Its backward rebuilds p as exp(s - maximum) / sum, so that the lse of the whole
row serves as maximum with a sum of 1, and wants the whole row's output, or a stand-in that carries delta. Results
are in the input's dtype; they are merged and added up in fp32 outside. Gradients are not deterministic unless
torch.use_deterministic_algorithms is on. Dropout is never asked for. Values may be narrower than keys, not wider: q
and k get zeros then.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from tokenring.backends.interfaces import Tiles
from tokenring.backends.kernels import npu_packed, npu_running
from tokenring.backends.kernels.npu_call import PlainRows, RowsOfCall
from tokenring.backends.kernels.npu_masks import (
    EXPLICIT,
    TRIANGLE,
    common_mode,
    every_row_sees,
    options,
    wants_triangle,
)  # fmt: skip
from tokenring.backends.kernels.npu_operator import Operator, canonical, find, row_lse
from tokenring.backends.kernels.npu_trials import packs_in_token_order
from tokenring.backends.widths import cut, filled
from tokenring.sequence.region import Patch

LARGEST_HEAD_DIM, MOST_HEADS = 768, 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MASK_BYTES = 64 << 20  # of a mask of its own that a patch may need

Made = tuple[torch.Tensor, ...]


class NpuFusion:
    """A kernel of torch.ops.npu.npu_fusion_attention and its gradient, in either version. Raises BackendUnavailable."""

    name = "npu-fusion"

    def __init__(self) -> None:
        self._forward = find("npu_fusion_attention", "npu_fusion_attention_v2")
        self._gradient = find("npu_fusion_attention_grad", "npu_fusion_attention_grad_v2")
        self._triangle = TRIANGLE
        self._bound: tuple[Operator, torch.device] | None = None  # of the program that holds it
        self.rows = PlainRows()

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such calls; see AttentionKernel.supports."""
        if head_dim > LARGEST_HEAD_DIM:
            return f"npu_fusion_attention takes head dimensions up to {LARGEST_HEAD_DIM}, not {head_dim}"
        if dtype not in DTYPES:
            return f"npu_fusion_attention takes float16, bfloat16 and float32, not {dtype}"
        return None

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such calls; see UnequalWidths.supports_widths."""
        return self.supports(max(head_dim, value_dim), dtype)

    @staticmethod
    def supports_heads(q_heads: int) -> str | None:
        """Return None, or why it cannot compute so many query heads; see HeadLimited.supports_heads."""
        if q_heads > MOST_HEADS:
            return f"npu_fusion_attention takes up to {MOST_HEADS} query heads, not {q_heads}"
        return None

    @staticmethod
    def supports_patch(patch: Patch) -> str | None:
        """Return None, or why a patch should be cut: its own mask would be too large."""
        if common_mode((patch,)) is not None or patch.rows * patch.cols <= MASK_BYTES:
            return None
        return f"its mask of {patch.rows} × {patch.cols} bytes is larger than {MASK_BYTES >> 20} MiB"

    def holding(self, tiles: Tiles) -> NpuFusion:
        """Return this kernel with the triangle of the compressed modes, if one of these tiles uses any."""
        some = any(wants_triangle(_at_corner(patch)) for patch in tiles.patches)
        held = copy.copy(self)
        held._triangle = self._triangle.holding([(tiles.device,)] if some else [], tiles.device)
        held._bound = (self._forward if tiles.direction == "forward" else self._gradient), tiles.device
        return held

    def for_call(self) -> NpuFusion:
        """Return this kernel for one backward call, of rows that `prepared_lse` and `prepared_delta` have made."""
        made = copy.copy(self)
        made.rows = RowsOfCall()
        return made

    def prepared_lse(self, lse: torch.Tensor) -> torch.Tensor:
        """Return lse [B, H, T] of own rows as `for_call` takes it; see PreparesRows."""
        return RowsOfCall.prepared_lse(lse)

    def prepared_delta(self, dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        """Return what `for_call` takes in the place of delta [B, H, T] of own rows; see PreparesRows."""
        return RowsOfCall.prepared_delta(dout, delta)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of the tile; see AttentionKernel.forward."""
        if patch.pairs() == 0:
            lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
            return q.new_zeros(*q.shape[:3], v.shape[-1]), lse
        out, largest, total, layout = self._tile(q, k, v, patch, scale)
        lse = row_lse(largest, total)
        out = _in_layout_back(out, layout)
        explicit = options(patch, q.device, self._triangle).get("sparse_mode") == EXPLICIT
        return canonical(out, lse) if explicit and not every_row_sees(patch) else (out, lse)

    def _tile(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
        """Return out, maximum and sum as the operator gives them, and its layout."""
        q, k = _wide_enough(q, k, v)
        layout, how = _layout(q, k, v), options(patch, q.device, self._triangle)
        operands = [_in_layout(q, layout), *_both_in_layout(k, v, layout)]
        out, largest, total = self._forward(*operands, q.shape[1], layout, scale=scale, **how)[:3]
        return out, largest, total, layout

    # ---------- tiles that go into the same rows

    def runs(self, patches: Sequence[Patch]) -> bool:
        """Return True if all rows of these patches see something, and the operator that merges them is there."""
        if self._bound is None or not all(patch.pairs() and every_row_sees(patch) for patch in patches):
            return False
        return npu_running.updating(self._bound[1]) is not None

    def forward_running(
        self,
        before: npu_running.RunningRows | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        patch: Patch,
        scale: float,
    ) -> npu_running.RunningRows:
        """Return the result so far, with this tile's; see RunningKernel.forward_running."""
        out, largest, total, layout = self._tile(q, k, v, patch, scale)
        tile = npu_running.begun(out, largest, total, layout)
        update = None if before is None else npu_running.updating(q.device)
        return tile if before is None or update is None else npu_running.merged(update, before, tile)

    def results(self, running: npu_running.RunningRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of all tiles; see RunningKernel.results."""
        return running.results()

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
        if patch.pairs() == 0:
            return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        head_dim = q.shape[-1]
        q, k = _wide_enough(q, k, v)
        layout = _layout(q, k, v)
        (own, given), pair = _both_in_layout(q, dout.to(q.dtype), layout), _both_in_layout(k, v, layout)
        made = self._gradient(
            own, *pair, given, q.shape[1], layout, scale=scale,
            attention_in=_in_layout(self.rows.out(dout, delta, out, q.dtype), layout),
            **self.rows.statistics(lse), **options(patch, q.device, self._triangle),
        )  # fmt: skip
        dq, dk, dv = (_in_layout_back(x, layout) for x in made[:3])
        return cut(dq, head_dim), cut(dk, head_dim), dv

    # ---------- several patches in one call

    def packs(self, patches: Sequence[Patch]) -> bool:
        """Return True if one mode goes for all of them, so that each is one sequence of the layout TND."""
        found = common_mode(tuple(_at_corner(patch) for patch in patches)) is not None
        if found and len(patches) > 1 and self._bound is not None:
            packs_in_token_order(*self._bound)  # tried while a program is bound: within a step the host must not wait
        return found

    def forward_packed(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patches: Sequence[Patch], scale: float
    ) -> list[Made]:
        """Return (out, lse) of each patch; see PackingKernel.forward_packed."""
        q, k = _wide_enough(q, k, v)

        def call(how: npu_packed.NpuPacking, entries: slice) -> list[Made]:
            return how.forward(self._forward, q[entries], k[entries], v[entries], scale)

        return npu_packed.in_calls(patches, q.shape[0], call, self._triangle)

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
        head_dim = q.shape[-1]
        q, k = _wide_enough(q, k, v)

        def call(how: npu_packed.NpuPacking, entries: slice) -> list[Made]:
            return how.backward(
                self._gradient, dout[entries], q[entries], k[entries], v[entries], lse[entries],
                None if delta is None else delta[entries], None if out is None else out[entries], scale, self.rows,
            )  # fmt: skip

        made = npu_packed.in_calls(patches, q.shape[0], call, self._triangle)
        return [(cut(dq, head_dim), cut(dk, head_dim), dv) for dq, dk, dv in made]


def _wide_enough(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return q and k no narrower than v: the operator takes head dims of one size, of v up to that."""
    width = max(q.shape[-1], v.shape[-1])
    return filled(q, width), filled(k, width)


def _layout(*operands: torch.Tensor) -> str:
    """Return the layout in which no copy is needed; token-major memory, as the caller's, is BSND."""
    return "BNSD" if all(x.is_contiguous() for x in operands) else "BSND"


def _in_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return [B, H, S, D] as the operator wants it."""
    return (x if layout == "BNSD" else x.transpose(1, 2)).contiguous()


def _both_in_layout(a: torch.Tensor, b: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors as the operator wants them: with one copy where they lie side by side, as in messages."""
    a, b = (x if layout == "BNSD" else x.transpose(1, 2) for x in (a, b))
    apart = b.storage_offset() - a.storage_offset()
    alike = (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype) and apart > 0
    one_memory = alike and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    if not one_memory or a.is_contiguous():
        return a.contiguous(), b.contiguous()
    both = a.as_strided((2, *a.shape), (apart, *a.stride()), a.storage_offset()).contiguous()
    return both[0], both[1]


def _in_layout_back(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "BNSD" else x.transpose(1, 2)


def _at_corner(patch: Patch) -> Patch:
    return patch.shifted(-patch.row0, -patch.col0)
