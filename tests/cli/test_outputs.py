"""Files are what their names say: a suffix that an option does not write is refused before any work."""

from __future__ import annotations

import io
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from broken_dumps import DATA

from tokenring.cli.main import main

DUMP = str(DATA / "npu-910b.txt")
PLAN = ("plan", "--topology", "preset:hgx-h100", "--seq", "4k")


def run(*words: str) -> tuple[int, str]:
    out, err = StringIO(), StringIO()
    return main(list(words), out, err, StringIO()), err.getvalue()


REFUSED = [
    ("--output", (".txt", ".json", ".svg"), ("schedule", "ring", "--ranks", "2")),
    ("-o", (".txt", ".json", ".svg"), ("schedule", "ring", "--ranks", "2")),
    ("--save", (".txt", ".json"), ("doctor",)),
    ("--save", (".json",), ("topology", "--from", DUMP)),
    ("--svg", (".svg",), ("topology", "--from", DUMP)),
    ("--html", (".html", ".htm"), ("topology", "--from", DUMP)),
    ("--save", (".json",), ("topology", "--measure", "--ranks", "2")),
    ("--svg", (".svg",), ("topology", "--measure", "--ranks", "2")),
    ("--html", (".html", ".htm"), ("topology", "--measure", "--ranks", "2")),
    ("--save", (".json",), PLAN),
    ("--timeline", (".svg", ".json"), PLAN),
    ("--svg", (".svg",), (*PLAN, "--sweep", "seq=4k..8k")),
    ("--json", (".json",), ("bench", "--ranks", "2")),
    ("--save", (".json",), ("bench", "--ranks", "2")),
    ("--svg", (".svg",), ("bench", "--ranks", "2")),
    ("--svg", (".svg",), ("trace", "ring", "--ranks", "2")),
    ("--save", (".json",), ("trace", "ring", "--ranks", "2")),
    ("--chrome", (".json",), ("trace", "ring", "--ranks", "2")),
    ("--svg", (".svg",), ("demo", "--ranks", "2")),
]


def no_work(*given: Any, **named: Any) -> Any:
    raise AssertionError("work was begun")


@pytest.mark.parametrize(("option", "known", "words"), REFUSED, ids=lambda each: " ".join(each) if each else "")
def test_a_suffix_that_is_not_written(
    option: str, known: tuple[str, ...], words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for work in (
        "tokenring.cli.main._build", "tokenring.cli.doctor.command.examine", "tokenring.cli.topology.command.read_file",
        "tokenring.launch.command._Job", "tokenring.cli.plan.command.ask", "tokenring.cli.plan.command.sweep",
        "tokenring.cli.demo.command.Demo",
    ):  # fmt: skip
        monkeypatch.setattr(work, no_work)
    path = tmp_path / "x.png"
    long = "--save" if option in ("-o", "--output") else option
    code, said = run(*words, option, str(path))
    wanted = f"tokenring: {long} {str(path)!r}: '.png' files are not supported; end the name in {' or '.join(known)}\n"
    assert (code, said) == (2, wanted)
    assert not path.exists()


FORMS = [(".json", "{"), (".svg", "<svg"), (".txt", "schedule "), ("", "schedule ")]


@pytest.mark.parametrize(("suffix", "begins"), FORMS)
def test_a_schedule_is_written_as_its_file_says(suffix: str, begins: str, tmp_path: Path) -> None:
    path = tmp_path / f"it{suffix.upper()}"
    assert run("schedule", "ring", "--ranks", "2", "--save", str(path)) == (0, "")
    assert path.read_text(encoding="utf-8").startswith(begins)


def test_a_diagnosis_is_written_as_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "it.json"
    assert run("doctor", "--save", str(path)) == (0, "")
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == "tokenring-doctor"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("schedule", "ring", "--ranks", "2", "--json"), "x.txt"),
        (("schedule", "ring", "--ranks", "2", "--json"), "x.svg"),
        (("schedule", "ring", "--ranks", "2", "--svg"), "x.json"),
        (("doctor", "--json"), "x.txt"),
    ],
)
def test_an_option_and_a_name_that_differ(words: tuple[str, ...], name: str, tmp_path: Path) -> None:
    code, said = run(*words, "--save", str(tmp_path / name))
    assert code == 2
    assert "say different things: leave one out" in said
    assert not (tmp_path / name).exists()


def test_a_dump_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    path = DATA / "npu-910b.txt"
    whole, piped = StringIO(), StringIO()
    assert main(["topology", "--from", str(path)], whole) == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(path.read_bytes())))
    assert main(["topology", "--from", "-"], piped) == 0
    assert piped.getvalue() == whole.getvalue()
