"""torch's own attention operators for CUDA: flash, cuDNN and memory-efficient; nothing else needs to be installed.

Looked up and called by the schemas of torch 2.6 to 2.13. No dropout, so that the seeds which gradients want are
never read: they get memory that nobody wrote.

| operator | causal | lse | else |
|---|---|---|---|
| _flash_attention_forward | bottom right, windows | [B, H, S] | [B, S, H, D]; its gradient reads lse as contiguous |
| _scaled_dot_product_cudnn_attention | top left | [B, H, S, 1], [B, H, S] before 2.7 | no tiles of one row or column |
| _scaled_dot_product_efficient_attention | top left, bias | S filled up to 32 with +inf | k and v of q's heads |

Sources: ATen/native/transformers/cuda/{attention.cu, attention_backward.cu, sdp_utils.cpp, flash_attn/flash_api.cpp,
mem_eff_attention/kernel_backward.h}, ATen/native/cudnn/MHA.cpp, torch/_meta_registrations.py.
"""

from __future__ import annotations

from collections.abc import Set
from functools import lru_cache
from typing import Any

import torch

from tokenring.backends.kernels.flash_common import CACHED_PATCHES, HALF, Gradients, TileKernel, Window, second_version
from tokenring.backends.kernels.masks import MaskedKernel, Masks
from tokenring.backends.kernels.reference import dense_mask
from tokenring.errors import BackendUnavailable, UnsupportedError
from tokenring.sequence.region import Patch

LSE_MULTIPLE = 32  # rows in the lse of the memory-efficient operator (kAlignLSE)
BIAS_BYTES = 16 << 20  # of one patch's: larger ones are cut
HELD_BYTES = 256 << 20  # of all that a program holds: others are made for each call
BIAS_MULTIPLE = 16  # columns that a row of a bias has in memory
REGULAR = 128  # rows and columns of a regular tile for cuDNN are multiples of it
MOST_SHAPES, MOST_IRREGULAR = 64, 8  # tiles of how many sizes cuDNN is given by choice, in all and of irregular ones
REGULAR_ONLY = 91500  # up to this version of cuDNN: it reads beyond irregular tiles (pytorch #169849, #167101)
Shape = tuple[int, int, bool]  # of a call: rows, columns, whether it is causal


def operator(kernel: str, name: str) -> Any:
    """Return torch.ops.aten's operator of this name. Raises BackendUnavailable."""
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        raise BackendUnavailable(
            f"kernel {kernel!r} needs torch's operator {name}, and torch {torch.__version__} has none: "
            f"use ContextParallel(kernel='auto'), or another torch"
        )
    return packet.default


def cudnn_version() -> int | None:
    """Ask torch for cuDNN's version, as 91501; None: there is none that it can use."""
    try:
        found: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        return found
    except RuntimeError:  # another one than torch was built with
        return None


class TorchFlash(TileKernel):
    """A kernel of aten::_flash_attention_forward and its gradient.

    That is FlashAttention-2, or what torch has been told to put there.
    """

    name = "torch-flash"

    def __init__(self) -> None:
        super().__init__()
        self._forward = operator(self.name, "_flash_attention_forward")
        self._gradient = operator(self.name, "_flash_attention_backward")

    def says(self, patch: Patch) -> bool:
        """Return True if a window of version 2 means the patch; see TileKernel.says."""
        return second_version(patch) is not None

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of one call of the operator; see TileKernel.call_forward."""
        causal, sides = _said(patch)
        out, lse = self._forward(
            *_tokens_first(q, k, v), None, None, q.shape[2], k.shape[2], 0.0, causal, False, scale=scale, **sides
        )[:2]  # fmt: skip
        return out.transpose(1, 2), lse

    def call_backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, patch: Patch, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return dq, dk, dv of one call of the operator; see TileKernel.call_backward."""
        causal, sides = _said(patch)
        dq, dk, dv = self._gradient(
            *_tokens_first(dout, q, k, v, out), lse, None, None, q.shape[2], k.shape[2], 0.0, causal,
            *_seeds(q, torch.uint64), scale=scale, **sides,
        )  # fmt: skip
        return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


class TorchCudnn(TileKernel):
    """A kernel of aten::_scaled_dot_product_cudnn_attention and its gradient.

    Head dims above 128 depend on cuDNN and on the chip: they are left to others. Not deterministic.

    torch builds a graph for every size of tile that it meets (and pass, strides and heads) and keeps it for ever
    (MHACacheKeyWrapper in MHA.cpp; some 400 ms each, sglang #4650). Packed documents bring new sizes in each step. So
    beyond some sizes, of irregular tiles beyond a few, it leaves tiles of new ones to kernels that build nothing.
    """

    name = "torch-cudnn"
    largest_head_dim = 128

    def __init__(self) -> None:
        super().__init__()
        self._forward = operator(self.name, "_scaled_dot_product_cudnn_attention")
        self._gradient = operator(self.name, "_scaled_dot_product_cudnn_attention_backward")
        self._lse_dims: int | None = None  # as the last forward gave it: 4, or 3 in older torch
        self._built: set[Shape] = set()  # of the tiles that it was taken for, by choice
        self._shapes = lru_cache(maxsize=CACHED_PATCHES)(self._shapes_of)

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None, or why it cannot compute such calls; see AttentionKernel.supports."""
        return self._undetermined() or super().supports(head_dim, dtype)

    def _undetermined(self) -> str | None:
        if torch.are_deterministic_algorithms_enabled():
            return f"{self.name} is not deterministic, and torch.use_deterministic_algorithms is on"
        return None

    def unsafe(self, patch: Patch) -> str | None:
        """Say why a tile may do harm: older cuDNN reads beyond irregular tiles. None: it is safe."""
        if _irregular(self._shapes(patch)) and (cudnn_version() or REGULAR_ONLY + 1) <= REGULAR_ONLY:
            return f"cuDNN up to {REGULAR_ONLY} reads beyond tiles whose sides are not multiples of {REGULAR}"
        return None

    def avoids(self, patch: Patch) -> str | None:
        """Say why another kernel should take a tile: one row or column, unsafe, or a new graph. None: no reason."""
        if min(patch.rows, patch.cols) < 2:
            return f"{self.name} takes no tiles of one row or one column"
        if reason := self.unsafe(patch):
            return reason
        shapes = self._shapes(patch)
        if shapes <= self._built:
            return None
        shapes |= self._built
        if len(shapes) > MOST_SHAPES or _irregular(shapes) > MOST_IRREGULAR:
            return f"{self.name} would build a graph for a tile of yet another size"
        return None

    def reserve(self, patch: Patch) -> None:
        """Count the sizes of a tile that it was chosen for: it avoids no tile of these any more.

        Those that were avoided once stay so, since sizes are only added: a program runs as it was bound.
        """
        self._built |= self._shapes(patch)

    def _shapes_of(self, patch: Patch) -> frozenset[Shape]:
        """Return the shapes of its calls; parts that it does not say are computed without a graph."""
        return frozenset(_shape(part.patch) for part in self._parts(patch) if self.says(part.patch))

    def says(self, patch: Patch) -> bool:
        """Return True for full patches and causal squares of more than one row and column."""
        return min(patch.rows, patch.cols) > 1 and (patch.is_full or _causal_square(patch))

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of one call of the operator; see TileKernel.call_forward."""
        out, lse = self._forward(q, k, v, None, True, 0.0, patch.is_causal, False, scale=scale)[:2]
        self._lse_dims = lse.dim()
        return out, lse.reshape(q.shape[:3])

    def call_backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, patch: Patch, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return dq, dk, dv of one call; see TileKernel.call_backward. Raises UnsupportedError."""
        if reason := self._undetermined():  # a program that was bound before does not ask `supports` again
            raise UnsupportedError(f"{reason}: use ContextParallel(kernel='auto'), or another kernel by name")
        if self._lse_dims is None:  # another kernel computed forward: ask with a tile of 2 × 2
            self.call_forward(q[:, :, :2], k[:, :, :2], v[:, :, :2], Patch(0, 2, 0, 2), scale)
        lse = lse[..., None] if self._lse_dims == 4 else lse
        dq, dk, dv = self._gradient(
            _token_major(dout), q, k, v, _token_major(out), lse, *_seeds(q, torch.int64), None, None, None,
            q.shape[2], k.shape[2], 0.0, patch.is_causal, scale=scale,
        )  # fmt: skip
        return dq, dk, dv


class TorchEfficient(MaskedKernel):
    """A kernel of aten::_scaled_dot_product_efficient_attention and its gradient.

    It takes fp32 too, any head dim, values of another one, and bands as a bias.
    """

    name = "torch-efficient"
    largest_head_dim = None
    dtypes = (*HALF, torch.float32)
    most_held_bytes = HELD_BYTES
    given_widths = MaskedKernel.own_widths

    def __init__(self) -> None:
        super().__init__(BIASES)
        self._forward = operator(self.name, "_scaled_dot_product_efficient_attention")
        self._gradient = operator(self.name, "_scaled_dot_product_efficient_attention_backward")

    def says(self, patch: Patch) -> bool:
        """Return True for patches of steps 1 that are full, causal, or whose bias is small enough."""
        if patch.row_step != 1 or patch.col_step != 1:
            return False
        return patch.is_full or patch.is_causal or patch.rows * patch.cols * 4 <= BIAS_BYTES

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of one call of the operator; see TileKernel.call_forward."""
        groups = q.shape[1] // k.shape[1]
        out, lse = self._forward(
            q, _repeated(k, groups), _repeated(v, groups), self._bias(patch, q), True, 0.0, patch.is_causal, scale=scale
        )[:2]  # fmt: skip
        return out, lse[..., : q.shape[2]]

    def call_backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, patch: Patch, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return dq, dk, dv of one call of the operator; see TileKernel.call_backward."""
        groups = q.shape[1] // k.shape[1]
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % LSE_MULTIPLE), value=float("inf"))
        dq, dk, dv = self._gradient(
            dout, q, _repeated(k, groups), _repeated(v, groups), self._bias(patch, q), out, lse,
            *_seeds(q, torch.int64), 0.0, [True, True, True, False], patch.is_causal, scale=scale,
        )[:3]  # fmt: skip
        return dq, _summed(dk, groups), _summed(dv, groups)

    def _bias(self, patch: Patch, q: torch.Tensor) -> torch.Tensor | None:
        """Return the bias [B, Hq, rows, columns], without memory for each batch entry and head."""
        found = self.mask(patch, q)
        return None if found is None else found.expand(*q.shape[:2], -1, -1)

    def mask_bytes(self, patch: Patch, dtype: torch.dtype) -> int:
        """Return the bytes of the patch's bias; 0 for full and causal patches, which need none."""
        if patch.is_full or patch.is_causal:
            return 0
        return patch.rows * _bias_columns(patch) * dtype.itemsize


def bias(patch: Patch, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make the bias [rows, columns], 0 where visible and -inf where not.

    Its rows are so far apart as the operator wants them.
    """
    visible = dense_mask(patch, device)
    assert visible is not None  # full patches need none
    memory = torch.zeros(patch.rows, _bias_columns(patch), dtype=dtype, device=device)
    return memory[:, : patch.cols].masked_fill_(~visible, float("-inf"))


def _bias_columns(patch: Patch) -> int:
    """Return the columns of the bias's memory."""
    return patch.cols + -patch.cols % BIAS_MULTIPLE


BIASES = Masks(lambda patch, dtype, device: bias(patch, dtype, device))


def _said(patch: Patch) -> tuple[bool, dict[str, int]]:
    """Return True if it is causal, and the sides of its window; -1 is unbounded."""
    found = second_version(patch)
    assert found is not None  # `says` said so
    sides = Window(None, None) if found.causal else found
    left, right = (-1 if side is None else side for side in sides)
    return found.causal, {"window_size_left": left, "window_size_right": right}


def _causal_square(patch: Patch) -> bool:
    return patch.is_causal and patch.rows == patch.cols


def _tokens_first(*operands: torch.Tensor) -> list[torch.Tensor]:
    """Return [B, S, H, D] views of [B, H, S, D]."""
    return [x.transpose(1, 2) for x in operands]


def _seeds(like: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the seeds that a gradient without dropout does not read."""
    return torch.empty(2, dtype=dtype, device=like.device), torch.empty((), dtype=dtype, device=like.device)


def _shape(patch: Patch) -> Shape:
    return patch.rows, patch.cols, patch.is_causal


def _irregular(shapes: Set[Shape]) -> int:
    """Count the irregular shapes."""
    return sum(1 for rows, cols, _ in shapes if rows % REGULAR or cols % REGULAR)


def _token_major(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor so that it lies in memory as [B, S, H, D].

    The strides of out and dout are built into a graph that is found by those of q, k and v alone, so there is one way
    for them to lie, for axes of length 1 too (MHA.cpp: same_strides, check_tensor_matches_graph).
    """
    b, h, s, d = x.shape
    strides = (s * h * d, d, h * d, 1)
    if all(count == 1 or found == wanted for count, found, wanted in zip(x.shape, x.stride(), strides, strict=True)):
        return x.as_strided(x.shape, strides)  # along axes of length 1 nothing is read, so any stride is right there
    return torch.empty(b, s, h, d, dtype=x.dtype, device=x.device).transpose(1, 2).copy_(x)


def _repeated(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Repeat heads until there are as many as q has."""
    return x if groups == 1 else x.repeat_interleave(groups, dim=1)


def _summed(x: torch.Tensor, groups: int) -> torch.Tensor:
    """Sum gradients over repeated heads: the opposite; sums are taken in fp32 and rounded once."""
    if groups == 1:
        return x
    b, heads, s, d = x.shape
    return x.reshape(b, heads // groups, groups, s, d).sum(dim=2)
