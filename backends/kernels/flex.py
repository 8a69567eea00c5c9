"""torch's flex_attention: any mask in one call, those included that other kernels have to cut.

Compiled on a device (Triton), which takes seconds for each new combination of shapes; so it is taken where it is asked
for, or where `tokenring rates` found it fastest. Its gradient normalises by the lse of its own tile, not by one that
is given. So the backward computes the tile again and differentiates (out, lse) with what the whole row makes of them:
with w = exp(lse of the tile - lse of the row), dout arrives as w·dout, and lse gets w·(rowsum(dout · out) - delta).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from tokenring.backends.kernels.delta import row_dot
from tokenring.backends.kernels.flash_common import HALF, Gradients
from tokenring.backends.kernels.masks import MaskedKernel, Masks
from tokenring.errors import BackendUnavailable
from tokenring.sequence.region import Patch

MODULE = "torch.nn.attention.flex_attention"
BLOCK = 128  # rows and columns of a block of its masks
LARGEST = 2**31 - 1  # stands for no bound


class Flex(MaskedKernel):
    """A kernel of torch.nn.attention.flex_attention.

    compiled: as torch.compile makes it; without, it holds every score at once.
    """

    name = "flex"
    head_dim_multiple = 16
    dtypes = (*HALF, torch.float32)
    softcap = 0.0
    given_widths = MaskedKernel.own_widths

    def __init__(self, compiled: bool = True, attention: Callable[..., Any] | None = None) -> None:
        super().__init__(MASKS)
        if find_spec(MODULE) is None:
            raise BackendUnavailable(
                f"kernel 'flex' needs {MODULE}, and torch {torch.__version__} has none: "
                f"use ContextParallel(kernel='auto')"
            )
        self._attention = cache(lambda: _differentiable(compiled, attention))  # with the first call, and once

    def capped(self, softcap: float) -> Flex:
        """Return this kernel with this cap, compiled anew; see CappingKernel.capped."""
        made = copy.copy(self)
        made.softcap = softcap
        return made

    def says(self, patch: Patch) -> bool:
        """Return True: one call computes any patch."""
        return True

    def mask_bytes(self, patch: Patch, dtype: torch.dtype) -> int:
        """Estimate the mask's bytes: four tables of a number for each block, and some."""
        return 0 if patch.is_full else 16 * (1 + patch.rows // BLOCK) * (2 + patch.cols // BLOCK)

    def call_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse of one call of flex_attention; see TileKernel.call_forward."""
        out, made = self._attention()(
            q, k, v, block_mask=self.mask(patch, q), scale=scale, enable_gqa=q.shape[1] != k.shape[1],
            **({"score_mod": _cap(self.softcap)} if self.softcap else {}),
        )  # fmt: skip
        lse = made if isinstance(made, torch.Tensor) else made.lse
        return out, lse.float()

    def call_backward(
        self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, patch: Patch, scale: float,
    ) -> Gradients:  # fmt: skip
        """Return dq, dk, dv by autograd through the tile, computed again; see TileKernel.call_backward."""
        delta = row_dot(dout, out)
        with torch.enable_grad():
            q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
            tile_out, tile_lse = self.call_forward(q, k, v, patch, scale)
        seen = (tile_lse.detach() > -math.inf) & (lse > -math.inf)
        weight = torch.exp(tile_lse.detach() - lse).where(seen, 0.0)
        of_out = (weight[..., None] * dout).to(tile_out.dtype)
        of_lse = weight * (row_dot(dout, tile_out.detach()) - delta)
        dq, dk, dv = torch.autograd.grad((tile_out, tile_lse), leaves, (of_out, of_lse))
        return dq, dk, dv


@cache
def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    """Return what flex_attention does to each score; one for each cap, as it compiles each anew."""

    def score_mod(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return score_mod


def _differentiable(compiled: bool, given: Callable[..., Any] | None) -> Callable[..., Any]:
    """Return flex_attention with its lse; imported here: it brings the compiler along."""
    module = import_module(MODULE)
    attention = module.flex_attention if given is None else given
    # The lse by the request of 2.9 and later, or by the flag before, which later ones warn of.
    request = getattr(module, "AuxRequest", None)
    ask: dict[str, Any] = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    return partial(torch.compile(attention, dynamic=True) if compiled else attention, **ask)


def block_mask(patch: Patch, device: torch.device) -> Any:
    """Make the patch's BlockMask from its bounds.

    It says which blocks are seen in part and which wholly, without all pairs.
    """
    from torch.nn.attention.flex_attention import BlockMask

    seen, whole = blocks(patch, device)
    low = -LARGEST if patch.low is None else patch.low
    high = LARGEST if patch.high is None else patch.high
    # As tensors: as numbers they would be compiled in, once for each patch.
    bounds = torch.tensor([patch.row_step, patch.col_step, low, high], dtype=torch.int32, device=device)

    def visible(b: torch.Tensor, h: torch.Tensor, row: torch.Tensor, col: torch.Tensor) -> torch.Tensor:
        difference = bounds[1] * col - bounds[0] * row
        return (difference >= bounds[2]) & (difference <= bounds[3])

    return BlockMask.from_kv_blocks(
        *_listed(seen & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible,
        seq_lengths=(patch.rows, patch.cols),
    )  # fmt: skip


MASKS = Masks(lambda patch, dtype, device: block_mask(patch, device))


def blocks(patch: Patch, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two [row blocks, column blocks] booleans.

    The first: any pair may be visible. The second: all are, and the block lies wholly in the tile.
    """
    rows = torch.arange(0, patch.rows, BLOCK, device=device)[:, None]
    cols = torch.arange(0, patch.cols, BLOCK, device=device)[None, :]
    last_row, last_col = (rows + BLOCK).clamp(max=patch.rows) - 1, (cols + BLOCK).clamp(max=patch.cols) - 1
    least = patch.col_step * cols - patch.row_step * last_row
    most = patch.col_step * last_col - patch.row_step * rows
    low = -LARGEST if patch.low is None else patch.low
    high = LARGEST if patch.high is None else patch.high
    inside = (rows + BLOCK <= patch.rows) & (cols + BLOCK <= patch.cols)
    return (most >= low) & (least <= high), (least >= low) & (most <= high) & inside


def _listed(which: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Count each row's blocks, and list all column blocks with those first.

    Returns [1, 1, rows] and [1, 1, rows, columns].
    """
    order = torch.argsort(which.int(), dim=-1, descending=True, stable=True)
    return which.sum(dim=-1, dtype=torch.int32)[None, None], order.int()[None, None].contiguous()
