"""Ranks that are forks of one process which has loaded something large: none of them loads it again.

What is loaded may change the process (a version of Megatron-core, with stand-ins), so the fork server of all ranks
cannot have it. The process here is a rank's like any other until it has loaded; then it only forks.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

POLL_SECONDS = 0.01


class Fork:
    """A rank's process, which is a child of another process than this; as much of BaseProcess as ranks need."""

    exitcode = None  # known to that process alone, which does not ask

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def is_alive(self) -> bool:
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def kill(self) -> None:
        if self.is_alive():
            os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float) -> None:
        until = time.monotonic() + timeout
        while self.is_alive() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)


class Loaded:
    """A process that has called `load(*args)`, whose forks are ranks: `start` has one call `serve(pipe, *given)`."""

    def __init__(self, begin: Callable[[], None], load: Callable[..., Any], *args: Any) -> None:
        """begin: called in the process first, for what every rank begins with."""
        context = mp.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_fork_when_asked, args=(theirs, begin, load, args), daemon=True)
        self._process.start()
        theirs.close()

    def result(self, seconds: float) -> Any:
        """Return what `load` gave. Raises AssertionError with its traceback, or if it takes longer."""
        assert self._pipe.poll(seconds), f"not loaded within {seconds:g} s"
        done, value = pickle.loads(self._pipe.recv_bytes())
        assert done, value
        return value

    def start(self, serve: Callable[..., NoReturn], pipe: Connection, *given: Any) -> Fork:
        """A fork that calls `serve(pipe, *given)`; the pipe stays open here."""
        self._pipe.send_bytes(pickle.dumps((serve, given)))
        reduction.send_handle(self._pipe, pipe.fileno(), self._process.pid)
        return Fork(self._pipe.recv())

    def close(self) -> None:
        self._process.kill()  # and with it its forks
        self._process.join()
        self._pipe.close()


def _fork_when_asked(pipe: Connection, begin: Callable[[], None], load: Callable[..., Any], args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begin()
    torch.set_num_threads(1)
    try:
        found: tuple[bool, Any] = True, load(*args)
    except BaseException:
        found = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(found))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how a fork ended
    while True:
        try:
            serve, given = pickle.loads(pipe.recv_bytes())
            handle = reduction.recv_handle(pipe)
        except (EOFError, OSError):
            os._exit(0)
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            pipe.close()
            serve(Connection(handle), *given)
            os._exit(1)
        os.close(handle)
        pipe.send(pid)
