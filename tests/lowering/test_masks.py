"""Masks of kernels: a program holds those that it reads, and nobody meets one that may not be complete."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ascend import module
from ascend.operators import calls, register
from ascend.ranks import NpuPools
from cuda_ops.aten import operators
from ranks import Here

from tokenring import Causal, ContextParallel, Documents, SlidingWindow, Workload, attention
from tokenring.backends.devices import Cpu
from tokenring.backends.kernels import flex, masks, torch_cuda
from tokenring.backends.kernels.auto import Choosing
from tokenring.backends.kernels.flex import Flex
from tokenring.backends.kernels.torch_cuda import TorchEfficient
from tokenring.lowering.lower import lower
from tokenring.runtime.call import ActiveCall
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.schedule.names import named_schedule
from tokenring.sequence.layout import make_layout

CPU = torch.device("cpu")
TOKENS, HEADS, DIM = 32, 2, 16
Made = list["weakref.ref[torch.Tensor]"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """Every bias that is made, over operators that stand in for CUDA's."""
    found: Made = []
    whole = torch_cuda.bias

    def noted(*what: Any) -> torch.Tensor:
        bias = whole(*what)
        found.append(weakref.ref(bias))
        return bias

    monkeypatch.setattr(torch_cuda, "bias", noted)
    with operators():
        yield found


def auto() -> Choosing:
    """As one kernel for all programs of a device."""
    return Choosing(("torch-efficient",), lambda name: TorchEfficient(), lambda *_: None)


def bound(kernel: Any, window: int) -> Executor:
    """A forward pass of one rank, whose tile is a band."""
    size = Workload(1, TOKENS, TOKENS, HEADS, HEADS, DIM, torch.float32)
    layout = make_layout("contiguous", 1, TOKENS)
    schedule = named_schedule("ring", size, layout, layout, SlidingWindow(window), None)
    program = lower(schedule, 0, "forward", size, supports=kernel.supports_patch)
    return Executor(schedule, size, program, Pool(CPU), None, kernel, 0.25)


def run(executor: Executor) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    call = ActiveCall({name: torch.randn(1, TOKENS, HEADS, DIM, generator=random) for name in ("q", "k", "v")})
    executor.run(call)
    return executor.result(call, "q_partial", "out").clone()


def alive(found: Made) -> list[bool]:
    gc.collect()
    return [each() is not None for each in found]


def test_a_mask_lives_as_long_as_the_program_that_reads_it(made: Made) -> None:
    """However many others are computed meanwhile: a captured graph reads the same memory again. And no longer."""
    kernel = auto()
    first = bound(kernel, 3)
    wanted = run(first)
    mine = list(made)
    for window in range(4, 16):
        run(bound(kernel, window))
    assert mine and all(alive(mine))
    assert torch.equal(run(first), wanted)
    del first
    assert not any(alive(made))


def test_a_run_makes_no_masks(made: Made) -> None:
    """Not even the first: what it made would be part of a graph that captures it."""
    executor = bound(auto(), 3)
    count = len(made)
    run(executor), run(executor)
    assert len(made) == count > 0


def test_what_no_program_holds_is_made_for_the_call(made: Made) -> None:
    """As beyond the bytes that one may hold: right all the same."""
    wanted, count = run(bound(auto(), 3)), len(made)
    assert not any(alive(made))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TorchEfficient, "most_held_bytes", 100, raising=False)
        executor = bound(auto(), 3)
        assert len(made) == count
        assert torch.equal(run(executor), wanted)
        assert len(made) > count and not any(alive(made))


class Waiting(Cpu):
    """Whose host is about to wait for the device: `meanwhile` another program is bound."""

    def __init__(self, meanwhile: Any) -> None:
        self.meanwhile = meanwhile
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1
        meanwhile, self.meanwhile = self.meanwhile, lambda: None
        meanwhile()


def test_nobody_meets_a_mask_that_is_not_complete(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """On another stream it may not be written yet, until the device was waited for; from then on programs share it."""
    kernel, others = auto(), []
    device = Waiting(lambda: others.append(bound(kernel, 3)))
    monkeypatch.setattr(masks, "device_of", lambda where: device)
    one = bound(kernel, 3)
    assert device.waits == len(made) == 2
    two = bound(kernel, 3)
    assert torch.equal(run(one), run(two)) and torch.equal(run(one), run(others[0]))
    assert device.waits == len(made) == 2


def test_flex_holds_its_block_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    whole = flex.block_mask

    def noted(*what: Any) -> Any:
        made.append(what)
        return whole(*what)

    monkeypatch.setattr(flex, "block_mask", noted)
    executor = bound(Flex(compiled=False), 3)
    assert len(made) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        run(executor), run(executor)
    assert len(made) == 1


def triangles(here: Here) -> tuple[int, list[str]]:
    """How many there are in all passes of two calls, packed ones too, and how often the host waited for the device."""
    register("2.13.0")
    q, k, v = (torch.randn(1, 32, 2, 16).to("npu").requires_grad_() for _ in range(3))
    dout, pointers, waits = torch.randn(1, 32, 2, 16).to("npu"), set(), []
    with ContextParallel() as cp:
        for turn in range(2):
            for mask in (Causal(), Documents([0, 9, 20]) & Causal()):
                calls.clear()
                module.noted.clear()
                torch.autograd.backward(attention(q, k, v, cp=cp, mask=mask), dout)
                waits += [f"{turn}" for what, *_ in module.noted if what == "synchronize"]
                masks = [call.arguments.get("atten_mask") for call in calls]
                pointers |= {each.data_ptr() for each in masks if each is not None}  # else of a trial
    return len(pointers), waits


def test_the_triangle_of_npus_is_made_once(npus: NpuPools) -> None:
    """When the first program is bound, and then waited for: it may be read on any stream."""
    assert npus(1)(triangles) == [(1, ["0"])]
