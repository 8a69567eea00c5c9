"""The errors that tokenring raises on purpose.

TokenRingError
├── ConfigurationError (ValueError)   what was asked for cannot be: layouts, shapes, groups, names
│   └── MemoryLimitError              a memory limit that no schedule keeps to
├── UnsupportedError (NotImplementedError)   a feature, dtype or mask that no part here provides
│   └── NotPicklable (PicklingError)  what stands for this process and cannot be saved
├── ScheduleError (ValueError)        a schedule that fails its proof, or a text that is none
├── TopologyError (ValueError)        a dump of a machine that is broken, or in no known format
├── PeerLost (RuntimeError)           a peer did not answer in time
└── BackendUnavailable (RuntimeError) a transport or kernel that this machine lacks

TokenRingWarning (UserWarning)       a call that looks like a mistake, and is made as it was asked for

Each message says what was asked, what was found and what to do.
"""

from __future__ import annotations

from pickle import PicklingError


class TokenRingError(Exception):
    """Base of every error that tokenring raises on purpose."""


class ConfigurationError(TokenRingError, ValueError):
    """Sizes, names or groups that do not fit together."""


class MemoryLimitError(ConfigurationError):
    """A memory limit that no schedule keeps to. needs_bytes: of the smallest, where known."""

    needs_bytes: int | None = None


class UnsupportedError(TokenRingError, NotImplementedError):
    """A feature, dtype or mask that nothing here provides."""


class NotPicklable(UnsupportedError, PicklingError):
    """An object that stands for the group and the memory of this process, and cannot be saved."""


class ScheduleError(TokenRingError, ValueError):
    """A schedule that fails its proof, or a text that is not a schedule."""


class PeerLost(TokenRingError, RuntimeError):
    """A peer is dead, failed or silent.

    `rank` is the rank in the group that is lost. `certain`: its process is known to be gone or
    stopped, or said itself that it failed; else it is the one that is silent, seen from here.
    """

    def __init__(self, message: str, rank: int | None = None, certain: bool = False) -> None:
        super().__init__(message)
        self.rank, self.certain = rank, certain


class BackendUnavailable(TokenRingError, RuntimeError):
    """A transport or kernel that this machine does not have."""


class TopologyError(TokenRingError, ValueError):
    """A dump that is broken, or in no format that we know; `line` and `column` say where, from 1."""

    def __init__(
        self, message: str, line: int | None = None, column: int | None = None, file: str | None = None
    ) -> None:
        self.message, self.line, self.column, self.file = message, line, column, file
        place = [str(part) for part in (file, line, column if line is not None else None) if part is not None]
        super().__init__(f"{':'.join(place)}: {message}" if place else message)


class TokenRingWarning(UserWarning):
    """A call that looks like a mistake, and is made as it was asked for."""


MOST_SAID = 300  # characters of an error that another's message holds


def one_line(error: BaseException, most: int | None = None) -> str:
    """Return an error's text in one line (of up to `most` characters); its type where it has no text."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if most is None or len(text) <= most else f"{text[: most - 2]} …"
