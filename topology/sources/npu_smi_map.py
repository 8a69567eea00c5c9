"""`npu-smi info -m`: one line for each chip: its NPU, its number there, its logical or physical id, its name.

Columns differ between 910B, A3 and 950, and are taken from the header.
"""

from __future__ import annotations

import re

from tokenring.topology.model.facts import Facts, Note, single_number
from tokenring.topology.sources.npu_smi import (
    ELIDED,
    ESCAPE,
    MAX_LINES,
    Chip,
    Chips,
    devices_of,
    is_elision,
    model_name,
    take,
)
from tokenring.topology.sources.npu_topo import refused

TITLES = re.compile(r"NPU ID|Slot ID|Chip ID|Chip Logic ID|Chip Phy-ID|Chip Name", re.ASCII)
NO_CHIP = "mcu"  # a board controller that is listed among the chips


def recognises(text: str) -> bool:
    """Return whether a text has the header of the map; see SourceParser."""
    return any(_is_header(line) for line in text[:200_000].splitlines())


def parse(text: str) -> Facts:
    """Parse the chips of the map. Raises TopologyError."""
    chips, notes = _chips(text)
    return Facts("devices", tuple(devices_of(chips)), notes=tuple(notes)) if chips else refused(text, "no chip in it")


def _is_header(line: str) -> bool:
    return all(title in line for title in ("NPU ID", "Chip ID", "Chip Name")) and "|" not in line


def _chips(text: str) -> tuple[list[Chip], list[Note]]:
    titles: list[str] = []
    chips: Chips = {}
    notes: list[Note] = []
    for number, line in enumerate(text.splitlines()[:MAX_LINES], 1):
        line = ESCAPE.sub("", line)
        if not titles:
            titles = TITLES.findall(line) if _is_header(line) else []
            continue
        row = dict(zip(titles, line.split(None, len(titles) - 1), strict=False))
        npu, chip = single_number(row.get("NPU ID")), single_number(row.get("Chip ID"))
        if is_elision(line):
            notes.append(Note(ELIDED, number))
        elif npu is not None and chip is not None:
            name = " ".join(row.get("Chip Name", "").split())[:80]
            if name.lower() != NO_CHIP:
                logic, physical = single_number(row.get("Chip Logic ID")), single_number(row.get("Chip Phy-ID"))
                take(chips, Chip(npu, chip, physical, logic, model_name(name)), number)
        elif chips and line.strip():
            break  # what follows is another command's
    return list(chips.values()), notes[:64]
