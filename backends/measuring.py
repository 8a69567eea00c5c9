"""Measure what this machine's kernels do."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import NamedTuple

import torch

from tokenring.backends.devices import DeviceRuntime, device_of
from tokenring.backends.interfaces import AttentionKernel, refusal_of
from tokenring.backends.merging.choice import merger_for
from tokenring.backends.table_keys import key_of
from tokenring.errors import UnsupportedError
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.footprint import flops_per_pair
from tokenring.sequence.region import Patch
from tokenring.tables.launching import KERNELS, Launching
from tokenring.tables.rates import Rates, Sample

HEADS = 8
SIDES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens on a side of a square tile
ROUNDS = 5
SECONDS = 1.0  # of one call of a pass: larger tiles are not measured
QUEUED_SECONDS, MOST_QUEUED = 0.02, 50  # calls between two readings of the clock
KNOWN = 4  # times a call's own cost: above, the rest is the kernel's
COPY_BYTES = 64 << 20
SMALL = 1024  # numbers, which no device needs long to copy


class Dims(NamedTuple):
    """The head dims of q and k, and of v and out."""

    of_keys: int
    of_values: int


def measured_rates(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, seconds: float = SECONDS,
    value_dim: int | None = None,
) -> Rates:  # fmt: skip
    """Time square, full tiles of `HEADS` heads forward and backward, doubling until a call takes `seconds`.

    value_dim: the head dim of v; None: that of q and k.

    The shortest tile's call, less what its flops take at the rate of the longest, is what a call costs by itself.
    Raises UnsupportedError for what the kernel cannot compute.
    """
    dims = Dims(head_dim, head_dim if value_dim is None else value_dim)
    if reason := refusal_of(kernel, *dims, dtype):
        raise UnsupportedError(f"kernel {kernel.name!r} cannot be measured: {reason}")
    clock = device_of(device)
    found = {d: list(_samples(kernel, device, dtype, dims, d, clock, seconds)) for d in PASSES}
    calls = min(_call_seconds(found[direction], dims, direction) for direction in PASSES)
    forward, backward = (_without_call(found[direction], dims, direction, calls) for direction in PASSES)
    copy_gbs, operation = _copies(device, clock)
    merge = max(0.0, _merge_seconds(device, clock) - operation)
    launching = _launching(kernel, device, clock)
    if launching is not None:  # operators around the kernel, and those of a merge, are counted one by one
        calls, merge = max(0.0, calls - (launching.of_kernel.forward - 1) * operation), 0.0
    source = f"measured: {key_of(kernel, device, dtype, *dims)}"
    return Rates(source, forward, backward, calls, copy_gbs, operation, merge, launching)


def _samples(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, dims: Dims, direction: Pass,
    clock: DeviceRuntime, limit: float,
) -> Iterator[tuple[int, float]]:  # fmt: skip
    """Yield the tokens on a side, and the seconds of a call."""
    for side in SIDES:
        try:
            taken = timed(_call(kernel, device, dtype, dims, side, direction), clock)
        except torch.OutOfMemoryError:  # what is measured so far will do
            return
        yield side, taken
        if 4 * taken > limit:  # what the next one would take
            return


def _call(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, dims: Dims, side: int, direction: Pass
) -> Callable[[], object]:
    made = torch.Generator().manual_seed(side)
    widths = dims.of_keys, dims.of_keys, dims.of_values, dims.of_values
    q, k, v, dout = (torch.randn(1, HEADS, side, dim, generator=made).to(device, dtype) for dim in widths)
    patch, scale = Patch(0, side, 0, side), 1 / math.sqrt(dims.of_keys)
    if direction == "forward":
        return lambda: kernel.forward(q, k, v, patch=patch, scale=scale)
    out, lse = kernel.forward(q, k, v, patch=patch, scale=scale)
    return lambda: kernel.backward(dout, q, k, v, lse, None, out=out, patch=patch, scale=scale)


def timed(call: Callable[[], object], clock: DeviceRuntime) -> float:
    """Return the seconds of a call among others: the median of some rounds, after a warm-up.

    Short calls are queued one after another, as schedules do: between two readings of the clock a device that works
    behind the host's back would be waited for each time.
    """
    call()
    began = clock.clock()
    call()
    many = max(1, min(MOST_QUEUED, round(QUEUED_SECONDS / max(clock.clock() - began, 1e-9))))
    taken = []
    for _ in range(ROUNDS):
        began = clock.clock()
        for _ in range(many):
            call()
        taken.append((clock.clock() - began) / many)
    return median(taken)


def _flops(side: int, dims: Dims, direction: Pass) -> float:
    return float(flops_per_pair(direction, *dims) * HEADS * side * side)


def _call_seconds(found: list[tuple[int, float]], dims: Dims, direction: Pass) -> float:
    """Return the seconds that a call takes whatever its size."""
    (small, least), (large, most) = found[0], found[-1]
    rate = _flops(large, dims, direction) / most
    return max(0.0, least - _flops(small, dims, direction) / rate)


def _without_call(
    found: list[tuple[int, float]], dims: Dims, direction: Pass, call_seconds: float
) -> tuple[Sample, ...]:
    """Return TFLOP/s by side, so that a call and its flops together take what was measured.

    Where a call takes little longer than any, nothing is known of the rate: it is at most that of the longer ones.
    """
    rates = {
        side: _flops(side, dims, direction) / max(taken - call_seconds, 0.05 * taken) / 1e12
        for side, taken in found
    }
    side, taken = found[-1]
    known = [rates[side] for side, taken in found if taken > KNOWN * call_seconds]
    known = known or [_flops(side, dims, direction) / taken / 1e12]
    return tuple((side, min(rate, max(known))) for side, rate in rates.items())


def _copies(device: torch.device, clock: DeviceRuntime) -> tuple[float, float]:
    """Return the GB/s that a copy reads and writes together, and the seconds of a small one."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    gbs = 2 * COPY_BYTES / timed(lambda: target.copy_(source), clock) / 1e9
    return gbs, timed(_small_copy(device), clock)


def _small_copy(device: torch.device) -> Callable[[], object]:
    source, target = torch.zeros(SMALL, device=device), torch.zeros(SMALL, device=device)
    return lambda: target.copy_(source)


def _merge_seconds(device: torch.device, clock: DeviceRuntime) -> float:
    """Return the seconds of a small merge, by log-sum-exp."""
    out, lse = torch.zeros(16, 1, HEADS, 64, device=device), torch.zeros(16, 1, HEADS, device=device)
    scratch = torch.zeros(2, 16, 1, HEADS, device=device)
    merge_ = merger_for(device, 64).merge_
    return timed(lambda: merge_(out, lse, out, lse, scratch), clock)


def _launching(kernel: AttentionKernel, device: torch.device, clock: DeviceRuntime) -> Launching | None:
    """Return what a launch takes the host, where the kernel's are counted: small copies, for whose end nobody waits."""
    if kernel.name not in KERNELS:
        return None
    launch, taken = _small_copy(device), []
    for _ in range(ROUNDS):
        launch()
        clock.clock()  # what was launched before is done
        began = time.perf_counter()
        for _ in range(MOST_QUEUED):
            launch()
        taken.append((time.perf_counter() - began) / MOST_QUEUED)
    return Launching(median(taken), kernel.name)
