"""Transport `hccl` from its first contact to its end: whom errors blame, how long messages may take, what it holds."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from ascend.hccl_ledger import MEGABYTE, Noted, ledger
from ascend.hccl_ranks import fresh
from ascend.ranks import NpuPools
from every_link import new
from ranks import Here

from tokenring import PeerLost
from tokenring.backends.hccl import CONNECTION_BYTES, watchdog_seconds
from tokenring.backends.registry import transport_capabilities
from tokenring.schedule.ir import REQUESTS

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
    assert transport_capabilities("hccl").connection_bytes == 16 * MEGABYTE
    monkeypatch.delenv("P2P_HCCL_BUFFSIZE")
    assert transport_capabilities("hccl").connection_bytes == CONNECTION_BYTES


def own_error(here: Here) -> tuple[int | None, str, str]:
    """An operator of rank 0 fails late: at a send to rank 1, which is well."""
    fresh()
    transport, memory = new("hccl", 5.0), torch.zeros(8, dtype=torch.uint8, device=NPU)
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
    transport = new("hccl", 0.5)
    memory = torch.zeros(8, dtype=torch.uint8, device=NPU)
    if here.rank == 0:
        work = transport.recv(memory, 1, REQUESTS, "step 0, kv1")
        time.sleep(0.8)
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


def dropped(here: Here, closes: bool) -> list[str]:
    """A transport whose messages were waited for, which blocks no host."""
    fresh()
    ledger.torn.clear()
    transport = new("hccl")
    memory = torch.zeros(8, dtype=torch.uint8, device=NPU)
    work = [transport.send, transport.recv][here.rank](memory, 1 - here.rank, REQUESTS, "step 0, kv0")
    work.wait()
    if closes:
        transport.close()
    del transport, work
    gc.collect()
    return list(ledger.torn)


def test_closing_waits_for_the_device(npus: NpuPools) -> None:
    """Communicators must not go while messages move; the mutant drops them without closing."""
    assert npus(2)(dropped, True) == [[], []]
    assert all("was dropped under" in texts[0] for texts in npus(2)(dropped, False))
