"""Verdicts on what was tried: kept by the process and in the user's cache, and never in the way."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tokenring.tables import trial_verdicts as module
from tokenring.tables.trial_verdicts import Verdicts, verdicts

KEY = "torch-cudnn forward on H100 (9.0), driver 580.65.06, torch 2.13"


def test_never_tried_is_not_fine(tmp_path: Path) -> None:
    made = Verdicts(tmp_path)
    assert made.known(KEY) is None
    made.record(KEY, "")
    assert made.known(KEY) == ""
    assert made.known(KEY + "1") is None


@pytest.mark.parametrize("reason", ["", "its dq is wrong: “½”"])
def test_another_process_finds_it(tmp_path: Path, reason: str) -> None:
    Verdicts(tmp_path / "made").record(KEY, reason)
    assert Verdicts(tmp_path / "made").known(KEY) == reason
    assert Verdicts(tmp_path).known(KEY) is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "null", '{"version": 1}', "changed key", "changed version", "changed tokenring", "no text"],
)
def test_a_file_that_is_not_ours_counts_as_none(tmp_path: Path, text: str) -> None:
    Verdicts(tmp_path).record(KEY, "bad")
    (path,) = tmp_path.iterdir()
    if text.startswith("changed "):
        found = json.loads(path.read_text(encoding="utf-8"))
        text = json.dumps(found | {text.removeprefix("changed "): "0"})
    elif text == "no text":
        text = json.dumps(json.loads(path.read_text(encoding="utf-8")) | {"reason": 3})
    path.write_text(text, encoding="utf-8")
    made = Verdicts(tmp_path)
    assert made.known(KEY) is None
    made.record(KEY, "")
    assert Verdicts(tmp_path).known(KEY) == ""
    assert [each.name for each in tmp_path.iterdir()] == [path.name], "nothing half written is left"


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    Verdicts(tmp_path).record(KEY, "bad")
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"\xff\xfe\x00")
    assert Verdicts(tmp_path).known(KEY) is None


def test_without_a_place_to_write(tmp_path: Path) -> None:
    """The process remembers it."""
    (tmp_path / "file").write_text("")
    for made in (Verdicts(None), Verdicts(tmp_path / "file" / "below")):
        made.record(KEY, "bad")
        assert made.known(KEY) == "bad"


def test_of_the_user(tmp_path: Path) -> None:
    here = verdicts({"XDG_CACHE_HOME": str(tmp_path)})
    assert here.folder == tmp_path / "tokenring"
    assert verdicts({"XDG_CACHE_HOME": str(tmp_path)}) is here, "the process keeps one"
    assert verdicts({}).folder is None


def test_what_is_read_once_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Verdicts(tmp_path).record(KEY, "bad")
    made = Verdicts(tmp_path)
    assert made.known(KEY) == "bad"
    monkeypatch.setattr(module, "_name", None)
    assert made.known(KEY) == "bad"
