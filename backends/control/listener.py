"""The listener of a rank: callers are known by the cards that they send, and all cards are read side by side."""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
MOST_WAITING = 256  # connections that have not shown a card yet: beyond, the oldest loses its place to a newer one
QUEUE = 4096  # strangers for whom there is room at the door while none is let in; a system may have less


@dataclass
class _Caller:
    line: socket.socket
    until: float  # when it has to have shown its card
    said: bytes = b""


class Door:
    """A listener that accepts callers with one of some cards, all of one size, and refuses and counts all others.

    Nobody is waited for alone: a caller that is silent or slow holds up no other. What callers take here is bounded.
    """

    def __init__(self, host: str, callers: int) -> None:
        """Listen from now on for so many callers and others, at a port that the system gives. Raises OSError."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._door = socket.create_server((host, 0), family=family, backlog=callers + QUEUE)
        self._door.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._door, selectors.EVENT_READ)
        self._callers: dict[int, _Caller] = {}  # by file number, the oldest first
        self._strangers = 0

    @property
    def place(self) -> tuple[str, int]:
        """Return the host and port of the listener."""
        host, port = self._door.getsockname()[:2]
        return host, port

    @property
    def strangers(self) -> int:
        """Return how many callers have come so far and have not sent a card."""
        return self._strangers + len(self._callers)

    def let_in(
        self, cards: set[bytes], deadline: float, answer_seconds: float, welcome: Callable[[bytes, socket.socket], None]
    ) -> set[bytes]:
        """Accept callers until each of the cards has come once, or until the deadline; return the missing cards.

        answer_seconds: how long a caller may be silent. welcome: takes a card, and the connection that brought it;
        raises OSError if nothing can be said there any more, and the card is still waited for. Raises OSError where
        nobody can be let in at all.
        """
        missing = set(cards)
        while missing and (now := time.monotonic()) < deadline:
            self._send_away_silent(now)
            oldest = next(iter(self._callers.values()), None)
            until = deadline if oldest is None else min(deadline, oldest.until)
            for key, _ in self._selector.select(max(0.0, until - now)):
                if key.fileobj is self._door:
                    self._accept_some(answer_seconds, missing, welcome)
                elif key.fd in self._callers:  # it may have lost its place meanwhile
                    self._hear(key.fd, missing, welcome)
        return missing

    def close(self) -> None:
        """Accept nobody any more, and close the sockets of callers that have not sent a card."""
        for number in list(self._callers):
            self._send_away(number)
        self._selector.close()
        self._door.close()

    def __enter__(self) -> Door:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept_some(
        self, answer_seconds: float, missing: set[bytes], welcome: Callable[[bytes, socket.socket], None]
    ) -> None:
        """Accept the callers that wait, but no more at once than lets it look at the clock in time."""
        for _ in range(MOST_WAITING):
            if not missing or not self._accept(answer_seconds, missing, welcome):
                return

    def _accept(
        self, answer_seconds: float, missing: set[bytes], welcome: Callable[[bytes, socket.socket], None]
    ) -> bool:
        """Accept the next caller, if there is one, and read what it has sent already: most have."""
        try:
            line, _ = self._door.accept()
        except BlockingIOError:
            return False
        except ConnectionError:  # it has left already
            return True
        except OSError as error:
            if error.errno not in TOO_MANY_FILES or not self._callers:
                raise
            self._send_away(next(iter(self._callers)))
            return True
        line.setblocking(False)
        self._callers[line.fileno()] = _Caller(line, time.monotonic() + answer_seconds)
        self._selector.register(line, selectors.EVENT_READ)
        self._hear(line.fileno(), missing, welcome)
        if len(self._callers) > MOST_WAITING:
            self._send_away(next(iter(self._callers)))
        return True

    def _hear(self, number: int, missing: set[bytes], welcome: Callable[[bytes, socket.socket], None]) -> None:
        """Read on in a caller's card. A caller that sends anything else is refused at once."""
        caller, size = self._callers[number], len(next(iter(missing))) if missing else 0
        try:
            part = caller.line.recv(size - len(caller.said)) if size else b""
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.said += part
        if not part or not any(card.startswith(caller.said) for card in missing):
            self._send_away(number)
        elif caller.said in missing:
            self._welcome(number, missing, welcome)

    def _welcome(self, number: int, missing: set[bytes], welcome: Callable[[bytes, socket.socket], None]) -> None:
        caller = self._callers.pop(number)
        self._selector.unregister(caller.line)
        caller.line.setblocking(True)
        try:
            welcome(caller.said, caller.line)
        except OSError:
            caller.line.close()
            return
        missing.remove(caller.said)

    def _send_away_silent(self, now: float) -> None:
        while self._callers and (oldest := next(iter(self._callers.items())))[1].until <= now:
            self._send_away(oldest[0])

    def _send_away(self, number: int) -> None:
        caller = self._callers.pop(number)
        self._strangers += 1
        self._selector.unregister(caller.line)
        with suppress(OSError):
            caller.line.close()
