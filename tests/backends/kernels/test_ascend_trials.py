"""Torch_npu over an older CANN: schemas take softmax_layout, and the kernels beneath may not be there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from ascend import operators
from ascend.device import host_waits
from ascend.operators import calls, fresh, lacking
from ascend.ranks import NpuPools
from conformance import operands
from ranks import Here
from said import said
from test_ascend_packed import CASES, Checked, tile_of
from test_ascend_runs import runs

from tokenring import Causal, Documents
from tokenring.backends.interfaces import Tiles
from tokenring.backends.kernels import npu_trials
from tokenring.backends.registry import make_kernel

FORWARD, GRADIENT = "aclnnFlashAttentionVarLenScoreV4", "aclnnFlashAttentionUnpaddingScoreGradV4"
WITH_LAYOUT, WITHOUT_LAYOUT = "2.13.0", "op-plugin 7.1.0"
LACKING = [(), (FORWARD,), (GRADIENT,), (FORWARD, GRADIENT)]
PARTS = CASES["two documents"]
TEXT = "The param softmax_layout is not supported"


@contextmanager
def cann_without(*kernels: str, offer: str = WITH_LAYOUT) -> Iterator[None]:
    """Operators of a wheel over a CANN that lacks these, of which nothing is known yet."""
    lacking.update(kernels)
    fresh(offer)
    try:
        yield
    finally:
        lacking.clear()
        fresh(offer)


def kernel() -> Any:
    return make_kernel("npu-fusion", torch.device("npu"))


def layouts() -> dict[str, set[str]]:
    """In which order statistics were asked for, by operator."""
    found: dict[str, set[str]] = {}
    for call in calls:
        found.setdefault(call.name, set()).add(call.arguments.get("softmax_layout", ""))
    return found


def refused(here: Here) -> None:
    """The stand-in raises as op-plugin does, in the direction that lacks its kernel."""
    with cann_without(GRADIENT):
        found = kernel()
        device = torch.device("npu", 0)
        npu_trials._forward(found._forward, device)
        with pytest.raises(RuntimeError, match=TEXT):
            npu_trials._gradient(found._gradient, device)


def test_the_stand_in_raises_as_op_plugin_does(npus: NpuPools) -> None:
    npus(1)(refused)


@pytest.mark.parametrize("without", LACKING, ids=str)
@pytest.mark.parametrize("name", ["two documents", "one token, many", "full", "windows"])
def test_packed_calls_are_exact(npus: NpuPools, name: str, without: tuple[str, ...]) -> None:
    npus(1)(packed, name, without)


def packed(here: Here, name: str, without: tuple[str, ...]) -> None:
    """Each direction goes in the order that it can, and is tried once."""
    with cann_without(*without):
        parts = CASES[name]
        Checked(kernel(), parts, tile_of(parts)).check()
        calls.clear()
        Checked(kernel(), parts, tile_of(parts)).check()  # another kernel of the same operators
        assert len(calls) == 3
        assert layouts() == {
            "npu_fusion_attention": {"" if FORWARD in without else "TND"},
            "npu_fusion_attention_grad": {"" if GRADIENT in without else "TND"},
        }


def test_what_was_found_is_said_once(npus: NpuPools) -> None:
    found = npus(1)(messages)[0]
    assert len(found) == 1 and "npu_fusion_attention on npu:0" in found[0] and TEXT in found[0]


def messages(here: Here) -> list[str]:
    with cann_without(FORWARD), said() as found:
        for _ in range(2):
            Checked(kernel(), PARTS, tile_of(PARTS)).check()
    return [each for each in found if "softmax_layout" in each]


def test_whole_calls_of_packed_documents(npus: NpuPools) -> None:
    for errors in npus(2)(whole):
        assert errors["packed"] > 0
        assert max(errors[name] for name in ("out", "dq", "dk", "dv", "lse")) < 1e-5


def whole(here: Here) -> dict[str, float]:
    with cann_without(FORWARD, GRADIENT):
        mask = Documents([0, 9, 24, 40, 48]) & Causal()
        return runs(here, WITH_LAYOUT, "ring", "contiguous", mask, (4, 2), torch.float32)


def test_a_bound_program_has_tried_before_it_runs(npus: NpuPools) -> None:
    npus(1)(bound)


def bound(here: Here) -> None:
    """Within a step the host waits for nothing."""
    with cann_without(FORWARD):
        given = operands(tile_of(PARTS), torch.device("npu"))
        tiles = Tiles(PARTS, "forward", 8, torch.float32, given.q.device)
        held = kernel().holding(tiles)
        assert held.packs(PARTS)
        calls.clear()
        host_waits.clear()
        held.forward_packed(given.q, *given.tile, patches=PARTS, scale=0.3)
        assert host_waits == [] and len(calls) == 1


def test_an_order_that_is_not_as_asked_is_found(npus: NpuPools) -> None:
    npus(1)(other_order)


def other_order(here: Here) -> None:
    """A kernel that takes the word and gives blocks all the same."""
    real = operators.IMPLEMENTED["npu_fusion_attention"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(
            operators.IMPLEMENTED, "npu_fusion_attention", lambda given: real(given | {"softmax_layout": ""})
        )
        with cann_without():
            Checked(kernel(), PARTS, tile_of(PARTS)).check()
            assert npu_trials._refused(kernel()._forward, torch.device("npu", 0)) is not None
    fresh(WITH_LAYOUT)


def test_without_the_argument_nothing_is_tried(npus: NpuPools) -> None:
    npus(1)(untried)


def untried(here: Here) -> None:
    with cann_without(offer=WITHOUT_LAYOUT):
        Checked(kernel(), PARTS, tile_of(PARTS)).check()
        assert len(calls) == 3
