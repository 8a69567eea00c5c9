"""Tables of commands that measure fit a terminal of sixty columns: no line is longer, and no word is lost.

A table that is wider goes on in a second one below, whose lines begin with the same first column.
"""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO

import pytest
from test_bench_report import REPORT
from test_demo_report import MEASURED
from test_doctor import full_findings
from test_trace_report import TRACED

from tokenring.cli.bench.table import table as bench_table
from tokenring.cli.demo.report import bytes_text, schedule_text, split_text
from tokenring.cli.doctor.report import report as doctor_report
from tokenring.cli.main import main
from tokenring.cli.rates.command import table as rates_table
from tokenring.cli.trace.table import table as trace_table
from tokenring.display.console import Console, Ink
from tokenring.display.wrapping import INK, wrap_lines
from tokenring.tables.rates import constant

WIDTH = 60
TABLES: dict[str, Callable[[Ink], str]] = {
    "bench": lambda ink: bench_table(REPORT, ink),
    "trace": lambda ink: trace_table(TRACED, ink),
    "rates": lambda ink: "\n".join(rates_table(constant(100.0, "as asked"))),
    "demo": lambda ink: "\n".join(
        [schedule_text(MEASURED), bytes_text(MEASURED, ink), split_text(MEASURED, 4, 2, ink)]
    ),
    "doctor": lambda ink: doctor_report(full_findings()),
}


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("colour", [False, True], ids=["plain", "colours"])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit(name: str, colour: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    out = Terminal()
    console = Console(out, Terminal(), {} if colour else {"NO_COLOR": "1"})
    whole = TABLES[name](console.ink)
    console.say(whole)
    said = INK.sub("", out.getvalue())
    assert [line for line in said.splitlines() if len(line) > WIDTH] == []
    assert sorted({*said.split()}) == sorted({*INK.sub("", whole).split()})
    assert colour == console.ink.colour
    if not colour:
        assert said.rstrip("\n") == wrap_lines(whole, WIDTH).rstrip("\n")


@pytest.mark.parametrize(
    "words",
    [
        ("plan", "--topology", "preset:a10-pix-4", "--cached", "4k"),
        ("plan", "--topology", "preset:a10-pix-4", "--layer", "llama3-8b", "--tp", "2", "--cp", "2", "--seq", "4k"),
        ("schedule", "tokenring", "--ranks", "4", "--mask", "causal"),
        ("advise", "--engine", "megatron", "--model", "llama-3.1-8b", "--topology", "preset:hgx-h100", "--ranks", "2",
         "--seq", "8k", "--pass", "forward"),
    ],
    ids=["plan", "plan of a layer", "schedule", "advise"],
)  # fmt: skip
def test_commands_fit(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    whole, fits = StringIO(), Terminal()
    for out in (whole, fits):
        assert main(list(words), out, StringIO(), StringIO()) == 0
    assert max(map(len, INK.sub("", fits.getvalue()).splitlines())) <= WIDTH
    assert {*INK.sub("", fits.getvalue()).split()} == {*whole.getvalue().split()}


WIDE = """\
name     first  second   third
a          1.0    20.0   300.0
another   10.0     2.0    30.0"""
CUT = """\
name     first  second
a          1.0    20.0
another   10.0     2.0

name     third
a        300.0
another   30.0"""


GRID = """\
# what a cell says
step | rank 0      | rank 1
   0 | kv0>1  q0×0 | kv1>0  q1×1
   1 |        q0×1 |        q1×0"""
RANK_BY_RANK = """\
# what a cell says
step | rank 0
   0 | kv0>1  q0×0
   1 |        q0×1

step | rank 1
   0 | kv1>0  q1×1
   1 |        q1×0"""


def test_a_trace_is_cut_between_the_mean_and_the_slowest_rank() -> None:
    heads = [line for line in wrap_lines(trace_table(TRACED, Ink(False)), WIDTH).splitlines() if line[:4] == "step"]
    parts = "compute  moves  waits merges  other  total"
    assert [line.split(maxsplit=1)[1].strip() for line in heads] == [parts, f"rank {parts}", "mean     most"] * 2


def test_a_grid_is_cut_between_ranks() -> None:
    assert wrap_lines(GRID, 20) == RANK_BY_RANK
    assert wrap_lines(GRID, 40) == GRID


def test_a_table_goes_on_below() -> None:
    assert wrap_lines(WIDE, 24) == CUT
    assert wrap_lines(WIDE, 30) == WIDE
    assert wrap_lines(f"before\n\n{WIDE}\n\nafter", 24) == f"before\n\n{CUT}\n\nafter"


def test_colours_stay_with_their_cells() -> None:
    ink = Ink(True)
    painted = WIDE.replace("20.0", ink.good("20.0")).replace("300.0", ink.bad("300.0"))
    found = wrap_lines(painted, 24)
    assert INK.sub("", found) == CUT
    assert f"20.0{ink.good('')[-4:]}" in found and "\x1b[31m300.0" in found
    assert all(line.endswith("\x1b[0m") for line in found.splitlines() if "\x1b[3" in line)
