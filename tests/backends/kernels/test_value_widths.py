"""Values of another width than keys: kernels that take them, and those that get zeros beside them in the call alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend.operators import calls as npu_calls
from ascend.operators import register
from ascend.ranks import NpuPools
from conformance import PATCHES, Tile, check, operands
from cuda_ops.aten import operators
from cuda_ops.packages import installed
from oracle import allowed, attention64
from ranks import Here
from test_ascend_kernel import npu_kernel
from test_ascend_packed import CASES, Checked, tile_of
from test_ascend_runs import LIMITS, MASKS, context
from test_cuda_flex import differentiable

from tokenring import Mask, attention, shard
from tokenring.backends.interfaces import AttentionKernel, Tiles, refusal_of
from tokenring.backends.kernels import numeric_trial
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.flash_attn import FlashAttn2, FlashAttn3, FlashAttn4
from tokenring.backends.kernels.flash_common import TileKernel
from tokenring.backends.kernels.flex import Flex
from tokenring.backends.kernels.numeric_trial import TILES, Kind, fault
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.sequence.region import Patch
from tokenring.tables.trial_verdicts import Verdicts

CPU, HALF = torch.device("cpu"), torch.bfloat16
MLA, TINY, WIDER = (192, 128), (24, 16), (16, 40)
CAUSAL, STEPS = PATCHES["causal, square"], PATCHES["unequal steps, rows see nothing"]
PLAIN = (
    Tile("causal, token-major", CAUSAL, (8, 2), token_major=True),
    Tile("rows see nothing", STEPS, (4, 4)),
    Tile("bf16", PATCHES["band"], (4, 1), dtype=HALF, token_major=True),
    Tile("nothing at all", PATCHES["nothing at all"]),
)
SLACK = 1.5  # as in test_cuda_kernels.py


def wide(tile: Tile, widths: tuple[int, int]) -> Tile:
    return replace(tile, head_dim=widths[0], value_dim=widths[1])


def supported(kernel: AttentionKernel, tile: Tile) -> None:
    assert refusal_of(kernel, tile.head_dim, tile.value_dim, tile.dtype) is None


@pytest.mark.parametrize("widths", [MLA, TINY, WIDER], ids=str)
@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
def test_on_the_cpu(kernel: AttentionKernel, widths: tuple[int, int]) -> None:
    for tile in PLAIN:
        supported(kernel, wide(tile, widths))
        check(kernel, wide(tile, widths))


def test_a_kernel_that_says_nothing_of_them_gets_none() -> None:
    class Plain:
        name = "plain"

        def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
            return None

    kernel: Any = Plain()
    assert refusal_of(kernel, 192, 192, HALF) is refusal_of(kernel, 192, None, HALF) is None
    assert refusal_of(kernel, *MLA, HALF) == (
        "it takes values that are as wide as keys, and these have head dims 128 and 192"
    )


# ---------- CUDA

Make = Callable[[], TileKernel]
MADE: dict[str, tuple[Callable[[], AbstractContextManager[None]], Make]] = {
    "torch-flash": (operators, TorchFlash),
    "torch-cudnn": (operators, TorchCudnn),
    "torch-efficient": (operators, TorchEfficient),
    "2.8": (lambda: installed("2.8"), FlashAttn2),
    "3": (lambda: installed("3"), FlashAttn3),
    "4": (lambda: installed("4"), FlashAttn4),
    "flex": (operators, lambda: Flex(compiled=False, attention=differentiable)),
}
GIVEN = {  # what the operator gets; as it is where nothing is said
    "torch-flash": {MLA: (192, 192), TINY: (24, 24), WIDER: (40, 40)},
    "torch-cudnn": {TINY: (24, 24), WIDER: (40, 40)},  # it takes none of 192
    "2.8": {MLA: (192, 192), TINY: (24, 24), WIDER: (40, 40)},
    "3": {TINY: (24, 24), WIDER: (40, 40)},
    "flex": {TINY: (32, 16), WIDER: (16, 48)},
}


@contextmanager
def kernel_of(name: str) -> Iterator[TileKernel]:
    there, make = MADE[name]
    with there():
        yield make()


@pytest.mark.parametrize("widths", [MLA, TINY, WIDER], ids=str)
@pytest.mark.parametrize("name", MADE)
def test_on_cuda(name: str, widths: tuple[int, int]) -> None:
    """The stand-ins refuse what the operators refuse; more calls are merged where a patch is cut."""
    with kernel_of(name) as kernel:
        if name == "torch-cudnn" and widths == MLA:
            assert refusal_of(kernel, *MLA, HALF) == "torch-cudnn takes head dimensions up to 128, not 192"
            return
        assert kernel.given_widths(*widths) == GIVEN.get(name, {}).get(widths, widths)
        assert kernel.given_widths(40, 40) == ((48, 48) if name == "flex" else (40, 40))
        for tile in (PLAIN[0], PLAIN[1], PLAIN[2]):
            tile = wide(tile if name in ("torch-efficient", "flex") else replace(tile, dtype=HALF), widths)
            supported(kernel, tile)
            check(kernel, tile, slack=SLACK)


def test_the_trial_is_of_these_widths() -> None:
    """A release that refuses them fails it, and an equally wide call is another matter."""
    kinds = [Kind(direction, 192, HALF, CPU, 128) for direction in PASSES]
    with installed("3"):
        assert [fault(FlashAttn3(), each, TILES, Verdicts(None)) for each in kinds] == ["", ""]

    def old(*, dq: Any = None, dk: Any = None, dv: Any = None, window_size_left: int = -1) -> Any:
        raise RuntimeError("v must have shape (batch_size, seqlen_k, num_heads_k, head_size)")

    with installed("3", _flash_attn_backward=old):
        kernel, kept = FlashAttn3(), Verdicts(None)
        assert fault(kernel, kinds[0], TILES, kept) == ""
        assert "v must have shape" in str(fault(kernel, kinds[1], TILES, kept))
    keys = {numeric_trial._key(TorchFlash, each, TILES[0]) for each in (*kinds, Kind("forward", 192, HALF, CPU))}  # type: ignore[arg-type]
    assert len(keys) == 3 and sum("head dims 192 and 128" in key for key in keys) == 2
    same = Kind("forward", 40, HALF, CPU, 40), Kind("forward", 40, HALF, CPU)
    assert len({numeric_trial._key(TorchFlash, each, TILES[0]) for each in same}) == 1  # type: ignore[arg-type]


class Noting(CpuFlash):
    """Computes, and counts its calls; or refuses values of another width."""

    def __init__(self, name: str, refuses: bool = False) -> None:
        self.name, self.refuses, self.calls = name, refuses, 0

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls += 1
        if self.refuses and v.shape[-1] != k.shape[-1]:
            raise RuntimeError("values of another width are not supported")
        return super().forward(q, k, v, patch=patch, scale=scale)


def test_a_choice_is_of_widths() -> None:
    """What refused these values is taken for others; tables and trials are asked for both widths."""
    first, second = Noting("first", refuses=True), Noting("second")
    asked: list[tuple[Any, ...]] = []

    def make(name: str) -> AttentionKernel:
        return TorchCudnn() if name == "torch-cudnn" else first if name == "first" else second

    def trial(kernel: AttentionKernel, direction: Pass, *of: Any) -> str:
        asked.append(("trial", *of))
        return ""

    with operators():
        kernel = Choosing(
            ("torch-cudnn", "first", "second"), make, lambda name, *of: asked.append(("table", *of)), trial=trial
        )
        assert kernel.supports_widths(*MLA, HALF) is None
        assert "up to 128" in str(kernel.why_not("torch-cudnn", 192, HALF, 128))
        given = operands(wide(Tile("MLA", CAUSAL, dtype=HALF), MLA), CPU)
        held = kernel.holding(Tiles((CAUSAL,), "forward", 192, HALF, CPU, 128))
        for _ in range(2):
            out, _ = held.forward(given.q, *given.tile, patch=CAUSAL, scale=0.1)
        assert out.shape[-1] == 128 and (first.calls, second.calls) == (1, 2)
        held.forward(given.q, given.tile[0], given.tile[0], patch=CAUSAL, scale=0.1)
        assert (first.calls, second.calls) == (2, 2)
    assert set(asked) == {(what, 192, HALF, *of) for what in ("table", "trial") for of in ((), (128,))}
    assert kernel.supports(192, HALF) is None and [each.name for each in kernel.kernels(192, HALF, 128)]


# ---------- Ascend


@pytest.mark.parametrize("widths", [MLA, WIDER], ids=str)
def test_on_an_npu(npus: NpuPools, widths: tuple[int, int]) -> None:
    npus(1)(on_an_npu, widths)


def on_an_npu(here: Here, widths: tuple[int, int]) -> None:
    """Narrower values as they are, for that is in the operator's contract; queries and keys no narrower than values."""
    register("2.13.0")
    kernel = npu_kernel()
    assert kernel.supports_widths(*widths, HALF) is None
    assert "up to 768, not 769" in str(kernel.supports_widths(8, 769, HALF))
    for tile in PLAIN:
        check(kernel, wide(tile, widths), "npu")
    parts = CASES["padding before, between and after"]
    for options in ({}, {"token_major": True, "dtype": HALF}):
        Checked(kernel, parts, wide(tile_of(parts, **options), widths)).check()
    seen = {tuple(call.arguments[name].shape[-1] for name in ("query", "key", "value")) for call in npu_calls}
    assert seen == {(max(widths), max(widths), widths[1])}


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("mask", ["full", "causal documents"])
def test_whole_calls_on_npus(npus: NpuPools, mask: str, dtype: torch.dtype) -> None:
    """Merged and added up over two ranks; documents in packed calls."""
    limits = LIMITS[dtype]
    for errors in npus(2)(whole_call, MASKS[mask], dtype):
        assert errors.pop("out") < limits[0] and max(errors.values()) < limits[1], errors


def whole_call(here: Here, mask: Mask, dtype: torch.dtype) -> dict[str, float]:
    register("2.13.0")
    cp = context(here, schedule="tokenring", layout="zigzag")
    draw, shapes = torch.Generator().manual_seed(2), ((4, 24), (2, 24), (2, 16), (4, 16))
    whole = [torch.randn(1, 48, *shape, generator=draw).to(dtype) for shape in shapes]
    q, k, v, dout = (shard(x, cp).to("npu").requires_grad_(index < 3) for index, x in enumerate(whole))
    out = attention(q, k, v, cp, mask)
    made = out.detach(), *torch.autograd.grad(out, (q, k, v), dout)
    right = attention64(whole[0], whole[1], whole[2], whole[3], allowed(mask, 48, 48))
    errors = {}
    for name, x in zip(("out", "dq", "dk", "dv"), made, strict=True):
        wanted = getattr(right, name)
        difference = x.cpu().double() - shard(wanted, cp)
        errors[name] = float(difference.norm()) / float(wanted.norm()) * here.world_size**0.5
    return errors
