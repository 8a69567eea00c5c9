"""Names of files and of devices may hold what drives a terminal: it is shown, and does nothing."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from broken_dumps import DATA

from tokenring.cli.main import main
from tokenring.display.console import Console, Ink, harmless

EVIL = "a\x1b]0;owned\x07\x1b[31m\x9b2J\r\u202eb"
RAW = ("\x1b", "\x07", "\x9b", "\r", "\u202e")


def all_said(*words: str) -> str:
    out = StringIO()
    main(list(words), out, out, StringIO())
    return out.getvalue()


@pytest.mark.parametrize(
    "words",
    [
        ("topology", "--from", EVIL), ("topology", EVIL), ("plan", "--topology", EVIL),
        ("plan", "--topology", "preset:hgx-h100", EVIL), ("plan", "--topology", "preset:hgx-h100", "--rates", EVIL),
        ("plan", "--topology", "preset:hgx-h100", "--schedules", EVIL),
        ("plan", "--topology", "preset:hgx-h100", "--mask", EVIL),
        ("plan", "--topology", "preset:hgx-h100", "--transport", EVIL), (EVIL,),
        ("schedule", EVIL, "--ranks", "2"), ("schedule", f"{EVIL}.json"), ("schedule", "ring", "--ranks", EVIL),
        ("schedule", "ring", "--ranks", "2", "--layout", EVIL),
        ("schedule", "ring", "--ranks", "2", "-o", f"/no/{EVIL}"),
        ("schedule", "ring", "--ranks", "2", "-o", f"{EVIL}.p{EVIL}"),
        ("trace", EVIL, "--ranks", "2"), ("trace", "ring", "--ranks", "2", "--picture", f"/no/{EVIL}.svg"),
        ("bench", "--ranks", "2", "--json", f"/no/{EVIL}.json"), ("bench", "--ranks", "2", "--transport", EVIL),
        ("demo", "--output", f"/no/{EVIL}.svg"), ("demo", "--layout", EVIL), ("rates", "--device", EVIL),
        ("doctor", EVIL), ("doctor", "-o", f"/no/{EVIL}"),
    ],
)  # fmt: skip
def test_errors(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    if words[0] == "doctor":
        monkeypatch.setattr("tokenring.cli.doctor.command.report", lambda found: "")
        monkeypatch.setattr("tokenring.cli.doctor.command.examine", lambda environment, seconds: None)
    said = all_said(*words)
    assert said.startswith("tokenring: ")
    assert not [each for each in RAW if each in said]


def test_reports_of_files_with_such_names(tmp_path: Path) -> None:
    files = [tmp_path / f"{EVIL}.txt", tmp_path / f"b{EVIL}.txt"]
    for file in files:
        file.write_text((DATA / "npu-910b.txt").read_text(encoding="utf-8"), encoding="utf-8")
    for words in (("topology", "--from", *map(str, files)), ("plan", "--topology", str(files[0]), "--seq", "4k")):
        said = all_said(*words)
        assert "910B" in said or "predicted" in said
        assert not [each for each in RAW if each in said]


def test_reports_of_devices_with_such_names(tmp_path: Path) -> None:
    dump = tmp_path / "matrix.json"
    text = '{"hardware": "A100\\u001b[2J\\u009b", "ids": ["0", "1"], "matrix": [["X", "NV12"], ["NV12", "X"]]}'
    dump.write_text(text, encoding="utf-8")
    for words in (("topology", "--from", str(dump)), ("plan", "--topology", str(dump), "--seq", "4k")):
        said = all_said(*words)
        assert said
        assert not [each for each in RAW if each in said]


def test_a_console_shows_them_beside_its_own_colours() -> None:
    out, err = StringIO(), StringIO()
    console = Console(out, err, {})
    console.say(EVIL)
    console.ink = Ink(True)
    console.say(console.ink.good("fine") + EVIL)
    console.complain(EVIL)
    plain, coloured = out.getvalue().splitlines()
    assert plain.startswith("a␛]0;owned␇␛[31m�2J␍")
    assert coloured.startswith("\x1b[32mfine\x1b[0ma␛]0;owned␇")
    assert coloured.count("\x1b") == 3  # and "red", which is one of its own colours
    assert "\x07" not in out.getvalue() + err.getvalue()
    assert "\x9b" not in out.getvalue() + err.getvalue()
    assert harmless("two\nlines") == "two\nlines"
