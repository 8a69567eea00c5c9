"""Lines that fit a terminal: what is longer goes on below its last cell. Files and pipes get each line whole."""

from __future__ import annotations

import re
import shutil
from typing import TextIO

INK = re.compile(r"(\x1b\[(?:0|1|2|31|32)m)")  # the colours of console.Ink, which take no room
CELLS = re.compile(r"  +(?=\S)")  # what stands between two cells
LEAST = 24  # columns that a hanging cell has
BELOW = 4  # columns by which what goes on below a whole row is indented


def fitted(text: str, out: TextIO) -> str:
    """Return the text as it fits the terminal that `out` is; unchanged where it is none."""
    return wrap_lines(text, shutil.get_terminal_size().columns) if out.isatty() else text


def wrap_lines(text: str, width: int) -> str:
    """Break lines that have more than `width` columns at spaces; a word that is longer than a line stays whole."""
    return "\n".join(line for each in text.split("\n") for line in _lines(each, width))


def _lines(line: str, width: int) -> list[str]:
    """Break one line: its last cell goes on below itself, or as a whole below the row where it has no room there."""
    lines: list[str] = []
    seen = INK.sub("", line)
    indent = len(seen) - len(seen.lstrip())
    cell = ([found.end() for found in CELLS.finditer(seen) if found.end() > indent] or [0])[-1]
    if cell and len(seen) > width and width - LEAST < cell <= width:
        lines.append(line[: _place(line, cell)].rstrip())
        line = " " * (indent + BELOW) + line[_place(line, cell) :]
    hang = cell if 0 < cell <= width - LEAST else indent + BELOW
    while len(seen := INK.sub("", line)) > width:
        start = len(seen) - len(seen.lstrip())
        at = seen.rfind(" ", start + 1, width + 1)
        at = seen.find(" ", start + 1) if at < 0 else at
        if at < 0:
            break
        cut = _place(line, at)
        lines.append(line[:cut].rstrip())
        line = " " * hang + line[cut:].lstrip()
    return [*lines, line]


def _place(line: str, at: int) -> int:
    """Return the index of the character that stands in this column, colours not counted."""
    index = 0
    for number, part in enumerate(INK.split(line)):
        if number % 2 == 0:
            if at < len(part):
                return index + at
            at -= len(part)
        index += len(part)
    return index
