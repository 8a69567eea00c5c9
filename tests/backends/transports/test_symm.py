"""Transport `symm` between processes without a GPU (symm_ranks): the suite of all transports, programs, failures."""

from __future__ import annotations

import gc
import logging
import os
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import symm_ranks
import test_transports as conformance
import torch
import torch.distributed as dist
from cases import Case, Local, check_exact, compute
from patience import patient
from ranks import Here, RankError, RankPools

import tokenring as tr
from tokenring import BackendUnavailable, ConfigurationError, ContextParallel, PeerLost
from tokenring.backends.registry import make_transport
from tokenring.backends.transports import symmetric
from tokenring.backends.transports.auto_cuda import CudaTransport, choice_here
from tokenring.backends.transports.nccl import NcclTransport
from tokenring.backends.transports.onesided import Receiving
from tokenring.ir.schedule_data import PARTIALS, REQUESTS
from tokenring.lowering.backend_names import transport_class, transport_target
from tokenring.lowering.mailboxes import BOXES
from tokenring.planner.interconnects.interconnect import full_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "hardware" / "gpu"))

import gpu_messages

LIMIT_SECONDS = 1.0


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPools]:
    """Of this module alone: they know transports that nobody else is to hear of."""
    pools = RankPools()
    yield pools
    pools.close()


# ---------- what every transport must do


def conforms(here: Here, name: str, what: str, *args: Any) -> Any:
    symm_ranks.register()
    transport_class(name)
    dist.barrier()  # what a rank has to import is no part of what is timed
    return getattr(conformance, what)(here, name, *args)


@pytest.mark.parametrize(
    ("name", "row"),
    [*(("told", row) for row in conformance.suite()), *(("boxed told", row) for row in conformance.suite(0.4))],
    ids=str,
)
def test_conformance(name: str, row: conformance.Row, ranks: RankPools) -> None:
    """The watch finds a silent peer, lets the streams go on, and it is named on every rank."""
    conformance.passes(row, ranks, conforms, name)


# ---------- programs


def computed(here: Here, name: str, case: Case, turns: int) -> list[Local]:
    """Both passes, several times, over one transport."""
    symm_ranks.register()
    if name not in here.memory:
        here.memory[name] = make_transport(name, dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    transport = here.memory[name]
    with ContextParallel(**case.options, transport=transport) as cp:
        return [compute(cp, case) for _ in range(turns)]


@pytest.mark.parametrize("name", ["on cpu", "boxed on cpu"])
@pytest.mark.parametrize(
    ("world_size", "schedule", "layout", "mask"),
    [
        (2, "ring", "zigzag", "causal"),
        (3, "tokenring", "contiguous", "full"),
        (4, "direct-q", "zigzag", "causal & documents"),
        (4, "direct-kv", "striped", "causal"),
        (4, "ulysses", "zigzag", "causal"),
        (4, "usp/2", "zigzag", "window to the left"),
    ],
)
def test_programs(world_size: int, schedule: str, layout: str, mask: str, name: str, ranks: RankPools) -> None:
    """Results are as exact as over any transport, in every turn."""
    case = Case(world_size, schedule, layout, mask, 4, 4, 1, 16, torch.float32, None)
    turns = zip(*ranks(world_size)(computed, name, case, 3), strict=True)
    for parts in turns:
        check_exact(case.whole(list(parts)), case.reference())


def moved(here: Here, name: str, spoil: bool) -> str:
    """What hardware/gpu/gpu_transports runs on GPUs."""
    symm_ranks.register()
    transport: Any = make_transport(name, dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        send = type(transport).send
        if spoil:
            patched.setattr(type(transport), "send", lambda self, data, *where: send(self, data + 1, *where))
        try:
            return gpu_messages.whole_messages(transport, "cpu", 4096, 5)
        except AssertionError as error:
            return str(error)


@pytest.mark.parametrize("name", ["on cpu", "boxed on cpu"])
def test_the_messages_of_ci(name: str, ranks: RankPools) -> None:
    for said in ranks(3)(moved, name, False):
        assert said.startswith("20 messages of 4 KiB whole")
    for said in ranks(3)(moved, name, True):
        assert said.endswith("bytes are wrong")


# ---------- what it refuses


def refusals(here: Here) -> list[str]:
    symm_ranks.register()
    transport: Any = make_transport("on cpu", dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    memory, peer = transport.allocate(1 << 12), 1 - here.rank
    receives = [(peer, REQUESTS, memory[:64]), (peer, PARTIALS, memory[64:96])]
    placement = transport.place(receives)
    texts = []

    def refuse(act: Any) -> None:
        with pytest.raises(ConfigurationError) as caught:
            act()
        texts.append(str(caught.value))

    refuse(lambda: transport.send(memory[:8], peer, REQUESTS, "step 0, kv0"))
    transport.begin(placement)
    refuse(lambda: transport.send(memory[128:136], peer, REQUESTS, "step 0, kv0"))
    transport.begin(placement)
    refuse(lambda: transport.recv(memory[64:128], peer, REQUESTS, "step 0, kv1"))
    transport.begin(placement)
    refuse(lambda: transport.recv(torch.empty(64, dtype=torch.uint8), peer, REQUESTS, "step 0, kv1"))
    refuse(lambda: transport.prepare([], torch.device("meta")))
    refuse(lambda: transport.send(memory[:64].view(8, 8)[:, :4], peer, REQUESTS, "step 0, kv0"))
    transport.begin(placement)
    handles = [transport.send(memory[128:192], peer, REQUESTS, "it"), transport.recv(memory[:64], peer, REQUESTS, "it")]
    refuse(lambda: transport.send(memory[:64], peer, REQUESTS, "more"))
    for handle in handles:
        handle.wait()
    transport.allocate(8 << 20)
    refuse(lambda: transport.begin(placement))
    transport.close()
    refuse(lambda: transport.send(memory[:64], peer, REQUESTS, "more"))
    transport.close()
    return texts


def test_refusals(ranks: RankPools) -> None:
    says = (
        "message 0 with rank 1 on requests has no place", "rank 0 sends 8 bytes, rank 1 expects 64",
        "was told another place than this", "receives only into memory of its allocate()", "these are on meta",
        "not contiguous", "message 1 with rank 1 on requests has no place", "bound before the memory grew",
        "was closed",
    )  # fmt: skip
    found = ranks(2)(refusals)[0]
    assert len(found) == len(says)
    for text, wanted in zip(found, says, strict=True):
        assert wanted in text, text


def dies(here: Here) -> int | None:
    """Rank 1 is gone while rank 0 waits for it on its stream."""
    symm_ranks.register()
    transport: Any = make_transport("told", dist.group.WORLD, patient(30.0))  # type: ignore[arg-type]
    memory = transport.allocate(4096)
    dist.barrier()
    if here.rank == 1:
        os._exit(7)
    with pytest.raises(PeerLost) as caught:
        transport.recv(memory, 1, REQUESTS, "kv1").wait()
    assert caught.value.certain and "is gone" in str(caught.value)
    return caught.value.rank


def waits_for_a_box(here: Here, watched: bool) -> str:
    """Rank 0 posts one receive more than rank 1 has boxes for, and waits for none; rank 1 sends nothing."""
    symm_ranks.register()
    transport: Any = make_transport("boxed told", dist.group.WORLD, patient(LIMIT_SECONDS))  # type: ignore[arg-type]
    memory = transport.allocate(4096)
    dist.barrier()
    if here.rank == 0:
        with pytest.MonkeyPatch.context() as patched:
            if not watched:
                patched.setattr(Receiving, "is_full", False)
            for number in range(BOXES + 1):
                transport.recv(memory[64 * number : 64 * (number + 1)], 1, REQUESTS, f"kv{number}")
    said, deadline = "", time.monotonic() + patient(3 * LIMIT_SECONDS)
    while here.rank == 0 and not said and time.monotonic() < deadline:
        try:
            transport.check()
        except PeerLost as error:
            said = str(error)
        time.sleep(0.05)
    dist.barrier()
    return said


@pytest.mark.parametrize("watched", [True, False])
def test_posts_that_wait_are_watched(watched: bool, ranks: RankPools) -> None:
    """Whatever stands behind them would hang, and nobody waits for the message itself."""
    with ranks.expendable(2) as some:
        said = some(waits_for_a_box, watched)[0]
    assert ("Rank 0 waited before kv2 for what comes first" in said) == watched


def closed_memory(here: Here) -> tuple[bool, bool]:
    """Whether a receive that fails is looked after no more; and whether a closed transport keeps its memory."""
    symm_ranks.register()
    transport: Any = make_transport("told", dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    memory, held = transport.allocate(4096), weakref.ref(transport._memory)
    dist.barrier()

    def fail(word: int) -> None:
        raise RuntimeError("the driver refuses")

    message = transport.recv(memory[:64], 1 - here.rank, REQUESTS, "kv1")
    transport._memory.wait = fail
    with pytest.raises(RuntimeError, match="the driver refuses"):
        message.wait()
    deadline = time.monotonic() + patient(5.0)
    while transport._watch._under_way and time.monotonic() < deadline:
        time.sleep(0.01)
    left = bool(transport._watch._under_way)
    dist.barrier()
    del message, memory
    transport.close()
    gc.collect()
    return left, held() is not None


def test_a_closed_transport_keeps_no_memory(ranks: RankPools) -> None:
    assert ranks(2)(closed_memory) == [(False, False)] * 2


def test_a_peer_that_dies_is_named_at_once(ranks: RankPools) -> None:
    with ranks.expendable(2) as some, pytest.raises(RankError) as caught:
        some(dies)
    text = str(caught.value)
    assert "rank 1: died with exit code 7" in text and "Traceback" not in text, text


# ---------- no symmetric memory


def broken(here: Here, name: str, what: str, at: int) -> str:
    """One rank fails in one part of the set-up, or is too slow: all say the same, in time, and none hangs."""
    symm_ranks.register()

    if here.rank == at:
        symm_ranks.fails(what, "peer access is not supported between these two devices")
    with pytest.raises(BackendUnavailable) as caught:
        transport: Any = make_transport(name, dist.group.WORLD, patient(2.0))  # type: ignore[arg-type]
        memory, before = transport.allocate(4096), (here.rank - 1) % here.world_size
        transport.place([(before, REQUESTS, memory[:64])])
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "what"),
    [*(("on cpu", what) for what in ("device", "hangs", "meet", "grow")), ("boxed on cpu", "lay")],
)
def test_a_set_up_that_fails_somewhere(name: str, what: str, ranks: RankPools) -> None:
    with ranks.expendable(3) as some:
        texts = some(broken, name, what, 1)
    assert len(set(texts)) == 1, texts
    assert "rank 1: " in texts[0] and "use transport='nccl' or 'auto'" in texts[0]
    assert ("no answer within " if what == "hangs" else "peer access is not supported") in texts[0]


def goes_on(here: Here, case: Case, what: str, at: int) -> tuple[list[Local], list[str], str, list[str]]:
    """Auto, where a rank has no symmetric memory, or loses it when a larger heap is wanted."""
    symm_ranks.register()
    if here.rank == at:
        symm_ranks.fails(what, "peer access is not supported between these two devices")
    heard: list[str] = []
    logging.getLogger("tokenring").addHandler(Hears(heard))
    transport: Any = make_transport("auto on cpu", dist.group.WORLD, patient(5.0))  # type: ignore[arg-type]
    names, found = [type(transport.now).__name__], []
    for _ in range(2):
        with ContextParallel(**case.options, transport=transport) as cp:
            found.append(compute(cp, case))
        names.append(type(transport.now).__name__)
    return found, names, transport.why, heard


class Hears(logging.Handler):
    def __init__(self, heard: list[str]) -> None:
        super().__init__(logging.INFO)
        self.heard = heard

    def emit(self, record: logging.LogRecord) -> None:
        self.heard.append(record.getMessage())


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("", ["OnCpu"] * 3),
        ("device", ["GlooTransport"] * 3),
        ("meet", ["GlooTransport"] * 3),
        ("grow", ["OnCpu", "GlooTransport", "GlooTransport"]),
    ],
)
def test_auto_goes_on(what: str, names: list[str], ranks: RankPools) -> None:
    """With the two-sided transport, on all ranks, with a reason that is logged; and computes the same."""
    case = Case(3, "tokenring", "zigzag", "causal", 2, 2, 1, 16, torch.float32, None)
    with ranks.expendable(3) as some:
        answers = some(goes_on, case, what, 1)
    for _, taken, why, heard in answers:
        assert taken == names, (taken, why)
        if what:
            assert "rank 1: " in why and any("peer access is not supported" in each for each in heard), (why, heard)
    for turn in range(2):
        check_exact(case.whole([found[turn] for found, *_ in answers]), case.reference())


def planned(here: Here, why: str) -> str:
    """The reason of the plan that `auto` makes over a transport that was chosen among several."""
    symm_ranks.register()
    transport: Any = make_transport("auto on cpu", dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    transport.why = why
    x = torch.zeros(1, 32, 2, 8)
    net = full_mesh(here.world_size, 1.0)
    with ContextParallel(schedule="auto:ring,direct-q", transport=transport, topology=net) as cp:
        return tr.plan(x, x, x, cp, tr.Causal()).reason


def test_plans_say_why_the_transport_was_taken(ranks: RankPools) -> None:
    """Behind the schedule's reason; of a transport that has no reason nothing is said."""
    with ranks.expendable(2) as some:
        assert all(each.endswith("; the test says so") for each in some(planned, "the test says so"))
        assert all(each and "the test says so" not in each for each in some(planned, ""))


def without_cuda(here: Here, name: str) -> str:
    with pytest.raises(BackendUnavailable) as caught:
        make_transport(name, dist.group.WORLD, patient(5.0))  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("symm", "its device fails on rank 0: torch sees no CUDA device here"),
        ("nccl", "this torch was built without NCCL"),
        ("nvshmem", "transport 'nvshmem' needs memory that peers reach, and its device fails on rank 0: torch sees no"),
        ("cuda", "nothing moves CUDA tensors here: symm: rank 0: torch sees no CUDA device here; nccl: rank 0: this"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda(name: str, says: str, ranks: RankPools) -> None:
    for text in ranks(2)(without_cuda, name):
        assert says in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_what_is_said_without_cuda() -> None:
    assert symmetric.unavailable() == "torch sees no CUDA device here"
    assert choice_here()[0] is None


def test_target() -> None:
    """Strict order, so that streams may share a queue; what the planner reckons with."""
    target = transport_target("symm")
    assert (target.one_sided, target.placing, target.early_receives, target.channels) == (True, True, False, 2)
    assert transport_target("cuda") == target
    assert CudaTransport.two_sided is NcclTransport
