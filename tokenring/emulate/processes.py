"""One process for each rank, in the namespaces of an emulation: started, read, and ended to the last one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from tokenring.emulate.build import tool
from tokenring.emulate.guardian import end_processes
from tokenring.emulate.plan import address
from tokenring.errors import PeerLost
from tokenring.launch.processes import OutputLines, ending_with_parent, rank_environment

PORT = "29500"  # each emulation has namespaces of its own, so the port is free
GRACE_SECONDS = 3.0  # after the first rank's failure the others may say what they saw
END_SECONDS = 20.0
LOG_LINES = 20
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
STOPPED = ("T", "t")


class RankProcesses:
    """One `python -m module arguments` in each namespace, in a session of its own. Use it as a context.

    `read` returns the standard output of rank 0, or of all ranks with `all_speak`; all other output is in the ranks'
    logs.
    """

    def __init__(
        self,
        namespaces: Sequence[str],
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        all_speak: bool,
    ) -> None:
        self.namespaces, self.all_speak = list(namespaces), all_speak
        self.command = [sys.executable, "-m", module, *arguments]
        self.environment = dict(environment)
        self.ended: list[tuple[int, int]] = []  # rank and exit code, in the order in which their ends were seen
        self._failed_at: float | None = None
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> RankProcesses:
        self.folder = Path(tempfile.mkdtemp(prefix="tokenring-"))
        reading, writing = os.pipe()
        self._lines = OutputLines(reading)
        try:
            for rank in range(len(self.namespaces)):
                self._processes.append(self._start(rank, writing))
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

    def _start(self, rank: int, writing: int) -> subprocess.Popen[bytes]:
        enter = [tool("ip"), "netns", "exec", self.namespaces[rank]]
        with open(self._log_of(rank), "wb") as log:
            return subprocess.Popen(
                [*ending_with_parent(signal.SIGKILL), *enter, *self.command],
                stdin=subprocess.DEVNULL,
                stdout=writing if rank == 0 or self.all_speak else log,
                stderr=log,
                cwd=self.folder,  # a module in the user's folder must not shadow one of Python's
                env=self._environment_of(rank),
                start_new_session=True,
            )

    def _environment_of(self, rank: int) -> dict[str, str]:
        """Return a rank's environment: torchrun's variables, Gloo's interface, one thread, a temporary folder."""
        return {
            **rank_environment({**os.environ, **self.environment}),
            **dict.fromkeys(THREADS, "1"),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(len(self.namespaces)),
            "MASTER_ADDR": address(0),
            "MASTER_PORT": PORT,
            "GLOO_SOCKET_IFNAME": "lo",
            "TP_SOCKET_IFNAME": "lo",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # else it warns about name look-ups, and there is no name server
            "TMPDIR": str(self.folder),
        }

    def _log_of(self, rank: int) -> Path:
        return self.folder / f"rank{rank}"

    # ---------- while they run

    def read(self, seconds: float) -> list[str]:
        """Return the lines that have come, waiting at most `seconds` for the first."""
        return self._lines.read(seconds)

    def exit_code(self) -> int | None:
        """Return None while any of them runs; then the exit code of the first that failed, or 0.

        When one has failed, the others are ended a little later.
        """
        seen = {rank for rank, _ in self.ended}
        found = [(rank, process.poll()) for rank, process in enumerate(self._processes) if rank not in seen]
        # Of the ranks that ended since the last check, those ended by a signal come first: they leave no message.
        ended = sorted((code, rank) for rank, code in found if code is not None)
        self.ended += [(rank, code) for code, rank in ended]
        if self._failed_at is None and any(code for _, code in self.ended):
            self._failed_at = time.monotonic()
        if len(self.ended) < len(self._processes):
            if self._failed_at is not None and time.monotonic() > self._failed_at + GRACE_SECONDS:
                self._kill()
            return None
        return next((code for _, code in self.ended if code), 0)

    def log(self, rank: int | None = None) -> str:
        """Return a rank's log; without a rank, that of the first that failed, or of all."""
        if rank is None:
            rank = next((each for each, code in self.ended if code), None)
        some = range(len(self.namespaces)) if rank is None else [rank]
        return "".join(self._log_of(each).read_text(errors="replace") for each in some)

    def killed(self) -> tuple[int, int] | None:
        """Return the rank that failed first and the signal that ended it; None if it was not a signal."""
        rank, code = next(((rank, code) for rank, code in self.ended if code), (0, 0))
        return (rank, -code) if code < 0 else None

    def failure(self) -> PeerLost:
        """Make the error for the rank that failed first."""
        rank, code = next((rank, code) for rank, code in self.ended if code)
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return PeerLost(f"rank {rank} {how}; the others were ended too{self._tail(rank)}", rank, True)

    def hung(self, seconds: float) -> PeerLost:
        """Make the error for ranks that did not end in time. It names a stopped one, else all that still run."""
        left = [rank for rank, process in enumerate(self._processes) if process.poll() is None]
        stopped = [rank for rank in left if _state(self._processes[rank].pid) in STOPPED]
        guilty = stopped or left
        some = f"rank{'s' if len(guilty) > 1 else ''} {', '.join(map(str, guilty))}"
        what = "stopped" if stopped else "still running"
        text = f"{some} {what} after {seconds:g} s: give more time, or look at why{self._tail(guilty[0])}"
        return PeerLost(text, guilty[0], len(guilty) == 1)

    def _tail(self, rank: int) -> str:
        lines = self.log(rank).splitlines()[-LOG_LINES:]
        return f"; the end of its log:\n{chr(10).join(lines)}" if lines else ""

    # ---------- the end

    def _kill(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)

    def _clean_up(self) -> None:
        self._kill()
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):  # only a process stuck in the kernel takes so long
                process.wait(END_SECONDS)
        end_processes(self.namespaces)  # what ranks have started in sessions of their own
        self._lines.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _state(pid: int) -> str:
    """Return a process's state letter; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""
