"""A part of ci/gpu in a process of its own, which takes no longer than it may, whatever it does.

Its lines come by a pipe that nothing else writes to: what libraries print, whole or not, text or not, spoils none.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

LINES = "TOKENRING_GPU_LINES"  # the file descriptor that a part's lines go to
WORDS = 15  # lines of what it prints that are kept: the last
MOST_CHARACTERS = 500  # of a line that is shown
END_SECONDS = 5.0  # for a process that was killed; one that the driver holds ends in no time at all
LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    value: str
    limit: str = ""
    met: bool | None = None


@dataclass
class Ended:
    """How a process ended. wrong: in words, "" where it ended well. words: the last that it printed."""

    wrong: str = ""
    words: list[str] = field(default_factory=list)

    @property
    def last(self) -> str:
        return self.words[-1] if self.words else "it said nothing"


def run_child(
    command: Sequence[str], environment: Mapping[str, str], seconds: float, heard: Callable[[str], None]
) -> Ended:
    """Run it to its end, or to the end of its time, with all that it started. heard: takes each line as it comes."""
    read_end, write_end = os.pipe()
    with os.fdopen(read_end, "rb", buffering=0) as lines:
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0,
                env={**environment, LINES: str(write_end)}, pass_fds=(write_end,), start_new_session=True,
            )  # fmt: skip
        finally:
            os.close(write_end)
        assert process.stdout is not None
        made, deadline = Ended(), time.monotonic() + seconds
        words = deque[str](maxlen=WORDS)
        try:
            with process.stdout:
                takes = {process.stdout.fileno(): Texts(words.append), lines.fileno(): Texts(heard)}
                ended = listen(process.pid, takes, deadline)
        except BaseException:  # such as Ctrl-C, which another session does not hear
            end(process)
            raise
        gone = end(process)
    made.words = [text.strip()[:MOST_CHARACTERS] for text in words if text.strip()]
    if not ended:
        made.wrong = f"no end within {seconds:.0f} s"
    elif process.returncode:
        made.wrong = f"ended with code {process.returncode}{signal_name(process.returncode)}"
    if not gone:
        made.wrong += f", and process {process.pid} cannot be killed: the driver holds it"
    return made


def signal_name(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f" ({signal.Signals(-code).name})" if code < 0 else ""
    return ""


class Texts:
    """Whole lines of what comes in pieces. A line without end is cut."""

    MOST_BYTES = 1 << 20

    def __init__(self, take: Callable[[str], None]) -> None:
        self._take, self._rest = take, b""

    def add(self, piece: bytes) -> None:
        *whole, self._rest = (self._rest + piece).split(b"\n")
        for text in whole:
            self._take(text.decode(errors="replace"))
        if len(self._rest) > self.MOST_BYTES:
            self.close()

    def close(self) -> None:
        """What is there counts as a line."""
        if self._rest:
            self._take(self._rest.decode(errors="replace"))
        self._rest = b""


def listen(process: int, takes: Mapping[int, Texts], deadline: float) -> bool:
    """Take what it says until it ends. Children of its own that hold the pipes do not put that off.

    False: it came to no end in time.
    """
    with selectors.DefaultSelector() as ready:
        for each in takes:
            ready.register(each, selectors.EVENT_READ)
        while True:
            ended = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            for each in takes_of(ready, 0.0 if ended else LOOK_SECONDS):
                piece = os.read(each, 1 << 16)
                takes[each].add(piece)
                if not piece:
                    ready.unregister(each)
            if ended or time.monotonic() > deadline:
                for text in takes.values():
                    text.close()
                return ended
            if not ready.get_map():
                time.sleep(LOOK_SECONDS)


def takes_of(ready: selectors.BaseSelector, seconds: float) -> Iterator[int]:
    """Descriptors that have something to read."""
    for key, _ in ready.select(seconds):
        yield key.fd


def end(process: subprocess.Popen[bytes]) -> bool:
    """End it, with all that it started, which would hold the device. False: it cannot be ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its own session, and so the number of its group
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return True


# ---------- what goes through the pipe


def give(descriptor: int, line: Line | int) -> None:
    """In the part's process: a line, or at its end how many there were."""
    rest = (json.dumps({"end": line} if isinstance(line, int) else asdict(line)) + "\n").encode()
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def taken(text: str) -> Line | int:
    """What `give` gave. Raises ValueError for anything else."""
    said = json.loads(text)
    if isinstance(said, dict):
        if isinstance(count := said.get("end"), int):
            return count
        name, value, limit = (said.get(what) for what in ("name", "value", "limit"))
        met = said.get("met", "missing")
        if all(isinstance(word, str) for word in (name, value, limit)) and (met is None or isinstance(met, bool)):
            return Line(str(name), str(value), str(limit), met)
    raise ValueError(f"{text[:80]!r} is no line")
