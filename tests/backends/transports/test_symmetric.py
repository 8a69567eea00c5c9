"""What torch's symmetric memory and the driver are called with, on stand-ins; gpu_transports without a GPU.

The stand-ins (symmetric_world) refuse what the real ones do.
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from symmetric_world import ASIDE, DEVICE, STREAM, Calls, Driver, Symmetric, WithInfo, c10d, install
from torch._C import _distributed_c10d

from tokenring.backends.transports import driver, symmetric
from tokenring.backends.transports.symmetric import SymmetricMemory, release_of

REPO = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO / "hardware" / "gpu"))

import gpu_transports  # noqa: E402

WORDS = 16


def new_memory(name: str = "ours") -> SymmetricMemory:
    return SymmetricMemory(name, 0, 2, _distributed_c10d.HashStore(), torch.device("cuda", DEVICE))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> tuple[SymmetricMemory, Symmetric, Calls]:
    """The memory of rank 0 of two, and what was called."""
    calls: Calls = []
    fake = Symmetric(calls)
    install(monkeypatch, calls, fake)
    memory = new_memory()
    memory.meet(WORDS)
    return memory, fake, calls


def word(fake: Symmetric, rank: int, number: int) -> int:
    return fake.handles[0].buffers[rank].data_ptr() + 4 * number


def words(fake: Symmetric, rank: int) -> list[int]:
    return fake.handles[0].buffers[rank][: 4 * WORDS].view(torch.int32).tolist()


def test_words_are_clear_before_anyone_signals(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    """The device is waited for before `meet` returns, and only then do the ranks agree that all are there."""
    _, fake, calls = made
    assert calls == [("group", 0, 2), ("new stream",), ("synchronize",)]
    assert not any(words(fake, 0)) and fake.handles[0].buffers[0].numel() == 4 * WORDS


def test_put_copies_and_then_signals(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    """By copies alone: streams write to no peer."""
    memory, fake, calls = made
    heap = memory.grow(64)
    calls.clear()
    data = torch.arange(4, dtype=torch.float32)
    memory.put(data, 1, 32, 5)
    assert calls == [] and words(fake, 1) == [int(number == 5) for number in range(WORDS)]
    there = fake.handles[1].buffers[1]
    assert torch.equal(there[32:48].view(torch.float32), data) and int((heap != 9).sum()) == 0
    memory.put(data + 1, 1, 32, 5)  # the view is kept; after a growth it is another one
    assert torch.equal(there[32:48].view(torch.float32), data + 1)
    memory.grow(128)
    memory.put(data, 1, 32, 5)
    assert torch.equal(there[32:48].view(torch.float32), data + 1)
    assert torch.equal(fake.handles[2].buffers[1][32:48].view(torch.float32), data)
    assert not any(words(fake, 0)), "a peer's words, not one's own"


def test_room_for_puts_before_the_memory_grows(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    """Behind the words, zero at first; later it is the heap that puts reach."""
    memory, fake, _ = made
    room = memory.meet(WORDS, 64)
    there = fake.handles[-1].buffers[1]
    assert room.numel() == 64 and not bool(room.any())
    memory.put(torch.full((8,), 7, dtype=torch.uint8), 1, 16, 2)
    assert torch.equal(there[4 * WORDS :].nonzero().view(-1), torch.arange(16, 24))
    memory.grow(64)
    memory.put(torch.full((8,), 7, dtype=torch.uint8), 1, 16, 2)
    assert torch.equal(fake.handles[-1].buffers[1].nonzero().view(-1), torch.arange(16, 24))


def test_wait_waits_and_then_clears(made: tuple[SymmetricMemory, Symmetric, Calls]) -> None:
    """In one call, of own words."""
    memory, fake, calls = made
    calls.clear()
    memory.wait(3)
    assert calls == [("wait", STREAM, word(fake, 0, 3), 1, 1), ("write", STREAM, word(fake, 0, 3), 0, 0)]


def test_looking_and_releasing_stand_on_a_stream_of_their_own(made: Any) -> None:
    """One for the whole life of the memory, that no pool gives to anyone else; it ends with it."""
    memory, fake, calls = made
    heap = memory.grow(64)
    fake.handles[0].buffers[0].view(torch.int32)[[2, 5]] = 1
    calls.clear()
    assert memory.are_set([2, 3, 5]) == [True, False, True]
    for _ in range(40):
        memory.release()
    assert calls == [("on", ASIDE)] * 41
    assert bool(heap.view(torch.float32).isnan().all()) and words(fake, 0) == [1] * WORDS


def test_what_a_memory_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream, and the name in torch's registry."""
    calls: Calls = []
    install(monkeypatch, calls, Symmetric(calls))
    memory = new_memory("for a while")
    memory.meet(WORDS)
    assert c10d._resolve_process_group("for a while").size() == 2  # held: torch's registry does not
    calls.clear()
    del memory
    gc.collect()
    assert calls == [("end stream", ASIDE)]
    with pytest.raises(RuntimeError, match="Could not resolve the process group registered under the name for a while"):
        c10d._resolve_process_group("for a while")
    new_memory("for a while").meet(WORDS)


@pytest.mark.parametrize(
    ("version", "info"), [("2.6.0+cu124", True), ("2.10.1", True), ("2.11.0a0+git1", False), ("2.13.0", False)]
)
def test_how_ranks_are_made_known(version: str, info: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a process group to torch 2.11 and newer, by group info to what is older; never by both."""
    calls: Calls = []
    monkeypatch.setattr(torch, "__version__", version)
    older, newer = WithInfo(calls), Symmetric(calls)
    install(monkeypatch, calls, older if info else newer)
    new_memory(version).meet(WORDS)
    assert ("group", 0, 2) in calls and not any(name == "group info" for name, *_ in calls)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", newer if info else older)
    with pytest.raises(RuntimeError, match=r"no group info associated|Could not resolve the process group"):
        new_memory(f"{version}, elsewhere").meet(WORDS)


def test_releases_of_torch() -> None:
    assert [release_of(each) for each in ("2.6.0", "2.11.0a0+abc.nv26", "2.13.0+cpu")] == [(2, 6), (2, 11), (2, 13)]


def info_alone(owner: object, name: str, rank: int, world_size: int, store: Any) -> None:
    """Mutant: as it was before."""
    _distributed_c10d._SymmetricMemory.set_group_info(name, rank, world_size, store)


def held_by_nobody(owner: object, name: str, rank: int, world_size: int, store: Any) -> None:
    """Mutant: torch's registry alone has the group."""
    c10d._register_process_group(name, _distributed_c10d.ProcessGroup(store, rank, world_size))


@pytest.mark.parametrize(
    ("mutant", "says"),
    [
        (info_alone, "Could not resolve the process group registered under the name"),
        (held_by_nobody, "has already been destroyed"),
    ],
)
def test_mutants_of_the_name(mutant: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Calls = []
    install(monkeypatch, calls, Symmetric(calls))
    monkeypatch.setattr(symmetric, "register", mutant)
    with pytest.raises(RuntimeError, match=says):
        new_memory("a mutant's").meet(WORDS)


class WritesToPeers(SymmetricMemory):
    """Mutant: signals as they were before."""

    def signal(self, peer: int, word: int) -> None:
        torch.ops.symm_mem.stream_write_value32_(self._at[peer].view(torch.uint32), word, 1)


def test_streams_write_own_memory_alone(made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-in refuses other addresses, by torch's operator and by the driver's own call."""
    memory, fake, _ = made
    memory.__class__ = WritesToPeers
    with pytest.raises(RuntimeError, match="operation not supported"):
        memory.signal(1, 5)
    memory.signal(0, 5)
    with pytest.raises(RuntimeError, match="CUresult 801"):
        driver.wait_and_clear(STREAM, word(fake, 1, 3), 1, 1, 0)


@pytest.mark.parametrize(("can_flush", "flags"), [(0, 1), (1, 1 | 1 << 30)])
def test_waits_flush_where_they_can(can_flush: int, flags: int, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a peer put before it set the word is seen behind the wait."""
    memory, _, calls = made
    monkeypatch.setattr(Driver, "can_flush", can_flush)
    memory.meet(WORDS)
    calls.clear()
    memory.wait(3)
    assert calls[0][0] == "wait" and calls[0][-1] == flags and calls[1][0] == "write"


def test_what_the_driver_refuses(
    made: tuple[SymmetricMemory, Symmetric, Calls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Driver, "code", 801)
    with pytest.raises(RuntimeError, match="cuStreamBatchMemOp failed with CUresult 801"):
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


def test_a_driver_without_batches_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older than CUDA 11.7: said before anything is set up."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace())
    driver._batch.cache_clear()
    assert str(symmetric.unavailable()).startswith("the driver's library has no cuStreamBatchMemOp: ")
    monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuStreamBatchMemOp_v2=SimpleNamespace()))
    assert symmetric.unavailable() is None
    driver._batch.cache_clear()


def test_a_batch_as_the_driver_reads_it() -> None:
    """CUstreamBatchMemOpParams of cuda.h: a union padded to six words of 64 bits."""
    at = {name: getattr(driver.Operation, name).offset for name, _ in driver.Operation._fields_}
    assert at == {"operation": 0, "address": 8, "value": 16, "flags": 24, "alias": 32, "padding": 40}
    assert ctypes.sizeof(driver.Operation) == 48


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_transports_without_a_gpu() -> None:
    """It says so, and runs nothing."""
    said: list[tuple[str, str, str, bool | None]] = []
    gpu_transports.run(lambda *row: said.append(row))
    (symmetric, nccl, nvshmem) = said
    assert symmetric == ("symmetric memory", "not run: torch sees no CUDA device here", "", False)
    assert nccl[0] == "nccl" and nccl[1].startswith("not here: ") and nccl[3] is None
    assert nvshmem == ("nvshmem", "not here: torch sees no CUDA device here", "", None)
