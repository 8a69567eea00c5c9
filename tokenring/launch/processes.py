"""The ranks as processes: started by torchrun, read, and ended to the last one. Linux only.

torchrun starts every rank in a session of its own, so no signal to a group reaches them all. Here
the process that the user started becomes the reaper of all its descendants: whoever loses a parent becomes its
child, and what is its child can be found and killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# Sets what holds before anything of the command's own has run, and then becomes the command.
END_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl({option}, {signal}); os.execv(sys.argv[1], sys.argv[1:])"
)
END_SECONDS = 20.0  # to kill and reap; only a process stuck in the kernel takes longer
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupts:
    """A record that the user wants the command to end. It raises nothing, so that no clean-up is cut short."""

    def __init__(self) -> None:
        self.seen = False
        for number in ENDING_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup stays in force
                signal.signal(number, self._note)

    def close(self) -> None:
        """Ignore these signals from here on, until the process has ended.

        Python replaces handlers of ours by the default before it ends, but leaves ignored signals so:
        a late Ctrl-C changes neither the exit code nor what is printed.
        """
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True


class OutputLines:
    """The reading end of a pipe, line by line."""

    def __init__(self, reading: int) -> None:
        self._reading = reading
        self._unread = b""

    def read(self, seconds: float) -> list[str]:
        """Return the lines that have come, waiting at most `seconds` for the first."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        if not poll.poll(1000 * seconds):
            return []
        data = os.read(self._reading, 1 << 20)
        if not data:  # everyone has closed it: nothing to wait for but the exit code
            time.sleep(seconds)
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Close the pipe."""
        os.close(self._reading)


class Processes:
    """A command in a session and a temporary folder of its own, with all that it starts.

    On leaving the context, every process is dead and reaped, and the folder is gone.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command, self.environment = list(command), dict(environment)

    def __enter__(self) -> Processes:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._others = descendants(os.getpid())
        self.folder = Path(tempfile.mkdtemp(prefix="tokenring-"))
        reading, writing = os.pipe()
        self._lines = OutputLines(reading)
        try:
            with open(self.folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    [*ending_with_parent(signal.SIGTERM), *self.command],
                    stdin=subprocess.DEVNULL,
                    stdout=writing,
                    stderr=log,
                    cwd=self.folder,  # a module in the user's folder must not shadow one of Python's
                    env=self.environment | {"TMPDIR": str(self.folder)},
                    start_new_session=True,
                )
        except BaseException:
            self._clean_up()
            raise
        finally:
            os.close(writing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._clean_up()

    def read(self, seconds: float) -> list[str]:
        """Return the lines that have come, waiting at most `seconds` for the first."""
        return self._lines.read(seconds)

    def exit_code(self) -> int | None:
        """Return the command's exit code; None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """Return what was written on standard error so far."""
        return (self.folder / "log").read_text(errors="replace")

    def killed(self) -> tuple[int, int] | None:
        """Return the rank that a signal ended first, and the signal, from torchrun's log; None if none was."""
        found = re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", self.log())
        return (int(found[2]), int(found[1])) if found else None

    def _clean_up(self) -> None:
        end_descendants(self._others)
        self._lines.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def ending_with_parent(number: int) -> list[str]:
    """Return words to put before a command, so that it gets the signal if this process is killed outright.

    torchrun gets one that makes it end its ranks. This is done by a command of its own: code between fork and
    exec is unsafe where threads run.
    """
    text = END_WITH_PARENT.format(option=PR_SET_PDEATHSIG, signal=int(number))
    return [sys.executable, "-S", "-c", text]


def torchrun_command(ranks: int, module: str, arguments: Sequence[str]) -> list[str]:
    """Return the command that runs torchrun on this machine alone: no host name is looked up."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    return [*torchrun, "--nproc-per-node", str(ranks), "-m", module, *arguments]


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment with one thread a rank, the loopback interface, and absolute import paths."""
    changed = dict(environment) | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    if paths := environment.get("PYTHONPATH"):
        changed["PYTHONPATH"] = os.pathsep.join(os.path.abspath(path) for path in paths.split(os.pathsep))
    return changed


def descendants(of: int) -> set[int]:
    """Return the ids of all processes below one, zombies included."""
    children = defaultdict(list)
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path("/proc", entry, "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # The second field is a name in parentheses, and may hold spaces and parentheses itself.
        children[int(stat.rpartition(")")[2].split()[1])].append(int(entry))
    found: set[int] = set()
    waiting = [of]
    while waiting:
        below = children[waiting.pop()]
        found.update(below)
        waiting += below
    return found


def end_descendants(spared: set[int]) -> None:
    """Kill and reap every process below this one, except those spared. Waits END_SECONDS at most.

    It ends after two looks that find nobody: one that was just being started may have escaped the first.
    """
    deadline = time.monotonic() + END_SECONDS
    empty_looks = 0
    while empty_looks < 2 and time.monotonic() < deadline:
        left = descendants(os.getpid()) - spared
        empty_looks = 0 if left else empty_looks + 1
        for process in left:
            _kill_and_reap(process)
        if left:
            time.sleep(0.01)


def _kill_and_reap(process: int) -> None:
    try:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, os.WNOHANG)
    except (ProcessLookupError, ChildProcessError):
        pass  # it is gone, or its own parent has yet to go
