"""A watch over messages that only streams wait for: where a host never blocks, no wait of its own finds a lost rank.

A thread looks at the oldest message that is under way. Where it will not end any more (the peer is gone, the group
has a verdict, or nothing has ended for the time limit since the device began to wait for it), it notes what it found
and lets the streams go on; the next call of the transport raises it as PeerLost. Where the streams do not go on even
then, the process is ended: nothing that waits for the device would ever come back.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tokenring.backends.control.control import Control, Controlled
from tokenring.errors import PeerLost, one_line

LOG = logging.getLogger("tokenring")
LOOK_SECONDS = 0.1
NOTE_SECONDS = 0.3  # from when on the others may read for whom this rank waits


Asked = Callable[[], bool]


class UnderWay(NamedTuple):
    """A message that is under way.

    done: tells if it is done. peer, what: with whom, and what for. begun: tells if the device has come to its wait.
    """

    done: Asked
    peer: int
    what: str
    begun: Asked


def _at_once() -> bool:
    return True


def _end_process(text: str) -> None:
    LOG.critical("%s", text)
    os.abort()  # as torch's own watchdog does: a device that is stuck holds up an orderly end, too


class Watch:
    """The watch of one transport, whose thread it starts at the first message.

    release: lets the device's streams go on; called again and again until everything that was under way has ended.
    begin_thread: what the thread does first. end_process: given why, where nothing else is left to do.
    """

    def __init__(
        self,
        control: Control,
        release: Callable[[], None],
        begin_thread: Callable[[], None] | None = None,
        end_process: Callable[[str], None] = _end_process,
    ) -> None:
        self._control, self._release = control, release
        self._begin_thread, self._end_process = begin_thread, end_process
        self._under_way: deque[UnderWay] = deque()
        self._since: float | None = None  # when a look first found the device waiting for the oldest
        self._noted = False
        self._found: tuple[int, str, str] | None = None
        self._troubles: list[str] = []  # what has failed in this look
        self._said: set[str] = set()
        self._signal, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _end, self._signal, self._closed)

    def add(self, done: Asked, peer: int, what: str, begun: Asked = _at_once) -> None:
        """Watch a message that was just queued.

        begun: tells if the device has done what stands before the wait for it.
        """
        if not self._under_way:
            self._since = None
        self._under_way.append(UnderWay(done, peer, what, begun))
        if self._thread is None:
            parts = weakref.ref(self), self._begin_thread, self._signal, self._closed
            self._thread = threading.Thread(target=_look, args=parts, daemon=True, name="tokenring watch")
            self._thread.start()
        self._signal.set()

    def check(self) -> None:
        """Raise PeerLost, once, if the thread has found a lost rank; later calls find the group broken."""
        if self._found is not None and self._control.broken is None:
            raise self.blame()

    def blame(self) -> PeerLost:
        """Make the error for the lost rank that the thread has found."""
        assert self._found is not None
        return self._control.lost(*self._found)

    def close(self) -> None:
        """End the thread. What it has found and no call has raised is logged now: results are not to be used."""
        _end(self._signal, self._closed)
        if self._found is not None and self._control.broken is None:
            LOG.error("a transport was closed, and its last results are not to be used: %s", self.blame())

    # ---------- in the thread

    def look(self) -> bool:
        """Look at the messages once; return True if any is still under way."""
        self._troubles.clear()
        ended = False
        while self._under_way and self._ask(self._under_way[0].done, False):
            self._under_way.popleft()
            ended = True
        if not self._under_way:
            self._note(None)
            return False
        oldest, now = self._under_way[0], time.monotonic()
        if self._found is None and not self._ask(oldest.begun, True):
            # A host may be far ahead of its device: a peer that has put its bytes and ended since is not lost.
            self._since = None
            self._note(None)
            return True
        if ended or self._since is None:
            self._since = now
        if self._found is not None:
            self._let_go(now - self._since)
        else:
            self._judge(oldest, now - self._since)
        return True

    def _ask(self, question: Asked, otherwise: bool) -> bool:
        """Return the answer, or `otherwise` if a failed device raises: logged once, since this thread must go on."""
        try:
            return question()
        except Exception as error:
            self._tell(error)
            return otherwise

    def _judge(self, oldest: UnderWay, seconds: float) -> None:
        control = self._control
        if seconds > NOTE_SECONDS:
            self._note(oldest.peer)
        late = seconds > control.timeout_seconds
        if late or (seconds > 0 and self._is_hopeless(oldest.peer)):  # not in the look that found it begun
            found = f"no end within {control.timeout_seconds:g} s" if late else ""
            self._found = oldest.peer, oldest.what, "; ".join([*filter(None, [found]), *self._troubles])
            self._since = time.monotonic()
            self._let_go(0.0)

    def _let_go(self, seconds: float) -> None:
        """Let the streams go on; after too many seconds in vain, of a device that answers, end the process."""
        try:
            self._release()
        except Exception as error:
            self._tell(error)
        if seconds > self._control.timeout_seconds and not self._troubles and self._found is not None:
            peer, what, _ = self._found
            self._end_process(
                f"rank {self._control.rank} {what} from rank {peer}, which is lost, and its device still waits "
                f"{seconds:.0f} s after it was told to go on: this process is ended. On CUDA what tells it may stand "
                f"behind what waits if streams share a hardware queue: set CUDA_DEVICE_MAX_CONNECTIONS=32"
            )

    def _tell(self, error: Exception) -> None:
        text = one_line(error)
        self._troubles.append(text)
        if text not in self._said:
            self._said.add(text)
            LOG.warning("the watch over messages of rank %d goes on after: %s", self._control.rank, text)

    def _is_hopeless(self, peer: int) -> bool:
        """Return True if the peer will never come.

        The store of ranks that share no memory is not asked: others may be using it.
        """
        control = self._control
        if control.shared is not None:
            return control.is_hopeless(peer)
        return control.members[peer].state(control.members[control.rank]) == "gone"

    def _note(self, peer: int | None) -> None:
        """Note the rank that this one waits for, where that costs nothing: by it others find who is to blame."""
        if self._control.shared is not None and (peer is not None or self._noted):
            self._control.board.note_waiting(peer)
            self._noted = peer is not None


def _end(signal: threading.Event, closed: threading.Event) -> None:
    closed.set()
    signal.set()


def _look(
    watch: weakref.ref[Watch], begin: Callable[[], None] | None, signal: threading.Event, closed: threading.Event
) -> None:
    """Look until the watch is closed or gone. Nothing here holds it while the thread sleeps."""
    try:
        if begin is not None:
            begin()
    except Exception as error:
        LOG.warning("the watch over messages goes on without what should come first: %s", one_line(error))
    while not closed.is_set():
        signal.wait()
        signal.clear()
        while not closed.is_set():
            alive = watch()
            if alive is None:
                return
            busy = alive.look()
            del alive
            if not busy:
                break
            time.sleep(LOOK_SECONDS)


class Watched(Controlled):
    """A transport whose every call asks its watch first."""

    _watch: Watch

    def check(self) -> None:
        """Raise PeerLost if the group is broken, or the watch has found that it is."""
        self.control.check_usable()
        self._watch.check()

    def before_exchange(self) -> None:
        """Raise PeerLost as `check` does, before each exchange."""
        self.check()
