"""Mutual exclusion of calls: one call at a time among threads that share a context, or its transport."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from tokenring.backends.interfaces import Transport
from tokenring.errors import ConfigurationError


class Turn:
    """A lock held while a thread uses what calls share, such as buffers and exchanges; its thread may enter it again.

    What counts is overlap, not which thread it is: backward may run in one of autograd's.
    """

    def __init__(self, waits: bool = False) -> None:
        """Make a turn. waits: a second thread waits for the first to end its call; else it is refused at once."""
        self._lock, self._waits, self._holder = threading.RLock(), waits, 0

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=self._waits):
            raise ConfigurationError(
                f"thread {_name(self._holder)!r} is in a call on this context, or on another one with its transport, "
                f"and thread {_name(threading.get_ident())!r} made a second one: the other ranks could not tell them "
                f"apart. Give each thread a context and a group of its own, or let all ranks take the calls in one "
                f"order, as under a lock"
            )
        self._holder = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


# By transport, for those that contexts share: their calls use one pool, and one exchange.
_turns: WeakKeyDictionary[Transport, Turn] = WeakKeyDictionary()


def turn_of(transport: str | Transport | None, world_size: int) -> Turn:
    """Return the turn of a context: its transport's, if it was given one.

    At one rank any order of calls is right, so threads wait instead of being refused.
    """
    if transport is None or isinstance(transport, str):
        return Turn(waits=world_size == 1)
    return _turns.setdefault(transport, Turn(waits=world_size == 1))


def share_turn(transport: Transport, turn: Turn) -> None:
    """Register the turn of a transport, for contexts that will be given this transport."""
    _turns[transport] = turn


def _name(ident: int) -> str:
    """Return a thread's name, without making a Thread for one of autograd's, which has none."""
    return next((each.name for each in threading.enumerate() if each.ident == ident), f"number {ident}")
