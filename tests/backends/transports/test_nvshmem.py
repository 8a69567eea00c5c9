"""What torch and NVSHMEM are called with by transport `nvshmem`, on stand-ins; and why it cannot be used, where so."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nvshmem_ops import Emulated, Ready
from stream_world import Refused
from torch._C import _distributed_c10d

from tokenring.backends.transports import nvshmem
from tokenring.backends.transports.nvshmem import OPERATORS, NvshmemMemory, NvshmemTransport
from tokenring.backends.transports.onesided import RING, Words, signaller
from tokenring.lowering.backend_names import transport_class, transport_target

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "hardware" / "gpu"))

import gpu_nccl
import gpu_nvshmem
import gpu_transports

WORDS, RANKS, PEER = 4 * RING, 2, 1


class AtOnce:
    """Two ranks' symmetric memory, of which this is the first; what is queued is noted and done. A Place."""

    def __init__(self) -> None:
        self.own: list[torch.Tensor] = []
        self.others: list[torch.Tensor] = []
        self.said: list[str] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.own.append(torch.full((nbytes,), 9, dtype=torch.uint8))
        self.others.append(self.own[-1].clone())
        return self.own[-1]

    def there(self, peer: int, number: int) -> torch.Tensor:
        return (self.own, self.others)[peer][number]

    def queue(self, name: str, act: Any, ready: Ready) -> None:
        assert ready(), f"{name} would wait for ever"
        self.said.append(name)
        act()

    def fly(self, acts: list[tuple[str, Any]]) -> None:
        for name, act in acts:
            self.said.append(name)
            act()


@pytest.fixture
def place() -> AtOnce:
    return AtOnce()


@pytest.fixture
def memory(place: AtOnce) -> Emulated:
    made = Emulated(RANKS, place)
    made.meet(WORDS)
    made.lay(1024)
    return made


def words(part: torch.Tensor) -> torch.Tensor:
    return part[: 8 * WORDS].view(torch.int64)


# ---------- the verbs


def test_words_are_clear_before_anyone_signals(memory: Emulated, place: AtOnce) -> None:
    assert int(words(place.own[0]).abs().sum()) == 0 and place.own[0].numel() == 8 * WORDS + 16
    assert place.own[1].numel() == 1024


def test_put_copies_into_the_box_and_puts_that(memory: Emulated, place: AtOnce) -> None:
    """At the same place of the peer, and nowhere else; the signal behind it."""
    data = torch.arange(8, dtype=torch.float32).view(2, 4)
    memory.put(data, PEER, 256, 5)
    assert place.said == ["copies", "copies", f"puts to {PEER}", "put", "put", "signal"]
    for boxes in (place.own[1], place.others[1]):
        assert torch.equal(boxes[256:288].view(torch.float32), data.view(-1))
        assert int((boxes != 9).sum()) <= 32
    assert int(words(place.others[0])[5]) == 1 and int(words(place.own[0]).sum()) == 0


def test_a_signal_alone_touches_no_box(memory: Emulated, place: AtOnce) -> None:
    memory.signal(PEER, 7)
    assert int(words(place.others[0])[7]) == 1 and bool((place.others[1] == 9).all())


def test_wait_waits_for_64_bits_and_clears_them(memory: Emulated, place: AtOnce) -> None:
    words(place.own[0])[3] = 1
    memory.wait(3)
    assert place.said == ["waits for word 3", "writes"] and int(words(place.own[0])[3]) == 0
    words(place.own[0])[3] = 2
    with pytest.raises(AssertionError, match="would wait for ever"):  # equality, and nothing else
        memory.wait(3)


def test_take_copies_out(memory: Emulated, place: AtOnce) -> None:
    place.own[1][512:528] = torch.arange(16, dtype=torch.uint8)
    into = torch.zeros(2, 2, dtype=torch.float32)
    memory.take(into, 512)
    assert torch.equal(into.view(-1).view(torch.uint8), torch.arange(16, dtype=torch.uint8))


def test_release_leaves_nothing_plausible(memory: Emulated, place: AtOnce) -> None:
    """NaN in the pool and in the boxes, and every wait goes on."""
    pool = memory.grow(64)
    pool.zero_()
    memory.release()
    for each in (pool, place.own[1]):
        assert bool(each[:64].view(torch.float32).isnan().all())
    assert bool((words(place.own[0]) == 1).all())


def test_whose_word_it_is() -> None:
    """torch wants to know who signals it."""
    channels, ranks = ("requests", "partials"), 5
    found = Words(channels, ranks)
    for channel in channels:
        for peer in range(ranks):
            for number in (0, 3, RING - 1, RING):
                assert signaller(found.credit(channel, peer, number), ranks) == peer
                assert signaller(found.arrival(channel, peer, number), ranks) == peer


# ---------- the operators


def test_torchs_own_operators_take_these_arguments() -> None:
    schemas = {name: torch._C._jit_get_schemas_for_operator(f"symm_mem::{name}") for name in OPERATORS}
    found = {name: [(each.name, str(each.type)) for each in schema.arguments] for name, (schema,) in schemas.items()}
    assert found == {
        "nvshmem_put_with_signal": [("tensor", "Tensor"), ("sigpad", "Tensor"), ("signal", "int"), ("peer", "int")],
        "nvshmem_wait_for_signal": [("sigpad", "Tensor"), ("signal", "int"), ("peer", "int")],
        "stream_write_value32_": [("input", "Tensor"), ("offset", "int"), ("val", "int")],
    }
    for name in ("empty_strided_p2p", "rendezvous", "get_backend"):
        assert hasattr(_distributed_c10d._SymmetricMemory, name)


class WithoutPeer(Emulated):
    def _put(self, box: torch.Tensor, peer: int, word: int) -> None:
        torch.ops.symm_mem.nvshmem_put_with_signal(box, self._words[word : word + 1], 1)


class NarrowSignals(Emulated):
    def _put(self, box: torch.Tensor, peer: int, word: int) -> None:
        torch.ops.symm_mem.nvshmem_put_with_signal(box, self._halves[2 * word : 2 * word + 1], 1, peer)


class PutsData(Emulated):
    """As symm does: from wherever the data lies."""

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        with self.operators:
            self._put(data, peer, word)


@pytest.mark.parametrize(
    ("mutant", "says"),
    [(WithoutPeer, "missing value for argument 'peer'"), (NarrowSignals, "a signal of 1"), (PutsData, "not in symm")],
)
def test_mutants(mutant: type[Emulated], says: str, place: AtOnce) -> None:
    """What does not bind to the schema, and what the operators cannot do, is refused."""
    made = mutant(RANKS, place)
    made.meet(WORDS)
    made.lay(1024)
    with pytest.raises((RuntimeError, Refused), match=says):
        made.put(torch.zeros(4), PEER, 0, 1)


# ---------- symmetric memory


class Symmetric:
    """As torch._C._distributed_c10d._SymmetricMemory, of what is used."""

    def __init__(self, backend: str | None = "NVSHMEM") -> None:
        self.backend, self.calls = backend, list[Any]()

    def get_backend(self, device: torch.device) -> str | None:
        return self.backend

    def empty_strided_p2p(self, size: Any, stride: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """NVSHMEM's allocator takes no group: it is all ranks."""
        assert stride == (1,) and dtype == torch.uint8 and device == torch.device("cpu")
        self.calls.append(("empty", *size))
        return torch.full(size, 9, dtype=torch.uint8)

    def rendezvous(self, tensor: torch.Tensor, group: str) -> None:
        self.calls.append(("rendezvous", tensor.numel(), group))


def test_memory_stays_but_for_boxes_that_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    """To free it waits for all ranks of the job: only a growth, which they make together, may do it."""
    fake = Symmetric()
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    nvshmem._kept.cache_clear()
    memory = NvshmemMemory(RANKS, torch.device("cpu"))
    memory.meet(WORDS)
    memory.lay(256)
    memory.lay(512)
    sizes = [8 * WORDS + 16, 256, 512]
    assert fake.calls == [call for size in sizes for call in (("empty", size), ("rendezvous", size, "0"))]
    del memory
    assert sorted(each.numel() for each in nvshmem._kept().values()) == [512, 8 * WORDS + 16]
    nvshmem._kept.cache_clear()


# ---------- where it cannot be used


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch) -> Symmetric:
    """A process that has all that it takes."""
    fake = Symmetric()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda name, key: key == "CUDA")
    monkeypatch.setattr(_distributed_c10d, "_is_nvshmem_available", lambda: True, raising=False)
    monkeypatch.setattr(_distributed_c10d, "_SymmetricMemory", fake)
    return fake


def test_it_can_be_used(everything: Symmetric) -> None:
    assert nvshmem.unavailable() is None and nvshmem.missing() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda() -> None:
    assert nvshmem.unavailable() == "torch sees no CUDA device here"


def test_with_rocm(everything: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert nvshmem.unavailable() == "this torch is not built for CUDA"


@pytest.mark.parametrize("name", OPERATORS)
def test_schemas_without_code(name: str, everything: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda asked, key: name not in asked)
    assert nvshmem.unavailable() == f"this torch has no code behind symm_mem::{name}"


def test_this_torch_has_only_the_schemas(everything: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question as this torch answers it, and one after an operator that it does not know."""
    monkeypatch.undo()
    if torch.version.cuda is None:
        assert not nvshmem._has_code(OPERATORS[0])
    assert not nvshmem._has_code("nvshmem_that_never_was")


def test_without_the_library(everything: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (lambda: False, None):
        monkeypatch.setattr(_distributed_c10d, "_is_nvshmem_available", found)
        if found is None:
            monkeypatch.delattr(_distributed_c10d, "_is_nvshmem_available")
        assert nvshmem.unavailable() == "torch finds no NVSHMEM (libnvshmem_host.so.3) here"


@pytest.mark.parametrize(("backend", "whose"), [("CUDA", "CUDA"), ("NCCL", "NCCL"), (None, "nobody")])
def test_another_symmetric_memory(backend: str | None, whose: str, everything: Symmetric) -> None:
    everything.backend = backend
    assert nvshmem.unavailable() == (
        f"torch's symmetric memory is that of {whose} in this process: set TORCH_SYMMMEM=NVSHMEM"
    )
    assert nvshmem.missing() is None


@pytest.mark.parametrize(("rank", "size", "whole"), [(1, 4, True), (1, 2, False), (0, 4, False)])
def test_groups_that_leave_ranks_out(
    rank: int, size: int, whole: bool, everything: Symmetric, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    here: Any = SimpleNamespace(rank=rank, world_size=size)
    if whole:
        monkeypatch.setattr(nvshmem, "device_of", str)
        assert NvshmemTransport._find_device(here) == "cuda:3"  # type: ignore[comparison-overlap]
    else:
        says = f"in their order, and this group has {size} of 4, this rank 1 as its {rank}"
        with pytest.raises(RuntimeError, match=says):
            NvshmemTransport._find_device(here)


def test_by_name() -> None:
    assert transport_class("nvshmem") is NvshmemTransport
    target = transport_target("nvshmem")
    assert (target.one_sided, target.mailboxes, target.early_receives, target.channels) == (True, True, False, 2)
    assert not target.capturable  # until a GPU has shown it


# ---------- what hardware/gpu/gpu_transports makes of it


@pytest.mark.parametrize(("count", "why"), [(1, "a GPU for each of 2 ranks, and this machine has 1"), (2, None)])
def test_two_gpus(count: int, why: str | None, everything: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    found = gpu_nvshmem.why_not()
    assert found is None if why is None else why in str(found)


def test_without_the_setting_it_is_not_here(everything: Symmetric, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the processes that it starts, which have it: gpu_transports.OVER_NVSHMEM."""
    everything.backend = "CUDA"
    monkeypatch.setattr(torch.cuda, "set_device", lambda rank: None)
    with pytest.raises(gpu_nccl.NotHere, match="set TORCH_SYMMMEM=NVSHMEM"):
        gpu_nvshmem.nvshmem_messages(0)
    assert gpu_transports.OVER_NVSHMEM == {"TORCH_SYMMMEM": "NVSHMEM"}
