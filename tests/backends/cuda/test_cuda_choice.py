"""Which kernel computes a tile: the order, the tables, and what happens when a kernel is not there or refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import pytest
import torch
from conformance import PATCHES, Tile, check, operands, patch
from cuda_ops.aten import calls, operators

from tokenring.backends import registry
from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.kernels.auto import REFUSALS, Choosing, refuses
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.order import ORDERS, default_order, ranked
from tokenring.backends.kernels.reference import Reference
from tokenring.backends.kernels.torch_cuda import TorchCudnn, TorchEfficient, TorchFlash
from tokenring.errors import BackendUnavailable, UnsupportedError
from tokenring.lowering import backend_names
from tokenring.sequence.region import Patch
from tokenring.tables.rates import Rates

FAST = Rates("by hand", ((64, 100.0), (4096, 500.0)), ((64, 50.0), (4096, 300.0)))
SLOW = Rates("by hand", ((64, 200.0), (4096, 250.0)), ((64, 20.0), (4096, 400.0)))
HALF = torch.bfloat16


# ---------- the pure part


@pytest.mark.parametrize(
    ("capability", "first"), [((8, 0), "torch-flash"), ((8, 9), "torch-flash"), ((9, 0), "flash-attn-3"),
                              ((10, 0), "flash-attn-4"), ((12, 0), "flash-attn-4"), ((7, 5), "torch-efficient")]
)  # fmt: skip
def test_default_order(capability: tuple[int, int], first: str) -> None:
    order = default_order(capability)
    assert order[0] == first and order[-1] == "reference" and len(set(order)) == len(order)
    assert set(order) <= set(backend_names.KERNELS)


def test_every_cuda_kernel_has_a_place() -> None:
    placed = {name for _, order in ORDERS for name in order} | set(default_order((0, 0)))
    assert placed == {name for name, home in registry.HOMES.items() if home == "cuda"} | {"reference"}


def test_without_tables_the_default_order() -> None:
    picks = ranked(("b", "a"), {}, "forward", 512, "for capability 9.0")
    assert [pick.name for pick in picks] == ["b", "a"]
    assert picks[0].why == "number 1 of the default order for capability 9.0"


@pytest.mark.parametrize(
    ("direction", "side", "first", "rate"),
    [("forward", 64, "slow", "200"), ("forward", 4096, "fast", "500"), ("backward", 64, "fast", "50"),
     ("backward", 4096, "slow", "400")],
)  # fmt: skip
def test_the_highest_rate_for_a_side_and_pass(
    direction: Literal["forward", "backward"], side: int, first: str, rate: str
) -> None:
    picks = ranked(("none", "fast", "slow"), {"fast": FAST, "slow": SLOW}, direction, side)
    assert picks[0].name == first and picks[-1].name == "none"
    assert picks[0].why == f"{rate} TFLOP/s {direction} in tiles of {side} by `tokenring rates`"
    assert picks[-1].why.endswith("not measured")


# ---------- kernels that refuse


class Refusing(CpuFlash):
    """A kernel that raises."""

    def __init__(self, name: str, error: Exception | None = None, only: str = "") -> None:
        self.name, self.error, self.only, self.calls = name, error, only, list[str]()

    def forward(self, *given: Any, **named: Any) -> Any:
        return self._do("forward", given, named)

    def backward(self, *given: Any, **named: Any) -> Any:
        return self._do("backward", given, named)

    def _do(self, direction: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.calls.append(direction)
        if self.error is not None and self.only in ("", direction):
            raise self.error
        return getattr(super(), direction)(*given, **named)


class HalfOnly(Refusing):
    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        return None if dtype == HALF else f"{self.name} takes bfloat16, not {dtype}"


def choosing(*kernels: AttentionKernel | str, tables: dict[str, Rates] | None = None) -> Choosing:
    """Names are of kernels that are not installed."""
    made = {each.name: each for each in kernels if not isinstance(each, str)}

    def make(name: str) -> AttentionKernel:
        if name not in made:
            raise BackendUnavailable(f"kernel {name!r} cannot be imported")
        return made[name]

    order = [each if isinstance(each, str) else each.name for each in kernels]
    return Choosing(order, make, lambda name, head_dim, dtype: (tables or {}).get(name))


def run(kernel: Choosing, dtype: torch.dtype = torch.float32, passes: int = 1) -> None:
    tile = Tile("full", PATCHES["full"], dtype=dtype)
    given = operands(tile, torch.device("cpu"))
    for _ in range(passes):
        _, lse = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.2)
        kernel.backward(given.dout, given.q, *given.tile, lse, torch.zeros_like(lse), patch=tile.patch, scale=0.2)


NO_CUDNN = RuntimeError("cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph.")


def test_the_next_one_with_one_reason(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal at run time: logged once, with what it said; the kernel is not asked for such a call again."""
    first, second = Refusing("torch-cudnn", NO_CUDNN), Refusing("torch-flash")
    kernel = choosing(first, second)
    with caplog.at_level(logging.INFO, "tokenring"):
        run(kernel, passes=3)
    assert first.calls == ["forward", "backward"] and second.calls == ["forward", "backward"] * 3
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert warned == [
        f"kernel 'auto' leaves out torch-cudnn for tiles of 8, float32, head dim 40: it refused a call {direction}: "
        "cuDNN Frontend error: [cudnn_frontend] Error: No execution plans support the graph."
        for direction in ("forward", "backward")
    ]
    run(kernel, HALF)  # another kind of call: it may try
    assert first.calls == ["forward", "backward"] * 2


class OneShape(Refusing):
    """Refuses tiles of one size."""

    def __init__(self, name: str, *rows: int) -> None:
        super().__init__(name)
        self.rows = rows

    def _do(self, direction: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        self.error = NO_CUDNN if named["patch"].rows in self.rows else None
        return super()._do(direction, given, named)


def forward(kernel: Choosing, rows: int, dtype: torch.dtype = torch.float32) -> None:
    tile = Tile("full", patch(rows, rows), dtype=dtype)
    given = operands(tile, torch.device("cpu"))
    kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.2)


def test_one_refused_shape_costs_no_others() -> None:
    first, second = OneShape("torch-cudnn", 20), Refusing("torch-flash")
    kernel = choosing(first, second)
    for rows in (20, 20, 40, 70, 20):
        forward(kernel, rows)
    assert (len(first.calls), len(second.calls)) == (3, 3), "asked once for 20 rows, and for all others"


def test_several_refused_shapes_cost_all(caplog: pytest.LogCaptureFixture) -> None:
    """Of that pass, dtype and head dim: what was not built for a chip is not asked for each size."""
    first, second = OneShape("torch-cudnn", 9, 20, 40, 70, 140), Refusing("torch-flash")
    kernel = choosing(first, second)
    for rows in (9, 20):
        forward(kernel, rows)
    assert kernel.why_not("torch-cudnn", 40, torch.float32) is None
    for rows in (40, 70, 140, 300):
        forward(kernel, rows)
    assert len(first.calls) == 3 and len(second.calls) == 6
    assert "leaves out torch-cudnn for all tiles forward, float32, head dim 40: it refused" in caplog.text
    assert "No execution plans" in str(kernel.why_not("torch-cudnn", 40, torch.float32))
    run(kernel)
    assert first.calls[3:] == ["backward"], "the other pass"
    forward(kernel, 300, HALF)
    assert len(first.calls) == 5, "the other dtype"


def test_a_gradient_that_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    first = Refusing("flash-attn", RuntimeError("FlashAttention backward only supports A100"), only="backward")
    kernel = choosing(first, Refusing("torch-efficient"))
    check(kernel, Tile("full", PATCHES["full"]))
    assert first.calls == ["forward", "backward", "backward"], "tiles of two sizes"
    assert "refused a call backward" in caplog.text


def test_missing_packages_and_other_dtypes(caplog: pytest.LogCaptureFixture) -> None:
    """fp32: every kernel that does not take it is named once, and so is the one that does."""
    kernel = choosing("flash-attn-3", HalfOnly("torch-flash"), Refusing("torch-efficient"))
    with caplog.at_level(logging.INFO, "tokenring"):
        run(kernel, passes=2)
    said = [each.getMessage() for each in caplog.records]
    assert said == [
        "kernel 'auto' has no flash-attn-3 for float32, head dim 40: kernel 'flash-attn-3' cannot be imported",
        "kernel 'auto' has no torch-flash for float32, head dim 40: torch-flash takes bfloat16, not torch.float32",
        "kernel 'auto' takes torch-efficient for float32, head dim 40",
    ]
    assert not [each for each in caplog.records if each.levelno > logging.INFO]


def test_plain_attention_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    run(choosing("flash-attn", Reference()))
    assert "takes reference for float32, head dim 40, which holds every score of a tile in memory" in caplog.text


def test_nobody_is_left() -> None:
    kernel = choosing("flash-attn", Refusing("torch-flash", NotImplementedError("Could not run")))
    with pytest.raises(UnsupportedError, match=r"no kernel computes a tile of 13 × 17.*flash-attn: .*cannot be"):
        run(kernel)
    assert kernel.supports(40, torch.float32) is None, "it may compute others"
    for rows in (20, 40, 70):
        with pytest.raises(UnsupportedError, match="torch-flash: it refused a call forward: Could not run"):
            forward(kernel, rows)
    assert "Could not run" in str(kernel.supports(40, torch.float32))
    assert choosing("flash-attn").supports(40, HALF) == "kernel 'flash-attn' cannot be imported"


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. This call is not supported"),
        RuntimeError("CUDA error: an illegal memory access was encountered, not supported"),
        RuntimeError("shape mismatch"),
        TypeError("unexpected keyword"),
        KeyError("x"),
    ],
)
def test_what_is_no_refusal_is_raised(error: Exception) -> None:
    second = Refusing("torch-flash")
    with pytest.raises(type(error)):
        run(choosing(Refusing("torch-cudnn", error), second))
    assert second.calls == []


@pytest.mark.parametrize(
    "error",
    [
        NO_CUDNN,
        RuntimeError("FlashAttention only supports Ampere GPUs or newer."),
        RuntimeError("USE_FLASH_ATTENTION was not enabled for build."),
        RuntimeError("PyTorch was not compiled with cuDNN Flash Attention enabled!"),
        RuntimeError("CUDA error: no kernel image is available for execution on the device"),
        RuntimeError("cutlassF: no kernel found to launch!"),
        NotImplementedError("Could not run 'aten::_flash_attention_forward' with arguments from the 'CUDA' backend"),
        ImportError("libcudart.so.12"),
    ],
)
def test_what_is_a_refusal(error: Exception) -> None:
    assert refuses(error)
    assert len(REFUSALS) == len(set(REFUSALS))


def asserting(module: str) -> Callable[[], None]:
    """A function of a module, that asserts something which is not so."""
    space: dict[str, Any] = {"__name__": module}
    exec("def check():\n    assert 8 in (9, 10), 'Unsupported compute capability'", space)
    made: Callable[[], None] = space["check"]
    return made


@pytest.mark.parametrize(
    ("module", "is_refusal"),
    [("flash_attn.cute.interface", True), ("torch._inductor.lowering", True),
     ("tokenring.backends.kernels.torch_cuda", False)],
)  # fmt: skip
def test_whose_assertion(module: str, is_refusal: bool) -> None:
    """Packages refuse by it; one of our own is a mistake, which must not look like a kernel that is left out."""

    class Asserting(Refusing):
        def forward(self, *given: Any, **named: Any) -> Any:
            asserting(module)()

    second = Refusing("torch-flash")
    kernel = choosing(Asserting("flash-attn-4"), second)
    if is_refusal:
        forward(kernel, 20)
        assert second.calls
    else:
        with pytest.raises(AssertionError, match="Unsupported compute capability"):
            forward(kernel, 20)
        assert not second.calls
    assert not refuses(AssertionError("raised by nobody knows whom"))


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def test_determinism_is_asked_for_at_each_call() -> None:
    """Switched on after calls that did without, and off again."""
    with operators():
        kernel = choosing(TorchCudnn(), TorchFlash())
        for wanted, used in ((False, {"cudnn", "cudnn backward"}), (True, {"flash", "flash backward"})) * 2:
            calls.clear()
            with deterministic() if wanted else nullcontext():
                run(kernel, HALF)
            assert {name for name, _ in calls} == used


def test_by_table() -> None:
    """Small tiles forward go to one kernel, large ones to the other; gradients by their own rates."""
    fast, slow = Refusing("fast"), Refusing("slow")
    kernel = choosing(fast, slow, tables={"fast": FAST, "slow": SLOW})
    assert [pick.name for pick in kernel.picks("forward", 4097, 40, HALF)] == ["fast", "slow"]
    run(kernel)  # 13 × 17
    assert (fast.calls, slow.calls) == (["backward"], ["forward"])


class Avoiding(Refusing):
    def avoids(self, patch: Patch) -> str | None:
        return "one row" if patch.rows == 1 else None


def test_tiles_that_a_kernel_avoids() -> None:
    first, second = Avoiding("torch-cudnn"), Refusing("torch-flash")
    kernel = choosing(first, second)
    check(kernel, Tile("one row", patch(1, 19)))
    assert first.calls == [] and second.calls
    alone = choosing(first)
    check(alone, Tile("one row", patch(1, 19)))
    assert first.calls, "where nobody else does"


@pytest.mark.parametrize(
    ("where", "used"),
    [("full", "cudnn"), ("causal, square", "cudnn"), ("band", "flash"), ("causal, tall", "flash"),
     ("unequal steps", "flash")],
)  # fmt: skip
def test_tiles_that_the_first_has_to_cut(where: str, used: str) -> None:
    """Who says a tile in fewer calls takes it; those last in all orders say everything in one, and take nothing."""
    with operators():
        kernel = choosing(TorchCudnn(), TorchFlash(), TorchEfficient(), Refusing("flex"), Reference())
        given = operands(tile := Tile(where, PATCHES[where], dtype=HALF), torch.device("cpu"))
        _, lse = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=0.2)
        kernel.backward(given.dout, given.q, *given.tile, lse, torch.zeros_like(lse), patch=tile.patch, scale=0.2)
        assert {name.partition(" ")[0] for name, _ in calls} == {used}


def test_a_window_takes_one_call() -> None:
    """As on an H100 without flash-attn: cuDNN would take dozens."""
    window = Patch(0, 512, 0, 512, -63, 0)
    with operators():
        assert TorchCudnn().calls_for(window) > 20 and TorchFlash().calls_for(window) == 1
        kernel = choosing(TorchCudnn(), TorchFlash())
        q = torch.zeros(1, 1, 512, 8, dtype=HALF)
        kernel.forward(q, q, q, patch=window, scale=1.0)
        assert [(name, how["sides"]) for name, how in calls] == [("flash", (63, 0))]


def test_conformance() -> None:
    kernel = choosing(Refusing("a", NO_CUDNN), CpuFlash(), Reference())
    for name in ("full", "causal, tall", "unequal steps, rows see nothing", "nothing at all"):
        check(kernel, Tile(name, PATCHES[name]))
    assert kernel.supports_patch(PATCHES["band"]) is None
