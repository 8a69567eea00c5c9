"""Which versions of Megatron-core are here: each in a folder of its own, as `make test` installs them.

TOKENRING_MEGATRON names another place for these folders, which are called by their version.
"""

from __future__ import annotations

import os
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent
PINNED = (REPO / "ci/megatron-versions.txt").read_text().split()


def folder(version: str) -> Path:
    place = os.environ.get("TOKENRING_MEGATRON")
    return (Path(place) if place else REPO / ".venv/megatron") / version


def is_here(version: str) -> bool:
    return (folder(version) / "megatron/core/__init__.py").exists()
