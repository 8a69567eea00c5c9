"""Transport `hccl/collectives` on emulated NPUs: exact, counted, and wrong programs refused by name."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend.hccl_ledger import MEGABYTE, Communicator, Noted, NotedCollective, ledger, limits
from ascend.hccl_ranks import fresh, kept_transport, run_case, small_case
from ascend.ranks import NpuPools
from cases import Case, Local, check_bytes, check_exact
from patience import patient
from programs import reads_early
from ranks import Here
from test_exchange import alone, crossed, together

import tokenring as tr
from tokenring import ConfigurationError, ContextParallel
from tokenring.backends.registry import make_transport
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.footprint import connections
from tokenring.lowering.program import ALL_GATHER, Program, Wait
from tokenring.lowering.target import contacts

COLLECTIVES = "hccl/collectives"
GROUP, PAIR = 400 * MEGABYTE, 40 * MEGABYTE
NPU = "npu"  # no torch.device: only ranks know it
Held = tuple[list[Communicator], list[Noted], list[NotedCollective]]


def counted(here: Here, case: Case, streams: int | None) -> tuple[Local, Held]:
    """Both passes of a case, and what HCCL was given to do."""
    fresh()
    here.memory.clear()
    made = run_case(here, case, COLLECTIVES, streams=streams)
    return made, (list(ledger.communicators), list(ledger.messages), list(ledger.collectives))


CASES = [
    (Case(4, "ulysses", "zigzag", "causal", 4, 4, 1, 8, torch.float32, None, given_length=64), True),
    (Case(3, "ulysses", "contiguous", "full", 6, 3, 2, 8, torch.float32, None, given_length=48), True),
    (Case(4, "ulysses/2", "striped", "documents", 8, 8, 1, 8, torch.float32, None, given_length=64), True),
    (Case(4, "all-gather-kv", "contiguous", "full", 4, 2, 1, 8, torch.float32, None, given_length=64), True),
    (Case(4, "all-gather-kv", "zigzag", "full", 4, 2, 1, 8, torch.float32, None, given_length=64), True),
    (Case(3, "direct-kv", "zigzag", "full", 4, 2, 1, 8, torch.float32, None, given_length=48), True),
    (Case(3, "direct-q", "zigzag", "full", 4, 2, 1, 8, torch.float32, None, given_length=48), True),
    (Case(4, "direct-q", "zigzag", "causal", 4, 2, 1, 8, torch.float32, 2, given_length=64), False),
    (Case(6, "usp/3", "zigzag", "causal", 6, 6, 1, 8, torch.float32, None, given_length=96), True),
    (Case(4, "sub-sharded/2x2x1", "contiguous", "full", 4, 4, 1, 8, torch.float32, None, given_length=64), True),
    (Case(4, "ring", "zigzag", "causal", 4, 2, 1, 8, torch.float32, None, given_length=64), False),
    (Case(2, "ulysses", "zigzag", "causal", 4, 2, 1, 8, torch.float32, None, given_length=32), False),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("case", "uses", "streams"), [*((*row, 1) for row in CASES), *((*row, None) for row in CASES[::3])], ids=str
)
def test_exact_and_counted(case: Case, uses: bool, streams: int | None, npus: NpuPools) -> None:
    """Bytes of each link as the schedule says; collectives, messages and communicators as lowering says."""
    found = npus(case.ranks)(counted, case, streams)
    parts = [part for part, _ in found]
    check_exact(case.whole(parts), case.reference())
    schedule, target = case.make_schedule(), transport_target(COLLECTIVES)
    check_bytes(case, schedule, parts)
    programs = [each for direction in PASSES for each in together(schedule, direction)]
    assert any(each.collectives for each in programs) is uses
    needed = contacts(schedule, target)
    for rank, (_, (communicators, messages, collectives)) in enumerate(found):
        mine = [each for program in programs if program.rank == rank for each in program.collectives]
        wanted = Counter((each.kind.replace("-", "_"), len(each.ranks)) for each in mine for _ in range(each.parts))
        assert Counter((each.what, each.ranks) for each in collectives if each.label) == wanted
        together_bytes = sum(each.nbytes for each in collectives if each.label)
        apart_bytes = sum(each.nbytes for each in messages if each.kind == "send" and each.label)
        assert together_bytes + apart_bytes == sum(sum(sent.values()) for sent in parts[rank].sent.values())
        sizes = Counter(each.nbytes for each in communicators)
        assert sizes[GROUP] == sum(rank in ranks for ranks in needed.groups)
        assert sizes[PAIR] == connections(needed.links, target, rank)


def test_ulysses_sends_no_message(npus: NpuPools) -> None:
    """One communicator in place of those of all pairs, and an operation in place of six messages."""
    for _, (communicators, messages, collectives) in npus(4)(counted, CASES[0][0], None):
        assert [(each.peers, each.nbytes) for each in communicators] == [("all", GROUP)]
        assert not messages
        assert len([each for each in collectives if each.label]) == 12  # 2 parts of q, kv, out; q, dq, dkv


# ---------- wrong programs


def broken(here: Here, case: Case, at: int, change: Callable[[Program], Program] | None) -> str:
    """What this rank sees when the rank `at` runs a changed program."""
    fresh()
    here.memory.clear()
    kept_transport(here, COLLECTIVES)
    limits.execute = 2.0
    try:
        run_case(here, case, COLLECTIVES, change if here.rank == at else None)
    except (tr.TokenRingError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def gathers_instead(program: Program) -> Program:
    """Another collective than the others have."""
    first, *rest = program.collectives
    return replace(program, collectives=(first._replace(kind=ALL_GATHER), *rest))


def never_waits(program: Program) -> Program:
    """For none of the messages of its first collective: each of them would wait for all."""
    messages = program.collectives[0].messages
    kept = [i for i, x in enumerate(program.instructions) if not (isinstance(x, Wait) and x.message in messages)]
    return replace(
        program,
        instructions=tuple(program.instructions[i] for i in kept),
        steps=tuple(program.steps[i] for i in kept),
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("change", "at", "says"),
    [
        (alone, 1, r"have no connection for it"),
        (alone, 0, r"for ranks \[1\] in all_to_all \d+ \(step 0, all-to-all of kv of ranks 0-2"),
        (crossed, 1, r'\["all_to_all", "step 0, all-to-all of (q|kv) .* meets rank \d in .*all-to-all of (kv|q) '),
        (gathers_instead, 0, r'"all_to_all", .* meets rank 1 in \["all_gather"'),
        (reads_early, 1, r"reads the buffer of rank 1: all_to_all \d+ \(step 0, all-to-all of"),
        (never_waits, 1, r"reads the buffer of rank 1: all_to_all"),
    ],
)
def test_mutants_are_detected(change: Any, at: int, says: str, npus: NpuPools) -> None:
    """Rank 1 has the wrong program; rank `at` says what; the right program passes."""
    case = small_case(3, "ulysses")
    case = replace(case, q_heads=3, kv_heads=3)
    assert npus(3)(broken, case, 1, None) == [""] * 3
    with npus.expendable(3) as some:
        texts = some(broken, case, 1, change)
    assert re.search(says, texts[at]), texts


# ---------- what it refuses


def refusals(here: Here) -> list[str]:
    fresh()
    transport = make_transport(COLLECTIVES, dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    everybody, texts = tuple(range(here.world_size)), []
    data = torch.ones(4, dtype=torch.uint8, device=NPU)
    others = {rank: data.clone() for rank in everybody if rank != here.rank}
    acts: list[Callable[[], Any]] = [
        lambda: transport.all_to_all(others, others, everybody, "step 0, all-to-all"),
        lambda: transport.all_gather(data.cpu(), others, everybody, "step 0, all-gather"),
        lambda: transport.prepare_groups([everybody], torch.device("cpu")),
    ]
    for act in acts:
        with pytest.raises(ConfigurationError) as caught:
            act()
        texts.append(str(caught.value))
    os.environ["HCCL_BUFFSIZE"] = "x"
    with pytest.raises(ConfigurationError) as caught:
        make_transport(COLLECTIVES, dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    del os.environ["HCCL_BUFFSIZE"]
    return [*texts, str(caught.value)]


def test_refusals(npus: NpuPools) -> None:
    says = ("have no connection for it: prepare_groups()", "gave one on cpu", "these are on cpu", "HCCL_BUFFSIZE='x'")
    for text, wanted in zip(npus(3)(refusals)[0], says, strict=True):
        assert wanted in text


def absent(here: Here) -> str:
    """Rank 2 does not come to the first collective."""
    fresh()
    transport = make_transport(COLLECTIVES, dist.group.WORLD, patient(5.0))  # type: ignore[arg-type]
    limits.connect = 0.7
    if here.rank == 2:
        dist.barrier()
        return ""
    with pytest.raises(tr.PeerLost) as caught:
        transport.prepare_groups([(0, 1, 2)], torch.device(NPU))
    dist.barrier()
    return str(caught.value)


def test_a_rank_that_does_not_come(npus: NpuPools) -> None:
    with npus.expendable(3) as some:
        texts = some(absent)
    assert any("HCCL_CONNECT_TIMEOUT" in text and "ranks [2] did not within 0.7 s" in text for text in texts), texts


def differs(here: Here) -> str:
    """Whether exchanges are collectives is what the transport is called, on which ranks agree when they make it."""
    fresh()
    with pytest.raises(ConfigurationError) as caught:
        name = "hccl" if here.rank else COLLECTIVES
        ContextParallel(transport=name, timeout_seconds=patient(10.0)).transport_for(None)
    return str(caught.value)


def test_ranks_that_differ(npus: NpuPools) -> None:
    with npus.expendable(3) as some:
        for text in some(differs):
            assert "the ranks disagree on the transport: rank 0 'hccl/collectives', rank 1 'hccl'" in text
