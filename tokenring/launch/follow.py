"""The channel between ranks that a command started and the process that shows their reports, line by line."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tokenring.display.console import Console
from tokenring.errors import ConfigurationError, TokenRingError
from tokenring.launch.processes import PR_SET_PDEATHSIG, Interrupts

INTERRUPTED = 130
POLL_SECONDS = 0.1
LAST_WORDS_SECONDS = 2.0  # from a rank's failure until it ends, and torchrun all others with it
HEARD_OUT_SECONDS = LAST_WORDS_SECONDS + 1.0  # after the last that a failing job has said
LOG_LINES = 20
LONGEST_MESSAGE = 600


class Interrupted(Exception):
    """The user has interrupted the command."""


class CommandFailed(Exception):
    """A command found something wrong; the message says what."""


@dataclass(frozen=True)
class Failed:
    """A rank that cannot go on. `expected`: the message says all there is to say."""

    rank: int
    kind: str
    message: str
    expected: bool


class Running(Protocol):
    """Ranks that were started, as the process that follows them needs them."""

    def read(self, seconds: float) -> list[str]:
        """Return the lines that have come, waiting at most `seconds` for the first."""

    def exit_code(self) -> int | None:
        """Return the exit code; None while any of them runs."""

    def log(self) -> str:
        """Return what was written on standard error so far."""

    def killed(self) -> tuple[int, int] | None:
        """Return the rank that a signal ended first, and the signal; None if there is no such rank."""


# ---------- at a rank


def end_with_parent() -> None:
    """Make this rank end with its parent: if torchrun is killed, it must not stay behind."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it was, before we asked
            os._exit(1)


def report_line(line: str) -> None:
    """Write one line in one write: lines of several ranks do not mix."""
    sys.stdout.flush()
    os.write(sys.stdout.fileno(), (line + "\n").encode())


def short(error: BaseException) -> str:
    """Return the error's message in one line."""
    return " ".join(str(error).split())[:LONGEST_MESSAGE]


def fail(error: Exception, report: Callable[[Failed], None]) -> int:
    """Say why this rank ends, and give others time to say what they found. Returns the exit code."""
    traceback.print_exception(error)
    report(Failed(int(os.environ["RANK"]), type(error).__name__, short(error), isinstance(error, TokenRingError)))
    time.sleep(LAST_WORDS_SECONDS)
    return 1


# ---------- at the process that shows


def check(interrupts: Interrupts) -> None:
    """Raise Interrupted if the user has interrupted the command."""
    if interrupts.seen:
        raise Interrupted


def follow(
    processes: Running,
    interrupts: Interrupts,
    show: Callable[[str], Failed | None],
    wait: Callable[[float], None],
    phase: Callable[[], str],
    silence_seconds: float,
) -> None:
    """Hand over what the ranks say until they have ended. Raises Interrupted and CommandFailed.

    show: gets every line until one is a failure, and says so; wait: gets the seconds since the start whenever
    there is nothing to read; phase: what the ranks are doing, for the failure of being silent for too long.
    """
    heard = began = time.monotonic()
    failures: list[Failed] = []
    while True:
        check(interrupts)
        ended = processes.exit_code()  # asked first: what they wrote before is still read below
        lines = processes.read(POLL_SECONDS)
        now = time.monotonic()
        heard = now if lines else heard
        for line in lines:
            if (failed := show(line)) is not None:
                failures.append(failed)
        if lines:
            continue
        if ended is not None or (failures and now - heard > HEARD_OUT_SECONDS):
            break
        if now - heard > silence_seconds:
            raise CommandFailed(f"no news from the ranks for {silence_seconds:.0f} s while {phase()}")
        wait(now - began)
    if failures or ended:
        raise CommandFailed(failure_text(failures, ended, processes.log(), processes.killed()))


def failure_text(
    failures: Sequence[Failed], exit_code: int | None, log: str, killed: tuple[int, int] | None = None
) -> str:
    """Explain why the ranks failed: by their messages, else by how they ended, else by the end of their log.

    A rank that lost a peer knows less than the peer; `killed` names the one that a signal ended first.
    """
    first = sorted(failures, key=lambda failed: (failed.kind == "PeerLost", failed.rank))
    if killed is not None:
        return f"rank {killed[0]} was ended by {signal.Signals(killed[1]).name}; the others were ended too"
    if not first and exit_code is not None and exit_code < 0:
        return f"torchrun was ended by {signal.Signals(-exit_code).name}; the ranks were ended too"
    if not first:
        tail = "\n".join(log.splitlines()[-LOG_LINES:])
        return f"the ranks ended with exit code {exit_code}; the end of their log:\n{tail}"
    if first[0].expected:
        return first[0].message
    tail = "\n".join(log.splitlines()[-LOG_LINES:])
    return f"rank {first[0].rank}: {first[0].kind}: {first[0].message}\n{tail}"


def exit_code(command: str, console: Console, interrupts: Interrupts | None, do: Callable[[], int]) -> int:
    """Return what `do` returns, else 1 or 130; say in a sentence what ended the command."""
    try:
        return do()
    except Interrupted:
        console.complain("interrupted: nothing was left behind")
        return INTERRUPTED
    except CommandFailed as failure:
        console.complain(f"tokenring {command}: {failure}")
        return 1
    finally:
        if interrupts is not None:
            interrupts.close()


def check_output(option: str, path: Path) -> None:
    """Raise ConfigurationError if a file can plainly not be written there."""
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):
        raise ConfigurationError(f"{option} {path}: not a file in a folder that can be written to")


def write_at_last(texts: Mapping[Path, str], interrupts: Interrupts) -> None:
    """Write files; with them the command is done, and can no longer be interrupted. Raises Interrupted."""

    def last_chance() -> None:
        interrupts.close()
        check(interrupts)

    write_files(texts, last_chance)


def write_files(texts: Mapping[Path, str], before_the_end: Callable[[], None] = lambda: None) -> None:
    """Write files whole or not at all: what `before_the_end` raises leaves all as it was. Raises CommandFailed."""
    temporaries = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in texts}
    path = Path()
    try:
        for path, temporary in temporaries.items():
            temporary.write_text(texts[path], encoding="utf-8")
        before_the_end()
        for path, temporary in temporaries.items():
            temporary.replace(path)
    except OSError as error:
        raise CommandFailed(f"cannot write {path}: {error.strerror}") from None
    finally:
        for temporary in temporaries.values():
            temporary.unlink(missing_ok=True)
