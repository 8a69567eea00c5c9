"""A guardian that removes namespaces and their processes: at the end, after a crash, and leftovers of earlier runs.

It is also a program, `python guardian.py PREFIX`, in a session of its own. It waits for the end of its standard input,
which comes when its parent closes it or dies in any way, and removes all namespaces whose names begin with the prefix.
It imports only the standard library, so that it starts at once.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

NAMESPACES = Path("/run/netns")  # where iproute2 keeps them
NAME = re.compile(r"tokenring-(\d+)-(\d+)-\d+-[a-z]+\d*")  # owner, its start, number there, node
TOOL_FOLDERS = ("/usr/sbin", "/sbin", "/usr/bin", "/bin")  # sbin is not on everybody's PATH
REMOVE_SECONDS = 20.0
LOOK_SECONDS = 1.0  # interval of the checks for the parent, in case another process holds the pipe
NOBODY = ("Z", "X", "x")  # states of a process that is dead
DEAF_TO = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def tool_path() -> str:
    """Return the PATH on which `ip` and `tc` are looked for."""
    return os.pathsep.join([os.environ.get("PATH", os.defpath), *TOOL_FOLDERS])


def prefix_of(pid: int, number: int) -> str:
    """Return the prefix of the names of a process's emulation of this number; the names show whose they are."""
    return f"tokenring-{pid}-{start_time(pid)}-{number}-"


def start_time(pid: int) -> int | None:
    """Return when a living process started, in ticks since boot; None if it is dead.

    A reused PID has another start time.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the command in brackets may contain any characters
    return None if fields[0] in NOBODY else int(fields[19])


def names(prefix: str) -> list[str]:
    """Return the namespaces whose names begin with the prefix, sorted."""
    if not NAMESPACES.is_dir():
        return []
    return sorted(each for each in os.listdir(NAMESPACES) if each.startswith(prefix) and NAME.fullmatch(each))


def leftovers() -> list[str]:
    """Return the namespaces of owners that are dead."""
    found = []
    for name in names("tokenring-"):
        match = NAME.fullmatch(name)
        if match is not None and start_time(int(match[1])) != int(match[2]):
            found.append(name)
    return found


def processes_in(some: Sequence[str]) -> list[int]:
    """Return the ids of the processes that live in these namespaces."""
    wanted = set()
    for name in some:
        with suppress(OSError):
            status = os.stat(NAMESPACES / name)
            wanted.add((status.st_dev, status.st_ino))
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with suppress(OSError):
            status = os.stat(f"/proc/{entry}/ns/net")
            if (status.st_dev, status.st_ino) in wanted:
                found.append(int(entry))
    return found


def end_processes(some: Sequence[str]) -> None:
    """Kill all processes in these namespaces; wait REMOVE_SECONDS at most.

    It ends after two checks that find no process, because a process may have been starting another.
    """
    deadline = time.monotonic() + REMOVE_SECONDS
    looks = 0
    while looks < 2 and time.monotonic() < deadline:
        found = processes_in(some)
        looks = 0 if found else looks + 1
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if found:
            time.sleep(0.01)


def remove(some: Sequence[str]) -> None:
    """Remove the namespaces, with their processes and links. Another process may be doing it at the same time."""
    if not some:
        return
    end_processes(some)
    lines = "".join(f"netns del {name}\n" for name in some)
    subprocess.run(
        ["ip", "-force", "-batch", "-"], input=lines, text=True, timeout=REMOVE_SECONDS, capture_output=True,
        start_new_session=True, env={**os.environ, "PATH": tool_path()},
    )  # fmt: skip


def main(argv: Sequence[str]) -> None:
    """Wait until the parent closes the pipe or dies, and clean up after it."""
    for number in DEAF_TO:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    poll = select.poll()
    poll.register(0, select.POLLIN | select.POLLHUP)
    while not poll.poll(1000 * LOOK_SECONDS) and os.getppid() == parent:
        pass
    deadline = time.monotonic() + REMOVE_SECONDS
    empty = 0  # checks without a namespace: `ip netns add` may outlive its killed parent
    while empty < 3 and time.monotonic() < deadline:
        found = names(argv[0])
        remove(found)
        empty = 0 if found else empty + 1
        time.sleep(0.05 if os.getppid() != parent else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
