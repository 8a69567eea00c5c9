"""A device whose work is done late, on stock torch: what is queued happens when somebody waits for it.

It stands in for torch.cuda and torch.npu in tests of whatever must wait: `install` puts it in place of
`torch.privateuseone`, the type that torch keeps for backends of others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import torch

TYPE = "privateuseone"


class Stream:
    """Work in order, each done no earlier than when the one before is."""

    def __init__(self, device: int = 0, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.busy_until = 0.0

    def queue(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.busy_until - time.perf_counter()))


class LateModule(ModuleType):
    """The names that torch.cuda and torch.npu share."""

    def __init__(self) -> None:
        super().__init__(f"torch.{TYPE}")
        self.streams = [Stream()]
        self.current = self.streams[0]

    def Stream(self, device: int = 0, priority: int = 0) -> Stream:
        self.streams.append(Stream(device, priority))
        return self.streams[-1]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def current_stream(self, device: int | None = None) -> Any:
        return self.current

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self, device: int | None = None) -> None:
        for each in self.streams:
            each.synchronize()

    def get_device_name(self, device: int | None = None) -> str:
        return "a late device"

    def mem_get_info(self, device: int | None = None) -> tuple[int, int]:
        return 3 << 30, 4 << 30

    def memory_allocated(self, device: int | None = None) -> int:
        return 1 << 20


def _module() -> Any:
    return getattr(torch, TYPE)


def install(monkeypatch: pytest.MonkeyPatch) -> LateModule:
    """The module, in its place for the time of a test."""
    made = LateModule()
    monkeypatch.setattr(torch, TYPE, made, raising=False)
    return made


def late(module: LateModule, seconds: float) -> Callable[..., torch.Tensor]:
    """A kernel that returns at once and whose work takes so long: it gives back its first input."""

    def call(first: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        module.current_stream().queue(seconds)
        return first * 1.0

    return call
