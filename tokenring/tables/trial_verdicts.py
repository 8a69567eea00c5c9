"""Verdicts on trials of vendors' code on this machine, so that each is tried once.

A verdict is a reason, "" where all went well. Who tries makes the key: it has to name everything that the outcome
depends on, such as the device's model, the driver and the versions of libraries, so that an update is tried anew.
Verdicts are kept by the process, and in one small file each in the user's cache: a file is written whole or not at all,
is safe to lose and may be deleted at any time; one that cannot be read or written counts as none.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from tokenring._version import __version__
from tokenring.tables.kept_files import cache_folder, write_whole

VERSION = 1
MOST_BYTES = 65536  # of a file: longer ones are not ours


class Verdicts:
    """The verdicts in a folder; without a folder (None), those of this process alone."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._found: dict[str, str] = {}

    def known(self, key: str) -> str | None:
        """Look up the reason not to use what was tried: "" if there is none, None if it was never tried."""
        if key not in self._found and (kept := self._read(key)) is not None:
            self._found[key] = kept
        return self._found.get(key)

    def record(self, key: str, reason: str) -> None:
        """Keep a verdict. That it cannot be written is no error: this process keeps it."""
        self._found[key] = reason
        if self.folder is not None:
            text = json.dumps({"version": VERSION, "tokenring": __version__, "key": key, "reason": reason})
            with suppress(OSError):
                write_whole(self.folder / _name(key), text + "\n")

    def _read(self, key: str) -> str | None:
        if self.folder is None:
            return None
        try:
            with (self.folder / _name(key)).open(encoding="utf-8") as file:
                found = json.loads(file.read(MOST_BYTES))
            ours = (found["version"], found["tokenring"], found["key"]) == (VERSION, __version__, key)
            return found["reason"] if ours and isinstance(found["reason"], str) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None


def _name(key: str) -> str:
    return f"verdict-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def verdicts(environment: Mapping[str, str] = os.environ) -> Verdicts:
    """Return the verdicts of this user on this machine."""
    return _in(cache_folder(environment))


@lru_cache(maxsize=16)
def _in(folder: Path | None) -> Verdicts:
    return Verdicts(folder)
