"""What commands print fits the terminal, of eighty columns too; files and pipes get each line whole."""

from __future__ import annotations

from io import StringIO

import pytest
from broken_dumps import DATA
from test_planner_command import SMALL

from tokenring.cli.main import main
from tokenring.display.console import Console, Ink
from tokenring.display.wrapping import INK, wrap_lines

ROW = "packed/2   1.2 ms    2.90  the fastest, bound by launches, copies and merges (kernels 42%)"
COMMANDS = [
    ["plan", *SMALL, "--no-cache"],
    ["topology", "--from", str(DATA / "npu-910b.txt")],
    ["topology", "--from", str(DATA / "amd-smi-topology.txt")],
]


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def printed(monkeypatch: pytest.MonkeyPatch, out: StringIO, words: list[str]) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words, out, StringIO(), StringIO()) == 0
    return out.getvalue()


@pytest.mark.parametrize("words", COMMANDS, ids=["plan", "topology", "short"])
def test_commands_fit(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fits = (printed(monkeypatch, out, words) for out in (StringIO(), Terminal()))
    assert max(map(len, fits.splitlines())) <= 80
    assert fits.split() == whole.split()
    assert (fits == whole) == (max(map(len, whole.splitlines())) <= 80)


def test_json_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["topology", "--from", str(DATA / "npu-910b.txt"), "--json"]
    assert printed(monkeypatch, Terminal(), words) == printed(monkeypatch, StringIO(), words)


def test_lines_go_on_below_their_last_cell() -> None:
    first, *others = wrap_lines(ROW, 60).split("\n")
    assert first == ROW[: len(first)] and others
    assert all(each.startswith(" " * ROW.index("the fastest")) and len(each) <= 60 for each in others)
    assert wrap_lines(ROW, len(ROW)) == ROW


def test_a_cell_without_room_stands_below_its_row() -> None:
    numbers, *others = wrap_lines(ROW, 48).split("\n")
    assert numbers.split() == ["packed/2", "1.2", "ms", "2.90"]
    assert others[0].startswith("    the fastest,") and all(len(each) <= 48 for each in others)


def test_prose_is_indented_and_long_words_stay_whole() -> None:
    assert wrap_lines("  one two three", 10) == "  one two\n      three"
    assert wrap_lines("x" * 50, 10) == "x" * 50
    assert wrap_lines("a " + "x" * 50 + " b", 10) == "a\n    " + "x" * 50 + "\n    b"
    assert wrap_lines("", 10) == "" and wrap_lines("a\n\nb", 10) == "a\n\nb"


def test_colours_take_no_room() -> None:
    ink = Ink(True)
    painted = ink.bold(ROW)
    assert INK.sub("", wrap_lines(painted, 60)) == wrap_lines(ROW, 60)
    assert wrap_lines(ink.good("x" * 10), 10) == ink.good("x" * 10)


def test_a_console_wraps_what_it_says_and_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    out = Terminal()
    console = Console(out, StringIO(), {})
    console.say(ROW)
    console.data(ROW)
    assert out.getvalue() == wrap_lines(ROW, 60) + "\n" + ROW
