"""The trace of a real call: complete, on one clock, and as many bytes as the schedule says."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from patience import patient
from ranks import Here, RankPools

from tokenring import Workload
from tokenring.cli.bench.results import RaceCase, RaceMachine
from tokenring.cli.trace.chrome import to_chrome
from tokenring.cli.trace.command import main
from tokenring.cli.trace.picture import timeline_of, to_svg
from tokenring.cli.trace.record import Traced
from tokenring.cli.trace.table import spent, table
from tokenring.cli.trace.worker import Clocked, trace
from tokenring.display.console import Ink
from tokenring.errors import ConfigurationError
from tokenring.ir.passes import without_lse
from tokenring.ir.schedule_data import PASSES
from tokenring.schedule.names import SCHEMES, named_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask

CASE = RaceCase(
    seq_len=128, heads=4, kv_heads=2, head_dim=16, dtype="float32", mask="causal", batch=1, backward=True,
    layout="zigzag", transport="auto", pieces=None, schedules=["ring"], peers=[], rounds=3,
)  # fmt: skip
RANKS = 3


def traced(here: Here, case: RaceCase) -> Traced | None:
    cp = Clocked(layout=case.layout, schedule=case.schedules[0], transport=case.transport)
    with cp:
        found = trace(case, cp, lambda done, steps, what: None)
    return None if found is None else Traced(case, RaceMachine("", 1, 1, here.world_size, ""), **found)


def run(ranks: RankPools, case: RaceCase) -> Traced:
    found = ranks(RANKS)(traced, replace(case, seq_len=RANKS * 32))
    assert found[0] is not None and found[1:] == [None] * (RANKS - 1)
    return found[0]


@pytest.mark.parametrize("transport", ["gloo", "shm"])
@pytest.mark.parametrize("name", SCHEMES)
def test_every_schedule(ranks: RankPools, name: str, transport: str) -> None:
    made = run(ranks, replace(CASE, schedules=[name], transport=transport))
    assert made.one_clock and made.schedule == name and len(made.rounds_s) == CASE.rounds
    assert made.seconds == sorted(made.rounds_s)[1]
    check_bars(made)
    check_bytes(made, name)
    assert all(each.sent <= each.received and each.waited <= each.received for each in made.messages)


def check_bars(made: Traced) -> None:
    """Nothing overlaps at a rank, all lies inside its pass, and the parts add up to it."""
    assert {(each.rank, each.direction) for each in made.stretches} == {(r, d) for r in range(RANKS) for d in PASSES}
    sums: dict[tuple[int, str], float] = defaultdict(float)
    for part in spent(made):
        assert all(seconds >= -1e-8 for seconds in part.seconds.values()), part
        sums[part.rank, part.direction] += part.total
    for stretch in made.stretches:
        bars = [bar for bar in made.bars if (bar.rank, bar.direction) == (stretch.rank, stretch.direction)]
        times = [stretch.began, *(time for bar in bars for time in (bar.began, bar.ended)), stretch.ended]
        assert times == sorted(times)
        assert any(bar.kind == "compute" for bar in bars)
        assert sums[stretch.rank, stretch.direction] == pytest.approx(stretch.ended - stretch.began, abs=1e-7)


def check_bytes(made: Traced, name: str) -> None:
    length = RANKS * 32
    workload = Workload(1, length, length, 4, 2, 16, torch.float32)
    layout = make_layout("zigzag", RANKS, length)
    schedule = named_schedule(name, workload, layout, layout, parse_mask("causal"), None)
    for direction in PASSES:
        assert sent_bytes(made, direction) == schedule.link_bytes(workload, direction)


def sent_bytes(made: Traced, direction: str) -> dict[tuple[int, int], int]:
    sent: Counter[tuple[int, int]] = Counter()
    for each in made.messages:
        if each.direction == direction:
            sent[each.src, each.dst] += int(each.details["bytes"])
    return dict(sent)


def test_ranks_without_tokens_are_traced(ranks: RankPools) -> None:
    found = ranks(RANKS)(traced, replace(CASE, seq_len=1))
    assert found[0] is not None
    made = found[0]
    assert {(each.rank, each.direction) for each in made.stretches} == {(r, d) for r in range(RANKS) for d in PASSES}
    assert {each.rank for each in made.bars if each.kind == "compute"} == {0}
    text = table(made, Ink())
    assert text.count("\nsum ") == len(PASSES) and "nan" not in text
    assert ElementTree.fromstring(to_svg(timeline_of(made))) is not None
    assert json.loads(to_chrome(made))["traceEvents"]


def test_forward_alone(ranks: RankPools) -> None:
    """Its messages are those of a call that wants no lse."""
    made = run(ranks, replace(CASE, backward=False, heads=6, kv_heads=3, schedules=["ulysses"]))
    assert {each.direction for each in made.stretches} == {"forward"}
    length = RANKS * 32
    workload, layout = Workload(1, length, length, 6, 3, 16, torch.float32), make_layout("zigzag", RANKS, length)
    schedule = without_lse(named_schedule("ulysses", workload, layout, layout, parse_mask("causal"), None))
    assert sent_bytes(made, "forward") == schedule.link_bytes(workload)


def test_command(tmp_path: Path, warm: str) -> None:
    command = [warm, "-m", "tokenring", "trace", "ring", "--ranks", "2", "--seq-len", "128", "--heads", "2"]
    outputs = ["--head-dim", "16", "--picture", "t.svg", "--chrome", "t.json"]
    result = subprocess.run([*command, *outputs], cwd=tmp_path, capture_output=True, text=True, timeout=patient(100))
    assert result.returncode == 0 and result.stderr == "", result.stderr
    assert sorted(each.name for each in tmp_path.iterdir()) == ["t.json", "t.svg"]
    assert result.stdout.startswith("tokenring trace: schedule ring, forward and backward, 128 tokens")
    assert "written: t.svg (open it in a browser)" in result.stdout
    assert json.loads((tmp_path / "t.json").read_text())["otherData"]["schedule"] == "ring"


@pytest.mark.usefixtures("own_signals")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ring"], "say how many processes to start"),
        (["rings", "--ranks", "2"], "'rings'"),
        (["auto", "--ranks", "2", "--pieces", "2"], "--pieces goes with a schedule by name, not with auto"),
        (["ring", "--ranks", "2", "--svg", "x", "--chrome", "x"], "--svg and --chrome are both x"),
        (["ring", "--ranks", "2", "--chrome", "/no/such/x"], "--chrome /no/such/x: not a file in a folder"),
        (["ring", "--ranks", "2", "--rounds", "0"], "--rounds 0: use 1 or more"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        main(arguments, {})
