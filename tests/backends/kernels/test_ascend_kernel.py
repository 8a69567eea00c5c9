"""The kernel npu-fusion passes the suite of all kernels on the emulated NPU, with the operators of every wheel."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ascend import refusals
from ascend.binding import bind
from ascend.device import host_waits
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from ascend.schemas import BRANCHES, OFFERS, WHEELS
from conformance import PATCHES, TILES, Tile, check, operands, patch
from oracle import attention64, relative_error
from ranks import Here

from tokenring.backends.interfaces import Tiles
from tokenring.backends.kernels.delta import whole_out
from tokenring.backends.kernels.npu_fusion import LARGEST_HEAD_DIM, MASK_BYTES, NpuFusion
from tokenring.backends.kernels.npu_masks import common_mode
from tokenring.backends.kernels.npu_operator import statistics
from tokenring.backends.kernels.npu_trials import packs_in_token_order
from tokenring.backends.registry import make_kernel
from tokenring.errors import BackendUnavailable
from tokenring.sequence.region import Patch, tidy

BY_NAME = {tile.name: tile for tile in TILES}


def npu_kernel() -> NpuFusion:
    """Whose orders of packed statistics are tried, so that `calls` holds what is called afterwards."""
    kernel = make_kernel("auto", torch.device("npu"))
    assert isinstance(kernel, NpuFusion)
    tried(kernel, torch.empty(0, device="npu").device)
    calls.clear()
    return kernel


def tried(kernel: NpuFusion, device: torch.device) -> bool:
    """Try both directions' orders of packed statistics; return True if both go in token order."""
    return all([packs_in_token_order(operator, device) for operator in (kernel._forward, kernel._gradient)])


@pytest.mark.sampled(144)
@pytest.mark.parametrize("offer", [*WHEELS, *BRANCHES])
@pytest.mark.parametrize("tile", BY_NAME)
def test_conformance(npus: NpuPools, offer: str, tile: str) -> None:
    npus(1)(conforms, offer, tile)


def conforms(here: Here, offer: str, name: str) -> None:
    register(offer)
    kernel, tile = npu_kernel(), BY_NAME[name]
    assert kernel.supports(tile.head_dim, tile.dtype) is None
    check(kernel, tile, "npu")
    named = {each.name for each in calls}
    suffix = "_v2" if offer == "second version only" else ""
    hidden = tile.patch.pairs() == 0
    if hidden:  # the one call is for the gradient of what the rows see elsewhere
        assert named == {f"npu_fusion_attention_grad{suffix}"}
    else:
        assert named == {f"npu_fusion_attention{suffix}", f"npu_fusion_attention_grad{suffix}"}


class Noting:
    """An operator, and what it was called with."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.seen = inner, list[tuple[str, tuple[Any, ...], dict[str, Any]]]()
        call = inner._call

        def noted(*positional: Any, **named: Any) -> Any:
            self.seen.append((inner.name.removeprefix("npu::"), positional, named))
            return call(*positional, **named)

        inner._call = noted


@pytest.mark.parametrize("offer", WHEELS)
def test_calls_bind_in_every_wheel(npus: NpuPools, offer: str) -> None:
    npus(1)(binds, offer)


def binds(here: Here, offer: str) -> None:
    """What is called with one wheel binds to the signatures of all of them, and dropout is never among it."""
    register(offer)
    kernel = npu_kernel()
    noting = [Noting(kernel._forward), Noting(kernel._gradient)]
    for name in ("full", "causal, square", "causal, tall", "band", "unequal steps", "bf16"):
        check(kernel, BY_NAME[name], "npu")
    run_packed(kernel)
    seen = [each for one in noting for each in one.seen]
    assert len(seen) > 30 and any("actual_seq_qlen" in named for _, _, named in seen)
    for name, positional, named in seen:
        for wheel in WHEELS.values():
            bound = bind(wheel[name], positional, named)
            assert not bound.keys() & {"keep_prob", "dropout_mask", "seed", "offset", "numels"}
        if "softmax_layout" in named:
            with pytest.raises(TypeError, match="unknown keyword argument"):
                bind(OFFERS["op-plugin 7.1.0"][name], positional, named)


def run_packed(kernel: NpuFusion) -> None:
    given = operands(Tile("two documents", Patch(0, 9, 0, 9), heads=(4, 2)), torch.device("npu"))
    host_waits.clear()  # those of the operands
    documents = (Patch(0, 4, 0, 4, None, 0), Patch(4, 9, 4, 9, None, 0))
    assert kernel.packs(documents)
    kernel.forward_packed(given.q, *given.tile, patches=documents, scale=0.3)
    lse = torch.zeros(2, 4, 9, device="npu")
    kernel.backward_packed(given.dout, given.q, *given.tile, lse, lse, patches=documents, scale=0.3)


def test_no_wait_for_the_device(npus: NpuPools) -> None:
    npus(1)(without_waiting)


def without_waiting(here: Here) -> None:
    register("2.13.0")
    kernel = npu_kernel()
    for tile in TILES:
        given = operands(tile, torch.device("npu"))
        lse = torch.zeros(given.q.shape[:3], device="npu")
        host_waits.clear()
        kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.1)
        kernel.backward(given.dout, given.q, *given.tile, lse, lse, patch=tile.patch, scale=0.1)
        assert host_waits == [], tile
    run_packed(kernel)
    assert host_waits == []


def test_one_mask_for_each_device(npus: NpuPools) -> None:
    npus(1)(one_mask)


def one_mask(here: Here) -> None:
    register("2.13.0")
    tiles = [BY_NAME[name] for name in ("causal, square", "causal, large", "band")]
    npu = torch.ones(1, device="npu").device
    kernels = [npu_kernel().holding(Tiles((x.patch,), "forward", x.head_dim, x.dtype, npu)) for x in tiles]
    for kernel, tile in zip(kernels, tiles, strict=True):
        check(kernel, tile, "npu")
    masks = [call.arguments["atten_mask"] for call in calls if "atten_mask" in call.arguments]
    assert len({mask.data_ptr() for mask in masks}) == 1 and {mask.shape for mask in masks} == {(2048, 2048)}


class TestModes:
    """How patches are said."""

    @pytest.mark.parametrize(
        ("each", "mode"),
        [
            (patch(13, 17), (0, 2147483647, 2147483647)),
            (patch(16, 16, None, 0), (3, 2147483647, 2147483647)),
            (patch(20, 12, None, 0), (2, 2147483647, 2147483647)),
            (patch(15, 15, -4, 2), (4, 4, 2)),
            (patch(15, 19, 2, 6), (4, 2, 2)),
            (patch(14, 14, -3), (4, 3, 13)),
            (patch(14, 18, None, 4), (4, 17, 0)),
            (patch(14, 18, None, -3), None),  # some rows see nothing
            (patch(8, 20, None, 5, (3, 1)), None),
        ],
    )
    def test_one(self, each: Patch, mode: tuple[int, int, int] | None) -> None:
        assert common_mode((each,)) == mode

    def test_several(self) -> None:
        square, tall, full, window = (
            patch(5, 5, None, 0), patch(7, 5, None, 0), patch(4, 4), patch(9, 9, -3, 0),
        )  # fmt: skip
        small = tidy(patch(3, 3, -3, 0))  # a window that hides nothing of so short a document
        assert small == patch(3, 3, None, 0)
        assert common_mode((square, small)) == (3, 2147483647, 2147483647)
        assert common_mode((square, tall)) == (2, 2147483647, 2147483647)
        assert common_mode((full, full)) == (0, 2147483647, 2147483647)
        assert common_mode((window, small)) == (4, 3, 0)
        assert common_mode((window, square)) is None  # the window would hide a corner of the larger triangle
        assert common_mode((square, full)) is None

    def test_every_window_is_a_band(self) -> None:
        """All tidy patches with steps of 1 go by a compressed mask."""
        for rows in range(1, 7):
            for cols in range(1, 7):
                for low in (None, *range(-6, 7)):
                    for high in (None, *range(-6, 7)):
                        made = tidy(Patch(0, rows, 0, cols, low, high))
                        assert made is None or common_mode((made,)) is not None


class TestSupports:
    @pytest.fixture
    def kernel(self) -> NpuFusion:
        return NpuFusion.__new__(NpuFusion)  # nothing is computed

    def test_head_dims_and_dtypes(self, kernel: NpuFusion) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert kernel.supports(LARGEST_HEAD_DIM, dtype) is None
        assert kernel.supports(769, torch.bfloat16) == "npu_fusion_attention takes head dimensions up to 768, not 769"
        assert "float16, bfloat16 and float32, not torch.float64" in str(kernel.supports(64, torch.float64))

    def test_query_heads(self, kernel: NpuFusion) -> None:
        assert kernel.supports_heads(refusals.MOST_HEADS) is None
        assert kernel.supports_heads(257) == "npu_fusion_attention takes up to 256 query heads, not 257"

    def test_masks_of_their_own_are_not_too_large(self, kernel: NpuFusion) -> None:
        side = math.isqrt(MASK_BYTES)
        assert kernel.supports_patch(patch(100 * side, 100 * side, None, 0)) is None
        assert kernel.supports_patch(patch(side, side, None, 0, (3, 1))) is None
        assert "is larger than 64 MiB" in str(kernel.supports_patch(patch(side + 1, side, None, 0, (3, 1))))


def test_not_without_its_operators() -> None:
    with pytest.raises(BackendUnavailable, match="needs the operator npu_fusion_attention or npu_fusion_attention_v2"):
        NpuFusion()


def test_only_on_an_npu() -> None:
    with pytest.raises(BackendUnavailable, match="kernel 'npu-fusion' takes NPU tensors; these are on cpu"):
        make_kernel("npu-fusion", torch.device("cpu"))


# ---------- delta, and precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stand_in_carries_delta_better_than_the_output(dtype: torch.dtype) -> None:
    """Both are rounded to the operands' dtype. Figures for D = 64: docs/ascend-emulation.md."""
    random = torch.Generator().manual_seed(0)
    dout, out = (torch.randn(4096, 64, generator=random, dtype=torch.float64) for _ in range(2))
    dout = dout.to(dtype).double()
    delta = (dout * out).sum(dim=-1)

    def error(carried: torch.Tensor) -> float:
        return relative_error((dout * carried.double()).sum(dim=-1), delta)

    by_stand_in = error(whole_out(dout.to(dtype), delta.float(), None, dtype))
    by_output = error(whole_out(dout.to(dtype), None, out.to(dtype), dtype))
    assert by_stand_in < torch.finfo(dtype).eps / 8
    assert by_stand_in < by_output / 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_by_delta_are_as_exact_as_by_the_output(npus: NpuPools, dtype: torch.dtype) -> None:
    ((by_delta, by_out),) = npus(1)(gradient_errors, dtype)
    for name in by_delta:
        assert by_delta[name] < 1.05 * by_out[name], name


def gradient_errors(here: Here, dtype: torch.dtype) -> tuple[dict[str, float], dict[str, float]]:
    register("2.13.0")
    kernel = npu_kernel()
    given = operands(Tile("half", Patch(0, 64, 0, 64), heads=(4, 2), head_dim=64, dtype=dtype), torch.device("npu"))
    q, k, v, dout = (x.cpu().transpose(1, 2) for x in (given.q, *given.tile, given.dout))
    right = attention64(q, k, v, dout, torch.ones(64, 64, dtype=torch.bool), 0.125)
    out = right.out.transpose(1, 2)
    delta = (out * dout.transpose(1, 2).double()).sum(-1).float().to("npu")
    lse = right.lse.float().to("npu")
    arguments = (given.dout, given.q, *given.tile, lse)
    whole = Patch(0, 64, 0, 64)
    by_delta = kernel.backward(*arguments, delta, patch=whole, scale=0.125)
    by_out = kernel.backward(*arguments, None, out=out.to("npu", dtype), patch=whole, scale=0.125)

    def errors(made: tuple[torch.Tensor, ...]) -> dict[str, float]:
        wanted = {"dq": right.dq, "dk": right.dk, "dv": right.dv}
        return {
            name: relative_error(x.cpu().transpose(1, 2), y) for x, (name, y) in zip(made, wanted.items(), strict=True)
        }

    return errors(by_delta), errors(by_out)


def test_patches_of_the_suite_reach_every_mode() -> None:
    reached = {mode[0] if mode else 1 for mode in (common_mode((each,)) for each in PATCHES.values())}
    assert reached == {0, 1, 2, 3, 4}


def test_rows_that_see_nothing_on_a_device_that_saturates() -> None:
    """910A, and INF_NAN_MODE_ENABLE=0: -inf becomes the lowest fp32, which is no maximum to subtract."""
    lse = torch.tensor([float("-inf"), torch.finfo(torch.float32).min, -80.0, 3.0])
    assert statistics(lse)["softmax_max"][..., 0].tolist() == [0.0, 0.0, -80.0, 3.0]
