"""The kernel flex: torch's own flex_attention on the CPU, without its compiler; gradients over arithmetic of its form.

On a CPU torch computes flex_attention forward only, so that a differentiable stand-in takes its place in backward.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from conformance import PATCHES, TILES, Tile, check, operands, visible
from oracle import attention64, relative_error

from tokenring.backends.kernels.flex import BLOCK, Flex, block_mask, blocks
from tokenring.backends.kernels.masks import Masks
from tokenring.sequence.region import Patch

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def uncompiled() -> Iterator[None]:
    """torch warns that it holds every score: here that is meant."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        yield


def pairs(mask: Any, rows: int, cols: int) -> torch.Tensor:
    row, col = torch.arange(rows)[:, None], torch.arange(cols)[None, :]
    made: torch.Tensor = mask.mask_mod(torch.tensor(0), torch.tensor(0), row, col)
    return made


# ---------- real


REAL = [tile for tile in TILES if tile.patch.pairs() and tile.head_dim <= 128]


@pytest.mark.sampled(16)
@pytest.mark.parametrize("tile", REAL, ids=str)
def test_forward_is_torchs_own(tile: Tile) -> None:
    """Of what a kernel must do: out and lse of every tile, with rows that see nothing, against float64."""
    given = operands(tile, CPU)
    scale = 1 / math.sqrt(tile.head_dim) if tile.scale is None else tile.scale
    out, lse = Flex(compiled=False).forward(given.q, *given.tile, patch=tile.patch, scale=scale)
    q, k, v, dout = (x.transpose(1, 2) for x in (given.q, *given.tile, given.dout))
    right = attention64(q, k, v, dout, visible(tile.patch), scale)
    assert relative_error(lse, right.lse) < 1e-5 * (1 if tile.dtype == torch.float32 else 1e3)
    limit = 5e-6 if tile.dtype == torch.float32 else 1e-2
    assert relative_error(out, right.out.transpose(1, 2)) < limit


def test_a_wrong_mask_is_seen() -> None:
    given = operands(Tile("band", PATCHES["band"]), CPU)
    kernel = Flex(compiled=False)
    right, _ = kernel.forward(given.q, *given.tile, patch=PATCHES["band"], scale=0.2)
    kernel._masks = Masks(lambda patch, dtype, device: block_mask(patch._replace(high=3), device))
    wrong, _ = kernel.forward(given.q, *given.tile, patch=PATCHES["band"], scale=0.2)
    assert relative_error(wrong, right) > 0.1


# ---------- block masks


@pytest.mark.parametrize(
    "patch",
    [
        *PATCHES.values(), Patch(0, 300, 0, 300, None, 0), Patch(0, 513, 0, 260, -130, 5),
        Patch(0, 256, 0, 384, 100, None), Patch(0, 256, 0, 300, None, 17, 3, 2), Patch(0, 300, 0, 640, -200, 80, 1, 2),
    ],
)  # fmt: skip
def test_blocks(patch: Patch) -> None:
    """Seen in part or wholly as the pairs say; a block without any may be listed, one that has some must."""
    shown = visible(patch)
    seen, whole = blocks(patch, CPU)
    for row in range(seen.shape[0]):
        for col in range(seen.shape[1]):
            inside = shown[row * BLOCK : (row + 1) * BLOCK, col * BLOCK : (col + 1) * BLOCK]
            assert bool(seen[row, col]) or not inside.any()
            complete = inside.shape == (BLOCK, BLOCK) and bool(inside.all())
            assert bool(whole[row, col]) == complete
            assert bool(seen[row, col]) or not complete
            if patch.row_step == patch.col_step == 1:
                assert bool(seen[row, col]) == bool(inside.any())
    if not patch.is_full:
        mask = block_mask(patch, CPU)
        assert torch.equal(pairs(mask, patch.rows, patch.cols), shown)
        assert mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum() == seen.sum()


# ---------- gradients


class Aux(NamedTuple):
    lse: torch.Tensor


def differentiable(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, block_mask: Any, scale: float, enable_gqa: bool,
    return_aux: Any = None, return_lse: bool = False, score_mod: Any = None,
) -> tuple[torch.Tensor, Aux]:  # fmt: skip
    """flex_attention written out, out and lse differentiable, in fp32."""
    assert return_aux is not None or return_lse
    assert enable_gqa == (q.shape[1] != k.shape[1])
    groups, dtype = q.shape[1] // k.shape[1], q.dtype
    q, k, v = q.float(), *(x.float().repeat_interleave(groups, dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = scores if score_mod is None else score_mod(scores, None, None, None, None)
    if block_mask is not None:
        scores = scores.masked_fill(~pairs(block_mask, q.shape[2], k.shape[2]), -math.inf)
    empty = (scores == -math.inf).all(dim=-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty, 0.0)
    lse = torch.logsumexp(scores.masked_fill(empty, 0.0), dim=-1).masked_fill(empty[..., 0], -math.inf)
    return (p @ v).to(dtype), Aux(lse)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_conformance(tile: Tile) -> None:
    if tile.head_dim > 256:
        assert "head dimensions up to 256" in str(Flex(False).supports(tile.head_dim, tile.dtype))
        return
    check(Flex(compiled=False, attention=differentiable), tile)


class OwnStatistics(Flex):
    """Leaves out what the lse of the tile contributes."""

    def call_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, patch: Patch, scale: float
    ) -> Any:  # fmt: skip
        with torch.enable_grad():
            q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
            tile_out, tile_lse = self.call_forward(q, k, v, patch, scale)
        weight = torch.exp(tile_lse.detach() - lse)
        return torch.autograd.grad(tile_out, leaves, weight[..., None] * dout)


def test_a_gradient_without_the_lse_fails() -> None:
    with pytest.raises(AssertionError):
        check(OwnStatistics(compiled=False, attention=differentiable), Tile("full", PATCHES["full"]))
