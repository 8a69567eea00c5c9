"""Which versions of Megatron-core are here: each in a folder of its own, as `make test` installs them.

TOKENRING_MEGATRON names another place for these folders, which are called by their version. `make test` sets
TOKENRING_MEGATRON_REQUIRED=1: then tests of a version that is not here fail, where this Python could have it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[3]
_LINES = [line.split() for line in (REPO / "ci/megatron-versions.txt").read_text().splitlines()]
PYTHONS = {version: pythons for version, *pythons in _LINES}  # of which the index has wheels, for Linux
PINNED = list(PYTHONS)


def folder(version: str) -> Path:
    place = os.environ.get("TOKENRING_MEGATRON")
    return (Path(place) if place else REPO / ".venv/megatron") / version


def is_here(version: str) -> bool:
    return (folder(version) / "megatron/core/__init__.py").exists()


def has_wheel(version: str, python: tuple[int, ...] = sys.version_info[:2], system: str = sys.platform) -> bool:
    """Whether `make megatron` installs it for this Python (ci/megatron goes by the same)."""
    return system == "linux" and ".".join(map(str, python)) in PYTHONS[version]


def need(version: str, environment: Mapping[str, str] = os.environ) -> None:
    """Skips the test where this version is not here; fails it where `make test` was to install it."""
    if is_here(version):
        return
    text = f"no Megatron-core {version} in {folder(version)}: make megatron"
    if environment.get("TOKENRING_MEGATRON_REQUIRED") == "1" and has_wheel(version):
        pytest.fail(text)
    pytest.skip(text)
