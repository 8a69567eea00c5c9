"""The kernels for CUDA pass the suite of all kernels, over operators and packages that stand in for the real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance import PATCHES, TILES, Tile, check, operands, patch
from cuda_ops import aten
from cuda_ops.aten import calls, operators
from cuda_ops.packages import RELEASES, installed

from tokenring.backends.kernels import flash_attn
from tokenring.backends.kernels.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from tokenring.backends.kernels.flash_common import HALF, TileKernel, aligned, packed
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash
from tokenring.backends.registry import make_kernel
from tokenring.errors import BackendUnavailable, UnsupportedError
from tokenring.lowering.backend_names import KERNELS
from tokenring.sequence.region import Patch

SLACK = 1.5  # × the limits: tiles made for fp32 are small, or have large scores, for bf16
PACKAGES = {"flash-attn": FlashAttn2, "flash-attn-3": FlashAttn3, "flash-attn-4": FlashAttn4}
MADE: dict[str, tuple[Callable[[], AbstractContextManager[None]], Callable[[], TileKernel]]] = {
    "torch-flash": (operators, TorchFlash),
    "torch-cudnn": (operators, TorchCudnn),
    "torch-efficient": (operators, TorchEfficient),
} | {
    release: (lambda release=release: installed(release), PACKAGES[name])  # type: ignore[misc]
    for release, (name, _, _) in RELEASES.items()
}


@contextmanager
def kernel_of(name: str) -> Iterator[TileKernel]:
    there, make = MADE[name]
    calls.clear()
    with there():
        yield make()


def tile_for(kernel: TileKernel, tile: Tile) -> Tile:
    """In a dtype that the kernel takes: whatever else is special about it stays."""
    return tile if tile.dtype in kernel.dtypes else replace(tile, dtype=torch.bfloat16)


@pytest.mark.sampled(180)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", MADE)
def test_conformance(name: str, tile: Tile) -> None:
    with kernel_of(name) as kernel:
        tile = tile_for(kernel, tile)
        reason = kernel.supports(tile.head_dim, tile.dtype)
        if tile.head_dim > (kernel.largest_head_dim or tile.head_dim):
            assert reason == f"{kernel.name} takes head dimensions up to {kernel.largest_head_dim}, not {tile.head_dim}"
            return
        assert reason is None
        check(kernel, tile, slack=SLACK)


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("dtype", HALF)
def test_odd_heads_and_misaligned_records(name: str, dtype: torch.dtype) -> None:
    """Operands that lie between statistics, as in a slot: addresses and strides that are no multiples of 16 bytes."""
    with kernel_of(name) as kernel:
        tile = Tile("record", PATCHES["causal, tall"], (3, 1), 40, dtype=dtype)
        given = operands(tile, torch.device("cpu"))
        shifted = [between(x) for x in (given.q, *given.tile)]
        assert all(not torch.equal(aligned(x), x) or aligned(x) is not x for x in shifted)
        q, k, v = shifted
        out, lse = kernel.forward(q, k, v, patch=tile.patch, scale=0.2)
        right, right_lse = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.2)
        assert torch.equal(out, right) and torch.equal(lse, right_lse)
        delta, dout = torch.zeros_like(lse), between(given.dout)
        made = kernel.backward(dout, q, k, v, strided(lse), delta, patch=tile.patch, scale=0.2)
        wanted = kernel.backward(given.dout, given.q, *given.tile, lse, delta, patch=tile.patch, scale=0.2)
        assert all(torch.equal(x, y) for x, y in zip(made, wanted, strict=True))


def between(x: torch.Tensor) -> torch.Tensor:
    """The same values with two elements before each token's heads."""
    b, h, s, d = x.shape
    memory = torch.zeros(s, b, 2 + h * d, dtype=x.dtype)
    view = memory[..., 2:].view(s, b, h, d).permute(1, 2, 0, 3)
    return view.copy_(x)


def strided(lse: torch.Tensor) -> torch.Tensor:
    """[B, H, S] as it lies in a slot, a record for each token."""
    return lse.permute(2, 0, 1).contiguous().permute(1, 2, 0)


# ---------- how patches are said


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("torch-flash", "full", [{"causal": False, "sides": (-1, -1)}]),
        ("torch-flash", "causal, square", [{"causal": True, "sides": (-1, -1)}]),
        ("torch-flash", "band", [{"causal": False, "sides": (4, 2)}]),
        ("torch-flash", "triangle above", [{"causal": True, "sides": (-1, -1)}]),
        ("torch-flash", "lower bound", [{"causal": False, "sides": (3, -1)}]),
        ("torch-cudnn", "causal, square", [{"causal": True}]),
        ("torch-cudnn", "causal, tall", [{"causal": True, "rows": 12}, {"causal": False, "rows": 8}]),
        ("torch-cudnn", "one row", []),
        ("torch-efficient", "causal, tall", [{"causal": True, "bias": False, "rows": 20}]),
        ("torch-efficient", "band", [{"causal": False, "bias": True}]),
        ("2.8", "causal, tall", [{"rows": 20}]),
        ("4", "band", [{"rows": 15}]),
        ("4, gradient without windows", "causal, square", [{"rows": 16}]),
    ],
)
def test_calls(name: str, where: str, said: list[dict[str, Any]]) -> None:
    with kernel_of(name) as kernel:
        tile = tile_for(kernel, Tile(where, PATCHES[where]))
        given = operands(tile, torch.device("cpu"))
        kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.2)
        assert len(calls) == len(said)
        for (_, what), wanted in zip(calls, said, strict=True):
            assert wanted.items() <= what.items()


def test_cudnn_of_an_older_torch() -> None:
    """Whose lse has no last axis, and whose gradient wants it so; also where another kernel computed forward."""

    def flat(*given: Any, **named: Any) -> Any:
        out, lse, *rest = aten.cudnn_forward(*given, **named)
        return out, lse[..., 0].contiguous(), *rest

    def gradient(grad_out: Any, q: Any, k: Any, v: Any, out: Any, logsumexp: Any, *given: Any, **named: Any) -> Any:
        aten.check(logsumexp.dim() == 3, "cuDNN Frontend error: Stats")
        return aten.cudnn_backward(grad_out, q, k, v, out, logsumexp[..., None], *given, **named)

    older = {"_scaled_dot_product_cudnn_attention": flat, "_scaled_dot_product_cudnn_attention_backward": gradient}
    tile = replace(Tile("full", PATCHES["full"]), dtype=torch.bfloat16)
    for changed in ({}, older):
        with operators(**changed):
            check(TorchCudnn(), tile)
            given, lse = operands(tile, torch.device("cpu")), torch.zeros(2, 2, 13)
            TorchCudnn().backward(given.dout, given.q, *given.tile, lse, lse, patch=tile.patch, scale=0.2)


def test_a_large_band_needs_no_bias() -> None:
    """16 MiB of bias at most: beyond, the patch is cut into rectangles and triangles."""
    kernel = TorchEfficient()
    assert kernel.says(patch(2048, 2048, -100, 0).shifted(-3, -5))
    assert not kernel.says(patch(4096, 2048, -100, 0))
    assert all(kernel.says(part.patch) for part in kernel._parts(patch(4096, 2048, -100, 0)))


def test_nothing_that_is_visible_nowhere_reaches_an_operator() -> None:
    for name in MADE:
        with kernel_of(name) as kernel:
            tile = tile_for(kernel, Tile("nothing", PATCHES["nothing at all"]))
            check_empty(kernel, tile)
            assert calls == []


def check_empty(kernel: TileKernel, tile: Tile) -> None:
    given = operands(tile, torch.device("cpu"))
    out, lse = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=1.0)
    assert not out.any() and bool((lse == -math.inf).all())
    empty = Patch(0, 0, 0, 4)  # no length at all
    out, lse = kernel.forward(given.q[:, :, :0], *given.tile, patch=empty, scale=1.0)
    assert out.shape[2] == lse.shape[2] == 0
    dq, dk, dv = kernel.backward(
        given.dout[:, :, :0], given.q[:, :, :0], *given.tile, lse, lse, patch=empty, scale=1.0
    )  # fmt: skip
    assert dq.shape[2] == 0 and not dk.any() and not dv.any()


# ---------- what is refused


class TestSupports:
    def test_dtypes(self) -> None:
        assert TorchFlash().supports(64, torch.float32) == "torch-flash takes float16 and bfloat16, not float32"
        assert TorchEfficient().supports(640, torch.float32) is None
        assert "not float64" in str(TorchEfficient().supports(64, torch.float64))

    def test_head_dims(self) -> None:
        assert TorchFlash().supports(256, torch.bfloat16) is None
        assert TorchFlash().supports(257, torch.bfloat16) == "torch-flash takes head dimensions up to 256, not 257"
        assert TorchCudnn().supports(128, torch.float16) is None and TorchCudnn().supports(136, torch.float16)

    def test_cudnn_is_not_deterministic(self) -> None:
        torch.use_deterministic_algorithms(True)
        try:
            assert "torch-cudnn is not deterministic" in str(TorchCudnn().supports(64, torch.bfloat16))
            assert TorchFlash().supports(64, torch.bfloat16) is None
            x, lse = torch.zeros(1, 1, 4, 8, dtype=torch.float16), torch.zeros(1, 1, 4)
            with pytest.raises(UnsupportedError, match=r"not deterministic.*use ContextParallel"):  # bound before
                TorchCudnn().backward(x, x, x, x, lse, lse, patch=Patch(0, 4, 0, 4), scale=1.0)
        finally:
            torch.use_deterministic_algorithms(False)

    def test_single_rows_are_avoided(self) -> None:
        assert "one row" in str(TorchCudnn().avoids(patch(1, 19)))
        assert TorchCudnn().avoids(patch(2, 2)) is TorchFlash().avoids(patch(1, 19)) is None

    def test_all_patches_are_taken(self) -> None:
        assert TorchFlash().supports_patch(patch(999, 999, -1, 1, (3, 2))) is None


@pytest.mark.parametrize("name", ["torch-flash", "torch-cudnn", "torch-efficient", "flash-attn", "flex"])
def test_only_on_cuda(name: str) -> None:
    assert name in KERNELS
    with pytest.raises(BackendUnavailable, match=rf"kernel '{name}' takes CUDA tensors; these are on cpu"):
        make_kernel(name, torch.device("cpu"))


class TestPackages:
    @pytest.mark.parametrize("name", PACKAGES)
    def test_missing(self, name: str) -> None:
        with pytest.raises(BackendUnavailable, match=rf"kernel '{name}' cannot be imported \(.*No module named"):
            make_kernel(name, torch.device("cuda"))

    def test_broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(name: str) -> None:
            raise OSError("undefined symbol: _ZN3c10")

        monkeypatch.setattr(flash_attn, "import_module", fails)
        with pytest.raises(BackendUnavailable, match=r"undefined symbol: _ZN3c10.*pip install flash-attn"):
            FlashAttn2()

    def test_without_its_functions(self) -> None:
        with (
            installed("2.8", _flash_attn_backward=None),  # type: ignore[arg-type]
            pytest.raises(BackendUnavailable, match="flash_attn_interface has no _flash_attn_forward and"),
        ):
            FlashAttn2()

    def test_arguments_that_nobody_knows(self) -> None:
        def forward(q: Any, k: Any, v: Any, dropout_p: Any, sinks: Any) -> None:
            """As a later release may want."""

        with (
            installed("2.8", _flash_attn_forward=forward),
            pytest.raises(BackendUnavailable, match="forward of this release wants sinks, which this version of"),
        ):
            FlashAttn2()

    def test_deterministic_gradients_are_asked_for(self) -> None:
        seen = []

        def backward(
            dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, dq: Any, dk: Any, dv: Any, deterministic: Any
        ) -> None:
            seen.append(deterministic)

        x, lse = torch.zeros(1, 1, 4, 8, dtype=torch.float16), torch.zeros(1, 1, 4)
        with installed("2.8", _flash_attn_backward=backward):
            kernel = FlashAttn2()
            for wanted in (False, True):
                torch.use_deterministic_algorithms(wanted)
                try:
                    kernel.backward(x, x, x, x, lse, lse, patch=Patch(0, 4, 0, 4), scale=1.0)
                finally:
                    torch.use_deterministic_algorithms(False)
        assert seen == [False, True]


# ---------- the stand-ins, memory


def test_a_fake_that_forgets_what_is_odd_about_an_operator_is_seen() -> None:
    """The stand-ins count: causal at the top left, an lse to base 2 and a gradient without delta make kernels fail."""

    def base_2(*given: Any, **named: Any) -> Any:
        out, lse, *rest = aten.flash_forward(*given, **named)
        return out, lse / math.log(2), *rest

    def without_delta(grad_out: Any, query: Any, key: Any, value: Any, out: Any, *given: Any, **named: Any) -> Any:
        return aten.flash_backward(grad_out, query, key, value, torch.zeros_like(out), *given, **named)

    full = replace(Tile("full", PATCHES["full"]), dtype=torch.bfloat16)
    for changed in ({"_flash_attention_forward": base_2}, {"_flash_attention_backward": without_delta}):
        with operators(**changed), pytest.raises(AssertionError):
            check(TorchFlash(), full)
    with operators(), nullcontext():
        check(TorchFlash(), full)


def test_aligned() -> None:
    x = torch.zeros(2, 3, 5, 8, dtype=torch.bfloat16)
    assert aligned(x) is x and aligned(x[:, :, ::2]).data_ptr() == x.data_ptr()
    assert aligned(x[..., 1:]).is_contiguous() and aligned(x.mT).stride(-1) == 1
    narrow = torch.zeros(2, 3, 5, 4, dtype=torch.bfloat16)
    assert aligned(narrow[:, :, 1:]) is not narrow and aligned(narrow[:, :, 1:]).is_contiguous()


@pytest.mark.parametrize("heads", [1, 3])
def test_one_row_is_contiguous_and_misaligned(heads: int) -> None:
    """A row of a record behind an odd number of statistics, or of whole statistics: a view that torch does not copy."""
    x = torch.randn(1, heads, 5, 8).to(torch.bfloat16)
    row = between(x)[:, :, 1:2]
    assert row.is_contiguous() and row.data_ptr() % 16 and row.contiguous() is row
    assert aligned(row).data_ptr() % 16 == 0 and torch.equal(aligned(row), x[:, :, 1:2])
    lse = torch.randn(1, 1, 8)[:, :, 1:]
    assert lse.is_contiguous() and lse.data_ptr() % 16
    assert packed(lse).data_ptr() % 16 == 0 and torch.equal(packed(lse), lse)
    assert packed(strided(torch.randn(2, 3, 5))).is_contiguous()


@pytest.mark.parametrize("name", MADE)
def test_a_single_row_of_a_record(name: str) -> None:
    """The same through kernels, whose operators check addresses."""
    with kernel_of(name) as kernel:
        tile = Tile("record", PATCHES["one row"], (3, 1), 40, batch=1, dtype=torch.bfloat16)
        given = operands(tile, torch.device("cpu"))
        q, k, v, dout = (between(x) for x in (given.q, *given.tile, given.dout))
        out, lse = kernel.forward(q, k, v, patch=tile.patch, scale=0.2)
        right, _ = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.2)
        assert torch.equal(out, right)
        made = kernel.backward(dout, q, k, v, lse, torch.zeros_like(lse), patch=tile.patch, scale=0.2)
        assert all(bool(x.isfinite().all()) for x in made)
