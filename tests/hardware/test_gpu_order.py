"""ci/gpu's parts for kernels and times: what says most comes first, and what there was no time for says so."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from test_gpu_kernels import lines, script

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "hardware" / "gpu"))

import gpu_times  # noqa: E402

__all__ = ["script"]  # the fixture


def test_rates_come_before_suites(script: Any) -> None:
    """What builds few of cuDNN's graphs comes before what builds hundreds."""
    names = [name for name in lines(script) if not name.startswith("kernel ")]
    kinds = [next(kind for kind in ("one call", "error", "suite") if kind in name) for name in names]
    assert kinds == sorted(kinds, key=["one call", "error", "suite"].index) and set(kinds) > {"one call", "suite"}


def test_a_suite_that_there_is_no_time_for(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tries a tile at least, says how many it did not try, and is no success; what is wrong stays wrong."""
    kernel = script.make_kernel("torch-flash", torch.device("cpu"))
    monkeypatch.setattr(script, "check", lambda *given: None)
    assert script._suite(kernel, torch.bfloat16, "cpu", 0.0)() == ("1 of 1 tiles; no time for 3 more", None)
    assert script._suite(kernel, torch.bfloat16, "cpu", 600.0)() == ("4 of 4 tiles", True)

    def wrong(*given: Any) -> None:
        raise AssertionError("lse is off")

    monkeypatch.setattr(script, "check", wrong)
    value, met = script._suite(kernel, torch.bfloat16, "cpu", 0.0)()
    assert met is False and value.startswith("0 of 1 tiles; ") and value.endswith("; no time for 3 more")


def test_kernels_that_there_is_no_time_for(script: Any) -> None:
    """Rates are measured all the same; every other line says that it was not."""
    said: dict[str, tuple[str, bool | None]] = {}
    given = script.run

    def short(report: Any, device: str, length: int) -> None:
        given(report, device, length, 0.0)

    script.run = short
    said = {name: (value, met) for name, (value, _, met) in lines(script).items()}
    timed = {name: each for name, each in said.items() if name.startswith("one call")}
    assert len(timed) == 2 and all("TFLOP/s" in value for value, _ in timed.values())
    others = {name: each for name, each in said.items() if "suite" in name or "error" in name}
    assert len(others) >= 8 and set(others.values()) == {("no time was left", False)}


def test_times_that_there_is_no_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started; each line says so."""
    said: list[tuple[str, bool | None]] = []

    def report(name: str, value: str, limit: str, met: bool | None) -> None:
        said.append((value, met))

    device, past = torch.device("cpu"), time.monotonic() - 1.0
    monkeypatch.setattr(gpu_times, "HEADS", 8)
    monkeypatch.setattr(gpu_times, "DIM", 16)
    gpu_times.host_times(report, gpu_times.steps(device), device, past)
    gpu_times.sum_of_ranks(report, device, 256, past)
    assert said == [("no time was left", False)] * (4 + 1 + len(gpu_times.SCHEDULES))
