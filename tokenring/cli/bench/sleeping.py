"""Kernels that sleep: for emulated links, where many ranks would fight over few cores.

Only the benchmark has them: no user can choose one by name. What they return has the right shapes, and is zero.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from tokenring.api.context import ContextParallel
from tokenring.lowering.footprint import flops_per_pair
from tokenring.sequence.region import Patch

PR_SET_TIMERSLACK = 29
MOST_OVERSLEPT_SECONDS = 0.002


class Sleeping:
    """An attention kernel that takes the time of one of so many TFLOP/s, and computes nothing.

    call_seconds: that each call takes beside, as a launch does.
    """

    name = "sleeping"

    def __init__(self, tflops: float, call_seconds: float = 0.0) -> None:
        self.flops_per_s, self.call_seconds = tflops * 1e12, call_seconds
        self._overslept = 0.0
        if sys.platform == "linux":  # else a thread's sleep may be 50 µs longer than asked
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, 1)

    def supports(self, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return None: it takes every head dim and dtype."""
        return None

    def supports_widths(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
        """Return None: it takes values of any width."""
        return None

    def supports_patch(self, patch: Patch) -> str | None:
        """Return None: it takes every patch."""
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros for out and lse [B, H, S] after the time that forward takes at the kernel's rate."""
        began = time.perf_counter()
        batch, heads, rows, dim = q.shape
        out, lse = _zeros(q, v.shape[-1]), torch.zeros(batch, rows, heads).transpose(1, 2)
        self._sleep(began, flops_per_pair("forward", dim, v.shape[-1]) * batch * heads * patch.pairs())
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        *,
        out: torch.Tensor | None = None,
        patch: Patch,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return zeros for dq, dk and dv after the time that backward takes at the kernel's rate."""
        began = time.perf_counter()
        batch, heads, _, dim = q.shape
        made = _zeros(q, dim), _zeros(k, dim), _zeros(v, v.shape[-1])
        self._sleep(began, flops_per_pair("backward", dim, v.shape[-1]) * batch * heads * patch.pairs())
        return made

    def _sleep(self, began: float, flops: float) -> None:
        """Sleep until the operations would be done; what a sleep was too long shortens the next ones, within limits."""
        end = began + self.call_seconds + flops / self.flops_per_s - self._overslept
        if (left := end - time.perf_counter()) > 0:
            time.sleep(left)
        self._overslept = min(MOST_OVERSLEPT_SECONDS, time.perf_counter() - end)


class SleepingContext(ContextParallel):
    """A ContextParallel whose kernel sleeps."""

    def __init__(self, tflops: float, call_seconds: float = 0.0, **options: Any) -> None:
        super().__init__(**options)
        self._sleeping = Sleeping(tflops, call_seconds)

    def kernel(self, device: torch.device) -> Sleeping:
        """Return the sleeping kernel, for any device."""
        return self._sleeping


class SleepingPartial:
    """The kernel of cached attention, which takes the time of one of so many TFLOP/s and computes nothing."""

    def __init__(self, tflops: float) -> None:
        self.kernel = Sleeping(tflops)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor | None, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros as of `cached_partial`."""
        return self.flash(q, k, v)

    def flash(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: object, scale: float = 0.0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return zeros for out [B, H, T, Dv] and lse [B, H, T]."""
        began = time.perf_counter()
        batch, heads, tokens, dim = q.shape
        made = torch.zeros(batch, heads, tokens, v.shape[-1]), torch.zeros(batch, heads, tokens)
        self.kernel._sleep(began, 2.0 * batch * heads * tokens * k.shape[2] * (dim + v.shape[-1]))
        return made


@contextmanager
def cached_kernels(kernel: Any, flash: Any) -> Iterator[None]:
    """Let steps over a cache call `kernel` for `cached_partial`, and `flash` for torch's operator of one token."""
    from tokenring.api.caching import attending, one_token, rows

    names = {(attending, "cached_partial"): kernel, (rows, "cached_partial"): kernel, (one_token, "FLASH"): flash}
    with replaced(names):
        yield


@contextmanager
def replaced(names: Mapping[tuple[ModuleType, str], Any]) -> Iterator[None]:
    """Let modules hold other values under these names."""
    before = {(module, name): getattr(module, name) for module, name in names}
    for (module, name), value in names.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


def _zeros(like_BHSD: torch.Tensor, dim: int) -> torch.Tensor:
    """Return zeros in fp32 of this width, with heads inside rows, as torch's own kernel returns them."""
    batch, heads, rows, _ = like_BHSD.shape
    return torch.zeros(batch, rows, heads, dim).transpose(1, 2)
