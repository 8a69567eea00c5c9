"""The scale of q·k: any that can be computed is right, in every kernel; others are refused with words."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any

import pytest
import torch
from ascend.operators import register
from ascend.ranks import NpuPools
from cuda_ops.aten import operators
from cuda_ops.packages import RELEASES, installed
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_ascend_runs import context

import tokenring as tr
from tokenring import Causal, ConfigurationError, Documents, Full, Mask, SlidingWindow, attention
from tokenring.backends import registry
from tokenring.backends.kernels.reference import Reference
from tokenring.runtime.bound_kernel import LEAST, WHOLE, folded

LENGTH, HEADS, DIM = 48, (4, 2), 16
MASKS = {"full": Full(), "causal": Causal(), "documents": Documents([0, 11, 30, 44]) & SlidingWindow(7, 2)}
SCALES = (-0.3, 0, -0.0, -1.5, 1e-40, -1e-300, 0.3)
OURS = {"cpu-flash": 5e-6, "reference": 5e-6, "torch-efficient": 5e-6}
HALVES = {"torch-flash": 2e-2, "torch-cudnn": 2e-2, **{release: 2e-2 for release in RELEASES}}
Errors = dict[str, float]


@contextmanager
def at_home(kernel: str) -> Iterator[str]:
    """The kernel's name, as one for this CPU, with what stands in for its operators."""
    name, there = (RELEASES[kernel][0], installed(kernel)) if kernel in RELEASES else (kernel, operators())
    with pytest.MonkeyPatch.context() as patched, there:
        if name in registry.HOMES:
            patched.setitem(registry.HOMES, name, "cpu")
        yield name


def errors(
    cp: tr.ContextParallel, mask: Mask, scale: Any, dtype: torch.dtype, device: str = "cpu", call: Any = attention
) -> Errors:
    """Of this rank's part of each result; the absolute one where the right one is zero."""
    random = torch.Generator().manual_seed(1)
    shapes = {"q": HEADS[0], "k": HEADS[1], "v": HEADS[1], "dout": HEADS[0]}
    whole = [torch.randn(1, LENGTH, count, DIM, generator=random).to(dtype) for count in shapes.values()]
    rows = torch.tensor(cp.layout_for(LENGTH).positions(cp.rank))
    all_q, all_k, all_v, all_dout = whole
    q, k, v, dout = (x[:, rows].to(device) for x in whole)
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out, lse = call(q, k, v, cp, mask, scale, return_lse=True)
    made = dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, dout), strict=True))
    right = attention64(all_q, all_k, all_v, all_dout, allowed(mask, LENGTH, LENGTH), float(scale))
    assert torch.equal(lse.cpu() == -math.inf, right.lse[:, :, rows] == -math.inf)
    found = {}
    for name, x in {"out": out.detach(), **made}.items():
        wanted = getattr(right, name)[:, rows]
        tiny = bool(wanted.abs().max() < 1e-30)
        found[name] = float((x.cpu() - wanted).abs().max()) if tiny else relative_error(x.cpu(), wanted)
    return found


def on_ranks(here: Here, kernel: str, mask: Mask, dtype: torch.dtype) -> list[Errors]:
    with at_home(kernel) as name:
        cp = here.cp(kernel=name, layout="zigzag", schedule="tokenring")
        return [errors(cp, mask, scale, dtype) for scale in SCALES]


@pytest.mark.sampled(20)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [*OURS, *HALVES])
@pytest.mark.parametrize("world_size", [1, 3])
def test_every_kernel(world_size: int, kernel: str, mask: str, ranks: RankPools) -> None:
    limit, dtype = (OURS[kernel], torch.float32) if kernel in OURS else (HALVES[kernel], torch.bfloat16)
    for found in ranks(world_size)(on_ranks, kernel, MASKS[mask], dtype):
        for scale, each in zip(SCALES, found, strict=True):
            assert all(error < limit for error in each.values()), (scale, each)  # NaN is not


def on_npus(here: Here, mask: Mask) -> list[Errors]:
    register("2.13.0")
    cp = context(here, layout="zigzag", schedule="tokenring")
    return [errors(cp, mask, scale, torch.float32, "npu") for scale in SCALES]


@pytest.mark.parametrize("mask", MASKS)
def test_npu(mask: str, npus: NpuPools) -> None:
    """Documents go packed."""
    for found in npus(2)(on_npus, MASKS[mask]):
        for scale, each in zip(SCALES, found, strict=True):
            assert all(error < 5e-6 for error in each.values()), (scale, each)


def compiled(here: Here) -> list[Errors]:
    call = torch.compile(attention, backend="aot_eager", fullgraph=True)
    cp = here.cp(layout="zigzag", schedule="ring")
    return [errors(cp, Causal(), scale, torch.float32, call=call) for scale in (-0.3, 0.0, 0.3)]


def test_compiled(ranks: RankPools) -> None:
    for found in ranks(2).within(110.0, quiet, compiled):
        assert all(error < 5e-6 for each in found for error in each.values()), found


def quiet(here: Here, function: Any) -> Any:
    """With what torch says of its own parts while it compiles."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(here)


# ---------- positive ones


def test_a_positive_scale_costs_nothing() -> None:
    """The kernel itself is called, with the scale that was given."""
    kernel = Reference()
    for scale in (LEAST, 0.25, 1e5):
        assert folded(kernel, scale) == (kernel, scale)
    assert folded(kernel, 0.0)[0] is not kernel


# ---------- those that are refused

X = torch.randn(1, 8, 2, DIM)
LARGEST = WHOLE / DIM
BEYOND = (
    f"give a number up to 2^24/D in size, which is {LARGEST:.9g} for head dim {DIM}, or None for 1/√D; what is larger "
    f"belongs in q and k, whose values decide what can be computed"
)
REFUSED: list[tuple[Any, str]] = [
    (1e300, f"scale is 1e+300, and fp32 does not hold scores so large; {BEYOND}"),
    (-1e300, f"scale is -1e+300, and fp32 does not hold scores so large; {BEYOND}"),
    (1e39, f"scale is 1e+39, and fp32 does not hold scores so large; {BEYOND}"),
    (1e38, f"scale is 1e+38, and fp32 does not hold scores so large; {BEYOND}"),
    (LARGEST * 1.001, f"scale is {LARGEST * 1.001!r}, and fp32 does not hold scores so large; {BEYOND}"),
    (10**400, f"scale is of type int and beyond what a float holds; {BEYOND}"),
    (-(10**5000), f"scale is of type int and beyond what a float holds; {BEYOND}"),
    (Fraction(10**400, 3), f"scale is of type Fraction and beyond what a float holds; {BEYOND}"),
]


@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_too_large(case: int, kernel: str) -> None:
    scale, says = REFUSED[case]
    with pytest.raises(ConfigurationError) as caught:
        attention(X, X, X, tr.ContextParallel(kernel=kernel), scale=scale)
    assert str(caught.value) == says


@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
@pytest.mark.parametrize("scale", [LARGEST, -LARGEST])
def test_the_largest_gives_numbers(kernel: str, scale: float) -> None:
    """Rows of length √D, as normalised heads have: scores reach 2^24, and nothing runs out of bounds."""
    x = [torch.nn.functional.normalize(torch.randn(1, 8, 2, DIM), dim=-1) * math.sqrt(DIM) for _ in range(3)]
    q, k, v = (each.requires_grad_() for each in x)
    out = attention(q, k, v, tr.ContextParallel(kernel=kernel), Causal(), scale)
    made = (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))
    assert all(bool(each.isfinite().all()) for each in made)


def refused_by_all(here: Here) -> tuple[list[str], bool]:
    cp, said = here.cp(schedule="ring"), []
    for scale in (1e300, 10**400):
        try:
            attention(X, X, X, cp, scale=scale)
        except ConfigurationError as error:
            said.append(str(error))
    return said, bool(attention(X, X, X, cp, scale=-0.5).isfinite().all())


def test_all_ranks_refuse_and_go_on(ranks: RankPools) -> None:
    assert ranks(2)(refused_by_all) == [([REFUSED[0][1], REFUSED[5][1]], True)] * 2


def refused_in_a_graph(here: Here) -> list[str]:
    cp, said = here.cp(), []
    for scale in (1e300, 10**400, -(10**400), -2):
        call = torch.compile(lambda x, scale=scale: attention(x, x, x, cp, scale=scale), backend="aot_eager")
        try:
            said.append(str(list(call(X).shape)))
        except ConfigurationError as error:
            said.append(str(error).partition(",")[0].partition(";")[0])
    return said


def test_compiled_calls_refuse_them(ranks: RankPools) -> None:
    (said,) = ranks(1).within(110.0, quiet, refused_in_a_graph)
    assert said == ["scale is 1e+300", "scale is inf", "scale is inf", "[1, 8, 2, 16]"]
