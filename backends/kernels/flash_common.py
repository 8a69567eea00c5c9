"""A base for kernels whose operator computes only some patches, aligned memory and certain head dims.

A kernel says which patches one call computes (`says`) and writes that call (`call_forward`, `call_backward`); cutting,
merging, padding and the gradients' inputs are here. Results of several parts are merged and added up in fp32, and
come in q's dtype.

A gradient of every operator here recomputes p from the lse that it is given and takes delta as rowsum(dout · out), so
that it is given the lse of the whole row, and the merged output or a stand-in that carries delta.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import lru_cache
from typing import NamedTuple

import torch

from tokenring.backends.kernels.delta import lean_out
from tokenring.backends.kernels.patch_parts import Part, parts
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.widths import cut, filled
from tokenring.sequence.region import Patch

HALF = (torch.float16, torch.bfloat16)
ALIGNMENT_BYTES = 16  # of addresses and strides: operators load so much at a time and do not check
CACHED_PATCHES = 1024
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class TileKernel(ABC):
    """A base of kernels for CUDA. `supports` gives reasons; the rest of `AttentionKernel` follows from `says`."""

    name = ""
    largest_head_dim: int | None = 256
    head_dim_multiple = 8  # other head dims are filled up with zeros
    dtypes: tuple[torch.dtype, ...] = HALF

    def __init__(self) -> None:
        self._parts = lru_cache(maxsize=CACHED_PATCHES)(lambda patch: parts(patch, self.says))
        self._plain: Reference = Reference()

    # ---------- what a kernel says and computes

    @abstractmethod
    def says(self, patch: Patch) -> bool:
        """Return True if one call computes a trimmed patch at its corner."""

    @abstractmethod
    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, Hq, Sq, D], lse [B, Hq, Sq] of operands in aligned memory."""

    @abstractmethod
    def call_backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, patch: Patch, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return dq, dk, dv of operands in aligned memory.

        out: of the whole rows, or a stand-in; lse: of the whole rows, contiguous fp32, aligned.
        """

    def given_widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return the widths of q and k, and of v and out, that the operator is given for such a call.

        By default one for all: with zeros beside the narrower ones.
        """
        width = self._whole(max(head_dim, value_dim))
        return width, width

    def own_widths(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        """Return `given_widths` of an operator that takes values of any width."""
        return self._whole(head_dim), self._whole(value_dim)

    def unsafe(self, patch: Patch) -> str | None:
        """Say why it may do harm to give it a tile, also to try it; None: nothing is known against it."""
        return None

    def avoids(self, patch: Patch) -> str | None:
        """Say why another kernel should take a tile, where there is a choice; None: there is no reason."""
        return self.unsafe(patch)

    def calls_for(self, patch: Patch) -> int:
        """Count the calls, whose results are merged, that compute a tile; 0 where nothing is visible."""
        return len(self._parts(patch))

    # ---------- AttentionKernel

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such calls; see AttentionKernel.supports."""
        if dtype not in self.dtypes:
            return f"{self.name} takes {named(self.dtypes)}, not {named((dtype,))}"
        if self.largest_head_dim is not None and head_dim > self.largest_head_dim:
            return f"{self.name} takes head dimensions up to {self.largest_head_dim}, not {head_dim}"
        return None

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such calls; see UnequalWidths.supports_widths."""
        return self.supports(max(self.given_widths(head_dim, value_dim)), dtype)

    def supports_patch(self, patch: Patch) -> str | None:
        """Return None: what one call does not compute, several do."""
        return None  # what one call does not compute, several do

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse, merged from the calls of the patch's parts; see AttentionKernel.forward."""
        value_dim, cuts = v.shape[-1], self._parts(patch)
        width, value_width = self.given_widths(q.shape[-1], value_dim)
        q, k, v = filled(q, width), filled(k, width), filled(v, value_width)
        if (only := _only(cuts, patch)) is not None:
            out, lse = self._part_forward(only, q, k, v, scale)
            return cut(out, value_dim), lse
        out = torch.zeros((*q.shape[:3], value_width), dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
        for part in cuts:
            merge_part(out[:, :, part.rows], lse[:, :, part.rows], *self._part_forward(part, q, k, v, scale))
        return cut(out, value_dim).to(q.dtype), lse

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
    ) -> Gradients:
        """Return dq, dk, dv, added up from the calls of the patch's parts; see AttentionKernel.backward."""
        head_dim, value_dim, cuts = q.shape[-1], v.shape[-1], self._parts(patch)
        width, value_width = self.given_widths(head_dim, value_dim)
        dout, out = dout.to(q.dtype), lean_out(dout, delta, out, q.dtype)
        rows = [filled(dout, value_width), filled(q, width), filled(out, value_width)]
        cols = [filled(k, width), filled(v, value_width)]
        if (only := _only(cuts, patch)) is not None:
            dq, dk, dv = self._part_backward(only, rows, cols, lse, scale)
        else:
            dq, dk, dv = (torch.zeros(x.shape, dtype=torch.float32, device=x.device) for x in (rows[1], *cols))
            for part in cuts:
                made = self._part_backward(part, rows, cols, lse, scale)
                for total, where, new in zip((dq, dk, dv), (part.rows, part.cols, part.cols), made, strict=True):
                    total[:, :, where] += new
        return cut(dq, head_dim).to(q.dtype), cut(dk, head_dim).to(q.dtype), cut(dv, value_dim).to(q.dtype)

    # ---------- one part

    def _part_forward(
        self, part: Part, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = aligned(part.of_rows(q)), aligned(part.of_cols(k)), aligned(part.of_cols(v))
        if not self.says(part.patch):
            out, lse = self._plain.forward(q, k, v, patch=part.patch, scale=scale)
        else:
            out, lse = self.call_forward(q, k, v, part.patch, scale)
        return part.back(out), part.back(lse)

    def _part_backward(
        self, part: Part, rows: list[torch.Tensor], cols: list[torch.Tensor], lse: torch.Tensor, scale: float
    ) -> Gradients:
        dout, q, out = (aligned(part.of_rows(x)) for x in rows)
        k, v = (aligned(part.of_cols(x)) for x in cols)
        lse = packed(part.of_rows(lse).float())
        if not self.says(part.patch):
            made = self._plain.backward(dout, q, k, v, lse, None, out=out, patch=part.patch, scale=scale)
        else:
            made = self.call_backward(dout, q, k, v, out, lse, part.patch, scale)
        dq, dk, dv = made
        return part.back(dq), part.back(dk), part.back(dv)

    def _whole(self, width: int) -> int:
        """Return the next head dim that the operator takes."""
        return width + -width % self.head_dim_multiple


def _only(cuts: tuple[Part, ...], patch: Patch) -> Part | None:
    """Return the one part that covers the tile; None if there are several, or if it is turned."""
    if len(cuts) != 1 or cuts[0].turned or (cuts[0].patch.rows, cuts[0].patch.cols) != (patch.rows, patch.cols):
        return None
    return cuts[0]


def merge_part(out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor) -> None:
    """Merge a part, all of whose rows see something, into fp32 views: rows that had nothing yet take it as it is."""
    total = torch.logaddexp(lse, new_lse)
    out.lerp_(new_out.float(), torch.exp(new_lse - total)[..., None])
    lse.copy_(total)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, in memory that operators can read."""
    size = x.element_size()
    outer = zip(x.stride()[:-1], x.shape[:-1], strict=True)
    steps = [x.data_ptr(), *(stride * size for stride, count in outer if count > 1)]
    if x.stride(-1) == 1 and not any(each % ALIGNMENT_BYTES for each in steps):
        return x
    return _copied(x)


def packed(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy, aligned and with nothing between its elements."""
    return x if x.is_contiguous() and x.data_ptr() % ALIGNMENT_BYTES == 0 else _copied(x)


def _copied(x: torch.Tensor) -> torch.Tensor:
    """Copy into memory of its own.

    `contiguous()` would give x itself where the axes that have more than one entry are so.
    """
    return x.clone(memory_format=torch.contiguous_format)


def named(dtypes: tuple[torch.dtype, ...]) -> str:
    """Return the names of dtypes, as "bfloat16 and float32", without torch's name before each."""
    return " and ".join(str(each).removeprefix("torch.") for each in dtypes)


# ---------- windows: since version 2.1 flash attention aligns its masks at the bottom right, so that row i sees columns
# i + (cols - rows) - left to i + (cols - rows) + right (Dao-AILab/flash-attention, README, "2.1: Change behavior of
# causal flag")


class Window(NamedTuple):
    """A window's left and right side: None is unbounded. causal: there is a shorter way to say (None, 0)."""

    left: int | None
    right: int | None

    @property
    def causal(self) -> bool:
        """True if the window is (None, 0)."""
        return self.left is None and self.right == 0


def window(patch: Patch) -> Window | None:
    """Return the window of a trimmed patch; None where its steps are unequal."""
    if patch.row_step != 1 or patch.col_step != 1:
        return None
    offset = patch.cols - patch.rows
    left = None if patch.low is None else offset - patch.low
    right = None if patch.high is None else patch.high - offset
    return Window(left, right)


def second_version(patch: Patch) -> Window | None:
    """Return the window as version 2 (torch's and flash_attn's) means it; None: no window says this patch.

    It takes sides of at least `cols` for unbounded, and beside a bounded side an unbounded one for `cols`: tall tiles
    would lose pairs or gain some (flash_api.cpp, mha_fwd and set_params_fprop).
    """
    found = window(patch)
    if found is None or found.causal or patch.is_full:
        return found
    if found.right is None and patch.rows > patch.cols + 1:
        return None
    if found.right is not None and found.right >= patch.cols:
        return None
    return found
