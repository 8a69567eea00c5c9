"""Soft-capping: who computes it and who says that it does not, what ranks agree on, and that its memory is bounded."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from cases import Case
from conformance import LIMITS, PATCHES, Tile, operands
from oracle import relative_error
from ranks import Here, RankPools
from test_cuda_flex import differentiable
from test_cuda_kernels import kernel_of
from test_refusals import ODD, opened, said, works
from torch.utils._python_dispatch import TorchDispatchMode
from variants import Variant, compute, errors

from tokenring import ConfigurationError, ContextParallel, UnsupportedError, attention
from tokenring.backends.interfaces import CappingKernel
from tokenring.backends.kernels import reference
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.flex import Flex
from tokenring.backends.kernels.numeric_trial import Kind, fault
from tokenring.backends.kernels.reference import Reference, SoftCapped, with_cap
from tokenring.backends.registry import capped_kernel, make_kernel
from tokenring.tables.trial_verdicts import Verdicts

CPU = torch.device("cpu")
CAP = 2.0
CAPPED_RELEASES = ("2.6", "2.8", "3", "3, as a package")
TILES = (
    Tile("causal", PATCHES["causal, tall"], (4, 2), 16),
    Tile("a band", PATCHES["unequal steps, band"], (2, 2), 64),
    Tile("rows see nothing", PATCHES["lower bound, rows see nothing"], (2, 1)),
)
CALL_SECONDS = 110.0  # with the import of the compiler


def check_capped(kernel: Any, tile: Tile, cap: float = CAP) -> None:
    """Both passes against plain float64, as a part of longer rows; scores are large enough for the cap to show."""
    given, scale, limits = operands(tile, CPU), 3 / math.sqrt(tile.head_dim), LIMITS[tile.dtype]
    plain, exact = SoftCapped(cap), [x.double() for x in (given.q, *given.tile)]
    right = plain.forward(exact[0], exact[1], exact[2], patch=tile.patch, scale=scale)
    made = kernel.forward(given.q, *given.tile, patch=tile.patch, scale=scale)
    assert relative_error(made[0], right[0]) <= 1.5 * limits[0] and relative_error(made[1], right[1]) <= 2e-6
    lse = torch.logaddexp(right[1], torch.ones(())).float()
    delta = torch.randn(lse.shape, generator=torch.Generator().manual_seed(1))
    wanted = plain.backward(
        given.dout.double(), exact[0], exact[1], exact[2], lse.double(), delta.double(), patch=tile.patch, scale=scale
    )  # fmt: skip
    gradients = kernel.backward(given.dout, given.q, *given.tile, lse, delta, patch=tile.patch, scale=scale)
    for x, y in zip(gradients, wanted, strict=True):
        assert relative_error(x, y) <= 2 * limits[1], (tile.name, relative_error(x, y))


# ---------- kernels


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("most", [1, 64, 1 << 22])
def test_blocks_of_rows(tile: Tile, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row at a time, some, or all."""
    monkeypatch.setattr(reference, "MOST_SCORES", most)
    check_capped(Reference().capped(CAP), tile)


def test_against_autograd() -> None:
    """The plain kernel itself, in whole calls."""
    for mask in ("causal & documents", "window to both sides"):
        case = Case(1, "ring", "contiguous", mask, 4, 2, 2, 16, torch.float32, None)
        for kernel in ("auto", "reference"):
            what = Variant(case, sinks=True, softcap=CAP, kernel=kernel)
            here: Any = type("Here", (), {"rank": 0})
            found = errors(what, [compute(here, what, ContextParallel(kernel=kernel))])
            assert max(found.values()) < 5e-6, found


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the elements of the largest tensor that any operator makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().nbytes():
            self.elements = max(self.elements, made.numel())
        return made


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are never there all at once."""
    monkeypatch.setattr(reference, "MOST_SCORES", 1 << 12)
    q, k, v = (torch.randn(1, 256, 2, 8).requires_grad_() for _ in range(3))
    with Largest() as seen:  # type: ignore[no-untyped-call]
        torch.autograd.backward(attention(q, k, v, ContextParallel(), softcap=CAP).sum())
    assert 0 < seen.elements <= 2 * 256 * 8


@pytest.mark.parametrize("release", CAPPED_RELEASES)
def test_packages(release: str) -> None:
    with kernel_of(release) as kernel:
        for tile in TILES:
            for cap in (CAP, 30.0):
                check_capped(with_cap(kernel, cap), replace(tile, dtype=torch.bfloat16), cap)
        assert isinstance(kernel, CappingKernel) and kernel.softcap == 0.0


@pytest.mark.parametrize("release", ["2.5", "4", "torch-flash", "torch-cudnn", "torch-efficient"])
def test_others_say_so(release: str) -> None:
    with kernel_of(release) as kernel, pytest.raises(UnsupportedError, match=f"kernel '{kernel.name}'.*soft-capping"):
        with_cap(kernel, CAP)


def test_flex() -> None:
    for tile in TILES:
        for dtype in (torch.float32, torch.bfloat16):
            check_capped(Flex(False, differentiable).capped(CAP), replace(tile, dtype=dtype))


def test_flex_of_this_torch() -> None:
    """Its score_mod means what we take it for."""
    given = operands(TILES[0], CPU)
    kernel = Flex(compiled=False).capped(CAP)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it holds all scores
        made = kernel.forward(given.q, *given.tile, patch=TILES[0].patch, scale=0.5)
    right = SoftCapped(CAP).forward(given.q, *given.tile, patch=TILES[0].patch, scale=0.5)
    assert all(relative_error(x, y.double()) < 2e-6 for x, y in zip(made, right, strict=True))


def test_auto_takes_kernels_that_compute_it() -> None:
    made = {"torch-flash": kernel_of("torch-flash"), "flash-attn": kernel_of("2.8")}
    with made["torch-flash"] as one, made["flash-attn"] as two:
        kernels: dict[str, Any] = {"torch-flash": one, "flash-attn": two, "reference": Reference()}
        auto = Choosing(tuple(kernels), kernels.__getitem__, lambda *_: None)
        capped = auto.capped(CAP)
        assert capped is auto.capped(CAP), "what it finds out, it says once"
        assert [pick.name for pick in auto.picks("forward", 64, 64, torch.bfloat16)] == list(kernels)
        assert [pick.name for pick in capped.picks("forward", 64, 64, torch.bfloat16)] == ["flash-attn", "reference"]
        why = str(capped.why_not("torch-flash", 64, torch.bfloat16))
        assert why == "kernel 'torch-flash' does not compute soft-capping"
        check_capped(capped, replace(TILES[0], dtype=torch.bfloat16))
        check_capped(capped, TILES[0])  # in fp32


class Ignoring(SoftCapped):
    """Takes a cap, and computes as if there were none."""

    name = "flash-attn"

    def capped(self, softcap: float) -> Any:
        made = Ignoring(softcap)
        made.softcap = softcap
        return made

    def forward(self, *given: Any, **options: Any) -> Any:
        return Reference().forward(*given, **options)


class Honest(SoftCapped):
    name = "flash-attn"

    def capped(self, softcap: float) -> Any:
        return Honest(softcap)


def test_a_trial_tries_the_cap() -> None:
    kind = Kind("forward", 64, torch.float32, CPU)
    assert fault(Honest(CAP), kind, kept=Verdicts(None)) == ""
    assert "its out is off by" in str(fault(Ignoring(50.0), kind, kept=Verdicts(None)))


# ---------- calls


def test_what_is_asked_for() -> None:
    x = torch.randn(1, 8, 2, 8)
    plain = attention(x, x, x, ContextParallel())
    assert torch.equal(attention(x, x, x, ContextParallel(), softcap=0.0), plain)
    none: Any = None
    assert torch.equal(attention(x, x, x, ContextParallel(), softcap=none), plain)
    assert not torch.allclose(attention(x, x, x, ContextParallel(), softcap=1.0), plain, atol=1e-3)
    assert torch.allclose(attention(x, x, x, ContextParallel(), softcap=1e6), plain, atol=1e-5)
    assert isinstance(make_kernel("auto", CPU), type(capped_kernel(make_kernel("auto", CPU), "auto", 0.0)))


@pytest.mark.parametrize("scale", [-0.5, 0.0, 0.7])
def test_any_scale(scale: float) -> None:
    q, k, v = (torch.randn(1, 12, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) * scale
    right = torch.einsum("bhst,bthd->bshd", torch.softmax(CAP * torch.tanh(scores / CAP), -1), v.double())
    assert relative_error(attention(q, k, v, ContextParallel(), scale=scale, softcap=CAP), right) < 1e-6


@pytest.mark.parametrize("given", [-1.0, math.nan, math.inf, 10**400, "50", True, torch.tensor(5.0)], ids=str)
def test_what_is_no_cap(given: Any) -> None:
    x = torch.randn(1, 8, 2, 8)
    with pytest.raises(ConfigurationError, match=r"softcap is .*; give a positive number, such as"):
        attention(x, x, x, ContextParallel(), softcap=given)


def test_a_kernel_by_name() -> None:
    x = torch.randn(1, 8, 2, 8)
    says = (
        "softcap=50: kernel 'cpu-flash' does not compute soft-capping; "
        "choose another, as in ContextParallel(kernel='auto')"
    )
    with pytest.raises(UnsupportedError) as caught:
        attention(x, x, x, ContextParallel(kernel="cpu-flash"), softcap=50.0)
    assert str(caught.value) == says


# ---------- ranks


def differing(here: Here, what: str) -> tuple[str, str]:
    odd = here.rank == ODD
    kernel = "cpu-flash" if odd and what == "kernel" else "auto"
    cp = ContextParallel(schedule="tokenring", transport=opened(here, "shm"), kernel=kernel)
    cap = {"value": 30.0, "none": 0.0, "nonsense": -1.0}.get(what, 50.0) if odd else 50.0
    x = torch.ones(1, 8, 4, 16)
    found = said(lambda: attention(x, x, x, cp, softcap=cap))
    works(cp)
    return found


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("value", "softcap: ranks 0, 2: 50.0; rank 1: 30.0."),
        ("none", "softcap: ranks 0, 2: 50.0; rank 1: nothing."),
        ("kernel", "rank 1: softcap=50: kernel 'cpu-flash' does not compute soft-capping;"),
        ("nonsense", "rank 1 refused: softcap is -1.0; give a positive number"),
    ],
)
def test_ranks_that_differ(what: str, says: str, ranks: RankPools) -> None:
    for rank, (kind, text) in enumerate(ranks(3)(differing, what)):
        if (what, rank) == ("nonsense", ODD):
            assert kind == "ConfigurationError" and text.startswith("softcap is -1.0")
        else:
            assert kind == "Disagreement" and says in text, text


def all_refuse(here: Here) -> tuple[str, str]:
    cp = here.cp(kernel="cpu-flash", schedule="auto")
    x = torch.ones(1, 8, 4, 16)
    found = said(lambda: attention(x, x, x, cp, softcap=50.0))
    works(cp)
    return found


def test_all_ranks_refuse(ranks: RankPools) -> None:
    for kind, text in ranks(3)(all_refuse):
        assert kind == "UnsupportedError" and "kernel 'cpu-flash' does not compute soft-capping" in text


def compiled(here: Here) -> bool:
    """The gradients of a plain call, and a plan of its own; a wrong cap is refused when it runs."""
    cp = here.cp(layout="zigzag", schedule="auto")
    leaves = [torch.randn(1, 16, 2, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(3)]
    leaves = [x.requires_grad_() for x in leaves]
    plain = attention(*leaves, cp, softcap=CAP)  # type: ignore[call-overload]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        torch._dynamo.reset()
        compiler: Any = partial(torch.compile, backend="aot_eager", fullgraph=True)
        made = compiler(lambda q, k, v: attention(q, k, v, cp, softcap=CAP))(*leaves)
        kind, text = said(lambda: compiler(lambda q, k, v: attention(q, k, v, cp, softcap=-CAP))(*leaves))
    assert "softcap is -2.0" in text, (kind, text)
    gradients = [torch.autograd.grad(x.sum(), leaves) for x in (plain, made)]
    return torch.equal(plain, made) and all(torch.equal(x, y) for x, y in zip(*gradients, strict=True))


def test_compiled(ranks: RankPools) -> None:
    assert all(ranks(2).within(CALL_SECONDS, compiled))
