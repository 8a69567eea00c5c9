"""`tokenring plan --layout auto`: the layout in which the fastest schedule is fastest, and what the others take."""

from __future__ import annotations

import re

import pytest

from tokenring.cli.plan.command import main

CALL = ["--topology", "preset:a10-pix-4", "--seq", "8k", "--heads", "3", "--kv-heads", "3"]
CALL += ["--schedules", "direct-kv,ring"]
MASK = ["--mask", "causal&documents(0,900,1000,3600,3700,6000,8192)"]


def planned(capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main([*CALL, *options, "--no-cache"]) == 0
    return capsys.readouterr().out


def test_the_fastest_layout_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    """Each alone takes what the line says of it, and the first of them is the layout of the plan."""
    text = planned(capsys, *MASK, "--layout", "auto")
    line = next(each for each in text.splitlines() if each.startswith("layouts, each with its fastest schedule: "))
    found = re.findall(r"(\w+) ([0-9.]+ .s) \(([\w/-]+)\)", line)
    assert {name for name, *_ in found} == {"balanced", "zigzag", "contiguous"}
    assert f"layout {found[0][0]}\n" in text
    for name, seconds, schedule in found:
        if name != "balanced":
            assert f"{schedule}: {seconds} predicted" in planned(capsys, *MASK, "--layout", name)


def test_a_causal_mask_has_two_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    text = planned(capsys, "--mask", "causal", "--layout", "auto")
    assert "layout zigzag\n" in text and "balanced" not in text


def test_where_kernels_decide_an_evener_layout_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    mask = ["--mask", "causal&documents(0,1224,2104,3184,4616,5008,8192)", "--tflops", "1"]
    text = planned(capsys, *mask, "--schedules", "direct-kv", "--layout", "auto")
    assert re.search("schedule: even .*, balanced .*, (zigzag|contiguous) .*, (zigzag|contiguous) ", text), text
    assert "layout even\n" in text
