"""The folder of what was measured: looked into before what reads it is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokenring.backends.transports.auto import choice_of
from tokenring.tables.kept_files import TRANSPORTS_MEASURED, may_have

NOTHING: dict[str, str | None] = {"shm": None, "gloo": None}


def test_what_it_may_have(tmp_path: Path) -> None:
    here, folder = {"XDG_CACHE_HOME": str(tmp_path)}, tmp_path / "tokenring"
    assert not may_have(TRANSPORTS_MEASURED, here)
    folder.mkdir()
    (folder / "rates-0.json").touch()
    assert not may_have(TRANSPORTS_MEASURED, here)
    (folder / "transports-0.json").touch()
    assert may_have(TRANSPORTS_MEASURED, here)
    assert not may_have(TRANSPORTS_MEASURED, {})  # no home


def test_what_cannot_be_looked_into_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "is not used" not in choice_of("cpu", "reached", NOTHING, 2).reason
    (tmp_path / "tokenring").touch()  # a file in the place of the folder
    assert "is not used: it cannot be read: Not a directory" in choice_of("cpu", "reached", NOTHING, 2).reason
