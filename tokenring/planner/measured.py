"""Rates of a kernel on this machine's device, measured once and kept: `tokenring rates`, or `measured_rates` below.

A table is of one device model, kernel, dtype and head dimension. The planner takes it where it finds one; else it
reckons with published figures. It never measures by itself: a plan is the same whenever it is made.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from tokenring.backends.base import AttentionKernel
from tokenring.backends.devices import Device, device_of
from tokenring.backends.mergers import merger_for
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.planner.rates import Rates, Sample
from tokenring.region import Patch
from tokenring.schedule.ir import PASSES, Pass
from tokenring.schedule.measure import FLOPS_PER_PAIR
from tokenring.topology.cache import cache_folder, write_whole

VERSION = 1
HEADS = 8
SIDES = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # tokens on a side of a square tile
ROUNDS = 5
SECONDS = 1.0  # of one call of a pass: larger tiles are not measured
QUEUED_SECONDS, MOST_QUEUED = 0.02, 50  # calls between two readings of the clock
KNOWN = 4  # times a call's own cost: above, the rest is the kernel's
COPY_BYTES = 64 << 20


@dataclass(frozen=True)
class Key:
    """What a table is of. device: the model's name, as torch or the operating system tells it; a CPU's with threads."""

    device: str
    kernel: str
    dtype: str
    head_dim: int
    torch: str

    @property
    def file_name(self) -> str:
        return f"rates-{hashlib.sha256(repr(self).encode()).hexdigest()[:16]}.json"

    def __str__(self) -> str:
        return f"{self.kernel} on {self.device}, {self.dtype}, head dim {self.head_dim}, torch {self.torch}"


def key_of(kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> Key:
    """The key of the table for such calls on this machine, with as many threads as this process has."""
    name = device_of(device).name
    if device.type == "cpu":
        name += f", {torch.get_num_threads()} threads"
    return Key(name, kernel.name, str(dtype).removeprefix("torch."), head_dim, torch.__version__)


# ---------- measuring


def measured_rates(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, seconds: float = SECONDS
) -> Rates:
    """Time square, full tiles of `HEADS` heads forward and backward, doubling until a call takes `seconds`.

    The shortest tile's call, less what its flops take at the rate of the longest, is what a call costs by itself.
    Raises UnsupportedError for what the kernel cannot compute.
    """
    if reason := kernel.supports(head_dim, dtype):
        raise UnsupportedError(f"kernel {kernel.name!r} cannot be measured: {reason}")
    clock = device_of(device)
    found = {d: list(_samples(kernel, device, dtype, head_dim, d, clock, seconds)) for d in PASSES}
    calls = min(_call_seconds(found[direction], head_dim, direction) for direction in PASSES)
    forward, backward = (_without_call(found[direction], head_dim, direction, calls) for direction in PASSES)
    copy_gbs, operation = _copies(device, clock)
    source = f"measured: {key_of(kernel, device, dtype, head_dim)}"
    return Rates(source, forward, backward, calls, copy_gbs, operation)


def _samples(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, direction: Pass, clock: Device,
    limit: float,
) -> Iterator[tuple[int, float]]:  # fmt: skip
    """Tokens on a side, and the seconds of a call."""
    for side in SIDES:
        try:
            taken = timed(_call(kernel, device, dtype, head_dim, side, direction), clock)
        except torch.OutOfMemoryError:  # what is measured so far will do
            return
        yield side, taken
        if 4 * taken > limit:  # what the next one would take
            return


def _call(
    kernel: AttentionKernel, device: torch.device, dtype: torch.dtype, head_dim: int, side: int, direction: Pass
) -> Callable[[], object]:
    made = torch.Generator().manual_seed(side)
    q, k, v, dout = (torch.randn(1, HEADS, side, head_dim, generator=made).to(device, dtype) for _ in range(4))
    patch, scale = Patch(0, side, 0, side), 1 / math.sqrt(head_dim)
    if direction == "forward":
        return lambda: kernel.forward(q, k, v, patch=patch, scale=scale)
    out, lse = kernel.forward(q, k, v, patch=patch, scale=scale)
    return lambda: kernel.backward(dout, q, k, v, lse, None, out=out, patch=patch, scale=scale)


def timed(call: Callable[[], object], clock: Device) -> float:
    """Seconds of a call among others: the median of some rounds, after a warm-up.

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


def _flops(side: int, head_dim: int, direction: Pass) -> float:
    return float(FLOPS_PER_PAIR[direction] * HEADS * head_dim * side * side)


def _call_seconds(found: list[tuple[int, float]], head_dim: int, direction: Pass) -> float:
    """What a call takes whatever its size."""
    (small, least), (large, most) = found[0], found[-1]
    rate = _flops(large, head_dim, direction) / most
    return max(0.0, least - _flops(small, head_dim, direction) / rate)


def _without_call(
    found: list[tuple[int, float]], head_dim: int, direction: Pass, call_seconds: float
) -> tuple[Sample, ...]:
    """TFLOP/s by side, so that a call and its flops together take what was measured.

    Where a call takes little longer than any, nothing is known of the rate: it is at most that of the longer ones.
    """
    rates = {
        side: _flops(side, head_dim, direction) / max(taken - call_seconds, 0.05 * taken) / 1e12
        for side, taken in found
    }
    side, taken = found[-1]
    known = [rates[side] for side, taken in found if taken > KNOWN * call_seconds]
    known = known or [_flops(side, head_dim, direction) / taken / 1e12]
    return tuple((side, min(rate, max(known))) for side, rate in rates.items())


def _copies(device: torch.device, clock: Device) -> tuple[float, float]:
    """GB/s that a copy reads and writes together, and the seconds of a small merge."""
    source = torch.zeros(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    gbs = 2 * COPY_BYTES / timed(lambda: target.copy_(source), clock) / 1e9
    out, lse = torch.zeros(16, 1, HEADS, 64, device=device), torch.zeros(16, 1, HEADS, device=device)
    scratch = torch.zeros(2, 16, 1, HEADS, device=device)
    merge_ = merger_for(device, 64).merge_
    return gbs, timed(lambda: merge_(out, lse, out, lse, scratch), clock)


# ---------- keeping


def keep(rates: Rates, key: Key, environment: Mapping[str, str]) -> Path | None:
    """Write a table into the user's cache; the file, or None where there is no home. Raises ConfigurationError."""
    document = {"version": VERSION, "key": asdict(key), "rates": asdict(rates)}
    return keep_document(key.file_name, json.dumps(document, indent=2) + "\n", environment)


def keep_document(name: str, text: str, environment: Mapping[str, str]) -> Path | None:
    """Write a file of what was measured into the user's cache. Raises ConfigurationError."""
    folder = cache_folder(environment)
    if folder is None:
        return None
    try:
        write_whole(folder / name, text)
    except OSError as error:
        raise ConfigurationError(f"cannot keep rates in {folder}: {error.strerror}: who may write there?") from None
    return folder / name


def kept(key: Key, environment: Mapping[str, str] | None = None) -> Rates | None:
    """The table that was kept for a key, if there is one that can be read."""
    folder = cache_folder(os.environ if environment is None else environment)
    if folder is None:
        return None
    try:
        found, rates = read_table(folder / key.file_name)
    except ConfigurationError:
        return None  # broken or of another version: as if there were none
    return rates if found == key else None


def read_table(path: Path) -> tuple[Key, Rates]:
    """A table that was kept. Raises ConfigurationError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']!r}, not {VERSION}")
        values = found["rates"]
        samples = {name: tuple((int(side), float(rate)) for side, rate in values[name]) for name in PASSES}
        return Key(**found["key"]), Rates(**{**values, **samples})
    except OSError as error:
        raise ConfigurationError(f"cannot read rates from {str(path)!r}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{str(path)!r} is no table of rates ({error}): make one with `tokenring rates`"
        ) from None
