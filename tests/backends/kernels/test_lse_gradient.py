"""Every kernel computes with a delta that no output carries, as it is where a gradient flows into lse."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
from any_delta import DELTAS, TILES, check_any_delta, check_kernel, compare, rows_given
from ascend.device import host_waits
from ascend.operators import register
from ascend.ranks import NpuPools
from conformance import LIMITS, operands
from ranks import Here
from test_ascend_kernel import npu_kernel
from test_cuda_flex import differentiable
from test_cuda_kernels import MADE, kernel_of

from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.backends.kernels.delta import AnyDelta
from tokenring.backends.kernels.flex import Flex
from tokenring.backends.kernels.reference import Reference
from tokenring.sequence.region import Patch

module = import_module("tokenring.backends.kernels.delta")


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference(), Flex(False, differentiable)], ids=lambda each: each.name)
def test_on_a_cpu(kernel: Any) -> None:
    check_kernel(kernel)


@pytest.mark.parametrize("name", MADE)
def test_for_cuda(name: str) -> None:
    with kernel_of(name) as kernel:
        check_kernel(kernel)


def for_npus(here: Here) -> None:
    register("2.13.0")
    check_kernel(npu_kernel(), "npu")


def test_for_npus(npus: NpuPools) -> None:
    npus(1)(for_npus)


def for_npus_packed(here: Here) -> None:
    """Rows of no patch hold what is still to come, of any size; nothing waits for the device."""
    register("2.13.0")
    kernel, parts = npu_kernel(), (Patch(2, 20, 2, 20, None, 0), Patch(25, 40, 25, 40, None, 0))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tile = replace(TILES[0], patch=Patch(0, 40, 0, 40), dtype=dtype)
        given = operands(tile, torch.device("npu"))
        dout, lse, delta = rows_given(tile, given, DELTAS[0])
        delta[:, :, 20:25] = torch.inf
        host_waits.clear()
        made = AnyDelta(kernel).backward_packed(
            dout, given.q, *given.tile, lse, delta, patches=parts, scale=0.25
        )  # fmt: skip
        assert not host_waits
        for part, found in zip(parts, made, strict=True):
            rows = slice(part.row0, part.row1)
            alone = [x.cpu()[:, :, rows].double() for x in (dout, given.q, *given.tile, lse, delta)]
            patch = Patch(0, part.rows, 0, part.cols, None, 0)
            right = Reference().backward(*alone, patch=patch, scale=0.25)
            compare(found, right, 1.5 * LIMITS[dtype][1], part.row0)


def test_for_npus_packed(npus: NpuPools) -> None:
    npus(1)(for_npus_packed)


# ---------- mutants


def added(rest: torch.Tensor, *like: Any) -> Any:
    """The wrong sign."""
    return of_rest(-rest, *like)


def values_too(made: Any, more: Any, size: Any) -> Any:
    """What the second call makes of its values is none of the call's."""
    return (*add(made, more, size)[:2], made[2].float() + more[2].float())


of_rest, add = module._of_rest, module._added
MUTANTS: dict[str, Any] = {
    "_of_rest": added,
    "_added": values_too,
    "divided": lambda dout, delta: (delta, torch.zeros_like(delta)),  # all by a stand-in
    "_nothing": lambda rest: True,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check_any_delta(CpuFlash(), TILES[0])
    monkeypatch.setattr(module, name, MUTANTS[name])
    with pytest.raises(AssertionError):
        check_any_delta(CpuFlash(), TILES[0])


def test_where_dout_carries_all_of_it_there_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which can tell."""
    count: list[Any] = []
    kernel, given = CpuFlash(), operands(TILES[0], torch.device("cpu"))
    backward = kernel.backward

    def counted(*operands: Any, **options: Any) -> Any:
        count.append(operands)
        return backward(*operands, **options)

    monkeypatch.setattr(kernel, "backward", counted)
    lse = torch.ones(given.q.shape[:3])
    for delta, calls in ((lse * 3, 1), (lse * 1e4, 3)):
        AnyDelta(kernel).backward(
            given.dout, given.q, *given.tile, lse, delta, patch=TILES[0].patch, scale=0.25
        )  # fmt: skip
        assert len(count) == calls
