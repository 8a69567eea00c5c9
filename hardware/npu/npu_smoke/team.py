"""The ranks as processes: started, listened to, and ended; started anew for what is left when a task breaks them."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

from npu_smoke.rank import MARK
from npu_smoke.tasks import TIMES_AS_LONG

START_SECONDS = 120.0  # until all ranks have joined: a first import of torch_npu takes long
TASK_SECONDS = 120.0  # pairs of ranks take seconds to meet first
LAST_WORDS_SECONDS = 3.0  # for other ranks, after one has failed
END_SECONDS = 5.0
PAUSE_SECONDS = 1.0  # until a device has noticed that its process is gone
STARTS = 3  # that may fail before anything was done, before all the rest is given up


@dataclass
class Asked:
    """What to run: kind of device, ranks, tasks in order."""

    kind: str
    ranks: int
    emulate: str | None
    until: float  # tasks not begun by then are left out; a monotonic clock is the same for all processes
    task_seconds: float = TASK_SECONDS
    start_seconds: float = START_SECONDS
    settings: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # task → of its processes' environment

    def together(self, tasks: Sequence[str]) -> list[str]:
        """The first of these tasks and those right behind it that run in the same environment."""
        return list(takewhile(lambda task: self.settings.get(task) == self.settings.get(tasks[0]), tasks))

    def limit_seconds(self, task: str | None) -> float:
        """Of a task, or of the start."""
        return self.task_seconds * TIMES_AS_LONG.get(task, 1.0) if task else self.start_seconds


@dataclass
class _Start:
    """One start of all ranks, and what they have said."""

    asked: Asked
    folder: Path
    tasks: list[str]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    joined: int = 0
    task: str | None = None
    step: str = ""
    device: str = ""
    since: float = field(default_factory=time.monotonic)
    failed: str | None = None


def run(asked: Asked, tasks: list[str], tell: Callable[[str, dict[str, Any]], None]) -> str:
    """All tasks; `tell` gets each with its status ("done", "failed", "late", "left out"). Returns the device's name."""
    left, device, without = list(tasks), "", 0
    while left:
        if time.monotonic() >= asked.until:
            _leave_out(left, tell)
            break
        before = len(left)
        with tempfile.TemporaryDirectory(prefix="npu-smoke-") as folder:
            start = _Start(asked, Path(folder), asked.together(left))
            try:
                error = _one_start(start, left, tell)
            finally:
                _end(start.processes)
            log = _logs(start)
        device = start.device or device
        if error is not None:
            time.sleep(PAUSE_SECONDS)
        if error is None:
            continue
        if start.task is not None:
            tell(start.task, {"status": error[0], "error": error[1], "log": log})
            left.remove(start.task)
        without = without + 1 if len(left) == before else 0
        if without >= STARTS:
            for task in left:
                tell(task, {"status": "failed", "error": f"the ranks cannot be started: {error[1]}", "log": log})
                log = {}  # once is enough
            break
    return device


def _leave_out(left: list[str], tell: Callable[[str, dict[str, Any]], None]) -> None:
    for task in left:
        tell(task, {"status": "left out", "error": "the time was used up"})
    left.clear()


def _one_start(start: _Start, left: list[str], tell: Callable[[str, dict[str, Any]], None]) -> tuple[str, str] | None:
    """Until all is done (None), or a status and why not. What is done is taken from `left`."""
    reading, writing = os.pipe()
    try:
        for rank in range(start.asked.ranks):
            start.processes.append(_process(start, rank, writing))
    finally:
        os.close(writing)
    unread = b""
    try:
        while True:
            ready, _, _ = select.select([reading], [], [], 0.2)
            if ready:
                data = os.read(reading, 1 << 16)
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    _take(start, line.decode(errors="replace"), left, tell)
                if not data:
                    return _ended(start, left)
            elif all(each.poll() is not None for each in start.processes):
                return _ended(start, left)
            if (found := _verdict(start)) is not None:
                return found
    finally:
        os.close(reading)


def _process(start: _Start, rank: int, writing: int) -> subprocess.Popen[bytes]:
    asked = start.asked
    argument = {
        "rank": rank, "ranks": asked.ranks, "kind": asked.kind, "emulate": asked.emulate,
        "tasks": start.tasks, "store": str(start.folder / "store"), "until": asked.until,
    }  # fmt: skip
    paths = [str(Path(__file__).resolve().parent.parent), *(path for path in sys.path if path)]
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(paths))
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine
    environment |= asked.settings.get(start.tasks[0], {})
    if asked.kind == "cpu" or asked.emulate:
        environment |= {"OMP_NUM_THREADS": "1", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    with open(start.folder / f"log{rank}", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "npu_smoke.rank", json.dumps(argument)],
            stdin=subprocess.DEVNULL, stdout=writing, stderr=log, env=environment, start_new_session=True,
        )  # fmt: skip


def _take(start: _Start, line: str, left: list[str], tell: Callable[[str, dict[str, Any]], None]) -> None:
    if not line.startswith(MARK):
        return
    what, task, value = json.loads(line.removeprefix(MARK))
    now = time.monotonic()
    if what == "joined":
        start.joined, start.device = start.joined + 1, value["device"]
        start.since = now
    elif what == "begun":
        start.task, start.since, start.step = task, now, ""
    elif what == "step":
        start.step = f", at {value!r}"
    elif what == "done":
        tell(task, {"status": "done", "seconds": round(now - start.since, 3), "result": value})
        left.remove(task)
        start.task = None
    elif what == "up":
        _leave_out(left, tell)
    elif what == "failed" and start.failed is None:
        start.failed, start.since = value, now


def _verdict(start: _Start) -> tuple[str, str] | None:
    """Whether this start must end."""
    now, asked = time.monotonic(), start.asked
    if start.failed is not None and now - start.since > LAST_WORDS_SECONDS:
        return "failed", start.failed
    if start.failed is None and (dead := _first_dead(start)) is not None:
        start.failed, start.since = dead, now
    limit = asked.limit_seconds(start.task)
    if now - start.since > limit:
        what = f"no answer in {limit:g} s{start.step}"
        return "late", what if start.task else f"{what}: {start.joined} of {asked.ranks} ranks had joined"
    return None


def _ended(start: _Start, left: list[str]) -> tuple[str, str] | None:
    """All ranks have ended."""
    if start.task is None and start.failed is None and not set(start.tasks) & set(left):
        return None
    return "failed", start.failed or _first_dead(start) or "all ranks ended before the task did"


def _first_dead(start: _Start) -> str | None:
    """The lowest rank that ended badly."""
    for rank, each in enumerate(start.processes):
        if each.poll() not in (None, 0):
            return f"rank {rank} ended with {each.returncode}{start.step}"
    return None


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    for each in processes:
        if each.poll() is None:
            try:
                os.killpg(each.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                each.kill()
    deadline = time.monotonic() + END_SECONDS
    for each in processes:
        with suppress(subprocess.TimeoutExpired):  # a process that the kernel cannot end is left to it
            each.wait(max(0.1, deadline - time.monotonic()))


def _logs(start: _Start) -> dict[str, str]:
    """The end of what each rank wrote on standard error, where it wrote anything."""
    texts = {}
    for rank in range(start.asked.ranks):
        path = start.folder / f"log{rank}"
        if path.exists() and (text := path.read_text(errors="replace").strip()):
            texts[str(rank)] = text[-2000:]
    return texts
