"""ci/gpu's part for NCCL, dry: its own code on emulated NPUs, and how what NCCL refuses is told."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import nccl_ranks
import pytest
import torch
import torch.distributed as dist
from ascend.ranks import NpuPools
from patience import patient
from ranks import Here

from tokenring import attention
from tokenring.backends.transports.nccl import NcclTransport
from tokenring.errors import PeerLost

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "hardware" / "gpu"))

import gpu_nccl  # noqa: E402
import gpu_programs  # noqa: E402
import gpu_transports  # noqa: E402

_send = NcclTransport.send


def sends_others(self: Any, data: torch.Tensor, *where: Any) -> Any:
    """Mutant: sends other numbers."""
    return _send(self, data + 1, *where)


# ---------- two ranks


def two_ranks(here: Here, spoil: bool) -> str:
    nccl_ranks.register(here)
    made: Any = nccl_ranks.OnNpu(dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_programs, "TOKENS", 16)
        patched.setattr(gpu_programs, "DIM", 8)
        patched.setattr(NcclTransport, "send", sends_others if spoil else _send)
        try:
            return f"{gpu_programs.worst_error(made, 'npu', gpu_nccl.SCHEDULES):.0e}"
        except AssertionError as error:
            return str(error)


def test_programs(npus: NpuPools) -> None:
    for said in npus(2)(two_ranks, False):
        assert 0 < float(said) < gpu_programs.MOST
    with npus.expendable(2) as some:
        assert any("ring" in said for said in some(two_ranks, True))


# ---------- one rank


class ToItself:
    """A group of one rank: what it posts between start and end moves when that is waited for. Order is the match."""

    def __init__(self) -> None:
        self.sizes, self.sent, self.received = list[int](), list[Any](), list[Any]()

    def allreduce(self, tensors: Any, options: Any) -> ToItself:
        return self

    def send(self, tensors: Any, peer: int, tag: int) -> None:
        assert peer == 0
        self.sent += tensors

    def recv(self, tensors: Any, peer: int, tag: int) -> None:
        assert peer == 0
        self.received += tensors

    def _start_coalescing(self) -> None:
        assert not self.sent and not self.received

    def _end_coalescing(self) -> ToItself:
        self.sizes.append(len(self.sent) + len(self.received))
        return self

    def wait(self) -> None:
        for source, place in zip(self.sent, self.received, strict=True):
            place.copy_(source)
        self.sent, self.received = [], []

    def is_completed(self) -> bool:
        return True

    def abort(self) -> None:
        """Nothing is under way."""


class OneRank(nccl_ranks.OnNpu):
    """The transport on such groups."""

    def _make(self, group: Any, channel: str) -> Any:
        return ToItself()


def one_rank(here: Here, spoil: bool) -> tuple[str, list[list[int]]]:
    made: Any = OneRank(dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_nccl, "SIZE", 64)
        patched.setattr(NcclTransport, "send", sends_others if spoil else _send)
        try:
            said = gpu_nccl.own_messages(made, "npu")
        except AssertionError as error:
            return str(error), []
    return said, [each.sizes for each in made._groups.values()]


def test_messages_of_a_rank_to_itself(npus: NpuPools) -> None:
    """One group a channel for the first contact, then one for each round, both ends in it; every byte is looked at."""
    ((said, sizes),) = npus(1)(one_rank, False)
    assert said == f"{2 * gpu_nccl.COUNT} messages of 0 KiB whole"
    assert sizes == [[2] * (1 + gpu_nccl.COUNT)] * 2
    with npus.expendable(1) as some:
        ((said, _),) = some(one_rank, True)
    assert said == f"{2 * 64 * gpu_nccl.COUNT} bytes are wrong"


def one_rank_whole(here: Here, spoil: bool) -> str:
    """All that ci/gpu has of one rank."""
    smaller = {"SIZE": 64, "DEVICE": "npu", "_version": lambda: "2.30", "_transport": lambda: made}
    made: Any = OneRank(dist.group.WORLD, patient(20.0))  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        for name, value in smaller.items():
            patched.setattr(gpu_nccl, name, value)
        patched.setattr(gpu_programs, "TOKENS", 16)
        patched.setattr(gpu_programs, "DIM", 8)
        if spoil:
            patched.setattr(gpu_programs, "attention", lambda *given: 1.01 * attention(*given))
        try:
            return gpu_nccl.nccl_messages(0)
        except AssertionError as error:
            return str(error)


def test_a_program_of_one_rank(npus: NpuPools) -> None:
    """Nothing moves in it, over a transport that has moved messages before and is closed behind it."""
    (said,) = npus(1)(one_rank_whole, False)
    told, version, program = said.split("; ")
    assert (told, version) == (f"{2 * gpu_nccl.COUNT} messages of 0 KiB whole", "NCCL 2.30")
    error = float(program.removeprefix("a program of one rank: error ").removesuffix(" against float64"))
    assert 0 < error < gpu_programs.MOST
    with npus.expendable(1) as some:
        assert some(one_rank_whole, True)[0].startswith("('ring', [0.0")


# ---------- what is told


def test_a_refusal_is_told_as_one() -> None:
    """And nothing else is: NCCL's other errors are failures."""
    said = "NCCL error in: NCCLUtils.cpp:94, invalid usage\nLast error:\nDuplicate GPU detected : rank 1 and rank 0"
    lost = PeerLost("rank 1 is lost", 1)
    lost.__cause__ = RuntimeError(said)
    assert gpu_nccl.refusal(lost) == "Duplicate GPU detected : rank 1 and rank 0"
    lost.__cause__ = RuntimeError("NCCL error: unhandled system error")
    assert gpu_nccl.refusal(lost) is None


@pytest.mark.parametrize(
    ("heard", "told"),
    [
        ({0: (True, "fine"), 1: (True, "")}, (True, "fine")),
        ({0: (False, "lost"), 1: (None, "NCCL 2.28: Duplicate GPU")}, (None, "not here: NCCL 2.28: Duplicate GPU")),
        ({1: (None, "Duplicate GPU")}, (None, "not here: Duplicate GPU")),
        ({0: (True, "fine"), 1: (False, "wrong")}, (False, "rank 1: wrong")),
        ({0: (True, "fine")}, (False, "no answer of ranks [1] within 20 s")),
    ],
)
def test_what_ranks_say_is_one_line(heard: Any, told: Any) -> None:
    assert gpu_transports.summed_up(heard, 2) == told


def test_it_is_a_part() -> None:
    """With one rank, and with two that share the GPU, as NCCL 2.30 lets them if it is told so."""
    assert [(check.__name__, ranks) for _, check, ranks in gpu_transports.NCCL_PARTS] == [
        ("nccl_messages", (1,)), ("nccl_programs", (2,)),
    ]  # fmt: skip
    assert gpu_transports.SETTINGS["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
