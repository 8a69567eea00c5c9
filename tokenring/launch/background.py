"""Work that is done in a thread of its own, while whoever wants it goes on or waits with a limit."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar

T = TypeVar("T")


class Background(Generic[T]):
    """A call of `work` in a thread that does not keep the process from ending: it may never come back."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.error: BaseException | None = None  # what it raised
        self._answers: list[T] = []
        self._work = work
        self._thread = Thread(target=self._run, daemon=True, name="tokenring background")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._work())
        except BaseException as error:  # whoever asks for the result gets it
            self.error = error

    def ended(self, seconds: float) -> bool:
        """Wait until the work is over, at most so many seconds; return whether it is."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self, seconds: float = 0.0) -> T:
        """Return what the work returned. Raises what it raised, and TimeoutError while it goes on."""
        if not self.ended(seconds):
            raise TimeoutError(f"not done within {seconds} s")
        if self.error is not None:
            raise self.error
        return self._answers[0]
