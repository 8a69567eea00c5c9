"""Both kernels pass one suite, which kernels with the usual faults do not pass."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from conformance import PATCHES, TILES, Tile, check, operands, patch, visible
from torch.utils._python_dispatch import TorchDispatchMode

from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.cpu_flash import BAND_ROWS, CpuFlash
from tokenring.backends.kernels.delta import stand_in
from tokenring.backends.kernels.reference import Reference, dense_mask
from tokenring.sequence.region import Patch

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
def test_conformance(kernel: AttentionKernel, tile: Tile) -> None:
    assert kernel.supports(tile.head_dim, tile.dtype) is None
    check(kernel, tile)


@pytest.mark.parametrize("each", PATCHES.values(), ids=PATCHES)
def test_patches_are_what_they_say(each: Patch) -> None:
    """columns_of, pairs and the dense mask agree with the definition."""
    shown = visible(each)
    assert [list(each.columns_of(row)) for row in range(each.rows)] == [
        line.nonzero().flatten().tolist() for line in shown
    ]
    assert each.pairs() == int(shown.sum())
    dense = dense_mask(each, torch.device("cpu"))
    assert torch.equal(torch.ones_like(shown) if dense is None else dense, shown)


def test_inputs_are_left_alone() -> None:
    tile = Tile("token-major", PATCHES["unequal steps, rows see nothing"], token_major=True)
    given = operands(tile, torch.device("cpu"))
    before = [x.clone() for x in (given.q, given.dout, *given.tile)]
    lse, delta = torch.zeros(2, 2, 7), torch.ones(2, 2, 7)
    for kernel in (CpuFlash(), Reference()):
        kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.1)
        kernel.backward(given.dout, given.q, *given.tile, lse, delta, patch=tile.patch, scale=0.1)
    for x, y in zip((given.q, given.dout, *given.tile), before, strict=True):
        assert torch.equal(x, y)
    assert torch.equal(lse, torch.zeros(2, 2, 7)) and torch.equal(delta, torch.ones(2, 2, 7))


# ---------- mutants


class Given(NamedTuple):
    """What a wrong backward may spoil before it computes."""

    q: torch.Tensor
    k: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor | None
    out: torch.Tensor | None
    patch: Patch
    scale: float


class LseZero(CpuFlash):
    """Leaves torch's lse of 0 in rows that see nothing."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, patch=patch, scale=scale)
        return out, lse.masked_fill(lse == -math.inf, 0.0)


class MeanOfValues(Reference):
    """Gives rows that see nothing the mean of all values, as a softmax of equal scores does."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, patch=patch, scale=scale)
        mean = v.float().mean(dim=2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], dim=1)
        return torch.where((lse == -math.inf)[..., None], mean, out), lse


class BottomRight(CpuFlash):
    """Aligns causal tiles at their last row and column."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if patch.is_causal:
            patch = patch._replace(high=patch.cols - patch.rows)
        return super().forward(q, k, v, patch=patch, scale=scale)


class IgnoresSteps(CpuFlash):
    """Takes every chunk for a run of neighbours."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(q, k, v, patch=patch._replace(row_step=1, col_step=1), scale=scale)


class LogBaseTwo(CpuFlash):
    """Gives the lse to base 2."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, patch=patch, scale=scale)
        return out, lse / math.log(2)


class Backward(CpuFlash):
    """The base of those that are wrong in backward only."""

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
    ) -> Results:
        given = self.spoil(Given(q, k, lse, delta, out, patch, scale))
        return super().backward(dout, q, k, v, given.lse, given.delta, out=given.out, patch=given.patch, scale=scale)

    def spoil(self, given: Given) -> Given:
        return given


class LocalLse(Backward):
    """Normalises by what this tile alone sees."""

    def spoil(self, given: Given) -> Given:
        lse = self.forward(given.q, given.k, given.k, patch=given.patch, scale=given.scale)[1]
        return given._replace(lse=lse)


class NoDelta(Backward):
    """Forgets rowsum(dout · out)."""

    def spoil(self, given: Given) -> Given:
        return given._replace(delta=None if given.delta is None else torch.zeros_like(given.delta))


class Unmasked(Backward):
    """Forgets the mask in backward."""

    def spoil(self, given: Given) -> Given:
        return given._replace(patch=given.patch._replace(low=None, high=None))


class IgnoresOut(Backward):
    """Forgets out, where it is given instead of delta."""

    def spoil(self, given: Given) -> Given:
        return given if given.out is None else given._replace(out=torch.zeros_like(given.out))


class GivesItsInput(Reference):
    """Hands out memory that is the caller's."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = super().forward(q, k, v, patch=patch, scale=scale)
        return q.copy_(out), lse


class LowPrecisionLse(Backward):
    """Keeps the lse in bf16."""

    def spoil(self, given: Given) -> Given:
        return given._replace(lse=given.lse.bfloat16().float())


@pytest.mark.parametrize(
    ("mutant", "where"),
    [
        (LseZero(), "unequal steps, rows see nothing"),
        (MeanOfValues(), "unequal steps, rows see nothing"),
        (BottomRight(), "causal, tall"),
        (BottomRight(), "causal, wide"),
        (IgnoresSteps(), "unequal steps"),
        (LogBaseTwo(), "full"),
        (LocalLse(), "full"),
        (NoDelta(), "full"),
        (Unmasked(), "causal, square"),
        (LowPrecisionLse(), "full"),
        (IgnoresOut(), "full"),
        (GivesItsInput(), "full"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, CpuFlash | Reference) else value,
)
def test_mutants_fail(mutant: AttentionKernel, where: str) -> None:
    with pytest.raises(AssertionError):
        check(mutant, Tile(where, PATCHES[where]))


# ---------- what cpu-flash refuses, and its stand-in for O


class TestSupports:
    WIDE = BAND_ROWS + 1

    @pytest.mark.parametrize(
        "each",
        [
            patch(WIDE, WIDE),
            patch(WIDE, WIDE, None, 0),
            patch(BAND_ROWS, 10 * WIDE, 0, 3),
            patch(WIDE, WIDE, None, 1),
        ],
    )
    def test_takes(self, each: Patch) -> None:
        assert CpuFlash().supports_patch(each) is None

    def test_refuses_a_band_of_which_most_is_hidden(self) -> None:
        says = CpuFlash().supports_patch(patch(self.WIDE, 300, -4, 4))
        assert says == f"more than half of its {self.WIDE} × 300 rectangle is hidden"

    def test_reference_takes_everything(self) -> None:
        assert Reference().supports_patch(patch(999, 999, -1, 1)) is None


class TestStandIn:
    """rowsum(dout · O') = delta, whatever the size of dout."""

    @pytest.mark.parametrize("size", [1.0, 1e-30, 1e30, 1e-38, 3e38, 1e-40, 1e-44])
    @pytest.mark.parametrize("head_dim", [1, 128])
    def test_carries_delta(self, size: float, head_dim: int) -> None:
        torch.manual_seed(0)
        dout = (torch.rand(6, head_dim, dtype=torch.float64) * 2 - 1).mul(size).float()
        out = torch.randn(6, head_dim, dtype=torch.float64) / head_dim
        delta = (dout.double() * out).sum(dim=-1).float()
        made = stand_in(dout, delta)
        assert bool(made.isfinite().all())
        carried = (dout.double() * made.double()).sum(dim=-1)
        # Relative to the largest terms of the sum; below 1e-38, to the last places that fp32 has there.
        scale = delta.double().abs().max() + 1e-45 / 1e-6
        assert float((carried - delta.double()).abs().max() / scale) < 1e-6

    def test_rows_of_zeros(self) -> None:
        dout = torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, -0.0]])
        made = stand_in(dout, torch.tensor([0.0, 5.0, 0.0]))
        assert torch.equal(made, torch.tensor([[0.0, 0.0], [1.0, 2.0], [0.0, 0.0]]))

    def test_rows_of_one_batch_do_not_touch_each_other(self) -> None:
        dout = torch.tensor([[1e-40, 0.0], [3e38, 3e38], [0.0, 0.0], [1.0, 1.0]])
        delta = torch.tensor([1e-40, 3e38, 0.0, 4.0])
        made = stand_in(dout, delta)
        assert torch.equal(made[3], torch.tensor([2.0, 2.0]))
        torch.testing.assert_close((dout.double() * made.double()).sum(dim=-1)[1], torch.tensor(3e38).double())


class Made(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The largest tensor of another dtype than bool that is made inside."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.dtype != torch.bool:
            self.largest = max(self.largest, made.numel())
        return made


def test_a_mask_takes_a_byte_for_each_pair() -> None:
    """And no matrix of numbers on the way to it, which would take eight."""
    band = Patch(0, 60, 0, 80, -9, 4, 2, 3)
    with Made() as made:  # type: ignore[no-untyped-call]
        mask = dense_mask(band, torch.device("cpu"))
    assert made.largest == 80
    assert mask is not None and torch.equal(mask, visible(band))
