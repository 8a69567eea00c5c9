"""A watch over messages that only streams wait for: where a host never blocks, no wait of its own finds a lost rank.

A thread looks at the oldest message that is under way. Where it will not end any more (the peer is gone, the group
has a verdict, or nothing has ended for the time limit), it notes what it found and lets the streams go on; the next
call of the transport raises it as PeerLost.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tokenring.backends.control import Control, Controlled
from tokenring.errors import PeerLost

LOOK_SECONDS = 0.1
NOTE_SECONDS = 0.3  # from when on the others may read for whom this rank waits


class UnderWay(NamedTuple):
    """A message: whether it is done, with whom, and what for."""

    done: Callable[[], bool]
    peer: int
    what: str


class Watch:
    """Of one transport, whose thread it starts at the first message.

    release: lets the device's streams go on; called again and again until everything that was under way has ended.
    """

    def __init__(self, control: Control, release: Callable[[], None]) -> None:
        self._control, self._release = control, release
        self._under_way: deque[UnderWay] = deque()
        self._since = time.monotonic()  # when the oldest became the oldest
        self._noted = False
        self._found: tuple[int, str, str] | None = None
        self._signal, self._closed = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, _end, self._signal, self._closed)

    def add(self, done: Callable[[], bool], peer: int, what: str) -> None:
        """A message that was just queued."""
        if not self._under_way:
            self._since = time.monotonic()
        self._under_way.append(UnderWay(done, peer, what))
        if self._thread is None:
            parts = weakref.ref(self), self._signal, self._closed
            self._thread = threading.Thread(target=_look, args=parts, daemon=True, name="tokenring watch")
            self._thread.start()
        self._signal.set()

    def check(self) -> None:
        """Raises PeerLost, once, if the thread has found a lost rank; later calls find the group broken."""
        if self._found is not None and self._control.broken is None:
            raise self.blame()

    def blame(self) -> PeerLost:
        assert self._found is not None
        return self._control.lost(*self._found)

    def close(self) -> None:
        """End the thread."""
        _end(self._signal, self._closed)

    # ---------- in the thread

    def look(self) -> bool:
        """One look; whether anything is still under way."""
        ended = False
        while self._under_way and self._under_way[0].done():
            self._under_way.popleft()
            ended = True
        if not self._under_way:
            self._note(None)
            return False
        now = time.monotonic()
        if ended:
            self._since = now
        elif self._found is not None:
            self._release()
        else:
            self._judge(self._under_way[0], now - self._since)
        return True

    def _judge(self, oldest: UnderWay, seconds: float) -> None:
        control = self._control
        if seconds > NOTE_SECONDS:
            self._note(oldest.peer)
        late = seconds > control.timeout_seconds
        if late or self._is_hopeless(oldest.peer):
            self._found = oldest.peer, oldest.what, f"no end within {control.timeout_seconds:g} s" if late else ""
            self._release()

    def _is_hopeless(self, peer: int) -> bool:
        """Whether it will never come. The store of ranks that share no memory is not asked: others may be using it."""
        control = self._control
        if control.shared is not None:
            return control.is_hopeless(peer)
        return control.members[peer].state(control.members[control.rank]) == "gone"

    def _note(self, peer: int | None) -> None:
        """For whom this rank waits, where that costs nothing to say: by it others find who is to blame."""
        if self._control.shared is not None and (peer is not None or self._noted):
            self._control.board.note_waiting(peer)
            self._noted = peer is not None


def _end(signal: threading.Event, closed: threading.Event) -> None:
    closed.set()
    signal.set()


def _look(watch: weakref.ref[Watch], signal: threading.Event, closed: threading.Event) -> None:
    """Until the watch is closed or gone. Nothing here holds it while the thread sleeps."""
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
        """Raises PeerLost if the group is broken, or the watch has found that it is."""
        self.control.check_usable()
        self._watch.check()

    def exchange(self, payload: bytes, what: str) -> list[bytes]:
        self.check()
        return super().exchange(payload, what)

    def exchange_text(self, text: bytes, what: str) -> list[bytes]:
        self.check()
        return super().exchange_text(text, what)
