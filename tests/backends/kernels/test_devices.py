"""The device interface: clocks wait for work, types are those that tensors say."""

from __future__ import annotations

from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from late_device import TYPE, LateModule, install, late
from patience import patient

from tokenring.backends import devices
from tokenring.backends.devices import (
    Accelerator,
    Cpu,
    DeviceMemory,
    DeviceRuntime,
    accelerator_types,
    device_of,
    has_device,
)
from tokenring.cli.bench.candidates import Runner
from tokenring.cli.bench.race import timed_call
from tokenring.errors import BackendUnavailable
from tokenring.topology.probing.device_identity import this_seat


def work_seconds() -> float:
    """How long the device works: longer than the host may be held up meanwhile."""
    return patient(0.03)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> LateModule:
    return install(monkeypatch)


@pytest.fixture
def device(module: LateModule) -> DeviceRuntime:
    return device_of(f"{TYPE}:0")


class Impatient(Accelerator):
    """A mutant: it reads the clock without waiting."""

    def clock(self) -> float:
        return perf_counter()

    stream_clock = clock


# ---------- clocks


def bench_seconds(module: LateModule, device: DeviceRuntime) -> tuple[float, float]:
    x = torch.ones(2, requires_grad=True)
    runner = Runner("late", torch.arange(2), late(module, work_seconds()))
    forward, whole, _ = timed_call(runner, [x, x, x, torch.ones(2)], False, None, device)
    return forward, whole


def test_bench_waits_for_the_device(module: LateModule, device: DeviceRuntime) -> None:
    forward, whole = bench_seconds(module, device)
    assert work_seconds() <= forward <= whole < 20 * work_seconds()


def test_a_clock_that_does_not_wait_is_found_out(module: LateModule) -> None:
    forward, _ = bench_seconds(module, Impatient(torch.device(TYPE, 0)))
    assert forward < work_seconds()


def test_each_clock_waits_for_what_it_says(module: LateModule, device: DeviceRuntime) -> None:
    """The stream's clock does not wait for moves on other streams, the device's does."""
    other = device.new_stream()
    with device.on(other):
        late(module, patient(0.2))(torch.ones(1))
    began = perf_counter()
    assert device.stream_clock() - began < patient(0.1)
    assert device.clock() - began >= patient(0.15)


def test_trace_times_what_the_device_did(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, no transport: the kernel's event is as long as the device took, not as its launch took."""
    module = LateModule()
    took = traced_seconds(monkeypatch, module, module.current_stream().synchronize)
    assert took >= work_seconds()
    assert traced_seconds(monkeypatch, LateModule(), lambda: None) < work_seconds()  # the mutant


def traced_seconds(monkeypatch: pytest.MonkeyPatch, module: LateModule, wait: Any) -> float:
    import tokenring as tr
    from tokenring.backends.kernels.reference import Reference

    def clock() -> float:
        wait()
        return perf_counter()

    real = Reference.forward

    def forward(self: Reference, *tensors: Any, **how: Any) -> Any:
        module.current_stream().queue(work_seconds())
        return real(self, *tensors, **how)

    monkeypatch.setattr(Reference, "forward", forward)
    monkeypatch.setattr("tokenring.runtime.call.device_of", lambda x: SimpleNamespace(stream_clock=clock))
    q = torch.randn(1, 8, 2, 4)
    with tr.ContextParallel(kernel="reference") as cp, cp.trace() as seen:
        tr.attention(q, q, q, cp)
    monkeypatch.undo()
    return seen.split_seconds()["compute"]


# ---------- the rest of the interface


def test_streams_memory_and_name(module: LateModule, device: DeviceRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (device.type, device.name) == (TYPE, "a late device")
    assert (device.new_stream().priority, device.new_stream(high_priority=True).priority) == (0, -1)
    assert device.current_stream() is module.streams[0]
    asked: list[int] = []
    told = module.mem_get_info

    def counted(index: int) -> Any:
        asked.append(index)
        return told(index)

    monkeypatch.setattr(module, "mem_get_info", counted)
    assert device.memory() == DeviceMemory(1 << 20, 3 << 30, 4 << 30)
    assert len(asked) == 1


def test_cpu_is_never_behind() -> None:
    device: DeviceRuntime = device_of(torch.ones(1))
    assert isinstance(device, Cpu)
    assert device.type == "cpu"
    device.synchronize()
    with device.on(None):
        assert device.current_stream() is device.new_stream() is None
    assert device.stream_clock() <= device.clock() <= perf_counter()
    assert device.memory() == DeviceMemory(None, None, None)
    assert device.name


# ---------- which devices there are


def test_types_that_are_not_here() -> None:
    assert has_device("cpu")
    assert not has_device("npu")  # no torch.npu
    assert not has_device("nonsense")


def test_an_alias_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under transfer_to_npu: torch.cuda says that it is there, and its tensors are of another type."""
    real_empty = torch.empty
    alias = SimpleNamespace(is_available=lambda: True, current_device=lambda: 0, device_count=lambda: 8)
    monkeypatch.setattr(torch, "cuda", alias)

    def empty(*size: int, device: str | None = None, **options: Any) -> Any:
        if device == "cuda":
            return SimpleNamespace(device=SimpleNamespace(type="npu"))
        return real_empty(*size, device=device, **options)

    monkeypatch.setattr(torch, "empty", empty)
    assert torch.cuda.is_available()  # what must not be asked
    assert not has_device("cuda")
    assert "cuda" not in accelerator_types()
    assert this_seat().kind == "cpu"


def test_a_device_without_its_package_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match=r"no module torch\.privateuseone; import its package"):
        device_of(TYPE)


def test_a_device_that_is_there(monkeypatch: pytest.MonkeyPatch, module: LateModule) -> None:
    made = SimpleNamespace(device=SimpleNamespace(type=TYPE))
    monkeypatch.setattr(torch, "empty", lambda *size, device=None: made)
    monkeypatch.setattr(devices, "ACCELERATORS", (TYPE,))
    assert accelerator_types() == [TYPE]
