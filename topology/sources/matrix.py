"""Matrices of labels as vendors' tools print them, and as they look after mail, Markdown and terminals.

A header names columns, a row starts with a name and has one label for each column, and affinities
follow. Whoever copied it may have lost tabs, headers, rows or the right side: what remains is read,
and a note says what was lost. A row counts only as far as its X, which marks itself, stands where it should.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import eq

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import PEER_KINDS, Coverage, Device, Link, Note, between_others, pairs, unordered
from tokenring.topology.model.labels import NOTHING, SELF, cells, meaning

ACCELERATOR = re.compile(r"(GPU|NPU|Phy-ID)([0-9]{1,5})", re.ASCII)
NICS = r"mlx|hfi|bnxt_re|qedr|irdma|efa|rdmap|roce|ib"
NAME = re.compile(rf"(?:GPU|NPU|NIC|Phy-ID)[0-9]{{1,5}}|(?:{NICS})[a-z0-9]*?(?:_[a-z]*)?[0-9]{{1,5}}", re.ASCII)
TITLES = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
TITLE = re.compile("|".join(TITLES))
ESCAPE = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
ALIAS = re.compile(r"\s*(NIC[0-9]{1,5}|[A-Z]{3}[0-9]{1,5}): +(\S+)\s*", re.ASCII)
MAX_COLUMNS = 1024


@dataclass
class Row:
    """A row of a matrix: the device's name, its line, its labels, and its affinities by title."""

    name: str
    line: int
    labels: list[str]
    affinity: dict[str, str] = field(default_factory=dict)


@dataclass
class Matrix:
    """A matrix of labels: columns, rows, the devices that aliases (NIC0) stand for, and notes."""

    columns: list[str]
    rows: list[Row]
    aliases: dict[str, str]
    notes: list[Note]

    @property
    def names(self) -> list[str]:
        """The names of rows and columns, each once, in order."""
        return list(dict.fromkeys([*self.columns, *(row.name for row in self.rows)]))

    @property
    def accelerators(self) -> list[str]:
        """The names of accelerators, in order."""
        return [name for name in self.names if ACCELERATOR.fullmatch(name)]


def read_matrix(text: str) -> Matrix:
    """Read the first matrix in a text, with all that can be read of it. Raises TopologyError."""
    lines = [ESCAPE.sub("", line) for line in text.splitlines()]
    matrix = _read(lines)
    if not matrix.rows and has_cells(logged := _read([_from_first_name(line) for line in lines])):
        return logged
    return matrix


def _from_first_name(line: str) -> str:
    """Cut off what a log puts before a line: time, level, rank."""
    name = NAME.search(line)
    return line if name is None else line[name.start() :]


def _read(lines: list[str]) -> Matrix:
    matrix = Matrix([], [], {}, [])
    titles: list[str] = []
    for number, line in enumerate(lines, 1):
        if alias := ALIAS.fullmatch(line):
            matrix.aliases[alias[1]] = alias[2]
        elif "Legend" in line or set(line.strip()) <= set("|-: "):
            continue
        elif "|" in line:
            _markdown_line(line, number, matrix, titles)
        elif not matrix.rows and (found := _header(line)):
            matrix.columns += found
            titles += TITLE.findall(line)
        elif not matrix.rows and not titles and TITLE.match(line.strip()):  # a matrix that was left out
            titles += TITLE.findall(line)
        elif row := _row(line, number, matrix.columns, titles):
            if any(row.name == other.name for other in matrix.rows):
                matrix.notes.append(Note("another table follows: only the first is read", number))
                break
            matrix.rows.append(row)
        elif matrix.rows and (more := _continuation(line, matrix)):
            matrix.rows[-1].labels += more
        if max(len(matrix.columns), len(matrix.rows)) > MAX_COLUMNS:
            raise TopologyError(f"more than {MAX_COLUMNS} devices in one matrix", number, 1)
    _settle(matrix)
    return matrix


def _header(line: str) -> list[str] | None:
    """Return the columns that a header names, be they run together; None for another line."""
    title = TITLE.search(line)
    before = line[: title.start()] if title else line
    if not ACCELERATOR.search(before) and not (NAME.search(before) and not before[:1].strip()):
        return None
    names: list[str] = []
    for word in before.split():
        found = NAME.findall(word)
        if found and "".join(found) == word:
            names += found
        elif re.fullmatch(r"[a-z][\w-]*[0-9]", word, re.ASCII) and names:  # a NIC of a name that we do not know
            names.append(word)
        elif word not in NOTHING and (cells(word) or not (word.endswith(":") or word.isalpha())):
            return None
    return names or None


def _row(line: str, number: int, columns: list[str], titles: list[str]) -> Row | None:
    words = line.split(None, 1)
    if not words or not (words[0] in columns or NAME.fullmatch(words[0])):
        return None
    labels, rest = _labels(words[1] if len(words) > 1 else "", len(columns))
    if not labels and (not rest.strip() or NAME.match(rest.strip())):
        return None
    return Row(words[0], number, labels, _affinity(rest, titles))


def _labels(text: str, width: int) -> tuple[list[str], str]:
    """Split a row into the cells at its start, and what follows them."""
    words = text.split(None, width) if width else []
    if len(words) >= width > 0 and all(len(cells(word) or ()) == 1 for word in set(words[:width])):
        past = len(words[width]) if len(words) > width else 0
        return words[:width], text[len(text[: len(text) - past].rstrip()) :]
    found: list[str] = []
    end = 0
    for match in re.finditer(r"\S+", text):
        if width and len(found) >= width:
            break
        more = cells(match[0])
        if more is None:
            break
        found += more
        end = match.end()
    return found, text[end:]


def _affinity(rest: str, titles: list[str]) -> dict[str, str]:
    fields = [part.strip() for part in rest.split("\t")] if "\t" in rest else rest.split()
    filled = [part for part in fields if part]
    if len(filled) < len(titles) and "\t" in rest:  # an empty one: position says which
        fields = fields[1:] if fields and not fields[0] else fields
        last = fields[-1:] if len(titles) == 3 and len(fields) > 3 else fields[2:3]
        filled = [*fields[:2], *last]
    return {title: value for title, value in zip(titles, filled, strict=False) if value and value not in NOTHING}


def _continuation(line: str, matrix: Matrix) -> list[str]:
    """Return cells of the last row that a narrow terminal put on a line of their own."""
    missing = len(matrix.columns) - len(matrix.rows[-1].labels)
    labels, _ = _labels(line, 0)
    return labels if 0 < len(labels) <= missing else []


def _markdown_line(line: str, number: int, matrix: Matrix, titles: list[str]) -> None:
    parts = [part.strip(" \t*`") for part in line.strip().strip("|").split("|")]
    names = [part for part in parts if NAME.fullmatch(part)]
    if not matrix.columns:
        if names:
            matrix.columns += names
            titles += [part for part in parts if part in TITLES]
        return
    if not names:
        return
    at = parts.index(names[0])
    labels = [part for part in parts[at + 1 :] if cells(part)]
    outside = [part for part in parts if part not in labels and part != names[0]]
    matrix.rows.append(Row(names[0], number, labels, dict(zip(titles, filter(None, outside), strict=False))))


def _settle(matrix: Matrix) -> None:
    """Complete the columns where there is no header, and keep labels only as far as they are sure."""
    if not matrix.columns:
        matrix.columns = [row.name for row in matrix.rows]
        if matrix.rows:
            matrix.notes.append(Note("the header is missing: columns are taken in the order of the rows"))
        widest = max((len(row.labels) for row in matrix.rows), default=0)
        if widest > len(matrix.rows):
            text = f"a row has {widest} cells, and there are {len(matrix.rows)} rows: others are missing"
            matrix.notes.append(Note(text, role="doubt"))
    if doubled := [name for name in dict.fromkeys(matrix.columns) if matrix.columns.count(name) > 1]:
        raise TopologyError(f"the header names {doubled[0]} twice", 1, 1)
    for row in matrix.rows:
        _trust(row, matrix)
    rows = {row.name for row in matrix.rows}
    if missing := [name for name in matrix.columns if name not in rows]:
        matrix.notes.append(Note(f"no row for {', '.join(missing)}", role="doubt"))


def _trust(row: Row, matrix: Matrix) -> None:
    if row.name not in matrix.columns:
        matrix.notes.append(Note(f"no column for {row.name}", row.line, role="doubt"))
        row.labels = []
    if not row.labels:
        return
    own = matrix.columns.index(row.name)
    if SELF not in row.labels and len(row.labels) <= own:
        matrix.notes.append(Note(f"the row of {row.name} is cut before its own cell", row.line, role="doubt"))
    elif own >= len(row.labels) or row.labels[own] != SELF:
        matrix.notes.append(Note(f"the row of {row.name} does not fit the header: not used", row.line, role="doubt"))
        row.labels = []
    elif len(row.labels) < len(matrix.columns):
        have, want = len(row.labels), len(matrix.columns)
        matrix.notes.append(Note(f"the row of {row.name} has {have} of {want} cells", row.line, role="doubt"))


def has_cells(matrix: Matrix) -> bool:
    """Return whether any row has labels."""
    return any(row.labels for row in matrix.rows)


def coverage_of(matrix: Matrix, names: Iterable[str], links: Iterable[Link]) -> Coverage:
    """Return the coverage of a matrix: in one that was cut, a link that is absent may exist.

    Where it has ways through PCIe only, these are enough.

    names: those of the accelerators.
    """
    if not any(link.kind in PEER_KINDS for link in links):
        return "links"
    whole = {row.name for row in matrix.rows if len(row.labels) == len(matrix.columns)}
    if whole.issuperset(names) and set(matrix.columns).issuperset(names):
        return "links"
    rows = [(row.name, zip(matrix.columns, row.labels, strict=False)) for row in matrix.rows]
    cells = {unordered(name, column) for name, row in rows for column, _ in row}
    return "links" if cells.issuperset(unordered(*pair) for pair in pairs(names)) else "devices"


def words_in(text: str) -> set[str]:
    """Return the label words of a text that stand in rows; for recognising."""
    found: set[str] = set()
    for line in text[:200_000].splitlines():
        words = ESCAPE.sub("", line).replace("|", " ").split()
        if any(ACCELERATOR.fullmatch(word) for word in words[:8]):
            found.update(label for word in words for label in cells(word) or ())
    return found - {SELF, *NOTHING}


def links_of(matrix: Matrix, devices: list[Device]) -> tuple[list[Link], list[Note]]:
    """Return one link for each pair that has a label; a pair whose two labels differ has none, and a note."""
    known = {device.id for device in devices}
    labels, notes = (_upper(matrix), []) if _is_symmetric(matrix, known) else _agreed(matrix, known)
    made = {label: _link_of(label) for label in {label for _, _, label in labels}}
    linked = ((link, a, b) for a, b, label in labels if (link := made[label]) is not None)
    return list(between_others(linked)), notes


def _is_symmetric(matrix: Matrix, known: set[str]) -> bool:
    """Return whether rows are columns, all of devices, and say the same both ways.

    Nearly all matrices are, and it is quick to find out.
    """
    rows = [row.labels for row in matrix.rows]
    if [row.name for row in matrix.rows] != matrix.columns or not known.issuperset(matrix.columns):
        return False
    return {len(row) for row in rows} <= {len(rows)} and all(map(eq, rows, map(list, zip(*rows, strict=True))))


def _upper(matrix: Matrix) -> list[tuple[str, str, str]]:
    """Return the pairs, each with its label, of a symmetric matrix."""
    rows = [(row.name, matrix.columns[i:], row.labels[i:]) for i, row in enumerate(matrix.rows, 1)]
    return [
        (name, column, label)
        for name, columns, labels in rows
        for column, label in zip(columns, labels, strict=True)
        if label != SELF
    ]


def _agreed(matrix: Matrix, known: set[str]) -> tuple[list[tuple[str, str, str]], list[Note]]:
    """Return the pairs, each with its label, and notes on pairs that have two."""
    labels: dict[tuple[str, str], str] = {}
    notes: list[Note] = []
    for row in matrix.rows:
        name = row.name
        if name not in known:
            continue
        for column, label in zip(matrix.columns, row.labels, strict=False):
            if column == name or label == SELF or column not in known:
                continue
            back = labels.get((column, name))
            if back is None:
                labels[name, column] = label
            elif back != label and meaning(back) != meaning(label):
                notes.append(Note(f"{column} to {name} is {back}, the other way {label}: unknown", row.line))
                labels[column, name] = "N/A"
    return [(*pair, label) for pair, label in labels.items()], notes


def _link_of(label: str) -> Link | None:
    """Return the link that a label stands for, of no two devices yet; None if it stands for none."""
    found = meaning(label)
    return Link("", "", found.kind, found.count, switched=found.switched, label=label) if found else None
