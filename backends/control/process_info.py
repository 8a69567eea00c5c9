"""The processes of a group's ranks: on which machine each is, and if it still runs."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Literal

ProcessState = Literal["gone", "stopped"]
GONE = ("Z", "X", "x")
STOPPED = ("T", "t")


@dataclass(frozen=True)
class ProcessInfo:
    """A process. Two are on one machine if `boot_id` and `network` are the same; `pids` is their PID namespace.

    `started` is in clock ticks since boot: a PID that was given out again has another one. 0: unknown.
    """

    host: str
    boot_id: str
    network: str
    pids: str
    pid: int
    started: int

    def to_text(self) -> str:
        """Return the process as JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_text(text: str) -> ProcessInfo:
        """Make the process from JSON; see to_text."""
        return ProcessInfo(**json.loads(text))

    def state(self, seen_from: ProcessInfo) -> ProcessState | None:
        """Return "gone" or "stopped" as far as the other process can see this process's state; else None."""
        if not self.boot_id or not self.started or (self.boot_id, self.pids) != (seen_from.boot_id, seen_from.pids):
            return None
        try:
            found = _stat(self.pid)
        except OSError:  # such as no file descriptor left: that says nothing of the other process
            return None
        if found is None or found[1] != self.started or found[0] in GONE:
            return "gone"
        return "stopped" if found[0] in STOPPED else None

    def shares_memory_with(self, other: ProcessInfo) -> bool:
        """Return True if both are on one machine and in one network namespace.

        Containers and test beds that pretend to be machines do not count.
        """
        return bool(self.boot_id) and (self.boot_id, self.network) == (other.boot_id, other.network)


def this_process() -> ProcessInfo:
    """Describe this process; what the system does not tell is empty."""
    pid = os.getpid()
    try:
        found = _stat(pid)
    except OSError:
        found = None
    began = found[1] if found else 0
    return ProcessInfo(socket.gethostname(), _boot_id(), _namespace("net"), _namespace("pid"), pid, began)


def _stat(pid: int) -> tuple[str, int] | None:
    """Return a process's state letter and start time, None if there is no such process. Raises OSError if unknown."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command in brackets may hold anything
    return fields[0], int(fields[19])


@cache
def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""
