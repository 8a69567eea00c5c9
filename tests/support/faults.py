"""Four ranks, one of which dies, stops, fails or leaves while all compute: what do the others see, and when?

Every case has processes of its own, forks of a server that has imported torch: no launcher watches
them, and rank 0 holds the store of the group in its own process. `run_case` reports for each
survivor what it raised, which rank that named and how long after the fault; and what was left over.
"""

from __future__ import annotations

import io
import math
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from machines import APART, transport_name
from oracle import allowed, attention64, relative_error
from patience import patient, set_stretch, stretch
from ranks import PRELOADED

from tokenring import Causal, ContextParallel, PeerLost, attention, shard
from tokenring.backends.control.control import MAY_WAIT
from tokenring.backends.control.segments import FOLDER, PREFIX
from tokenring.backends.kernels.cpu_flash import CpuFlash

WORLD_SIZE = 4
LIMIT_SECONDS = 3.0  # timeout_seconds of the ranks
WITHIN_SECONDS = LIMIT_SECONDS + 2.0  # how soon every survivor must know
PATIENCE_SECONDS = 30.0  # of this driver, for anything else
KINDS = ("killed", "stopped", "raises", "leaves", "kernel fails")
SCHEDULES = ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q")
TRANSPORTS = ("gloo", "shm", APART)
PASSES = ("forward", "backward")  # calls of forward alone, or of both


@dataclass(frozen=True)
class Case:
    """`seed` decides on the moment and the sizes. reform: survivors then make a smaller group and compute in it."""

    kind: str
    schedule: str
    transport: str
    passes: str
    victim: int
    seed: int
    reform: bool = False

    def __str__(self) -> str:
        return f"rank {self.victim} {self.kind}, {self.schedule}, {self.transport}, {self.passes}, seed {self.seed}"

    @staticmethod
    def random(seed: int, reform: bool = False) -> Case:
        draw = random.Random(seed)
        kind, schedule = draw.choice(KINDS), draw.choice(SCHEDULES)
        transport, passes = draw.choice(TRANSPORTS), draw.choice(PASSES)
        return Case(kind, schedule, transport, passes, draw.randrange(WORLD_SIZE), seed, reform)


@dataclass(frozen=True)
class Outcome:
    """What one survivor saw. `seconds` after the fault."""

    rank: int
    error: str
    named: int | None
    certain: bool
    seconds: float
    text: str


@dataclass(frozen=True)
class Found:
    """What a case gave; `left`: processes, files and failures that should not be."""

    case: Case
    outcomes: list[Outcome]
    left: list[str]

    def troubles(self, within_seconds: float = math.inf) -> list[str]:
        """Return what no case may show; whether the right rank is named is a matter of the whole.

        within_seconds: how soon each survivor must know, of a quiet machine. A campaign asks; a test does not, since
        time is measured in benchmarks alone.
        """
        found = list(self.left)
        for each in self.outcomes:
            if each.error != "PeerLost":
                found.append(f"rank {each.rank} raised {each.error}: {each.text}")
            elif each.seconds > patient(within_seconds):
                found.append(f"rank {each.rank} knew after {each.seconds:.1f} s: {each.text}")
            elif each.named not in (None, self.case.victim) and MAY_WAIT not in each.text:
                found.append(f"rank {each.rank} named the living rank {each.named}: {each.text}")
        return [f"{self.case}: {each}" for each in found]


# ---------- the driver


def run_cases(cases: list[Case], show: Callable[[Found], None] = lambda found: None) -> list[Found]:
    """Two at a time. What is in /dev/shm is looked at when none runs."""
    before = shared_names()
    with ThreadPoolExecutor(2) as pool:
        found = []
        for each in pool.map(run_case, cases):
            show(each)
            found.append(each)
    if names := lasting_names() - before:
        found[-1].left.append(f"in {FOLDER}: {names}")
    return found


def run_case(case: Case) -> Found:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port, pipes, processes, left = free_port(), [], [], list[str]()
    outcomes: list[Outcome] = []
    try:
        for rank in range(WORLD_SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, case, rank, port, stretch()), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for rank, pipe in enumerate(pipes):
            assert _next(pipe) == "ready", f"{case}: rank {rank}"
        for pipe in pipes:
            pipe.send("go")
        moment = _harm(case, processes[case.victim], pipes[case.victim])
        survivors = [rank for rank in range(WORLD_SIZE) if rank != case.victim]
        for rank in survivors:
            answer = _next(pipes[rank])
            if isinstance(answer, tuple):
                error, named, certain, at, text = answer
                outcomes.append(Outcome(rank, error, named, certain, at - moment, text))
            else:
                outcomes.append(Outcome(rank, str(answer), None, False, math.inf, ""))
        if case.reform:
            left += _reform(survivors, pipes)
        left += _end(case, survivors, pipes, processes)
    finally:
        for process in processes:
            process.kill()
            process.join(patient(PATIENCE_SECONDS))
        for pipe in pipes:
            pipe.close()
    return Found(case, outcomes, left)


def _harm(case: Case, process: BaseProcess, pipe: Connection) -> float:
    """Do to the victim what is to be done, or see it do it; when that was."""
    if case.kind not in ("killed", "stopped"):
        return float(_next(pipe))
    time.sleep(random.Random(case.seed).uniform(0.0, 0.4))
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL if case.kind == "killed" else signal.SIGSTOP)
    return time.monotonic()


def _reform(survivors: list[int], pipes: list[Connection]) -> list[str]:
    port = free_port()
    for new_rank, rank in enumerate(survivors):
        pipes[rank].send((new_rank, len(survivors), port))
    answers = [_next(pipes[rank]) for rank in survivors]
    said = [f"rank {rank}, in a new group: {answer}" for rank, answer in zip(survivors, answers, strict=True)]
    return [each for each in said if not each.endswith(": right")]


def _end(case: Case, survivors: list[int], pipes: list[Connection], processes: Sequence[BaseProcess]) -> list[str]:
    """Survivors end by themselves, and well."""
    for rank in survivors:
        pipes[rank].send("end")
    left = []
    for rank in survivors:
        processes[rank].join(patient(10.0))
        if processes[rank].exitcode != 0:
            left.append(f"rank {rank} ended with exit code {processes[rank].exitcode}")
    return left


def _next(pipe: Connection) -> Any:
    """What the rank says next; text if it says nothing or is dead."""
    try:
        return pipe.recv() if pipe.poll(patient(PATIENCE_SECONDS)) else f"silent for {patient(PATIENCE_SECONDS):g} s"
    except (EOFError, ConnectionError):
        return "died"


def free_port() -> int:
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def shared_names() -> set[str]:
    return {path.name for path in Path(FOLDER).glob(f"{PREFIX}*")}


EARLIER = shared_names()  # somebody else's, or of tests that were killed


def lasting_names() -> set[str]:
    """Those of now that do not go within a second: other tests on this machine may be setting up theirs."""
    found = shared_names() - EARLIER
    for _ in range(10):
        if found:
            time.sleep(patient(0.1))
            found &= shared_names()
    return found


# ---------- in the ranks' processes


class Harm(Exception):
    """What a victim raises."""


def _work(pipe: Connection, case: Case, rank: int, port: int, factor: float) -> None:
    set_stretch(factor)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    _join(rank, WORLD_SIZE, port)
    with transport_name(case.transport) as name:
        cp = ContextParallel(schedule=case.schedule, transport=name, timeout_seconds=patient(LIMIT_SECONDS))
        assert cp.transport is not None
    draw = random.Random(case.seed)
    x = torch.randn(1, draw.choice((32, 128, 512)), 4, 16, requires_grad=case.passes == "backward")
    calls_to_come = draw.randrange(40)  # until the victim does it
    _call(x, cp)
    pipe.send("ready")
    pipe.recv()
    if rank == case.victim:
        _suffer(pipe, case, cp, x, calls_to_come)
        return
    try:
        while True:
            _call(x, cp)
    except Exception as error:
        at = time.monotonic()
        named, certain = (error.rank, error.certain) if isinstance(error, PeerLost) else (None, False)
        pipe.send((type(error).__name__, named, certain, at, str(error)))
    while (order := pipe.recv()) != "end":
        cp.close()
        dist.destroy_process_group()
        pipe.send(_attempt(*order))


def _call(x: torch.Tensor, cp: ContextParallel) -> None:
    out = attention(x, x, x, cp, Causal())
    if x.requires_grad:
        torch.autograd.backward(out.sum())


def _suffer(pipe: Connection, case: Case, cp: ContextParallel, x: torch.Tensor, calls: int) -> None:
    """The victim's life. Who is killed or stopped is so in the middle of it."""
    if case.kind == "kernel fails":
        _break_kernel(pipe, random.Random(case.seed).randrange(100), "forward" if case.seed % 2 else case.passes)
    sys.stderr = io.StringIO()  # its traceback is expected
    while case.kind not in ("raises", "leaves") or calls > 0:
        try:
            _call(x, cp)
        except Harm:
            pipe.recv()  # it lives on
        calls -= 1
    if case.kind == "raises":
        pipe.send(time.monotonic())
        raise Harm("on purpose")
    pipe.send(time.monotonic())
    if case.seed % 2:
        dist.destroy_process_group()


def _break_kernel(pipe: Connection, tiles: int, name: str) -> None:
    """The kernel raises at some tile from now on."""
    left, whole = iter(range(tiles)), getattr(CpuFlash, name)

    def broken(*args: Any, **kwargs: Any) -> Any:
        if next(left, None) is None:
            pipe.send(time.monotonic())
            raise Harm("on purpose")
        return whole(*args, **kwargs)

    setattr(CpuFlash, name, broken)


def _attempt(rank: int, world_size: int, port: int) -> str:
    """A new group of those who are left computes what one process does."""
    _join(rank, world_size, port)
    cp = ContextParallel(schedule="tokenring", timeout_seconds=patient(20.0))
    random_ = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 24 * world_size, 4, 16, generator=random_) for _ in range(3))
    wanted = attention64(q, k, v, torch.zeros_like(q), allowed(Causal(), q.shape[1], q.shape[1])).out
    parts = [shard(x, cp) for x in (q, k, v)]
    for _ in range(5):
        error = relative_error(attention(parts[0], parts[1], parts[2], cp, Causal()), shard(wanted, cp))
        if error > 2e-6:
            return f"error {error:.3g}"
    dist.barrier()
    cp.close()
    return "right"


def _join(rank: int, world_size: int, port: int) -> None:
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)


def _end_with_parent() -> None:
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
