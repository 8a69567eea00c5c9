"""What parts of ci/gpu share: one call of a kernel over the whole sequence, and the clocks."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping

import torch

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import AttentionKernel, Tiles
from tokenring.runtime.bound_kernel import held
from tokenring.sequence.region import Patch

Tensors = tuple[torch.Tensor, ...]
Work = Callable[[], object]
WARM_UP = 2  # rounds that do not count: kernels load, tune and allocate


def one_call(kernel: AttentionKernel, given: Tensors, patch: Patch, scale: float) -> Tensors:
    """out, dq, dk, dv of the whole sequence in one call, in the dtype of the inputs; [B, T, H, D]."""
    q, k, v, dout = (x.transpose(1, 2) for x in given)
    out, lse = kernel.forward(q, k, v, patch=patch, scale=scale)
    out = out.to(q.dtype)
    gradients = kernel.backward(dout, q, k, v, lse, None, out=out, patch=patch, scale=scale)
    return tuple(x.to(q.dtype).transpose(1, 2) for x in (out, *gradients))


def one_call_seconds(
    kernel: AttentionKernel, given: Tensors, patch: Patch, scale: float, rounds: int
) -> tuple[float, float]:
    """Of forward, and of both passes; given [B, T, H, D]."""
    q, k, v, _ = (x.transpose(1, 2) for x in given)
    device = q.device
    kernel = held(kernel, Tiles((patch,), "forward", q.shape[-1], q.dtype, device))
    forward = seconds(lambda: kernel.forward(q, k, v, patch=patch, scale=scale), device, rounds)
    return forward, seconds(lambda: one_call(kernel, given, patch, scale), device, rounds)


def seconds(work: Work, device: torch.device, rounds: int) -> float:
    """The median over some rounds of the device's own work, which the host runs ahead of."""
    return in_turn({"it": work}, device, rounds)["it"]


def in_turn(works: Mapping[str, Work], device: torch.device, rounds: int, calls: int = 1) -> dict[str, float]:
    """Of one call of each: medians of rounds that take turns, with so many calls between two looks at the clock."""
    clock = device_of(device).clock
    found: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + WARM_UP):
        for name, work in works.items():
            began = clock()
            for _ in range(calls):
                work()
            if turn >= WARM_UP:
                found[name].append((clock() - began) / calls)
    return {name: statistics.median(times) for name, times in found.items()}


def stream_seconds(work: Work, rounds: int, before: Work = lambda: None) -> float:
    """Of what `work` puts into the current stream, by events; `before` is queued first, on whatever stream."""
    times: list[float] = []
    for turn in range(rounds + WARM_UP):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        before()
        began.record()
        work()
        ended.record()
        torch.cuda.synchronize()
        if turn >= WARM_UP:
            times.append(1e-3 * float(began.elapsed_time(ended)))
    return statistics.median(times)
