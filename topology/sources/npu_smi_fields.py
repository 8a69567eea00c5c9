"""Fields of one NPU as npu-smi and hccn_tool print them, `name : value`: board, usages, health, hccs, sio, super pod.

Of one device, so that they say nothing of how many there are: their facts are notes. `ascend_log` knows which
device each belongs to and takes models and bus ids from them.
"""

from __future__ import annotations

import re

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Facts, Note

NAME = re.compile(r"[A-Za-z][\w /()%.-]{0,60}", re.ASCII)
OPENERS = re.compile(
    r"^[ \t|]*(?:NPU ID|SDID|Super Pod (?:ID|Size)|Chip Count|Health Status|hccs health status|hccs lane mode"
    r"|[TR]X Error Count|Slot ID) {0,80}:",
    re.MULTILINE | re.ASCII,
)
TOLD = (
    "NPU ID",
    "Chip ID",
    "Chip Name",
    "Chip Count",
    "PCIe Bus Info",
    "PCI Device ID",
    "Software Version",
    "Firmware Version",
    "Health Status",
    "Error Code",
    "SDID",
    "Super Pod Size",
    "Super Pod ID",
    "Server Index",
    "hccs health status",
    "hccs lane mode",
    "hccs link lane list",
    "hccs link speed",
    "TX Error Count",
    "RX Error Count",
)
NOTHING = ("", "NA", "N/A", "-")
MAX_LINE = 2000
MAX_CHARACTERS = 1 << 20


def recognises(text: str) -> bool:
    """Return whether a text has a field that these tools print; see SourceParser."""
    return OPENERS.search(text[:20_000]) is not None


def parse(text: str) -> Facts:
    """Parse the fields into notes. Raises TopologyError if none is known."""
    found = fields(text)
    notes = [Note(f"{name}: {value[:120]}", line) for name, (value, line) in found.items() if name in TOLD]
    if not notes:
        raise TopologyError("no known field", 1, 1)
    notes += _lanes(found)
    return Facts("devices", notes=tuple(notes))


def fields(text: str) -> dict[str, tuple[str, int]]:
    """Return values and lines by name; the first where a name comes again."""
    found: dict[str, tuple[str, int]] = {}
    for number, line in enumerate(text[:MAX_CHARACTERS].splitlines(), 1):
        name, colon, value = line[:MAX_LINE].partition(":")
        name, value = name.strip(" \t|"), value.strip(" \t|")
        if colon and value not in NOTHING and NAME.fullmatch(name):
            found.setdefault(name, (value, number))
    return found


def _lanes(found: dict[str, tuple[str, int]]) -> list[Note]:
    """Note HCCS links with lanes that are down: 1111 is a link with all four."""
    value, line = found.get("hccs link lane list", ("", 0))
    links = re.findall(r"[01]{2,8}", value)
    down = [i for i, lanes in enumerate(links) if "0" in lanes]
    return [Note(f"HCCS links {down[:32]} have lanes that are down", line)] if down else []
