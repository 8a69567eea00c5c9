"""`tokenring trace --cached`: complete, on one clock, with as many bytes as an exchange sends; refusals."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from patience import patient
from ranks import Here, RankPools

from tokenring.cli.bench import cached_ways
from tokenring.cli.bench.results import CachedCase, RaceMachine
from tokenring.cli.trace.cached_worker import bars_of, traced_step
from tokenring.cli.trace.chrome import to_chrome
from tokenring.cli.trace.command import main
from tokenring.cli.trace.notes import StepNote
from tokenring.cli.trace.picture import timeline_of, to_svg
from tokenring.cli.trace.record import Traced
from tokenring.cli.trace.table import spent, table, to_json
from tokenring.display.console import Ink
from tokenring.errors import ConfigurationError
from tokenring.launch.command import quiet

RANKS = 3
CASE = CachedCase(6, 96, 6, 2, 16, 16, False, "float32", 2, "shm", ["one-shot"], 2)
ROWS, LSE, ITEM = 2 * 6 * 6, 1, 4  # rows of all heads
RESULT, Q = ROWS * (16 + LSE) * ITEM, ROWS * 16 * ITEM
SMALL = ("--cached", "1k", "--ranks", "2")


def traced(here: Here, cases: list[CachedCase]) -> list[dict[str, Any] | None]:
    return [traced_step(case, quiet) for case in cases]


def run(ranks: RankPools, *cases: CachedCase) -> list[Traced]:
    found = ranks(RANKS)(traced, list(cases))
    assert found[1:] == [[None] * len(cases)] * (RANKS - 1)
    return [
        Traced(case, RaceMachine("", 1, 1, RANKS, ""), **made)
        for case, made in zip(cases, found[0], strict=True)
        if made is not None
    ]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_every_way(ranks: RankPools, transport: str) -> None:
    """Let nothing overlap at a rank, all lie inside the step, and the parts add up to it."""
    cases = [replace(CASE, schedules=[name], transport=transport) for name in cached_ways.WAYS]
    one = replace(CASE, tokens=1, batch=1, transport=transport)
    latents = replace(CASE, kv_heads=1, value_dim=8, latents=True, transport=transport, schedules=["direct-q/tokens"])
    for made in run(ranks, *cases, one, latents):
        name = made.case.schedules[0]
        assert made.one_clock and len(made.rounds_s) == CASE.rounds and made.seconds == sorted(made.rounds_s)[0]
        assert made.schedule == name or (name.startswith("auto") and made.schedule in (*cached_ways.WAYS, "direct-q"))
        for stretch in made.stretches:
            bars = [bar for bar in made.bars if bar.rank == stretch.rank]
            times = [stretch.began, *(time for bar in bars for time in (bar.began, bar.ended)), stretch.ended]
            assert times == sorted(times), (name, stretch.rank)
            assert {"compute", "wait", "post", "merge"} <= {bar.kind for bar in bars}, name
            assert [bar.step for bar in bars] == sorted(bar.step for bar in bars)
            parts = sum(part.total for part in spent(made) if part.rank == stretch.rank)
            assert parts == pytest.approx(stretch.ended - stretch.began, abs=1e-7)
        assert made.messages
        assert all(each.sent <= each.received and each.waited <= each.received for each in made.messages)


def test_bytes_are_those_of_the_exchange(ranks: RankPools) -> None:
    wanted = {"one-shot": [RESULT], "two-step": [RESULT // 3] * 2, "direct-q/heads": [Q // 3, RESULT // 3]}
    for made in run(ranks, *(replace(CASE, schedules=[name]) for name in wanted)):
        sent = Counter((each.src, each.dst, int(each.details["bytes"])) for each in made.messages)
        pairs = [(src, dst) for src in range(RANKS) for dst in range(RANKS) if src != dst]
        assert sent == Counter((*pair, size) for pair in pairs for size in wanted[made.case.schedules[0]])


def test_notes_of_messages_in_an_executor_are_not_shown_twice(ranks: RankPools) -> None:
    """Show each post of a ring once: two of its keys and values, and of new tokens those that later ranks read."""
    (made,) = run(ranks, replace(CASE, schedules=["ring"]))
    posts = [bar for bar in made.bars if bar.kind == "post" and "send" in bar.label]
    assert len(posts) == len(made.messages)


def test_steps_end_with_waits() -> None:
    kinds = "post", "wait", "wait", "compute", "wait", "merge"
    notes = [StepNote(kind, "", "", float(at), at + 0.5) for at, kind in enumerate(kinds)]
    found = bars_of(0, notes, [], 0.0)
    assert [(bar.kind, bar.step) for bar in found] == [*zip(kinds, (0, 0, 0, 1, 1, 2), strict=True)]


def test_outputs(ranks: RankPools) -> None:
    (made,) = run(ranks, replace(CASE, schedules=["two-step"]))
    read = Traced.from_json(made.to_json())
    assert read == made
    text = table(made, Ink(False))
    assert text.startswith("tokenring trace: schedule two-step, forward, 6 new tokens over 96 cached, 6 query heads ")
    assert "simulated" not in text and "nan" not in text
    svg = to_svg(timeline_of(made))
    assert ElementTree.fromstring(svg) is not None and "Schedule two-step on 3 ranks, forward" in svg
    arrows = [each for each in json.loads(to_chrome(made))["traceEvents"] if each["ph"] == "s"]
    assert len(arrows) == len(made.messages) == 2 * RANKS * (RANKS - 1)
    shown = json.loads(to_json(made))
    assert shown["format"] == "tokenring-trace" and shown["case"]["cached"] == 96 and shown["simulated"] is None


def alone(here: Here) -> dict[str, Any] | None:
    return traced_step(replace(CASE, schedules=["auto"]), quiet)


def test_one_rank_sends_nothing(ranks: RankPools) -> None:
    (found,) = ranks(1)(alone)
    assert found is not None and not found["messages"]
    assert {bar.kind for bar in found["bars"]} == {"compute", "merge"}


def test_command(tmp_path: Path, warm: str) -> None:
    command = [warm, "-m", "tokenring", "trace", "auto", "--cached", "128", "--ranks", "2", "--heads", "2"]
    command += ["--dim", "16", "--rounds", "1", "--svg", "t.svg"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=patient(100))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert result.stdout.startswith("tokenring trace: schedule one-shot, forward, 1 new token over 128 cached, 2 heads")
    assert [each.name for each in tmp_path.iterdir()] == ["t.svg"]


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("one-shto", *SMALL), "'one-shto' --cached: choose one of auto, one-shot, two-step"),
        (("ring", *SMALL), "ring --cached 1k: each rank has its part of the new tokens, and 1 new token cannot be cut"),
        (("two-step", "--heads", "3", *SMALL), "two-step --cached 1k: it cuts query heads over the ranks, and 3 "),
        (("auto", *SMALL, "--seq", "4k"), "--seq 4k does not go with --cached"),
        (("auto", *SMALL, "--pass", "training"), "--pass training does not go with --cached: it is forward alone"),
        (("auto", "--ranks", "2", "--tokens", "2"), "--tokens goes with --cached N, how many tokens are cached"),
        (("auto", "--ranks", "2", "--cach", "2"), "write --cached in full: it has options of its own"),
        (("auto", "--cached", "1001", "--ranks", "2"), "--cached 1001: 2 ranks have equal parts of it; give 1000"),
        (SMALL, "required: WAY; see tokenring trace --cached N --help"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, tuple) else "",
)
def test_options_that_do_not_fit(arguments: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        main([*arguments], {})
