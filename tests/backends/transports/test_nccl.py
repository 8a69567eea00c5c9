"""Transport `nccl` without a GPU (nccl_ranks): the suite of all transports, programs in groups, mutants, failures."""

from __future__ import annotations

import os
import random
import re
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import nccl_ranks
import pytest
import test_transports as conformance
import torch
import torch.distributed as dist
from ascend.hccl_ledger import HcclError, ledger, limits
from ascend.hccl_ranks import Change, run_case, small_case, without
from ascend.ranks import NpuPools
from cases import Case, Local, check_exact
from patience import patient
from ranks import Here, RankError
from test_hccl_mutants import compute_before_wait, reuse_early
from test_watch import FakeControl

import tokenring as tr
from tokenring import ConfigurationError, PeerLost
from tokenring.backends.control.watch import Watch
from tokenring.backends.registry import make_transport
from tokenring.backends.transports import accelerated
from tokenring.backends.transports.nccl import NcclTransport, _abort, limit_seconds
from tokenring.ir.schedule_data import PARTIALS, REQUESTS
from tokenring.lowering.program import Merge, Pack, Program, Recv, Send, Span, Wait
from tokenring.runtime.message_groups import last_posts

SILENT_SECONDS = 2.0
NPU = "npu"
KEPT = "nccl, for programs"  # in a rank's memory


# ---------- what every transport must do


def conforms(here: Here, what: str, *args: Any) -> Any:
    nccl_ranks.register(here)
    limits.execute = SILENT_SECONDS if what in ("silent", "failing") else 20.0
    return getattr(conformance, what)(here, nccl_ranks.NAME, *args)


@pytest.mark.parametrize("row", conformance.suite(0.3), ids=str)
def test_conformance(row: conformance.Row, npus: NpuPools) -> None:
    conformance.passes(row, npus, conforms)


# ---------- programs


def computed(here: Here, case: Case, change: Change | None = None, at: int | None = None) -> Local | str:
    nccl_ranks.register(here)
    if KEPT not in here.memory:
        here.memory[KEPT] = make_transport(nccl_ranks.NAME, dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    limits.execute = 20.0 if change is None else 2.0
    try:
        return run_case(here, case, KEPT, change if here.rank == at else None)
    except (tr.TokenRingError, HcclError) as error:
        if change is None:
            raise
        return str(error)


@pytest.mark.parametrize(
    ("world_size", "schedule", "mask"),
    [
        (2, "ring", "causal"),
        (3, "tokenring", "full"),
        (4, "direct-q", "causal"),
        (4, "direct-kv", "full"),
        (4, "usp/2", "causal"),
    ],
)
def test_programs(world_size: int, schedule: str, mask: str, npus: NpuPools) -> None:
    """Exact, with every operator watched; a group of messages is never empty."""
    case = small_case(world_size, schedule, mask)
    parts = npus(world_size)(computed, case)
    check_exact(case.whole(parts), case.reference())  # type: ignore[arg-type]


def sizes(here: Here, case: Case) -> list[list[int]]:
    computed(here, case)
    found = here.memory[KEPT]._groups.values()
    return [each.sizes for each in found if hasattr(each, "sizes")]


def test_messages_move_in_groups(npus: NpuPools) -> None:
    """What each rank of a direct schedule sends and receives of requests is one group in each pass."""
    for found in npus(4)(sizes, small_case(4, "direct-kv")):
        assert max(found[0]) >= 6, found


def drop_waits_of_a_group(program: Program) -> Program:
    """All of them: one wait would do for the group."""
    row = last_posts(program.instructions)[0]
    posted = {each.message for each in program.instructions[: row + 1] if isinstance(each, Recv | Send)}
    waits = [at for at, each in enumerate(program.instructions) if isinstance(each, Wait) and each.message in posted]
    for at in reversed(waits):
        program = without(program, at)
    return program


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop_waits_of_a_group, r"the buffer of rank 1's (send|receive).* before that is waited for|never waited for"),
        (compute_before_wait, r"reads the buffer of rank 1's receive from rank 0"),
        (reuse_early, r"(reads|writes) the buffer of rank 1's (send|receive)"),
    ],
)
def test_mutants(change: Any, says: str, npus: NpuPools) -> None:
    case = small_case(3, "ring")
    with npus.expendable(3) as some:
        texts = some(computed, case, change, 1)
    assert any(isinstance(text, str) and re.search(says, text) for text in texts), texts


# ---------- groups


def span() -> Span:
    return Span(0, 0, 1)


def test_rows_of_posts() -> None:
    """A row ends before whatever waits or computes; copies into what is sent do not end it."""
    post, send = Recv(0, span(), 1, REQUESTS, ""), Send(1, span(), 1, REQUESTS, "")
    pack, wait, merge = Pack("q", span(), span()), Wait(0), Merge("q_partial", span(), span(), True)
    assert last_posts([post, send, wait, send, pack, send, merge, pack, wait]) == [1, 5]
    assert last_posts([pack, wait]) == []
    assert last_posts([wait, send, pack]) == [1]


def left_over(seed: int, one_order: bool) -> int:
    """How many messages of random ones between 5 ranks never move, in groups that are cut anyhow, one queue a rank."""
    draw = random.Random(seed)
    messages = [tuple(draw.sample(range(5), 2)) for _ in range(40)]
    queues = []
    for rank in range(5):
        posts = [number for number, ends in enumerate(messages) if rank in ends]
        if not one_order:
            draw.shuffle(posts)
        cuts = sorted(draw.sample(range(1, len(posts)), draw.randrange(len(posts))))
        queues.append([set(posts[a:b]) for a, b in zip([0, *cuts], [*cuts, len(posts)], strict=True)])
    while moved := [n for n, ends in enumerate(messages) if all(queues[r] and n in queues[r][0] for r in ends)]:
        for number in moved:
            for rank in messages[number]:
                queues[rank][0].discard(number)
        queues = [[group for group in queue if group] for queue in queues]
    return sum(len(group) for queue in queues for group in queue)


def test_groups_of_one_order_cannot_hang() -> None:
    """However rows are cut; in orders of the ranks' own they do."""
    assert {left_over(seed, one_order=True) for seed in range(300)} == {0}
    assert any(left_over(seed, one_order=False) for seed in range(300))


def test_it_is_grouping() -> None:
    assert NcclTransport.target.grouping


# ---------- what it refuses, and time


def refusals(here: Here) -> list[str]:
    nccl_ranks.register(here)
    ledger.in_use.clear()
    bare: Any = make_transport(nccl_ranks.NAME, dist.group.WORLD, patient(5.0))  # type: ignore[arg-type]
    texts = []
    acts: tuple[Callable[[], Any], ...] = (
        lambda: bare.send(torch.ones(4, device=NPU), 1 - here.rank, PARTIALS, "step 0, o0@1"),
        lambda: bare.prepare([], torch.device("cpu")),
        lambda: bare.send(torch.ones(4), 1 - here.rank, REQUESTS, "step 0, kv0"),
    )
    for act in acts:
        with pytest.raises(ConfigurationError) as caught:
            act()
        texts.append(str(caught.value))
    bare.prepare([(0, 1, REQUESTS)], torch.device(NPU))
    for group in bare._groups.values():
        group.abort()  # as torch's watchdog does, or ours
    with pytest.raises(PeerLost) as lost:
        post = bare.send if here.rank == 0 else bare.recv
        post(torch.ones(4, device=NPU), 1 - here.rank, REQUESTS, "step 1, kv0").wait()
    texts.append(f"{lost.value.rank == 1 - here.rank} {lost.value}")
    return texts


def test_refusals(npus: NpuPools) -> None:
    """And an aborted communicator, which names the peer."""
    says = ("no connection for it (partials)", "these are on cpu", "rank 0 gave one on cpu", "aborted")
    with npus.expendable(2) as some:
        found = some(refusals)[0]
    for text, wanted in zip(found, says, strict=True):
        assert wanted in text, text


def first_contact(here: Here, absent: int, dies: bool) -> tuple[int | None, str] | None:
    """One rank does not come to its first contact, in which the others' hosts are held up for twenty seconds."""
    nccl_ranks.register(here)
    limits.connect = 20.0
    transport: Any = make_transport(nccl_ranks.NAME, dist.group.WORLD, patient(1.0))  # type: ignore[arg-type]
    transport.contact_seconds = patient(1.0)
    dist.barrier()
    if here.rank == absent:
        if dies:
            os._exit(7)
        time.sleep(patient(4.0))
        return None
    with pytest.raises(PeerLost) as lost:
        transport.prepare([(0, 1, REQUESTS), (1, 2, REQUESTS)], torch.device(NPU))
    return lost.value.rank, str(lost.value)


def test_a_first_contact_has_our_time_limit(npus: NpuPools) -> None:
    """And names who did not come: NCCL would wait much longer, if not for ever."""
    with npus.expendable(3) as some:
        found = [each for each in some(first_contact, 2, False) if each is not None]
    for rank, text in found:
        assert rank == 2 and "connected (requests)" in text and "HCCL" not in text, text
        assert re.search(r"within [0-9.]+ s", text), text


def test_a_rank_that_dies_before_its_first_contact(npus: NpuPools) -> None:
    with npus.expendable(3) as some, pytest.raises(RankError) as caught:
        some(first_contact, 2, True)
    text = str(caught.value)
    assert "rank 2: died with exit code 7" in text and "Traceback" not in text, text


def test_it_is_closed_under_the_watch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The host ran ahead, and a peer is lost while `close` waits for the device: only an abort lets that go on."""
    aborted, control = threading.Event(), FakeControl(0.3)
    made: Any = NcclTransport.__new__(NcclTransport)
    made.control, made._groups = control, {REQUESTS: SimpleNamespace(abort=aborted.set)}
    made._open, made._connected, made._device = {}, set(), torch.device("cuda", 0)
    groups = made._groups
    made._watch = Watch(control, lambda: _abort(groups), end_process=control.ended.append)  # type: ignore[arg-type]
    made._watch.add(aborted.is_set, 1, "waited for kv1")
    synchronized: list[bool] = []
    device = SimpleNamespace(synchronize=lambda: synchronized.append(aborted.wait(patient(5.0))))
    monkeypatch.setattr(accelerated, "device_of", lambda where: device)
    made.close()
    assert synchronized == [True] and not made._groups
    assert "its last results are not to be used: rank 1" in caplog.text
    thread = made._watch._thread
    thread.join(patient(3.0))
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({}, 660.0),
        ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, 60.0),
        ({"NCCL_BLOCKING_WAIT": "1"}, 60.0),
        ({"TORCH_NCCL_BLOCKING_WAIT": "0", "NCCL_BLOCKING_WAIT": "1"}, 660.0),
    ],
)
def test_limits(environment: dict[str, str], seconds: float) -> None:
    """Where waits block the host, ours; else later than our own watch."""
    assert limit_seconds(environment, 60.0) == seconds


@pytest.mark.parametrize(
    ("text", "about_a_peer"),
    [
        ("NCCL communicator was aborted on rank 0.", True),
        ("[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=SEND)", True),
        ("[rank1] Timeout waiting for key", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", False),
    ],
)
def test_who_is_to_blame(text: str, about_a_peer: bool) -> None:
    assert bool(NcclTransport.vendor_says.search(text)) == about_a_peer
