"""Transport `hccl` from its first contact to its end: whom errors blame, how long messages may take, what it holds."""

from __future__ import annotations

import gc
import re
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import nccl_ranks
import pytest
import torch
import torch.distributed as dist
from ascend.hccl_ledger import MEGABYTE, HcclError, Noted, ledger
from ascend.hccl_ranks import fresh
from ascend.ranks import NpuPools
from every_link import new
from patience import patient
from ranks import Here

from tokenring import PeerLost
from tokenring.backends.registry import make_transport
from tokenring.backends.transports import hccl
from tokenring.backends.transports.hccl import CONNECTION_BYTES
from tokenring.backends.transports.hccl_environment import watchdog_seconds
from tokenring.backends.transports.nccl import NcclTransport
from tokenring.ir.schedule_data import REQUESTS
from tokenring.lowering.backend_names import transport_target

COLLECTIVES = "hccl/collectives"
NPU = "npu"  # no torch.device: only ranks know it


def first_contacts(here: Here) -> list[Noted]:
    fresh()
    new("hccl")
    return list(ledger.messages)


def test_first_contact_goes_the_way_of_the_lane(npus: NpuPools) -> None:
    """So that what is connected is what is used."""
    for rank, messages in enumerate(npus(3)(first_contacts)):
        assert len(messages) == 4 * 2
        for group, kind, peer, _, _ in messages:
            assert (kind == "send") == (group.endswith("up") == (peer > rank)), (rank, group, kind, peer)


def test_memory_is_planned_by_the_buffers_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2P_HCCL_BUFFSIZE", "8")
    assert transport_target("hccl").connection_bytes == 16 * MEGABYTE
    monkeypatch.delenv("P2P_HCCL_BUFFSIZE")
    assert transport_target("hccl").connection_bytes == CONNECTION_BYTES


def own_error(here: Here) -> tuple[int | None, str, str]:
    """An operator of rank 0 fails late: at a send to rank 1, which is well."""
    fresh()
    transport, memory = new("hccl", patient(5.0)), torch.zeros(8, dtype=torch.uint8, device=NPU)
    dist.barrier()
    if here.rank == 1:
        with pytest.raises(PeerLost) as caught:
            transport.exchange(b"", "what comes next")
        return caught.value.rank, str(caught.value), ""
    group = transport._groups["requests up"]  # type: ignore[attr-defined]
    text = "NPU out of memory. Tried to allocate 2.00 GiB"
    group.send = lambda *given: (_ for _ in ()).throw(RuntimeError(text))
    with pytest.raises(PeerLost) as caught:
        transport.send(memory, 1, REQUESTS, "step 4, kv0")
    with pytest.raises(PeerLost) as again:
        transport.send(memory, 1, REQUESTS, "step 4, kv0")
    return caught.value.rank, str(caught.value), str(again.value)


def test_an_error_of_this_rank_blames_no_peer(npus: NpuPools) -> None:
    with npus.expendable(2) as some:
        (mine, text, again), (theirs, other, _) = some(own_error)
    assert (mine, theirs) == (0, 0)
    assert "rank 0 (this one) failed" in text and "out of memory" in text and "No peer is to blame" in text, text
    assert "out of memory" in again and "out of memory" in other, (again, other)


def runs_ahead(here: Here) -> list[float]:
    """Messages are posted long before the device comes to them: longer than our own time limit."""
    fresh()
    transport = new("hccl", patient(0.5))
    memory = torch.zeros(8, dtype=torch.uint8, device=NPU)
    if here.rank == 0:
        work = transport.recv(memory, 1, REQUESTS, "step 0, kv1")
        time.sleep(patient(0.8))
        dist.barrier()
    else:
        dist.barrier()
        work = transport.send(memory, 0, REQUESTS, "step 0, kv1")
    work.wait()
    return [group.timeout_seconds for group in transport._groups.values()]  # type: ignore[attr-defined]


def test_the_watchdog_lets_a_host_run_ahead(npus: NpuPools) -> None:
    assert npus(2)(runs_ahead) == [[1836.0 + 600.0] * 4] * 2
    assert watchdog_seconds({"HCCL_EXEC_TIMEOUT": "5000"}) > 5000
    assert watchdog_seconds({"HCCL_EXEC_TIMEOUT": "68"}) == 1800
    assert watchdog_seconds({"HCCL_EXEC_TIMEOUT": "0"}) > 1e7  # HCCL waits for ever
    assert watchdog_seconds({"HCCL_EXEC_TIMEOUT": "soon"}) > 1836


def aged(here: Here, how: str) -> str:
    """Rank 0 posts long before rank 1 does, in a group with a short limit."""
    fresh()
    made: Any = dist.new_group(backend="hccl", timeout=timedelta(seconds=patient(0.5)))
    peer = 1 - here.rank
    memory, act = torch.zeros(8, device=NPU), (dist.isend, dist.irecv)[here.rank]
    acts: dict[str, Callable[[], Any]] = {
        "message": lambda: [made.send, made.recv][here.rank]([memory], peer, 0),
        "batch": lambda: dist.batch_isend_irecv([dist.P2POp(act, memory, peer, made)])[0],
        "collective": lambda: dist.all_reduce(memory, group=made, async_op=True),
    }
    acts[how]().wait()  # connected beforehand
    dist.barrier()
    if here.rank == 1:
        time.sleep(patient(1.0))
    work = acts[how]()
    if here.rank == 1:
        work.wait()
        return ""
    with pytest.raises(HcclError) as caught:
        work.wait()
    return str(caught.value)


@pytest.mark.parametrize("how", ["message", "batch", "collective"])
def test_the_emulated_watchdog_counts_from_the_post(how: str, npus: NpuPools) -> None:
    text, _ = npus(2)(aged, how)
    assert re.search(r"the watchdog of group .* ends the process: .* is older than its [0-9.]+ s", text), text


def dropped(here: Here, name: str, closes: bool) -> list[str]:
    """A transport whose messages were waited for, which blocks no host."""
    fresh()
    gc.collect()  # what an earlier call on these ranks left
    ledger.torn.clear()
    transport, peer = made(here, name), 1 - here.rank
    memory, into = (torch.zeros(8, dtype=torch.uint8, device=NPU) for _ in range(2))
    torch.get_device_module(NPU).synchronize()  # what made the connections is over
    if name == COLLECTIVES:
        work = transport.all_to_all({peer: memory}, {peer: into}, (0, 1), "step 0, kv")
    else:
        work = [transport.send, transport.recv][here.rank](memory, peer, REQUESTS, "step 0, kv0")
    work.wait()
    if closes:
        transport.close()
    del transport, work
    gc.collect()
    return list(ledger.torn)


def made(here: Here, name: str) -> Any:
    """A transport with all its connections."""
    if name != COLLECTIVES:
        return new(name)
    transport: Any = make_transport(name, dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    transport.prepare_groups([(0, 1)], torch.device(NPU))
    return transport


@pytest.mark.parametrize("name", ["hccl", COLLECTIVES])
def test_closing_waits_for_the_device(name: str, npus: NpuPools) -> None:
    """Communicators must not go while messages move; the mutant drops them without closing."""
    assert npus(2)(dropped, name, True) == [[], []]
    assert all("was dropped under" in texts[0] for texts in npus(2)(dropped, name, False))


# ---------- what a message moves


def forgetful_hccl(patched: pytest.MonkeyPatch) -> None:
    """Mutant: a handle that keeps no tensor."""
    real = hccl._Handle.__init__

    def init(self: Any, transport: Any, work: Any, data: object, peer: int, what: str) -> None:
        real(self, transport, work, None, peer, what)

    patched.setattr(hccl._Handle, "__init__", init)


def forgetful_nccl(patched: pytest.MonkeyPatch) -> None:
    """Mutant: a group that keeps no tensors once they are on their way."""
    real = NcclTransport._start

    def start(self: Any, batch: Any, channel: str) -> None:
        real(self, batch, channel)
        batch.posts[:] = [post._replace(data=torch.empty(0, device=NPU)) for post in batch.posts]

    patched.setattr(NcclTransport, "_start", start)


FORGETFUL = {"hccl": forgetful_hccl, nccl_ranks.NAME: forgetful_nccl}


def alive(here: Here, name: str, forgets: bool) -> tuple[bool, bool]:
    """Whether a tensor that nobody else holds lives while its message is under way, and when that was waited for."""
    nccl_ranks.register(here)
    fresh()
    with pytest.MonkeyPatch.context() as patched:
        if forgets:
            FORGETFUL[name](patched)
        transport = new(name)
        data = torch.ones(64, device=NPU)
        held = weakref.ref(data)  # the emulation holds the memory behind it, never the tensor: the mutants show that
        post = transport.send if here.rank == 0 else transport.recv
        handle = post(data, 1 - here.rank, REQUESTS, "kv0")
        del data
        if transport.target.grouping:
            transport.go()
        gc.collect()
        during = held() is not None
        handle.wait()
        del handle
        gc.collect()
        after = held() is not None
        transport.close()
    return during, after


@pytest.mark.parametrize("name", FORGETFUL)
def test_tensors_live_until_they_are_waited_for(name: str, npus: NpuPools) -> None:
    """At both ends, and no longer."""
    with npus.expendable(2) as some:
        assert some(alive, name, False) == [(True, False)] * 2
        assert some(alive, name, True) == [(False, False)] * 2
