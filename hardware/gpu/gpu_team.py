"""Processes that share the GPU, for gpu_transports: one set for a number of ranks, which runs check after check.

To import torch and to start CUDA takes a process about ten seconds: more than most checks. A set of which a rank
failed, hung or ended is ended itself, and the next check gets a new one.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Check = Callable[[int], str]  # rank → what it found; raises where something is wrong
Heard = dict[int, "tuple[bool | None, str]"]  # by rank: whether it went well (None: not here), and what it says
START_SECONDS = 45.0  # for imports, CUDA and the rendezvous of a new set
STARTS = 2  # that may fail before a set is given up
END_SECONDS = 2.0  # for a process that was killed
MOST_CHARACTERS = 300


class NotHere(Exception):
    """What a check needs is not to be had on this machine; the text says why."""


class Leaves(Exception):
    """Raised by a check whose rank is to go, process and all; the text is what it found."""


def on_the_gpu(rank: int) -> None:
    """How a rank begins: on the GPU that all share."""
    torch.cuda.set_device(0)


@dataclass(frozen=True)
class Kind:
    """Of a set: its ranks, the settings in their environment, how each begins."""

    ranks: int
    settings: tuple[tuple[str, str], ...] = ()
    begin: Callable[[int], None] = on_the_gpu


class Teams:
    """A set of each kind, made when it is first needed. started: how many processes there were in all."""

    def __init__(self) -> None:
        self.started = 0
        self._teams: dict[Kind, Team] = {}
        self._failed: Counter[Kind] = Counter()

    def run(self, kind: Kind, check: Check, seconds: float, left: float) -> Heard:
        """What the ranks answer in so many seconds. left: in all, of which a new set may take some to start."""
        deadline = time.monotonic() + left
        if kind not in self._teams:
            if self._failed[kind] >= STARTS:
                return dict.fromkeys(range(kind.ranks), (False, f"its processes did not start {STARTS} times"))
            self.started += kind.ranks
            made = self._teams[kind] = Team(kind)
            if trouble := made.begun(min(START_SECONDS, left)):
                self._failed[kind] += 1
                self._teams.pop(kind).close()
                return trouble
        team = self._teams[kind]
        heard = team.run(check, max(1.0, min(seconds, deadline - time.monotonic())))
        if not team.is_sound(heard):
            self._teams.pop(kind).close()
        return heard

    def close(self) -> None:
        """All end."""
        while self._teams:
            self._teams.popitem()[1].close()


class Team:
    """One set."""

    def __init__(self, kind: Kind) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._ends: list[Any] = []  # of the pipes to the ranks
        self._processes: list[Any] = []
        self._left = False  # some rank has gone, as it was to
        with settings(dict(kind.settings)):
            for rank in range(kind.ranks):
                mine, theirs = context.Pipe()
                given = (rank, kind, f"{self._folder.name}/store", theirs)
                made = context.Process(target=_serve, args=given, daemon=True)  # none outlives this process
                made.start()
                theirs.close()
                self._ends.append(mine)
                self._processes.append(made)

    def begun(self, seconds: float) -> Heard:
        """Nothing once all ranks have met; else what is wrong with those that have not."""
        said = self._answers(range(len(self._ends)), seconds)
        late = (False, f"it has not started within {seconds:.0f} s")
        return {rank: said.get(rank, late) for rank in range(len(self._ends)) if not said.get(rank, late)[0]}

    def run(self, check: Check, seconds: float) -> Heard:
        """Of a rank whose process ends, that it does; nothing of one that says nothing in time."""
        heard: Heard = {}
        for rank, end in enumerate(self._ends):
            try:
                end.send(check)
            except OSError:
                heard[rank] = False, self._how_it_ended(rank)
        return heard | self._answers([rank for rank in range(len(self._ends)) if rank not in heard], seconds)

    def _answers(self, ranks: Iterable[int], seconds: float) -> Heard:
        deadline, heard = time.monotonic() + seconds, dict[int, "tuple[bool | None, str]"]()
        waiting: dict[Any, int] = {self._ends[rank]: rank for rank in ranks}
        while waiting and (ready := wait(list(waiting), max(0.0, deadline - time.monotonic()))):
            for end in list[Any](ready):
                rank = waiting.pop(end)
                try:
                    well, text, leaves = end.recv()
                except (EOFError, OSError):
                    well, text, leaves = False, self._how_it_ended(rank), True
                heard[rank], self._left = (well, text), self._left or leaves
        return heard

    def _how_it_ended(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(END_SECONDS)
        code = process.exitcode
        name = signal.Signals(-code).name if code is not None and -code in set(signal.Signals) else f"code {code}"
        return f"its process ended ({name})"

    def is_sound(self, heard: Heard) -> bool:
        """All are there and did alike, so that nothing of this check is under way: well, or not here."""
        answers = {heard[rank][0] if rank in heard else False for rank in range(len(self._ends))}
        return not self._left and answers in ({True}, {None})

    def close(self) -> None:
        """They end; one that the driver holds is not waited for."""
        for each in self._processes:
            each.kill()
        for each in self._processes:
            each.join(END_SECONDS)
        for end in self._ends:
            end.close()
        self._folder.cleanup()


@contextmanager
def settings(values: Mapping[str, str]) -> Iterator[None]:
    """In the environment, while processes start that inherit it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


# ---------- in the processes


def _serve(rank: int, kind: Kind, file: str, end: Any) -> None:
    """Begin, say so, and run what comes."""

    def begin(rank: int) -> str:
        kind.begin(rank)
        store = dist.FileStore(file, kind.ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=kind.ranks)
        return ""

    check: Check = begin
    with suppress(EOFError, OSError):  # whoever asked is gone
        while True:
            well, text, leaves = _answer(check, rank)
            end.send((well, text, leaves))
            if leaves:
                break
            check = end.recv()
    os._exit(0)  # a driver that is in trouble must not hold us up


def _answer(check: Check, rank: int) -> tuple[bool | None, str, bool]:
    """Whether it went well, what it says, and whether the rank is to go."""
    try:
        return True, check(rank), False
    except NotHere as reason:
        return None, str(reason), False
    except Leaves as found:
        return True, str(found), True
    except BaseException:
        return False, traceback.format_exc().strip().splitlines()[-1][:MOST_CHARACTERS], False
