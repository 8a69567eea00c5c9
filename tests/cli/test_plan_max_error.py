"""`tokenring plan --max-error`: a format of attention where links are slow, none elsewhere, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tokenring.cli.plan.command import main
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.plan import Plan
from tokenring.planner.machines.presets import PRESETS
from tokenring.topology.model.schema import to_json

CALL = ("--seq", "8k", "--heads", "8", "--kv-heads", "8", "--schedules", "ring,direct-kv,tokenring", "--no-cache")


def slow(tmp_path: Path) -> str:
    """The file of a machine whose links were measured, at 0.1 GB/s: those of a known kind have published figures."""
    saved = json.loads(to_json(PRESETS["mi300x-8"].facts()))
    for link in saved["facts"][0]["links"]:
        link |= {"bandwidth_gbs": 0.1, "kind": "link"}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps(saved), encoding="utf-8")
    return str(path)


def plan(*options: str) -> int:
    return main([*options, *CALL])


def as_json(capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    assert plan(*options, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_a_format_on_slow_links(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the text, in JSON and in the file alike, with the time without; a program takes the plan as it is."""
    topology, saved = ("--topology", slow(tmp_path)), tmp_path / "plan.json"
    before = as_json(capsys, *topology)
    found = as_json(capsys, *topology, "--max-error", "0.05", "--save", str(saved))
    assert json.loads(saved.read_text(encoding="utf-8")) == found
    assert Plan.load(saved).schedule.formats == {"kv": "mxint8", "q": "mxint8"}
    first = found["candidates"][0]["predicted_seconds"]
    assert first < 0.98 * before["candidates"][0]["predicted_seconds"]
    assert found["candidates"][1]["reason"].startswith("without a format: ")
    assert plan(*topology, "--max-error", "0.05") == 0
    text = capsys.readouterr().out
    assert found["reason"] in text and "the fastest, in mxint8" in text
    assert "communicators" not in text  # which take no memory here


def test_none_on_fast_links(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--topology", "preset:mi300x-8", "--max-error", "0.3") == 0
    assert "; no wire format within an error of 0.3 makes it faster" in capsys.readouterr().out


def test_many_ranks_say_that_none_was_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """Say so of a forecast, too, as of 512 ranks."""
    for hosts in ("8", "64"):
        assert plan("--topology", f"preset:mi300x-8*{hosts}", "--max-error", "0.3") == 0
        assert "; no wire format was tried, as one host stands for all" in capsys.readouterr().out


REFUSED = {
    ("--max-error", "0"): "--max-error 0: give a number above 0, as 0.05",
    ("--max-error", "nan"): "--max-error nan: give a number above 0",
    ("--max-error", "0.1", "--explain", "ring"): "--explain shows schedules without wire formats: leave out",
    ("--max-error", "0.1", "--sweep", "seq=8k..16k"): "--sweep shows schedules without wire formats",
    ("--max-error", "0.1", "--timeline", "a.svg"): "--timeline shows schedules without wire formats",
    ("--max-error", "0.1", "--operator", "row"): "--max-error does not go with --operator row",
    ("--wire", "mxint8"): "--wire goes with --operator NAME: for attention say --max-error",
}


@pytest.mark.parametrize("options", REFUSED, ids=" ".join)
def test_refused(options: tuple[str, ...]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        main(["--topology", "preset:mi300x-8", *options])
    assert str(caught.value).startswith(REFUSED[options])


def test_not_of_layers_nor_of_caches() -> None:
    for options in (("--layer", "llama3-8b", "--tp", "4"), ("--cached", "8k")):
        with pytest.raises(ConfigurationError, match="--max-error"):
            main(["--topology", "preset:mi300x-8", *options, "--max-error", "0.1"])
