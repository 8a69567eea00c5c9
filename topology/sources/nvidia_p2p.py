"""`nvidia-smi topo -p2p`: which GPUs may reach which. It does not say over what links."""

from __future__ import annotations

import re
from collections import Counter

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Device, Facts, Note, unordered
from tokenring.topology.sources.tables import lost, read_tables

STATUS = {
    "OK": "may",
    "CNS": "may not: chipset not supported",
    "GNS": "may not: GPU not supported",
    "TNS": "may not: topology not supported",
    "NS": "may not: not supported",
    "DR": "may not: disabled by a registry key",
    "U": "unknown",
}
NAME = re.compile(r"GPU[0-9]{1,4}", re.ASCII)


def recognises(text: str) -> bool:
    """Return whether a text has rows of nothing but status words; see SourceParser."""
    for line in text[:200_000].splitlines():
        name, *words = line.split() or [""]
        if NAME.fullmatch(name) and words and words[0] in {"X", *STATUS} and {*words} & {*STATUS}:
            return True
    return "OK   = Status Ok" in text[:200_000]


def parse(text: str) -> Facts:
    """Parse the GPUs; how many pairs may reach each other becomes notes. Raises TopologyError."""
    tables = [table for _, table in read_tables(text, NAME)]
    if not tables:
        raise TopologyError("no matrix of GPUs in it", text.count("\n") + 1, 1)
    matrix = next((table for table in tables if any({*row.labels} & {*STATUS} for row in table.rows)), tables[0])
    devices = tuple(Device(name, "accelerator", int(name[3:]), vendor="nvidia") for name in matrix.columns)
    found: dict[tuple[str, str], str] = {}
    for row in matrix.rows:
        for column, word in zip(matrix.columns, row.labels, strict=False):
            if column != row.name and found.get(unordered(row.name, column)) in (None, "OK"):
                found[unordered(row.name, column)] = word
    notes = lost(matrix)[:20]
    notes += [Note("who may reach whom directly; over what links is not in it")]
    for word, number in Counter(found.values()).most_common():
        notes.append(Note(f"{number} pairs {STATUS.get(word, f'have {word[:20]!r}')}"))
    return Facts("devices", devices, notes=tuple(notes[: len(STATUS) + 21]))
