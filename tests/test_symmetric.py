"""What torch's symmetric memory and the driver are called with, on stand-ins; ci/gpu_transports without a GPU."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C import _distributed_c10d

from tokenring.backends import driver
from tokenring.backends.symmetric import SymmetricMemory

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "ci"))

import gpu_transports  # noqa: E402

WORDS, STREAM, DEVICE = 16, 77, 3
Calls = list[tuple[Any, ...]]


class Handle:
    """Buffers of two ranks, of which the tensor that was rendezvoused is the first's."""

    def __init__(self, own: torch.Tensor) -> None:
        self.buffers = [own, torch.zeros_like(own)]

    def get_buffer(self, rank: int, sizes: Any, dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        (count,) = sizes
        return self.buffers[rank].view(dtype)[storage_offset : storage_offset + count]


class Symmetric:
    """As torch._C._distributed_c10d._SymmetricMemory, of what is used."""

    backend: str | None = "CUDA"

    def __init__(self, calls: Calls) -> None:
        self.calls, self.handles = calls, list[Handle]()

    def get_backend(self, device: torch.device) -> str | None:
        return self.backend

    def set_group_info(self, name: str, rank: int, world_size: int, store: Any) -> None:
        self.calls.append(("group", name, rank, world_size, store))

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: Any, device: Any, group: str) -> torch.Tensor:
        assert stride == (1,) and dtype == torch.uint8
        return torch.full(size, 9, dtype=torch.uint8)

    def rendezvous(self, tensor: torch.Tensor, group: str) -> Handle:
        self.handles.append(Handle(tensor))
        return self.handles[-1]


class Driver:
    """As libcuda.so.1, of what is called. can_flush: what the device says of itself."""

    can_flush, code = 0, 0

    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def cuStreamWaitValue32_v2(self, *arguments: int) -> int:
        self.calls.append(("wait", *arguments))
        return self.code

    def cuDeviceGet(self, into: Any, ordinal: int) -> int:
        into._obj.value = 100 + ordinal
        return 0

    def cuDeviceGetAttribute(self, into: Any, attribute: int, device: Any) -> int:
        assert (attribute, device.value) == (98, 100 + DEVICE)  # CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES
        into._obj.value = self.can_flush
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        self.calls.append(("mode", mode._obj.value))
        return self.code


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[SymmetricMemory, Symmetric, Calls]:
    """The memory of rank 0 of two, and what was called."""
    calls: Calls = []
    fake = Symmetric(calls)

    def write(tensor: torch.Tensor, offset: int, value: int) -> None:
        assert tensor.dtype == torch.uint32 and tensor.dim() == 1  # as torch's own check has it
        calls.append(("write", tensor.data_ptr() + 4 * offset, value))

    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", fake)
    install(monkeypatch, Driver(calls))
    monkeypatch.setattr(torch.ops.symm_mem, "stream_write_value32_", write, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append(("synchronize",)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    memory = SymmetricMemory("ours", 0, 2, "a store", torch.device("cuda", DEVICE))
    memory.meet(WORDS)
    return memory, fake, calls


def install(monkeypatch: pytest.MonkeyPatch, made: Any) -> None:
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(driver, "_wait_value", lambda: made.cuStreamWaitValue32_v2)


def word(fake: Symmetric, rank: int, number: int) -> int:
    return fake.handles[0].buffers[rank].data_ptr() + 4 * number


def test_words_are_clear_before_anyone_signals(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    """The device is waited for before `meet` returns, and only then do the ranks agree that all are there."""
    _, fake, calls = made
    assert calls == [("group", "ours", 0, 2, "a store"), ("synchronize",)]
    assert int(fake.handles[0].buffers[0].sum()) == 0 and fake.handles[0].buffers[0].numel() == 4 * WORDS


def test_put_copies_and_then_signals(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    memory, fake, calls = made
    heap = memory.grow(64)
    calls.clear()
    data = torch.arange(4, dtype=torch.float32)
    memory.put(data, 1, 32, 5)
    assert calls == [("write", word(fake, 1, 5), 1)]
    there = fake.handles[1].buffers[1]
    assert torch.equal(there[32:48].view(torch.float32), data) and int((heap != 9).sum()) == 0
    memory.put(data + 1, 1, 32, 5)  # the view is kept; after a growth it is another one
    assert torch.equal(there[32:48].view(torch.float32), data + 1)
    memory.grow(128)
    memory.put(data, 1, 32, 5)
    assert torch.equal(there[32:48].view(torch.float32), data + 1)
    assert torch.equal(fake.handles[2].buffers[1][32:48].view(torch.float32), data)


def test_wait_waits_and_then_clears(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    memory, fake, calls = made
    calls.clear()
    memory.wait(3)
    assert calls == [("wait", STREAM, word(fake, 0, 3), 1, 1), ("write", word(fake, 0, 3), 0)]


@pytest.mark.parametrize(("can_flush", "flags"), [(0, 1), (1, 1 | 1 << 30)])
def test_waits_flush_where_they_can(can_flush: int, flags: int, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a peer put before it set the word is seen behind the wait."""
    memory, _, calls = made
    monkeypatch.setattr(Driver, "can_flush", can_flush)
    memory.meet(WORDS)
    calls.clear()
    memory.wait(3)
    assert calls[0][0] == "wait" and calls[0][-1] == flags


def test_what_the_driver_refuses(
    made: tuple[SymmetricMemory, Symmetric, Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "code", 801)
    with pytest.raises(RuntimeError, match="cuStreamWaitValue32 failed with CUresult 801"):
        made[0].wait(3)
    with pytest.raises(RuntimeError, match="cuThreadExchangeStreamCaptureMode failed with CUresult 801"):
        driver.stay_out_of_captures()


def test_a_thread_that_stays_out_of_captures(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    """CU_STREAM_CAPTURE_MODE_RELAXED: what it asks the driver ends no capture of another thread."""
    *_, calls = made
    calls.clear()
    driver.stay_out_of_captures()
    assert calls == [("mode", 2)]


def test_another_backend_of_symmetric_memory(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Symmetric, "backend", "NVSHMEM")
    with pytest.raises(RuntimeError, match="that of NVSHMEM in this process: unset TORCH_SYMMMEM"):
        SymmetricMemory("ours", 0, 2, "a store", torch.device("cuda", 0))


def test_torchs_own_operators_take_these_arguments() -> None:
    """The schema in this torch, which the stand-in follows."""
    schema = torch.ops.symm_mem.stream_write_value32_.default._schema
    assert [(each.name, str(each.type)) for each in schema.arguments] == [
        ("input", "Tensor"), ("offset", "int"), ("val", "int"),
    ]  # fmt: skip
    for name in ("set_group_info", "empty_strided_p2p", "rendezvous", "get_backend", "get_buffer"):
        assert hasattr(_distributed_c10d._SymmetricMemory, name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_transports_without_a_gpu() -> None:
    """It says so, and runs nothing."""
    said: list[tuple[str, str, str, bool | None]] = []
    gpu_transports.run(lambda *row: said.append(row))
    (symmetric, nccl, nvshmem) = said
    assert symmetric == ("symmetric memory", "not run: torch sees no CUDA device here", "", False)
    assert nccl[0] == "nccl" and nccl[1].startswith("not here: ") and nccl[3] is None
    assert nvshmem == ("nvshmem", "not here: torch sees no CUDA device here", "", None)
