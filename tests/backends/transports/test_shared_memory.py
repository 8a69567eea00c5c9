"""/dev/shm that is too small, read-only, missing or another for one rank: Gloo and a reason, or an error that says why.

The ranks enter a mount namespace of their own, with a /dev/shm that is as bad as the test wants.
"""

from __future__ import annotations

import ctypes
import logging
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import Case, Local, check_exact, compute
from faults import lasting_names
from held import held
from patience import patient
from ranks import PEER_SECONDS, Here, RankPools, Ranks

from tokenring import BackendUnavailable, ContextParallel
from tokenring.backends.control.failure_board import ShmFailureBoard
from tokenring.backends.transports.shm import LEAST_HEAP_BYTES, room_bytes

WORLD_SIZE = 4
NEW_NAMESPACE, READ_ONLY, PRIVATE, RECURSIVE = 0x20000, 1, 1 << 18, 1 << 14  # of mount(2) and unshare(2)
PAGE = 4096
SMALL, LARGE = 32, 512  # tokens
BOARD_BYTES = ShmFailureBoard.size_bytes(WORLD_SIZE)
SET_UP_BYTES = BOARD_BYTES + room_bytes(WORLD_SIZE)
HEAP_BYTES = WORLD_SIZE * LEAST_HEAP_BYTES
FULL = "No space left on device (enlarge it; docker: --shm-size)"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mount namespaces are of Linux")


# ---------- what ranks do


def confine(here: Here, where: str, size: int, flags: int, alone: int | None) -> bool:
    """Into one namespace, or only rank `alone` into one, with a tmpfs of so many bytes there. False: not permitted."""
    owner = 0 if alone is None else alone
    able = torch.tensor(1)
    if here.rank == owner:
        able.fill_(_unshare() and _mount(b"tmpfs", where, flags, f"size={size}"))
    dist.broadcast(able, owner)
    if able and alone is None:
        pid = torch.tensor(os.getpid())
        dist.broadcast(pid, owner)
        able.fill_(here.rank == owner or (_unshare() and _enter(int(pid))))
        dist.all_reduce(able, dist.ReduceOp.MIN)
    return bool(able)


def _unshare() -> bool:
    """A mount namespace for this thread, which makes all the files."""
    done: int = ctypes.CDLL(None).unshare(NEW_NAMESPACE)
    return done == 0 and _mount(b"none", "/", PRIVATE | RECURSIVE, "")


def _mount(kind: bytes, where: str, flags: int, options: str) -> bool:
    done: int = ctypes.CDLL(None).mount(kind, where.encode(), kind, ctypes.c_ulong(flags), options.encode())
    return done == 0


def _enter(pid: int) -> bool:
    descriptor = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    try:
        done: int = ctypes.CDLL(None).setns(descriptor, NEW_NAMESPACE)
    finally:
        os.close(descriptor)
    return done == 0


@dataclass
class Seen:
    """What one rank saw of a context's calls."""

    made: list[Local] = field(default_factory=list)
    transports: list[str] = field(default_factory=list)
    logged: list[str] = field(default_factory=list)
    error: str = ""
    left: list[str] = field(default_factory=list)
    mapped: int = 0


class Listener(logging.Handler):
    def __init__(self, texts: list[str]) -> None:
        super().__init__()
        self.texts = texts

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def case_of(tokens: int) -> Case:
    return Case(WORLD_SIZE, "tokenring", "zigzag", "causal", 4, 2, 1, 16, torch.float32, None, given_length=tokens)


def use(here: Here, transport: str, lengths: list[int], fill: int = 0, leaves: tuple[int, int] | None = None) -> Seen:
    """A context's life: calls of these lengths.

    fill: bytes of /dev/shm that are taken already. leaves: before that call, that rank's /dev/shm becomes another.
    """
    seen, log, before = Seen(), logging.getLogger("tokenring"), held().shared
    listener, filler = Listener(seen.logged), Path("/dev/shm/filler")
    log.addHandler(listener)
    log.setLevel(logging.INFO)
    if fill and here.rank == 0:
        filler.write_bytes(bytes(fill))
    dist.barrier()
    try:
        cp = ContextParallel(schedule="tokenring", transport=transport, timeout_seconds=patient(PEER_SECONDS))
        for number, tokens in enumerate(lengths):
            if leaves == (number, here.rank):
                assert _unshare() and _mount(b"tmpfs", "/dev/shm", 0, "")
            seen.made.append(compute(cp, case_of(tokens)))
            seen.transports.append(type(getattr(cp.transport, "now", cp.transport)).__name__)
        dist.barrier()
    except BackendUnavailable as error:
        seen.error = str(error)
        if seen.made:  # what it had goes on
            seen.made.append(compute(cp, case_of(lengths[0])))
    cp.close()
    dist.barrier()
    log.removeHandler(listener)
    if here.rank == 0:
        with suppress(OSError):
            filler.unlink()
    seen.left = sorted(lasting_names())
    seen.mapped = held().shared - before
    return seen


# ---------- tests


def confined(some: Ranks, where: str, size: int, flags: int = 0, alone: int | None = None) -> None:
    if not all(some(confine, where, size, flags, alone)):
        pytest.skip("this machine permits no mount namespaces")


def check(found: list[Seen], lengths: list[int], transports: list[str], reason: str) -> None:
    """All ranks computed right, over these transports, and say once why."""
    for number, tokens in enumerate(lengths):
        case = case_of(tokens)
        check_exact(case.whole([each.made[number] for each in found]), case.reference())
    for each in found:
        assert each.transports == transports and not each.error, each.error
        assert len(each.logged) == bool(reason) and all(reason in text for text in each.logged), each.logged
        assert not each.left and each.mapped == 0


def check_refused(found: list[Seen], reason: str) -> None:
    """All ranks raise the same, which says what was asked for, what was found and what to do."""
    for each in found:
        assert each.error == found[0].error
        assert "transport 'shm' needs" in each.error and reason in each.error, each.error
        assert each.error.endswith("; use transport='gloo' or 'auto'"), each.error
        assert not each.logged and not each.left and each.mapped == 0


# Where a tmpfs of what size is mounted with what flags, what is taken of it already, at whom alone; and what is said.
SET_UPS = {
    "no room at all": ("/dev/shm", PAGE, 0, PAGE, None, f"rank 0 cannot make {SET_UP_BYTES} bytes in /dev/shm: "),
    "room for the board alone": ("/dev/shm", PAGE, 0, 0, None, FULL),
    "room for the signals alone": ("/dev/shm", 16 * PAGE, 0, 0, None, f"rank 0 cannot make {HEAP_BYTES} bytes"),
    "read-only": ("/dev/shm", 0, READ_ONLY, 0, None, "Read-only file system"),
    "missing": ("/dev", 0, 0, 0, None, "No such file or directory"),
    "another at one rank": ("/dev/shm", 0, 0, 0, 2, f"rank 2 cannot map {SET_UP_BYTES} bytes in /dev/shm: "),
    "read-only at the first rank": ("/dev/shm", 0, READ_ONLY, 0, 0, "rank 0 cannot make"),
    "missing at the last rank": ("/dev", 0, 0, 0, 3, "rank 3 cannot map"),
}


def test_the_sizes() -> None:
    assert BOARD_BYTES <= PAGE < SET_UP_BYTES <= 16 * PAGE < HEAP_BYTES


@pytest.mark.parametrize("what", SET_UPS)
def test_no_shared_memory(what: str, ranks: RankPools) -> None:
    where, size, flags, fill, alone, reason = SET_UPS[what]
    with ranks.expendable(WORLD_SIZE) as some:
        confined(some, where, size, flags, alone)
        check(some(use, "auto", [SMALL, LARGE, SMALL], fill), [SMALL, LARGE, SMALL], ["GlooTransport"] * 3, reason)
        check_refused(some(use, "shm", [SMALL], fill), reason)
        check(some(use, "gloo", [SMALL], fill), [SMALL], ["GlooTransport"], "")


def test_room_for_small_calls(ranks: RankPools) -> None:
    """The heap cannot grow: that call goes on over Gloo; by name it is refused, and smaller calls still work."""
    with ranks.expendable(WORLD_SIZE) as some:
        confined(some, "/dev/shm", SET_UP_BYTES + HEAP_BYTES + 3 * PAGE)
        for _ in range(3):  # what was given up is there again
            lengths, names = [SMALL, SMALL, LARGE, SMALL], ["ShmTransport"] * 2 + ["GlooTransport"] * 2
            check(some(use, "auto", lengths), lengths, names, FULL)
        found = some(use, "shm", [SMALL, LARGE])
        check_refused(found, FULL)
        assert re.search(r"transport 'shm' needs a larger heap, but rank 0 cannot make \d+ bytes", found[0].error)
        case = case_of(SMALL)
        for number in range(2):
            check_exact(case.whole([each.made[number] for each in found]), case.reference())
        check(some(use, "shm", [SMALL]), [SMALL], ["ShmTransport"], "")


def test_one_rank_cannot_grow(ranks: RankPools) -> None:
    """Its /dev/shm is another one by then."""
    with ranks.expendable(WORLD_SIZE) as some:
        confined(some, "/dev/shm", 0)
        found = some(use, "auto", [SMALL, LARGE, SMALL], leaves=(1, 2))
        check(found, [SMALL, LARGE, SMALL], ["ShmTransport", "GlooTransport", "GlooTransport"], "rank 2 cannot map")


def test_room_for_everything(ranks: RankPools) -> None:
    with ranks.expendable(WORLD_SIZE) as some:
        confined(some, "/dev/shm", 64 << 20)
        for name in ("auto", "shm"):
            check(some(use, name, [SMALL, LARGE, SMALL]), [SMALL, LARGE, SMALL], ["ShmTransport"] * 3, "")
