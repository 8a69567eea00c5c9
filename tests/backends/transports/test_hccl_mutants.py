"""Programs and handles with something wrong in them, on the emulated HCCL: each is found, with rank and step."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from ascend import device, module
from ascend.hccl_ledger import limits
from ascend.hccl_ranks import Change, calls, fresh, kept_transport, later, run_case, small_case, swapped, without
from ascend.operators import register
from ascend.ranks import NpuPools
from ascend.schemas import OFFERS
from cases import Case
from ranks import Here

import tokenring as tr
from tokenring import ContextParallel
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.lowering.program import Attend, Program, Recv, Send, Wait


def broken(here: Here, case: Case, transport: str, at: int, change: Change | None) -> str:
    """What this rank sees when the rank `at` runs a changed program."""
    fresh()
    here.memory.pop(transport, None)
    kept_transport(here, transport)
    limits.execute = 20.0 if change is None else 2.0  # what is right may take its time on a busy machine
    try:
        run_case(here, case, transport, change if here.rank == at else None)
    except (tr.TokenRingError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def swap_sends_of_lane(program: Program) -> Program:
    """Two sends of equal size to one peer, over one channel, change places: the first goes right after the second."""
    found = [(at, each) for at, each in enumerate(program.instructions) if isinstance(each, Send)]
    for one, first in found:
        for other, then in found:
            between = program.instructions[one:other]
            alike = _peer(first) == _peer(then) and first.span.rows == then.span.rows
            same_kind = program.slots[first.span.slot].kind == program.slots[then.span.slot].kind
            if one < other and alike and same_kind and Wait(first.message) not in between:
                return later(program, one, other)
    raise ValueError("no two sends to change")


def posts(program: Program) -> list[int]:
    return [at for at, each in enumerate(program.instructions) if isinstance(each, Send | Recv)]


def swap_order_of_pair(program: Program) -> Program:
    """A send and the receive from the same peer change places."""
    found = [(at, program.instructions[at]) for at in posts(program)]
    for one, first in found:
        for other, then in found:
            if one < other and type(first) is not type(then) and _peer(first) == _peer(then):
                return swapped(program, one, other)
    return program


def _peer(post: Any) -> tuple[int, str]:
    return (post.dst if isinstance(post, Send) else post.src), post.channel


def drop_wait_for_receive(program: Program) -> Program:
    received = {each.message for each in program.instructions if isinstance(each, Recv)}
    at = next(at for at, each in enumerate(program.instructions) if isinstance(each, Wait) and each.message in received)
    return without(program, at)


def drop_wait_for_send(program: Program) -> Program:
    sent = {each.message for each in program.instructions if isinstance(each, Send)}
    waits = [at for at, each in enumerate(program.instructions) if isinstance(each, Wait) and each.message in sent]
    return without(program, waits[-1])


def compute_before_wait(program: Program) -> Program:
    """A kernel call goes before the wait for what it reads."""
    received = {each.message: each for each in program.instructions if isinstance(each, Recv)}
    waits = {each.message: at for at, each in enumerate(program.instructions) if isinstance(each, Wait)}
    for at, each in enumerate(program.instructions):
        if isinstance(each, Attend):
            for message, post in received.items():
                if post.span.slot in (each.q.slot, each.kv.slot) and waits[message] < at:
                    return swapped(program, waits[message], at)
    return program


def reuse_early(program: Program) -> Program:
    """A receive goes into the rows that are being sent."""
    send = next(each for each in program.instructions if isinstance(each, Send))
    instructions = tuple(
        each._replace(span=send.span) if isinstance(each, Recv) and each.span.rows == send.span.rows else each
        for each in program.instructions
    )
    return Program(
        program.rank, program.direction, program.slots, instructions, program.home, program.scratch_rows, program.steps
    )


@pytest.mark.parametrize(
    ("schedule", "transport", "change", "says"),
    [
        ("direct-kv", "hccl", swap_sends_of_lane, r"another message of the same size, which would go unnoticed"),
        ("direct-kv", "hccl/channel", swap_order_of_pair, r"both (send|receive), which would hang"),
        ("direct-kv", "hccl/pair", swap_order_of_pair, r"both (send|receive), which would hang"),
        ("direct-kv", "hccl/batch", swap_sends_of_lane, r"another message of the same size, which would go unnoticed"),
        ("ring", "hccl/batch", compute_before_wait, r"reads the buffer of rank 1's receive from rank 0"),
        ("ring", "hccl/batch", reuse_early, r"(reads|writes) the buffer of rank 1's (send|receive)"),
        ("ring", "hccl", drop_wait_for_receive, r"reads the buffer of rank 1's receive from rank 0"),
        ("ring", "hccl", drop_wait_for_send, r"never waited for: rank 1's send to rank \d|buffer of rank 1's send"),
        ("ring", "hccl", compute_before_wait, r"reads the buffer of rank 1's receive from rank 0"),
        ("ring", "hccl", reuse_early, r"(reads|writes) the buffer of rank 1's (send|receive)"),
    ],
)
def test_mutants_are_detected(schedule: str, transport: str, change: Any, says: str, npus: NpuPools) -> None:
    """The emulation names rank and step; the right program passes."""
    case = replace(small_case(3, schedule), pieces=2 if change is swap_sends_of_lane else None)
    assert npus(3)(broken, case, transport, 1, None) == [""] * 3
    with npus.expendable(3) as some:
        texts = some(broken, case, transport, 1, change)
    found = [text for text in texts if re.search(says, text)]
    assert found and re.search(r"\(step \d+, (kv|q|o)", found[0]), texts



# ---------- streams that communicators share


def shares(here: Here, case: Case, streams: int | None, early: bool) -> str:
    """What a rank sees whose communicators take their streams from so small a pool."""
    fresh()
    here.memory.clear()
    moved = kept_transport(here, "hccl", streams)
    moved.target = replace(moved.target, early_receives=early)
    limits.execute = 1.0 if early and streams else 20.0
    try:
        run_case(here, case, "hccl", streams=streams)
    except (tr.TokenRingError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_single_stream_is_enough_but_not_for_early_receives(npus: NpuPools) -> None:
    case = small_case(3, "direct-q")
    for streams, early in ((1, False), (2, False), (None, True)):
        assert npus(3)(shares, case, streams, early) == [""] * 3
    with npus.expendable(3) as some:
        texts = some(shares, case, 1, True)
    assert any("HCCL_EXEC_TIMEOUT" in text for text in texts), texts


# ---------- what would stop the device


def host_waits(here: Here, case: Case, transport: str, kernel: str, mutant: str) -> list[str]:
    """Where the host waits for the device in both passes of a call that was made before. mutant: what also waits."""
    fresh()
    register(next(iter(OFFERS)))
    moved: Any = kept_transport(here, transport)
    cp = ContextParallel(**case.options, transport=moved, kernel=kernel)
    call = calls(cp, case)
    call()
    device.host_waits.clear()
    module.noted.clear()
    with pytest.MonkeyPatch.context() as patched:
        if mutant:
            owner = moved if mutant in ("send", "all_to_all") else NpuFusion
            act = getattr(owner, mutant)
            patched.setattr(owner, mutant, lambda *given, **how: _waits_first(act, *given, **how), raising=False)
        call()
    return [*device.host_waits, *(what for what, _, _ in module.noted if what == "synchronize")]


def _waits_first(act: Callable[..., Any], *given: Any, **how: Any) -> Any:
    torch.get_device_module("npu").synchronize()
    return act(*given, **how)


@pytest.mark.parametrize(
    ("schedule", "transport", "kernel", "mutant"),
    [
        ("tokenring", "hccl/batch", "npu-fusion", "send"),
        ("tokenring", "hccl", "npu-fusion", "send"),
        ("tokenring", "hccl", "reference", "send"),
        ("direct-kv", "hccl/pair", "npu-fusion", "backward"),
        ("ulysses", "hccl/collectives", "npu-fusion", "all_to_all"),
    ],
)
def test_the_host_waits_for_nothing_in_the_step_loop(
    schedule: str, transport: str, kernel: str, mutant: str, npus: NpuPools
) -> None:
    case = replace(small_case(3, schedule, "causal"), q_heads=6, kv_heads=3)
    assert npus(3)(host_waits, case, transport, kernel, "") == [[]] * 3
    assert all("synchronize" in found for found in npus(3)(host_waits, case, transport, kernel, mutant))
