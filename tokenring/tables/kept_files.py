"""The user's folder of files that were probed or measured on this machine, and the functions that write there."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import filter as named
from pathlib import Path

from tokenring.errors import ConfigurationError

TRANSPORTS_MEASURED = "transports-*.json"  # the files of tables.transport_times

PLAN_CACHE, OFF = "TOKENRING_PLAN_CACHE", "off"
BEGUN = ".writing-"  # how the name of a file begins that is not whole yet


def cache_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of the files, by the XDG rules; None if there is no home."""
    asked = environment.get("XDG_CACHE_HOME", "")
    if os.path.isabs(asked):  # the rules say to ignore others
        return Path(asked) / "tokenring"
    home = environment.get("HOME", "")
    return Path(home) / ".cache" / "tokenring" if os.path.isabs(home) else None


def may_have(pattern: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Tell whether the folder may have files of these names: it does, or does not let itself be looked into."""
    folder = cache_folder(environment)
    try:
        return folder is not None and bool(named(os.listdir(folder), pattern))
    except OSError as error:
        return not isinstance(error, FileNotFoundError)


def folder_of_plans(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of kept plans: the user's, or TOKENRING_PLAN_CACHE; None where that is "off" or no home is.

    Raises ConfigurationError for a TOKENRING_PLAN_CACHE that is neither "off" nor an absolute path.
    """
    asked = environment.get(PLAN_CACHE, "")
    if asked == OFF:
        return None
    if os.path.isabs(asked):
        return Path(asked)
    if asked:
        raise ConfigurationError(f"{PLAN_CACHE}={asked!r}: give an absolute path, or {OFF!r} to keep no plans")
    folder = cache_folder(environment)
    return None if folder is None else folder / "plans"


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: ranks of two jobs may write at once, and readers must never see half."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=BEGUN)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogatepass", newline="") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


def keep_document(name: str, text: str, environment: Mapping[str, str]) -> Path | None:
    """Write a file of measured figures into the user's cache; return its path, or None if there is no home.

    Raises ConfigurationError if it cannot be written.
    """
    folder = cache_folder(environment)
    if folder is None:
        return None
    try:
        write_whole(folder / name, text)
    except OSError as error:
        raise ConfigurationError(f"cannot keep rates in {folder}: {error.strerror}: who may write there?") from None
    return folder / name
