"""The comparison with published measurements: its page says what the command prints, and rows are read rightly."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tokenring.planner.simulation.simulate import Outcome, TimeSpan
from tokenring.sequence.layout import Positions
from tokenring.tables.rates import Rates

REPO = Path(__file__).resolve().parents[2]
PAGE = (REPO / "docs/published-compared.md").read_text()
FAST = (
    "rfa-h800-llama8b-zigzag-fwdbwd", "rfa-a100-varlen-llama3-fwd", "usp-a100-8h128-128k-u4-stripe",
    "usp-a100-8h128-128k-u8-ulysses", "usp-a100-gqa64-32k-u2-zigzag-fwdbwd",
    "tokenring-a10-24k-tokenring-step2", "magi-h100-8-causal-ring-allgather-fwd",
    "ultra-h800-8-64k-full-ring-bwd", "burst-a100-8-256k-fwdbwd",
)  # fmt: skip


SCRIPT: Any = import_module("published")
ROWS: Any = import_module("published_rows")
DATA: dict[str, Any] = SCRIPT.load()
BY_ID = {row["id"]: row for row in DATA["measurements"]}


def lines(part: str) -> list[list[str]]:
    """The cells of a part's table, without its head."""
    found = SCRIPT.between(PAGE, part).splitlines()
    return [line[2:-2].split(" | ") for line in found if line.startswith("| ")][2:]


@pytest.mark.parametrize("name", FAST)
def test_the_page_says_what_the_command_prints(name: str) -> None:
    printed = SCRIPT.cells(SCRIPT.compare(BY_ID[name], DATA["given"]))
    assert [list(printed)] == [line for line in lines("rows") if line[0] == name]


def test_no_row_is_left_out() -> None:
    left = re.findall("- `(.*?)`: .{20}", SCRIPT.between(PAGE, "left"))
    assert left == [name for name, row in BY_ID.items() if SCRIPT.excuse(row)]
    assert len(left) == 4
    assert [line[0] for line in lines("rows")] == [name for name in BY_ID if name not in left]


def test_the_medians_are_those_of_the_rows() -> None:
    errors = {line[0]: abs(float(line[4]) / float(line[3]) - 1) for line in lines("rows")}
    shown = {line[0]: float(line[2].rstrip("%")) / 100 for line in lines("medians")}
    first = [errors[name] for name in DATA["suggested_first"]]
    assert len(first) == 15
    assert shown["all that are predicted"] == pytest.approx(median(errors.values()), abs=1e-3)
    assert shown["the fifteen named before any prediction"] == pytest.approx(median(first), abs=1e-3)
    of_usp = [errors[name] for name, row in BY_ID.items() if row["system"].startswith("USP")]
    assert shown["system: USP (long-context-attention)"] == pytest.approx(median(of_usp), abs=1e-3)
    assert max(shown["all that are predicted"], shown["the fifteen named before any prediction"]) <= 0.25
    outside = re.findall("`(.*?)` [0-9]", SCRIPT.between(PAGE, "outside"))
    assert set(outside) == {name for name, error in errors.items() if error > 0.25}


def test_a_part_is_written_between_its_marks() -> None:
    page = "a\n<!-- rows -->\nold\n<!-- rows -->\nz\n"
    assert SCRIPT.written(page, {"rows": "new\n"}) == page.replace("old", "new")


# ---------- rows


@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("rfa-h800-llama8b-zigzag-fwd", 1 / 63),
        ("magi-h100-8-full-ulysses-fwd", 4 * 65536**2 * 8192 / 8 / 605e12),
        ("magi-h100-8-causal-ulysses-bwd", 10 * 65536**2 * 8192 / 2 / 8 / 582e12),
    ],
)
def test_rates_become_times(name: str, seconds: float) -> None:
    assert ROWS.published_seconds(BY_ID[name]) == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("rfa-h800-llama8b-ring-fwd", "h100-sxm-fa2"),
        ("magi-h100-8-full-ulysses-fwd", "h100-sxm"),
        ("ultra-a800-16-32k-full-ring-fwd", "a100-sxm"),
        ("usp-l20-gqa32-128k-u8-zigzag", "l20"),
    ],
)
def test_the_device_has_the_kernel_that_the_system_calls(name: str, device: str) -> None:
    assert ROWS.device_of(BY_ID[name]).name == device


RATES = Rates("test", ((1, 100.0),), ((1, 50.0),))


@pytest.mark.parametrize(
    ("name", "forward", "backward"),
    [
        # 8192 tokens, 32 heads of 128, causal: 591.5 a second, of 4 flops a pair
        ("rfa-h800-llama8b-ring-fwd", 591.5 * 4 * 8192 * 8193 / 2 * 4096 / 1e12, None),
        # UltraAttn's seconds of 8192 tokens, the length of a rank's tile
        ("ultra-h800-8-64k-full-ring-fwd", 4 * 8192**2 * 4096 / 0.002821664 / 1e12, 10 * 8192**2 * 4096 / 8.437376e9),
        ("magi-h100-8-full-ring-p2p-fwd", 674.0, 556.0),
        ("magi-h100-8-full-ulysses-fwd", 702.0, 601.0),  # a tile of all tokens: the longest length listed
    ],
)
def test_the_sources_own_rate(name: str, forward: float, backward: float | None) -> None:
    own = ROWS.own_rates(BY_ID[name], DATA["given"], RATES)
    assert own.forward[0][1] == pytest.approx(forward, rel=1e-4)
    assert backward is None or own.backward[0][1] == pytest.approx(backward, rel=1e-4)


def test_no_rate_of_its_own() -> None:
    assert ROWS.own_rates(BY_ID["usp-a100-8h128-128k-u8-ulysses"], DATA["given"], RATES) is None


def test_stripes_of_usp_are_those_of_its_ring() -> None:
    layout = ROWS.layout_of(BY_ID["usp-a100-8h128-128k-u4-stripe"])  # four heads' ranks in a ring of two
    assert layout.owned_by(0) == (0,) and layout.chunks[0] == Positions(0, 32767, 2)
    assert [layout.chunks[layout.owned_by(rank)[0]].start % 2 for rank in range(8)] == [0] * 4 + [1] * 4


@pytest.mark.parametrize("name", ["magi-h100-64-causal-loongtrain-fwd", "burst-a100-8-256k-fwdbwd"])
def test_schemes_made_here_are_proved(name: str) -> None:
    from tokenring.proof.verify import verify

    row = BY_ID[name]
    if name.startswith("magi"):  # the same on fewer ranks: heads in two, rings of two by two
        row = {**row, "world_size": 8, "seq_len": 256, "schedule": "ulysses=2 x double ring of 4"}
    else:
        row = {**row, "world_size": 4, "seq_len": 64}
    verify(ROWS.schedule_of(row, "backward", ROWS._mask(row)))


def test_a_step_is_from_kernel_to_kernel() -> None:
    spans = [
        TimeSpan(rank, what, "", step, begin, begin + 0.5)
        for rank, what, step, begin in [
            (0, "kernel", 0, 0.0), (0, "copy", 0, 0.5), (0, "kernel", 1, 2.0), (0, "kernel", 2, 3.0),
            (1, "kernel", 0, 0.0), (1, "kernel", 1, 4.0), (1, "kernel", 1, 4.5), (1, "kernel", 2, 7.0),
        ]
    ]  # fmt: skip
    outcome = Outcome(9.0, [], {}, spans)
    assert ROWS.step_seconds(outcome, [0]) == 3.0
    assert ROWS.step_seconds(outcome, [1]) == 2.0
    assert ROWS.step_seconds(outcome, []) == 2.5
