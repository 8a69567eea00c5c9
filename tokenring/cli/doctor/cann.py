"""CANN according to its files: its folder and version. Nothing of it is run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from tokenring.cli.doctor.findings import Cann

HOMES = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")  # set by set_env.sh
INSTALLED = ("Ascend/cann", "Ascend/ascend-toolkit/latest", "Ascend/nnae/latest")  # below /usr/local or home
INFO = ("*-linux/ascend_toolkit_install.info", "ascend_toolkit_install.info", "ascend_nnae_install.info")
PARTS = ("runtime/version.info", "compiler/version.info", "version.cfg")  # where the package left no note
MOST_BYTES = 1 << 16


def find_cann(environment: Mapping[str, str], roots: tuple[str, ...] | None = None) -> Cann | None:
    """Return the CANN that this environment uses, else one that is installed; None: none is found."""
    if roots is None:
        roots = ("/usr/local", environment.get("HOME", "/root"))
    named = [environment[name] for name in HOMES if environment.get(name)]
    for folder in [*map(Path, named), *(Path(root, part) for root in roots for part in INSTALLED)]:
        if folder.is_dir():
            return Cann(_version(folder), str(folder))
    return None


def is_sourced(environment: Mapping[str, str]) -> bool:
    """Tell whether set_env.sh was run in this shell."""
    return any(environment.get(name) for name in HOMES)


def set_env_of(cann: Cann) -> str:
    """Return the path of the script that sets this CANN up in a shell."""
    folder = Path(cann.folder)
    for place in (folder / "set_env.sh", folder.parent / "set_env.sh"):
        if place.is_file():
            return str(place)
    return str(folder / "set_env.sh")


def _version(folder: Path) -> str | None:
    for file in _notes(folder):
        try:
            text = file.read_bytes()[:MOST_BYTES].decode("utf-8", "replace")
        except OSError:
            continue
        found = re.search(r"^\s*\w*version\s*=\s*\[?([0-9][\w.\-]*)", text, re.ASCII | re.IGNORECASE | re.MULTILINE)
        if found:
            return found[1]
    return None


def _notes(folder: Path) -> Iterator[Path]:
    for pattern in (*INFO, *PARTS):
        yield from sorted(folder.glob(pattern))
