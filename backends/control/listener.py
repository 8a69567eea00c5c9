"""The listener of a rank: callers are known by the hello that they send, and all hellos are read side by side."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
MOST_WAITING = 256  # connections that have not sent a hello yet: beyond, the oldest loses its place to a newer one
QUEUE = 4096  # connections that wait to be accepted; a system may have less


@dataclass
class _Caller:
    connection: socket.socket
    until: float  # when it has to have sent its hello
    received: bytes = b""


class RankListener:
    """A listener that accepts callers with one of some hellos, all of one size, and refuses and counts all others.

    Nobody is waited for alone: a caller that is silent or slow holds up no other. What callers take here is bounded.
    """

    def __init__(self, host: str, callers: int) -> None:
        """Listen from now on for so many callers and others, at a port that the system gives. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, 0), family=family, backlog=callers + QUEUE)
        self._socket.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)
        self._callers: dict[int, _Caller] = {}  # by file number, the oldest first
        self._refused = 0

    @property
    def place(self) -> tuple[str, int]:
        """Return the host and port of the listener."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    @property
    def unknown_callers(self) -> int:
        """Return how many callers have come so far and have not sent a hello."""
        return self._refused + len(self._callers)

    def accept(
        self, hellos: set[bytes], deadline: float, answer_seconds: float, answer: Callable[[bytes, socket.socket], None]
    ) -> set[bytes]:
        """Accept callers until each of the hellos has come once, or until the deadline; return the missing hellos.

        answer_seconds: how long a caller may be silent. answer: takes a hello, and the connection that brought it;
        raises OSError if nothing can be sent there any more, and the hello is still waited for. Raises OSError where
        nobody can be accepted at all.
        """
        missing = set(hellos)
        while missing and (now := time.monotonic()) < deadline:
            self._refuse_silent(now)
            oldest = next(iter(self._callers.values()), None)
            until = deadline if oldest is None else min(deadline, oldest.until)
            for key, _ in self._selector.select(max(0.0, until - now)):
                if key.fileobj is self._socket:
                    self._accept_waiting(answer_seconds, missing, answer)
                elif key.fd in self._callers:  # it may have lost its place meanwhile
                    self._read(key.fd, missing, answer)
        return missing

    def close(self) -> None:
        """Accept nobody any more, and close the sockets of callers that have not sent a hello."""
        for number in list(self._callers):
            self._refuse(number)
        self._selector.close()
        self._socket.close()

    def __enter__(self) -> RankListener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_waiting(
        self, answer_seconds: float, missing: set[bytes], answer: Callable[[bytes, socket.socket], None]
    ) -> None:
        """Accept the callers that wait, but no more at once than lets it look at the clock in time."""
        for _ in range(MOST_WAITING):
            if not missing or not self._accept_one(answer_seconds, missing, answer):
                return

    def _accept_one(
        self, answer_seconds: float, missing: set[bytes], answer: Callable[[bytes, socket.socket], None]
    ) -> bool:
        """Accept the next caller, if there is one, and read what it has sent already: most have."""
        try:
            connection, _ = self._socket.accept()
        except BlockingIOError:
            return False
        except ConnectionError:  # it has left already
            return True
        except OSError as error:
            if error.errno not in TOO_MANY_FILES or not self._callers:
                raise
            self._refuse(next(iter(self._callers)))
            return True
        connection.setblocking(False)
        self._callers[connection.fileno()] = _Caller(connection, time.monotonic() + answer_seconds)
        self._selector.register(connection, selectors.EVENT_READ)
        self._read(connection.fileno(), missing, answer)
        if len(self._callers) > MOST_WAITING:
            self._refuse(next(iter(self._callers)))
        return True

    def _read(self, number: int, missing: set[bytes], answer: Callable[[bytes, socket.socket], None]) -> None:
        """Read on in a caller's hello. A caller that sends anything else is refused at once."""
        caller, size = self._callers[number], len(next(iter(missing))) if missing else 0
        try:
            part = caller.connection.recv(size - len(caller.received)) if size else b""
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.received += part
        if not part or not any(hello.startswith(caller.received) for hello in missing):
            self._refuse(number)
        elif caller.received in missing:
            self._answer(number, missing, answer)

    def _answer(self, number: int, missing: set[bytes], answer: Callable[[bytes, socket.socket], None]) -> None:
        caller = self._callers.pop(number)
        self._selector.unregister(caller.connection)
        caller.connection.setblocking(True)
        try:
            answer(caller.received, caller.connection)
        except OSError:
            caller.connection.close()
            return
        missing.remove(caller.received)

    def _refuse_silent(self, now: float) -> None:
        while self._callers and (oldest := next(iter(self._callers.items())))[1].until <= now:
            self._refuse(oldest[0])

    def _refuse(self, number: int) -> None:
        caller = self._callers.pop(number)
        self._refused += 1
        self._selector.unregister(caller.connection)
        with suppress(OSError):
            caller.connection.close()
