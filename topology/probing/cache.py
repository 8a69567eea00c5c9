"""The facts of this machine's last probe, in a file of the user's, so that a second start need not ask its tools.

One file a host name, written whole or not at all. Its first line has the fingerprint of what is cheap to read and
changes when the hardware or its drivers do; a file with another first line is not used.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from tokenring._version import __version__
from tokenring.errors import ConfigurationError, TopologyError
from tokenring.tables.kept_files import cache_folder, write_whole
from tokenring.topology.model.facts import Facts, Note, SourceOrigin
from tokenring.topology.model.schema import MAX_CHARACTERS, from_json, to_json
from tokenring.topology.sources import REGISTRY

WORD = "tokenring-topology-cache"
VERSION = 1
MEASURED = "measured.json"
ACCELERATOR_NODES = re.compile(r"nvidia\d+|davinci\d+|kfd|mxcd|mtgpu\.\d+|cambricon_dev\d+")  # in /dev: what we may use
DRIVERS = (
    "proc/driver/nvidia/version",
    "sys/module/nvidia/version",
    "sys/module/amdgpu/version",
    "usr/local/Ascend/driver/version.info",
    "opt/rocm/.info/version",
)


def fingerprint(host: str, root: Path = Path("/")) -> str:
    """Return a hash of this boot of this machine, as far as this process may see it, and of the software that asks."""
    parts: list[object] = [__version__, host, [(source.name, source.command) for source in REGISTRY]]
    parts.append(find_spec("pynvml") is not None)
    parts.append(_text(root / "proc/sys/kernel/random/boot_id"))
    parts.append(_names(root / "sys/bus/pci/devices"))
    nodes = [name for name in _names(root / "dev") if ACCELERATOR_NODES.fullmatch(name)]
    parts.append([name for name in nodes if os.access(root / "dev" / name, os.R_OK | os.W_OK)])  # see cgroups
    parts.append(_names(root / "dev/dri"))
    parts += [_text(root / path) for path in DRIVERS]
    parts += [_stamp(shutil.which(name)) for name in dict.fromkeys(s.command[0] for s in REGISTRY if s.command)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def cached(folder: Path | None, host: str, mark: str, look: Callable[[], list[Facts]]) -> list[Facts]:
    """Return the facts in the file, if it has this mark; else what `look` finds, which is left there.

    A file that cannot be used, read or written is a note, never an error.
    """
    if folder is None:
        return look()
    path = folder / f"topology-{hashlib.sha256(host.encode()).hexdigest()[:16]}.json"
    try:
        return _read(path, mark)
    except FileNotFoundError:
        notes = []
    except (OSError, TopologyError) as error:
        notes = [_note(f"the cache {path} is not used: {_why(error)}")]
    facts = look()
    if _is_whole(facts):
        try:
            write_whole(path, _first_line(mark, document := to_json(facts)) + document)
        except OSError as error:
            notes.append(_note(f"the cache {path} cannot be written: {_why(error)}"))
    return [*facts, *notes]


def _read(path: Path, mark: str) -> list[Facts]:
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        text = file.read(MAX_CHARACTERS)
    first, newline, document = text.partition("\n")
    if not first.startswith(f"{WORD} ") or not newline:
        raise TopologyError("it is not a cache of tokenring's")
    if first.split(" ")[1:3] != [str(VERSION), mark]:
        raise TopologyError("it is of another boot, machine, driver or version")
    if first + newline != _first_line(mark, document):
        raise TopologyError("it is broken")
    return from_json(document)


def _first_line(mark: str, document: str) -> str:
    digest = hashlib.sha256(document.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{WORD} {VERSION} {mark} {digest}\n"


def _is_whole(facts: Iterable[Facts]) -> bool:
    """Return whether every source answered: a tool that was too slow today may answer tomorrow."""
    return all(each.coverage != "devices" or each.devices or not each.notes for each in facts)


def _note(text: str) -> Facts:
    return Facts("devices", notes=(Note(text),), origin=SourceOrigin("cache"))


def _why(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else str(error)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: Path) -> str | None:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return file.read(4096)
    except OSError:
        return None


def _stamp(path: str | None) -> list[object]:
    try:
        return [path, os.stat(path).st_mtime_ns] if path else []
    except OSError:
        return [path]


def keep_measured(document: str, environment: Mapping[str, str]) -> None:
    """Leave what was measured last, for `tokenring plan --topology measured`. That it cannot be written is no error."""
    folder = cache_folder(environment)
    if folder is not None:
        with suppress(OSError):
            write_whole(folder / MEASURED, document)


def measured_file(environment: Mapping[str, str]) -> Path:
    """Return the file of what was measured last on this machine. Raises ConfigurationError if nothing was."""
    folder = cache_folder(environment)
    if folder is None or not (folder / MEASURED).is_file():
        raise ConfigurationError("nothing was measured here yet: run `tokenring topology --measure` on the ranks first")
    return folder / MEASURED
