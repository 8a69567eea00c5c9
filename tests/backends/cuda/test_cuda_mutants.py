"""Kernels for CUDA with the usual faults: each fails the suite where the kernel that it is made from passes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from conformance import PATCHES, Tile, check
from cuda_ops.aten import operators
from test_cuda_kernels import strided, tile_for

from tokenring.backends.kernels.flash_common import TileKernel
from tokenring.backends.kernels.patch_parts import Part
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash
from tokenring.sequence.region import Patch


class Untrimmed(TorchFlash):
    """Lets rows that see nothing reach the operator, and so keeps its lse of +inf."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = lambda each: (  # type: ignore[assignment]
            Part(slice(0, each.rows), slice(0, each.cols), each.shifted(-each.row0, -each.col0)),
        )  # fmt: skip


class TopLeft(TorchFlash):
    """Takes torch's flash for an operator that is aligned at the top left."""

    def says(self, patch: Patch) -> bool:
        return patch.is_full or patch.is_causal

    def call_forward(self, q: Any, k: Any, v: Any, patch: Patch, scale: float) -> Any:
        tokens_first = (x.transpose(1, 2) for x in (q, k, v))
        rest = (None, None, q.shape[2], k.shape[2], 0.0, patch.is_causal, False)
        out, lse, *_ = self._forward(*tokens_first, *rest, scale=scale)
        return out.transpose(1, 2), lse


class PaddedLse(TorchEfficient):
    """Keeps the rows that the lse is filled up with."""

    def call_forward(self, q: Any, k: Any, v: Any, patch: Patch, scale: float) -> Any:
        out, lse = super().call_forward(q, k, v, patch, scale)
        return out, torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)


class UnpaddedGradient(TorchEfficient):
    """Gives the gradient an lse that is not filled up."""

    def call_backward(self, *given: Any) -> Any:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("tokenring.backends.kernels.torch_cuda.LSE_MULTIPLE", 1)
            return super().call_backward(*given)


class FlatStatistics(TorchCudnn):
    """Gives cuDNN's gradient an lse without its last axis."""

    def call_backward(self, *given: Any) -> Any:
        self._lse_dims = 3  # what this torch does not do
        return super().call_backward(*given)


class OwnOut(TorchFlash):
    """Gives the gradient the output of this tile instead of that of the whole rows."""

    def call_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, patch: Patch, scale: float
    ) -> Any:  # fmt: skip
        out = self.call_forward(q, k, v, patch, scale)[0]
        return super().call_backward(dout, q, k, v, out, lse, patch, scale)


class OwnLse(TorchFlash):
    """Normalises by this tile alone."""

    def call_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, patch: Patch, scale: float
    ) -> Any:  # fmt: skip
        lse = self.call_forward(q, k, v, patch, scale)[1]
        return super().call_backward(dout, q, k, v, out, lse, patch, scale)


class StridedLse(TorchFlash):
    """Hands on an lse that is not contiguous, whose address the gradient reads all the same."""

    def call_backward(
        self, dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, patch: Patch, scale: float
    ) -> Any:  # fmt: skip
        return super().call_backward(dout, q, k, v, out, strided(lse), patch, scale)


class Unfilled(TorchFlash):
    """Leaves head dims as they are."""

    head_dim_multiple = 1


class UnrepeatedHeads(TorchEfficient):
    """Trusts the operator with grouped heads."""

    def call_forward(self, q: Any, k: Any, v: Any, patch: Patch, scale: float) -> Any:
        made = self._forward(q, k, v, self._bias(patch, q), True, 0.0, patch.is_causal, scale=scale)
        return made[0], made[1][..., : q.shape[2]]


MUTANTS: list[tuple[type[TileKernel], Tile, str]] = [  # what the suite or the operator says of it
    (Untrimmed, Tile("rows see nothing", PATCHES["triangle below, rows see nothing"]), "out: error"),
    (TopLeft, Tile("causal, tall", PATCHES["causal, tall"]), "out: error"),
    (PaddedLse, Tile("full", PATCHES["full"]), "lse: error inf"),
    (UnpaddedGradient, Tile("full", PATCHES["full"]), "LSE is not correctly aligned"),
    (FlatStatistics, Tile("full", PATCHES["full"]), r"Stats of \(2, 2, 13\)"),
    (OwnOut, Tile("full", PATCHES["full"]), "dq: error"),
    (OwnLse, Tile("full", PATCHES["full"]), "dq: error"),
    (StridedLse, Tile("full", PATCHES["full"]), "dq: error"),
    (Unfilled, Tile("heads of 1", PATCHES["causal, square"], head_dim=1), "head_size must be a multiple of 8"),
    (UnrepeatedHeads, Tile("8/2 heads", PATCHES["causal, square"], (8, 2)), r"query\.size\(2\) == key\.size\(2\)"),
]


@pytest.mark.parametrize(("mutant", "tile", "says"), MUTANTS, ids=lambda each: getattr(each, "__name__", each))
def test_mutants_fail(mutant: type[TileKernel], tile: Tile, says: str) -> None:
    """The tile is right with the kernel, and wrong or refused with the mutant."""
    with operators():
        tile = tile_for(mutant(), tile)
        right = mutant.__mro__[1]
        assert issubclass(right, TileKernel)
        check(right(), tile)
        with pytest.raises((AssertionError, RuntimeError), match=says):
            check(mutant(), tile)
