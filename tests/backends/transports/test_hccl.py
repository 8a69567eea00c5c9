"""Transport `hccl` on emulated NPUs: what every transport must do, its communicators, and programs that are wrong."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import test_transports as conformance
import torch
import torch.distributed as dist
from ascend.hccl_ledger import MEGABYTE, Communicator, Noted, ledger, limits
from ascend.hccl_ranks import fresh, run_case, small_case
from ascend.ranks import NpuPools
from cases import Case
from every_link import new
from machines import APART, transport_name
from patience import patient
from ranks import Here, RankError

import tokenring as tr
from tokenring import BackendUnavailable, ConfigurationError, ContextParallel, PeerLost
from tokenring.backends.registry import make_transport
from tokenring.backends.transports.hccl import warm_up_order
from tokenring.backends.transports.hccl_environment import connection_bytes
from tokenring.ir.schedule_data import PARTIALS, PASSES, REQUESTS
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.footprint import connections
from tokenring.lowering.target import Target, links
from tokenring.planner.interconnects.interconnect import full_mesh

TRANSPORTS = ("hccl", "hccl/channel", "hccl/pair")
BUFFER = 40 * MEGABYTE
SILENT_SECONDS = 2.0  # the first contact of living ranks must take less on a busy machine
NPU = "npu"  # no torch.device: only ranks know it


# ---------- what every transport must do


def conforms(here: Here, what: str, *args: Any) -> Any:
    if what not in here.memory:
        fresh()
        here.memory[what] = True
    if what in ("silent", "failing"):
        limits.execute = SILENT_SECONDS
    return getattr(conformance, what)(here, "hccl", *args)


@pytest.mark.parametrize("row", conformance.suite(0.5), ids=str)
def test_conformance(row: conformance.Row, npus: NpuPools) -> None:
    found = conformance.passes(row, npus, conforms)
    if row.what == "silent" and row.args != ("exchange",):  # where HCCL found it, in the words of its time limit
        assert any("HCCL_EXEC_TIMEOUT" in each[2] for each in found if each)


def dies(here: Here) -> None:
    """Rank 1 is gone before anyone meets it in a communicator."""
    fresh()
    limits.connect = limits.execute = 0.7
    transport = make_transport("hccl", dist.group.WORLD, patient(5.0))  # type: ignore[arg-type]
    dist.barrier()
    if here.rank == 1:
        os._exit(7)
    with pytest.raises(PeerLost, match="HCCL_CONNECT_TIMEOUT") as caught:
        transport.prepare([(0, 1, REQUESTS), (1, 2, REQUESTS)], torch.device(NPU))
    assert (caught.value.rank, caught.value.certain) == (1, True)


def test_a_peer_that_dies_before_the_first_contact(npus: NpuPools) -> None:
    """The others raise nothing else than what they expect, or the pool would show their tracebacks."""
    with npus.expendable(3) as some, pytest.raises(RankError) as caught:
        some(dies)
    text = str(caught.value)
    assert "rank 1: died with exit code 7" in text and "Traceback" not in text, text


def late_error(here: Here) -> tuple[int | None, str]:
    """A wait that fails on the device says nothing; the next call does."""
    fresh()
    transport = new("hccl", patient(5.0))
    limits.execute, limits.late_errors = 0.5, True
    memory = torch.zeros(8, dtype=torch.uint8, device=NPU)
    if here.rank == 1:
        time.sleep(patient(3.0))
        return None, ""
    transport.recv(memory, 1, REQUESTS, "step 3, kv1").wait()
    assert bool((memory.cpu() == 255).all())  # poison: nobody may use it
    with pytest.raises(PeerLost) as caught:
        transport.send(memory.clone(), 1, PARTIALS, "step 4, o0@0")
    return caught.value.rank, str(caught.value)


def test_errors_that_come_late_name_the_peer(npus: NpuPools) -> None:
    with npus.expendable(2) as some:
        rank, text = some(late_error)[0]
    assert rank == 1 and "found late: HCCL waits HCCL_EXEC_TIMEOUT" in text, text


# ---------- communicators


def communicators(here: Here, case: Case, transport: str) -> tuple[list[Communicator], list[Noted]]:
    fresh()
    here.memory.pop(transport, None)
    run_case(here, case, transport)
    return list(ledger.communicators), list(ledger.messages)


def lanes(case: Case, rank: int, transport: str) -> set[tuple[str, ...]]:
    """By hand: the pairs of a rank, apart by what each transport keeps apart."""
    found = set()
    for move in case.make_schedule().moves:
        if rank in (move.src, move.dst):
            peers = f"{min(move.src, move.dst)}:{max(move.src, move.dst)}"
            up = "up" if move.src < move.dst else "down"
            apart = {"hccl": (peers, move.channel, up), "hccl/channel": (peers, move.channel), "hccl/pair": (peers,)}
            found.add(apart[transport])
    return found


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("world_size", "schedule"), [(2, "ring"), (3, "ring"), (3, "direct-q"), (4, "tokenring")])
def test_communicators_equal_the_formula(world_size: int, schedule: str, transport: str, npus: NpuPools) -> None:
    """Trap 11: of pairs that the schedule uses alone, two buffers each; trap 10: none of a whole group."""
    case = small_case(world_size, schedule)
    target, some = transport_target(transport), links(case.make_schedule())
    for rank, (made, _) in enumerate(npus(world_size)(communicators, case, transport)):
        assert len(made) == len(lanes(case, rank, transport)) == connections(some, target, rank)
        assert "all" not in {peers for _, peers, _ in made} and {nbytes for _, _, nbytes in made} == {BUFFER}
        assert {peers for _, peers, _ in made} == {each[0] for each in lanes(case, rank, transport)}


def test_bytes_of_each_link_and_step(npus: NpuPools) -> None:
    """What HCCL was given to send is what the schedule says, step by step."""
    case = small_case(3, "tokenring")
    schedule, size = case.make_schedule(), case.workload
    for rank, (_, messages) in enumerate(npus(3)(communicators, case, "hccl")):
        sent: Counter[tuple[int, int]] = Counter()
        for _, kind, peer, nbytes, label in messages:
            if kind == "send" and label:
                sent[peer, int(label.split(",")[0].removeprefix("step "))] += nbytes
        wanted = Counter[tuple[int, int]]()
        for direction in PASSES:
            for move in schedule.moves_in(direction):
                if move.src == rank:
                    one = schedule.replace(moves=(move,)).link_bytes(size, direction)
                    wanted[move.dst, move.step] += sum(one.values())
        assert sent == wanted


def test_memory_of_the_traps_examples() -> None:
    """Trap 11: one group in which a rank meets all others: 280 MB on 8 NPUs, 600 on 16 dies."""
    target = Target(early_receives=False, channels=1, pair_serial=True, connection_bytes=connection_bytes({}))
    for ranks, megabytes in ((8, 280), (16, 600)):
        everyone = [(src, dst, REQUESTS) for src in range(ranks) for dst in range(ranks) if src != dst]
        assert connections(everyone, target, 3) * target.connection_bytes == megabytes * MEGABYTE
    assert connection_bytes({"P2P_HCCL_BUFFSIZE": "8"}) == 16 * MEGABYTE


def crossing(here: Here, change: str) -> list[str]:
    """The mutants of test_mutants_of_the_transport."""
    fresh()
    transport = make_transport("hccl", dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    everyone = [(a, b, REQUESTS) for a in range(here.world_size) for b in range(here.world_size) if a != b]
    limits.connect = 0.7 if change == "own order" else 20.0
    if change == "own order":  # each rank makes its own next neighbour's first: a circle
        after, before = ((here.rank + step) % here.world_size for step in (1, -1))
        order = [(min(here.rank, peer), max(here.rank, peer), "all") for peer in (after, before)]
        with pytest.raises(PeerLost, match="HCCL_CONNECT_TIMEOUT"):
            for low, high, _ in order:
                transport._touch(low, high, "requests up", torch.device(NPU))  # type: ignore[attr-defined]
    else:
        transport.prepare(everyone, torch.device(NPU))
        if change == "barrier":
            transport._groups["requests up"].barrier().wait()  # type: ignore[attr-defined]
    return [each.peers for each in ledger.communicators]


def test_warm_up_has_one_order(npus: NpuPools) -> None:
    """Traps 11 and 12, on an odd ring too. The mutants: each rank's own order; a collective among the messages."""
    lane_by_lane = [["0:1", "0:2"] * 2, ["0:1", "1:2"] * 2, ["0:2", "1:2"] * 2]
    with npus.expendable(3) as some:
        assert [sorted(made[:2]) + sorted(made[2:]) for made in some(crossing, "")] == lane_by_lane
        assert some(crossing, "barrier")[0][-1] == "all"  # what test_communicators_equal_the_formula refuses
    with npus.expendable(3) as some:
        assert some(crossing, "own order") == [[]] * 3  # each waits for the next one, in a communicator of its own


@pytest.mark.parametrize("ranks", range(2, 17))
def test_the_order_of_warming_up(ranks: int) -> None:
    """Every pair once; as many at a time as ranks allow, so that it takes as many rounds as a rank has peers."""
    pairs = [(low, high, "requests up") for low, high in combinations(range(ranks), 2)]
    order = warm_up_order(pairs, ranks)
    assert sorted(order) == pairs
    busy = [0] * ranks  # rounds that each rank has been through
    for low, high, _ in order:
        busy[low] = busy[high] = max(busy[low], busy[high]) + 1
    assert max(busy) == ranks - 1 + ranks % 2


# ---------- what it refuses


def refusals(here: Here) -> list[str]:
    fresh()
    transport, texts = new("hccl"), []
    bare = make_transport("hccl", dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    acts: list[Callable[[], Any]] = [
        lambda: transport.send(torch.ones(4), 1 - here.rank, REQUESTS, "step 0, kv0"),
        lambda: transport.recv(torch.ones(4, 4, device=NPU)[:, :2], 1 - here.rank, REQUESTS, "step 0, kv0"),
        lambda: transport.prepare([], torch.device("cpu")),
        lambda: bare.send(torch.ones(4, device=NPU), 1 - here.rank, PARTIALS, "step 0, o0@1"),
    ]
    for act in acts:
        with pytest.raises(ConfigurationError) as caught:
            act()
        texts.append(str(caught.value))
    for variable, value in (("P2P_HCCL_BUFFSIZE", "0"), ("HCCL_OP_EXPANSION_MODE", "AIV"), ("P2P_HCCL_BUFFSIZE", "x")):
        os.environ[variable] = value
        with pytest.raises((BackendUnavailable, ConfigurationError)) as refused:
            new("hccl")
        del os.environ[variable]
        texts.append(str(refused.value))
    return texts


def test_refusals(npus: NpuPools) -> None:
    says = (
        "send of step 0, kv0: rank 0 gave one on cpu", "rank 0 gave one that is not contiguous", "these are on cpu",
        "ranks 0 and 1 have no connection for it (partials up)", "P2P_HCCL_BUFFSIZE=0", "AIV", "reads a number of MB",
    )  # fmt: skip
    for text, wanted in zip(npus(2)(refusals)[0], says, strict=True):
        assert wanted in text


def without_torch_npu(here: Here) -> str:
    with pytest.raises(BackendUnavailable) as caught:
        make_transport("hccl", dist.group.WORLD, patient(5.0))  # type: ignore[arg-type]
    return str(caught.value)


def test_without_torch_npu(ranks: Any) -> None:
    for text in ranks(2)(without_torch_npu):
        assert "needs torch_npu, which cannot be imported (No module named 'torch_npu')" in text


# ---------- who takes it


def taken(here: Here) -> list[str]:
    """What "auto" is, by the tensors' device; trap 13 is why it is not asked otherwise."""
    fresh()
    with ContextParallel(timeout_seconds=patient(20.0)) as cp:
        names = [type(cp.transport_for(torch.device(kind))).__name__ for kind in ("cpu", "npu", "npu")]
        assert cp.transport_for(torch.device(NPU)) is not cp.transport
    limits.meet_when_made = True
    for backend in ("hccl", "cpu:gloo,npu:hccl"):
        with ContextParallel(dist.new_group(backend=backend), timeout_seconds=patient(20.0)) as cp:
            names.append(type(cp.transport).__name__)
    return names


def test_auto_takes_hccl_for_tensors_on_npus(npus: NpuPools) -> None:
    for found in npus(2)(taken):
        assert found == ["AutoTransport", "HcclTransport", "HcclTransport", "HcclTransport", "AutoTransport"]


def planned(here: Here, limit: int | None) -> tuple[str, int | None, int | None, str | None]:
    """What "auto" chooses on NPUs, the memory that it reckons with, and the mode of the transport that it needs."""
    fresh()
    length = 32 * here.world_size
    q = torch.zeros(1, length // here.world_size, 4, 8, device=NPU)
    net = full_mesh(here.world_size, 1.0)
    some = "auto:ring,tokenring,direct-q"  # to two other ranks, and to all
    with ContextParallel(None, "zigzag", some, topology=net, memory_limit_bytes=limit, kernel="reference") as cp:
        try:
            found = tr.plan(q, q, q, cp)
        except ConfigurationError as error:
            return str(error), None, None, None
        first = found.candidates[0]
        return found.name, first.connections, first.peak_bytes, found.transport


def test_the_planner_reckons_with_communicators(npus: NpuPools) -> None:
    """In a job: they count in peak_bytes, and so in memory_limit_bytes."""
    name, count, peak, mode = npus(4)(planned, None)[0]
    assert count is not None and peak is not None and name and mode is None
    assert count * BUFFER < peak < (count + 1) * BUFFER
    _, count, peak, mode = npus(4)(planned, 3 * BUFFER)[0]
    assert mode == "hccl/pair" and count == 2 and peak is not None and 2 * BUFFER < peak < 3 * BUFFER
    text, none, *_ = npus(4)(planned, BUFFER)[0]
    assert none is None and "no schedule fits in 41.9 MB a rank" in text and "communicators" in text


def again_and_again(here: Here) -> int:
    """Transports of the same ranks, made and closed, and of groups that overlap."""
    for _ in range(3):
        fresh()
        for name in TRANSPORTS:
            transport = new(name)
            data, peer = torch.full((4,), here.rank, dtype=torch.uint8, device=NPU), (here.rank + 1) % here.world_size
            into = torch.zeros_like(data)
            handles = [transport.send(data, peer, REQUESTS, "it")]
            handles.append(transport.recv(into, (here.rank - 1) % here.world_size, REQUESTS, "it"))
            for handle in handles:
                handle.wait()
            assert into.cpu().tolist() == [(here.rank - 1) % here.world_size] * 4
            transport.close()
            with pytest.raises(ConfigurationError, match="was closed"):
                transport.send(data, peer, REQUESTS, "more")
    return sum(transport.sent_bytes.values())


def test_again_and_again(npus: NpuPools) -> None:
    assert npus(3)(again_and_again) == [4] * 3


def apart(here: Here) -> list[bytes]:
    """Ranks that share no memory exchange over Gloo, on the CPU."""
    fresh()
    with transport_name(APART):
        transport = new("hccl")
    said = transport.exchange(bytes([here.rank]), "the call")
    assert transport.exchange(b"all the same", "the call") == [b"all the same"] * here.world_size
    transport.close()
    return said


def test_exchange_between_machines(npus: NpuPools) -> None:
    assert npus(3)(apart) == [[b"\0", b"\1", b"\2"]] * 3
