"""Work that is done in a thread of its own, while whoever wants it says now and then that it goes on."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event, Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Aside(Generic[T]):
    """Calls `work` in a thread that does not keep the process from ending."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._done = Event()
        self._found: list[T] = []
        self._error: BaseException | None = None
        Thread(target=self._run, args=(work,), daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._found.append(work())
        except BaseException as error:  # whoever asks for the result gets it
            self._error = error
        finally:
            self._done.set()

    def result(self, seconds: float) -> T:
        """What the work came to. Raises TimeoutError while it goes on, and what it raised."""
        if not self._done.wait(seconds):
            raise TimeoutError(f"not done within {seconds} s")
        if self._error is not None:
            raise self._error
        return self._found[0]
