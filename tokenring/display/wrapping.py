"""Lines that fit a terminal: a longer one goes on below its last cell, a wider table in a second one below it.

Files and pipes get each line whole.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple, TextIO

INK = re.compile(r"(\x1b\[(?:0|1|2|31|32)m)")  # the colours of console.Ink, which take no room
PLAIN = "\x1b[0m"  # ends a colour
CELLS = re.compile(r"  +(?=\S)")  # what stands between two cells
LEAST = 24  # columns that a hanging cell has
COLUMNS = 4  # that lines have in common, at least, to be a table
BELOW = 4  # columns by which what goes on below a whole row is indented


def fitted(text: str, out: TextIO) -> str:
    """Return the text as it fits the terminal that `out` is; unchanged where it is none."""
    return wrap_lines(text, shutil.get_terminal_size().columns) if out.isatty() else text


def wrap_lines(text: str, width: int) -> str:
    """Break lines that have more than `width` columns at spaces; a word that is longer than a line stays whole.

    Lines of a table that is wider are cut between the same columns, and each part begins with the first column.
    """
    found: list[str] = []
    for filled, lines in groupby(text.split("\n"), bool):
        block = list(lines)
        found += _block(block, width) if filled else block
    return "\n".join(found)


def _block(block: Sequence[str], width: int) -> list[str]:
    """Fit lines between which none is empty."""
    seen = [INK.sub("", line) for line in block]
    columns = _columns(seen)
    if len(columns) >= COLUMNS and max(map(len, seen)) > width:
        cut = [[_cut(line, part) for line in block] for part in _parts(columns, width)]
        block = [line for at, part in enumerate(cut) for line in ([""] if at else []) + part]
    return [line for each in block for line in _lines(each, width)]


class TextColumn(NamedTuple):
    """A column that lines have in common: where it begins, where its longest cell ends, where the next one begins."""

    start: int
    end: int
    next: int


def _columns(seen: Sequence[str]) -> list[TextColumn]:
    """Return the columns of lines: in every line two spaces or more stand between them. One line has none."""
    if len(seen) < 2:
        return []
    longest = max(map(len, seen))
    used = [at for at in range(longest) if any(line[at : at + 1].strip() for line in seen)]
    after = [at for before, at in pairwise(used) if at - before > 2]
    ends = [before + 1 for before, at in pairwise(used) if at - before > 2]
    return [TextColumn(*each) for each in zip([0, *after], [*ends, longest], [*after, longest], strict=True)]


def _parts(columns: Sequence[TextColumn], width: int) -> list[list[TextColumn]]:
    """Return the columns of each part: the first one, and as many others as fit."""
    first, *others = columns
    parts, used = [[first]], first.next
    for each in others:
        if used + each.end - each.start > width and len(parts[-1]) > 1:
            parts.append([first])
            used = first.next
        parts[-1].append(each)
        used += each.next - each.start
    return parts


def _cut(line: str, columns: Sequence[TextColumn]) -> str:
    """Return these columns of a line, with the colours inside of them."""
    whole = len(INK.sub("", line))
    text = ""
    for start, _, stop in columns:
        begin, last = (_place(line, at - 1) + 1 if 0 < at < whole else at and len(line) for at in (start, stop))
        text += line[begin:last] + " " * (stop - max(start, min(stop, whole)))
    text = text.rstrip()
    return text + PLAIN if INK.search(text) else text


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
