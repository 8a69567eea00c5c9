"""Tables of words: a header that names columns, rows that start with a name. One text may hold several."""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.sources.matrix import ESCAPE, MAX_COLUMNS, Matrix, Row

MAX_TABLES = 64


def read_tables(text: str, name: re.Pattern[str]) -> list[tuple[str, Matrix]]:
    """Each table with the line of text that stands before it; `name` is what columns and rows are called."""
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
        else:
            title = line.strip("= \t")
    return tables


def _row(words: list[str], number: int, matrix: Matrix) -> None:
    if len(matrix.rows) >= len(matrix.columns):
        return
    matrix.rows.append(Row(words[0], number, words[1 : len(matrix.columns) + 1]))
