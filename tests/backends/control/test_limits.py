"""What would take minutes in silence, or cannot be, is refused at once, with the limit named."""

from __future__ import annotations

import os
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest

from tokenring.cli.main import main
from tokenring.launch.limits import MOST_PROCESSES, PROCESS_BYTES
from tokenring.schedule import by_name
from tokenring.schedule.size_limits import MADE_RANKS, MADE_TILES

MANY = "99999"
HUGE = "1" + 30 * "0"


def said_by(words: Sequence[str]) -> str:
    out, err = StringIO(), StringIO()
    assert main(list(words), out, err, StringIO()) == 2
    assert not out.getvalue()
    return err.getvalue()


def no_work(*given: Any, **named: Any) -> Any:
    raise AssertionError("work was begun")


STARTING = [
    ("demo",), ("bench",), ("trace", "ring"), ("rates", "--transports"), ("topology", "--measure"),
    ("bench", "--emulate", "switch", "--link-gbit", "1"),
]  # fmt: skip


@pytest.fixture
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 1 << 30, "SC_PAGE_SIZE": 4096}
    asked = os.sysconf
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name] if name in sizes else asked(name))


@pytest.mark.parametrize("words", STARTING, ids=" ".join)
def test_more_processes_than_a_machine_starts(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, large_machine: None
) -> None:
    for work in ("tokenring.launch.command._Job", "tokenring.cli.demo.command.Demo"):
        monkeypatch.setattr(work, no_work)
    said = said_by([*words, "--ranks", MANY])
    assert f"--ranks {MANY}: at most {MOST_PROCESSES} are started on this machine" in said
    assert "torchrun" in said


def test_less_memory_starts_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"SC_PHYS_PAGES": 12 * PROCESS_BYTES // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", lambda name: sizes[name])
    assert "at most 12 are started on this machine, as it has 1.61 GB of memory" in said_by(["demo", "--ranks", "13"])


def test_ranks_of_torchrun_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenring.launch.command import ranks_wanted

    assert ranks_wanted(None, 99999) == 99999


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("ring", "--ranks", "100000"), f"for 100,000 ranks: more than {MADE_RANKS} take minutes"),
        (("ulysses", "--ranks", "257"), f"more than {MADE_RANKS} take minutes"),
        (("ring", "--ranks", "8", "--pieces", "4096", "--length", "65536"), f"at most {MADE_TILES:,}"),
        (("ring", "--ranks", "8", "--layout", "zigzag/512"), f"at most {MADE_TILES:,}"),
        (("ulysses", "--ranks", "128", "--heads", "128"), f"at most {MADE_TILES:,}"),
    ],
)
def test_schedules_that_take_minutes(words: tuple[str, ...], wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_name, "schedule", no_work)
    assert wanted in said_by(["schedule", *words])


PLAN = ("plan", "--topology", "preset:hgx-h100")
EMULATED = ("bench", "--ranks", "2", "--emulate", "switch")
RATES = (*PLAN, "--tflops"), (*EMULATED, "--link-gbit")
SECONDS = [
    ("topology", "--measure", "--ranks", "2", "--seconds"), ("rates", "--transports", "--ranks", "2", "--seconds"),
    ("rates", "--device", "cpu", "--seconds"), ("doctor", "--seconds"), (*EMULATED, "--link-gbit", "1", "--compute"),
    ("bench", "--ranks", "2", "--emulate", "pcie-tree", "--link-gbit", "1", "--uplink-gbit"),
]  # fmt: skip


@pytest.mark.parametrize("value", ["inf", "-inf", "nan", "0", "-1", "1e300"])
@pytest.mark.parametrize("words", [*RATES, *SECONDS], ids=" ".join)
def test_numbers_that_cannot_be(words: tuple[str, ...], value: str) -> None:
    assert said_by([*words[:-1], f"{words[-1]}={value}"]).startswith("tokenring: ")


COUNTS = [
    (*PLAN, "--heads"), (*PLAN, "--dim"), (*PLAN, "--batch"), (*PLAN, "--ranks"), (*PLAN, "--tp"),
    ("schedule", "ring", "--ranks", "4", "--length"), ("schedule", "ring", "--ranks", "4", "--heads"),
    ("rates", "--device", "cpu", "--threads"), ("rates", "--device", "cpu", "--dim"),
    ("trace", "ring", "--ranks", "2", "--seq-len"), ("trace", "ring", "--ranks", "2", "--rounds"),
]  # fmt: skip


@pytest.mark.parametrize("words", COUNTS, ids=" ".join)
def test_counts_without_measure(words: tuple[str, ...]) -> None:
    assert f"argument {words[-1]}: {HUGE} is too large" in said_by([*words, HUGE])


def test_more_heads_than_anybody_has() -> None:
    assert "--heads 1125899906842624: give 65536 at most" in said_by([*PLAN, "--heads", str(1 << 50)])
