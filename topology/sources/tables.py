"""Tables of words: a header that names columns, rows that start with a name. One text may hold several."""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Note
from tokenring.topology.sources.matrix import ESCAPE, MAX_COLUMNS, Matrix, Row

MAX_TABLES = 64


def read_tables(text: str, name: re.Pattern[str]) -> list[tuple[str, Matrix]]:
    """Return each table with the line of text before it; `name` is what columns and rows are called.

    Rows without a header are a table where they are square: columns in the order of the rows. Raises
    TopologyError.
    """
    tables: list[tuple[str, Matrix]] = []
    title = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = ESCAPE.sub("", raw).replace("|", " ").replace("`", " ")  # as terminals and Markdown have it
        words = line.split()
        if not words:
            continue
        if len(words) > MAX_COLUMNS + 16 or len(tables) > MAX_TABLES:
            raise TopologyError(f"more than {MAX_COLUMNS} devices or {MAX_TABLES} tables", number, 1)
        named = [bool(name.fullmatch(word)) for word in words]
        if all(named):
            if doubled := next((word for word in words if words.count(word) > 1), None):
                raise TopologyError(f"the header names {doubled[:20]} twice", number, 1)
            tables.append((title, Matrix(words, [], {}, [])))
        elif named[0] and tables and words[0] in tables[-1][1].columns:
            _row(words, number, tables[-1][1])
        elif named[0] and not any(named[1:]):
            if not tables or tables[-1][1].columns:
                tables.append((title, Matrix([], [], {}, [])))
            tables[-1][1].rows.append(Row(words[0], number, words[1:]))
        else:
            title = line.strip("= \t")
        if tables and len(tables[-1][1].rows) > MAX_COLUMNS:
            raise TopologyError(f"more than {MAX_COLUMNS} devices", number, 1)
    return [(title, table) for title, table in tables if table.columns or _is_square(table)]


def _is_square(matrix: Matrix) -> bool:
    """Return whether rows without a header are a whole matrix, and if so give it its columns."""
    names = [row.name for row in matrix.rows]
    if len(names) < 2 or len({*names}) < len(names) or any(len(row.labels) != len(names) for row in matrix.rows):
        return False
    matrix.columns = names
    matrix.notes.append(Note("the header is missing: columns are taken in the order of the rows"))
    return True


def without_shifted(matrix: Matrix, own: tuple[str, ...]) -> Matrix:
    """Leave out the rows that lost a cell: what marks the device itself stands elsewhere in them.

    The matrix is changed and returned; its notes say what is missing of it.
    """
    for row in matrix.rows:
        at = matrix.columns.index(row.name)
        if len(row.labels) > at and row.labels[at] not in own:
            text = f"the row of {row.name} does not fit the header: not used"
            matrix.notes.append(Note(text, row.line, role="doubt"))
            row.labels = []
    matrix.notes += lost(matrix)
    return matrix


def lost(matrix: Matrix) -> list[Note]:
    """Return notes on what a matrix lacks that was cut: the ends of rows, and rows."""
    want = len(matrix.columns)
    notes = [
        Note(f"the row of {row.name} has {len(row.labels)} of {want} cells", row.line, role="doubt")
        for row in matrix.rows
        if 0 < len(row.labels) < want
    ]
    rows = {row.name for row in matrix.rows}
    if missing := [name for name in matrix.columns if name not in rows]:
        notes.append(Note(f"no row for {', '.join(missing)}", role="doubt"))
    return notes


def _row(words: list[str], number: int, matrix: Matrix) -> None:
    if len(matrix.rows) >= len(matrix.columns):
        return
    matrix.rows.append(Row(words[0], number, words[1 : len(matrix.columns) + 1]))
