"""Ranks for tests: processes that stay, joined by Gloo, to which a test sends functions.

    def rank_of(here: Here, factor: int) -> int:      # at module level, so that it pickles
        return here.rank * factor

    def test_it(ranks: RankPools) -> None:
        assert ranks(3)(rank_of, 2) == [0, 2, 4]

A fork server imports torch once; every rank is a fork of it, with one thread. Programs are replayed by rank
0 for all, so a refused one raises there only. Every wait has a time limit. A pool in which anything went
wrong is killed, and the next call for that many ranks starts a new one. Between calls ranks are stopped: a
Gloo group's thread looks around a hundred times a second, and those of all pools together took a tenth of
the time. Ranks end with the process that made them, however that ends, and leave no files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing as mp
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Concatenate, NoReturn, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from patience import patient, set_stretch, stretch
from rank_forks import Fork, Loaded

from tokenring import ContextParallel
from tokenring.backends.interfaces import Transport
from tokenring.ir.schedule_data import ScheduleData
from tokenring.lowering.target import APART, Target
from tokenring.proof import batches, replay

PRELOADED = [
    "numpy",
    "pytest",
    "torch.distributed.device_mesh",
    "torch.distributed.tensor",  # what torch asks for at the first .to of a tensor of another device
    "torch.utils.checkpoint",
    "tokenring.backends.transports.gloo",
    "tokenring.backends.transports.shm",
    "tokenring.runtime.agreement",
    "tokenring.backends.kernels.cpu_flash",
    "tokenring.planner.choosing.auto",
    "tokenring.runtime.executor",
    "tokenring.lowering.lower",
    "tokenring.planner.choosing.connections",
    "tokenring.proof.replay",
    "tokenring.proof.verify",
    "tokenring.backends.kernels.npu_fusion",
    "tokenring.backends.merging.npu",
    "tests.support.preloaded",  # where tests run in the folder above
    "torch.fx.experimental.symbolic_shapes",  # and with it sympy: for the first gradient, a second of each rank
    "torch._dynamo",  # for the first compiled or checkpointed call, or step of an optimizer: three seconds of each rank
    "torch._functorch.aot_autograd",
    "torch._inductor.compile_fx",  # which every backend imports when it first compiles, two more seconds
]
# Limits of a quiet machine; see `patience`.
CALL_SECONDS = 60.0  # a call on ranks; below pytest's limit for a test
GRACE_SECONDS = 3.0  # for the other ranks, once one has failed
PAUSES = sys.platform == "linux"
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
PEER_SECONDS = 20.0  # timeout_seconds of the ranks' own transport: they raise PeerLost before we kill them

P = ParamSpec("P")
T = TypeVar("T")


class RankError(AssertionError):
    """A function raised on some rank, or a rank died or was silent."""


@dataclass
class Here:
    """What a function that runs on a rank gets as its first argument."""

    rank: int
    world_size: int
    base: ContextParallel
    memory: dict[str, Any] = field(default_factory=dict)  # what functions leave to later calls
    transports: dict[str, Transport] = field(default_factory=dict)

    def transport(self, name: str) -> Transport | None:
        """The transport of all ranks, made once."""
        if self.world_size == 1:
            return None
        if name not in self.transports:
            cp = ContextParallel(transport=name, timeout_seconds=patient(PEER_SECONDS))
            assert cp.transport is not None
            self.transports[name] = cp.transport
        return self.transports[name]

    def cp(self, **options: Any) -> ContextParallel:
        """A ContextParallel of all ranks that shares the base's transport: nothing to connect."""
        if self.world_size > 1:
            options.setdefault("transport", self.base.transport)
        return ContextParallel(**options)


class Ranks:
    """P processes of one Gloo group. Calling it runs a function on every rank, and gives their results."""

    def __init__(self, world_size: int, port: int, prefix: str, loaded: Loaded | None = None) -> None:
        """loaded: the process of which they are forks, or None: the fork server itself."""
        self.world_size, self.usable = world_size, True
        self._pipes: list[Connection] = []
        self._processes: list[BaseProcess | Fork] = []
        context = mp.get_context("forkserver")
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe()
                given = rank, world_size, port, prefix, stretch(), os.getpriority(os.PRIO_PROCESS, 0)
                if loaded is None:
                    name = f"rank {rank} of {world_size}"
                    process = context.Process(target=_serve, args=(theirs, *given), daemon=True, name=name)
                    process.start()
                    self._processes.append(process)
                else:
                    self._processes.append(loaded.start(_serve_forked, theirs, *given))
                theirs.close()
                self._pipes.append(ours)
            self._collect(CALL_SECONDS)  # each says when it has joined the group
            self._signal(signal.SIGSTOP)
        except BaseException:
            self.kill()
            raise

    def __call__(self, function: Callable[Concatenate[Here, P], T], *args: P.args, **kwargs: P.kwargs) -> list[T]:
        """The results by rank. Raises RankError with the tracebacks of the ranks that failed."""
        return self.within(CALL_SECONDS, function, *args, **kwargs)

    def within(
        self, seconds: float, function: Callable[Concatenate[Here, P], T], *args: P.args, **kwargs: P.kwargs
    ) -> list[T]:
        """The same with a time limit of its own."""
        if not self.usable:
            raise RankError(f"these {self.world_size} ranks were killed; ask the fixture for new ones")
        # Plain pickle: the pickler of multiprocessing would put tensors into shared memory.
        request = pickle.dumps((function, args, kwargs, stretch()))
        try:
            self._signal(signal.SIGCONT)
            for pipe in self._pipes:
                pipe.send_bytes(request)
            results: list[T] = self._collect(seconds)
            self._signal(signal.SIGSTOP)
        except BaseException:  # also Ctrl-C and pytest's own limit: what the ranks do now is anyone's guess
            self.kill()
            raise
        return results

    def _signal(self, number: signal.Signals) -> None:
        """To every rank that is there."""
        for process in self._processes if PAUSES else ():
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _collect(self, seconds: float) -> list[Any]:
        """One answer from each rank, waiting for no longer than `seconds` of a quiet machine."""
        seconds, grace = patient(seconds), patient(GRACE_SECONDS)
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while silent := [rank for rank in range(self.world_size) if rank not in results and rank not in failed]:
            ready = wait([self._pipes[rank] for rank in silent], max(0.0, deadline - time.monotonic()))
            if not ready:
                names = ", ".join(map(str, silent))
                limit = f"{seconds:g} s" if not failed else f"{grace:g} s after that"
                raise RankError(f"{_texts(failed)}rank {names} of {self.world_size} gave no answer within {limit}")
            for rank in silent:
                if self._pipes[rank] not in ready:
                    continue
                try:
                    done, value = pickle.loads(self._pipes[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    self._processes[rank].join(grace)
                    done, value = False, f"died with exit code {self._processes[rank].exitcode}"
                if done:
                    results[rank] = value
                else:
                    failed[rank] = value
                    deadline = min(deadline, time.monotonic() + grace)
        if failed:
            raise RankError(_texts(failed))
        return [results[rank] for rank in range(self.world_size)]

    def kill(self) -> None:
        """End these ranks, at once and for good."""
        self.usable = False
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(patient(GRACE_SECONDS))
        for pipe in self._pipes:
            pipe.close()


class RankPools:
    """Pools by number of ranks, made when first asked for and kept. Closing it ends them all."""

    def __init__(self, load: Callable[..., Any] | None = None, *args: Any) -> None:
        """load: called once, with args, in a process of which all ranks are forks; see `loaded.result`."""
        mp.get_context("forkserver").set_forkserver_preload(PRELOADED)
        self.loaded = None if load is None else Loaded(_begin, load, *args)
        self._store = _tcp_store(0, is_master=True)
        self._made: list[Ranks] = []
        self._kept: dict[int, Ranks] = {}

    def __call__(self, world_size: int) -> Ranks:
        """The kept pool of so many ranks; a new one after a failure."""
        if world_size not in self._kept or not self._kept[world_size].usable:
            self._kept[world_size] = self._make(world_size)
        return self._kept[world_size]

    @contextlib.contextmanager
    def expendable(self, world_size: int) -> Iterator[Ranks]:
        """A pool for one test, which may do to it what it likes."""
        made = self._make(world_size)
        try:
            yield made
        finally:
            made.kill()

    def close(self) -> None:
        for made in self._made:
            made.kill()
        if self.loaded is not None:
            self.loaded.close()

    def _make(self, world_size: int) -> Ranks:
        self._made = [made for made in self._made if made.usable]
        self._made.append(Ranks(world_size, self._store.port, f"pool {time.monotonic_ns()}", self.loaded))
        return self._made[-1]


def _tcp_store(port: int, is_master: bool) -> Any:
    """The master listens at a free port of this machine; no file is left by anyone."""
    return dist.TCPStore("127.0.0.1", port, is_master=is_master, wait_for_workers=False)  # type: ignore[attr-defined]


def _texts(failed: dict[int, str]) -> str:
    return "".join(f"rank {rank}: {text.rstrip()}\n" for rank, text in sorted(failed.items()))


# ---------- in the ranks' processes


def _serve(pipe: Connection, *given: Any) -> NoReturn:
    _begin()
    _serve_forked(pipe, *given)


def _begin() -> None:
    if PAUSES:
        _end_with_fork_server()
    warnings.simplefilter("error")


def _serve_forked(
    pipe: Connection, rank: int, world_size: int, port: int, prefix: str, factor: float, niceness: int
) -> NoReturn:
    """The same in a fork of a process that has begun. niceness: of the process that wants these ranks."""
    os.setpriority(os.PRIO_PROCESS, 0, max(niceness, os.getpriority(os.PRIO_PROCESS, 0)))
    if PAUSES:
        _die_with_maker()
    set_stretch(factor)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process; the one that made us decides
    threading.Thread(target=_end_with_parent, daemon=True).start()
    gc.freeze()  # what the fork server has imported stays
    gc.set_threshold(20_000, 20, 50)  # as in conftest.py: programs are many small objects, and few of them garbage
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank:
        _leave_replays_to_rank_0(world_size)
    joined, here = _attempt(_join, rank, world_size, port, prefix)
    pipe.send_bytes(pickle.dumps((joined, None if joined else here)))
    while joined:
        try:
            function, args, kwargs, factor = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        except Exception:  # a function whose module does not import here
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        set_stretch(factor)
        pipe.send_bytes(_pickled(_attempt(function, here, *args, **kwargs)))
    os._exit(0)


def _leave_replays_to_rank_0(world_size: int) -> None:
    """Each rank replays the programs of all ranks; of schedules for this whole pool one does, as all find the same."""
    whole, in_batches = replay.replay_schedule, batches.replay_schedule_in_batches

    def some(schedule: ScheduleData, targets: Sequence[Target] = APART) -> None:
        if schedule.world_size < world_size:
            whole(schedule, targets)

    def some_in_batches(schedule: ScheduleData, in_pairs: bool = False) -> None:
        if schedule.world_size < world_size:
            in_batches(schedule, in_pairs)

    replay.replay_schedule, batches.replay_schedule_in_batches = some, some_in_batches


def _join(rank: int, world_size: int, port: int, prefix: str) -> Here:
    store = dist.PrefixStore(prefix, _tcp_store(port, is_master=False))  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    base = ContextParallel(timeout_seconds=patient(PEER_SECONDS))
    _ = base.transport  # all ranks connect here, together
    return Here(rank, world_size, base)


def _attempt(function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[bool, Any]:
    """(True, result), or (False, traceback)."""
    try:
        return True, function(*args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()


def _pickled(answer: tuple[bool, Any]) -> bytes:
    try:
        return pickle.dumps(answer)
    except Exception:
        return pickle.dumps((False, traceback.format_exc()))


def _end_with_fork_server() -> None:
    """Also while stopped, when no thread of ours runs. The fork server ends when no process holds its pipe any more."""
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]
    _die_with_maker()


def _die_with_maker() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    """When the process that made us is gone, so are we, whatever we are waiting for."""
    parent = mp.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
