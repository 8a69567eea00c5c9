"""GPUs without their links: `nvidia-smi -L`, `-q`, `--query-gpu=index,...`, and nvidia-smi's message when it fails.

Index and bus id together show that a GPU of `nvidia-smi topo -m` (indices) is one of the PCI tree (bus ids).
"""

from __future__ import annotations

import csv
import re

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, Facts, Note, normal_bus_id, single_number

FAILURE = re.compile(
    r"NVIDIA-SMI has failed|Failed to (?:parse|initialize)|No devices were found|Unable to determine the device handle"
    r"|Insufficient Permissions|couldn't communicate with the NVIDIA driver|GPU is lost|Unknown Error"
)
LISTED = re.compile(r"\s*GPU ([0-9]{1,4}): (.{1,200}?)(?: \(UUID: [^)]*\))?\s*", re.ASCII)
CUT = re.compile(r"\s*GPU [0-9]{1,4}: .{1,200}\(UUID: [^)]*", re.ASCII)
MIG = re.compile(r"\s+MIG \S+\s+Device +[0-9]")
BLOCK = re.compile(r"GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.[0-7])\s*", re.ASCII)
FIELD = re.compile(r"\s+(Product Name|Bus Id)\s+: (.{1,200}?)\s*", re.ASCII)
LONGEST = 400  # line
DISPLAY = re.compile(r"DGX Display")  # a graphics card for the screen, beside the GPUs that compute


def recognises(text: str) -> bool:
    """Return whether a text lists GPUs, or has nvidia-smi's message of a failure; see SourceParser."""
    start = text[:20_000]
    if FAILURE.search(start[:4000]) and re.search(r"\bGPU0\b", start) is None:
        return True
    lines = [line[:LONGEST] for line in start.splitlines()]
    is_list = any(LISTED.fullmatch(line) and "(UUID: " in line for line in lines)
    return is_list or "NVSMI LOG" in start or any(_is_query(line) for line in lines[:20])


def _is_query(line: str) -> bool:
    fields = [field.strip() for field in line.split(",")]
    return fields[0] == "index" and "pci.bus_id" in fields


def parse(text: str) -> Facts:
    """Parse the GPUs; failures become notes. Raises TopologyError."""
    lines = [line[:LONGEST] for line in text.splitlines()]
    if any(_is_query(line) for line in lines[:20]):
        devices = _queried(lines)
    elif any(BLOCK.fullmatch(line) for line in lines):
        devices = _blocks(lines)
    else:
        devices = [
            Device(f"GPU{int(match[1])}", "accelerator", int(match[1]), model=match[2].strip(), vendor="nvidia")
            for line in lines
            if (match := LISTED.fullmatch(line))
        ]
    notes = [Note(f"nvidia-smi says: {' '.join(line.split())[:200]}", n) for n, line in _failures(lines)]
    notes += [Note("the line is cut", n, role="doubt") for n, line in enumerate(lines, 1) if CUT.fullmatch(line)][:20]
    if len(devices) > MAX_DEVICES:
        raise TopologyError(f"more than {MAX_DEVICES} devices", 1, 1)
    if not devices and not notes:
        raise TopologyError("no GPU in it", len(lines) + 1, 1)
    if slices := sum(MIG.match(line) is not None for line in lines):
        notes.append(Note(f"{slices} MIG slices: parts of GPUs, not accelerators of their own"))
    kept = [device for device in devices if not DISPLAY.search(device.model or "")]
    if len(kept) < len(devices):
        notes.append(Note(f"{len(devices) - len(kept)} card for a display, which is not an accelerator"))
    if len({device.id for device in kept}) < len(kept):
        raise TopologyError("a GPU is there twice", 1, 1)
    return Facts("devices", tuple(kept), notes=tuple(notes))


def _failures(lines: list[str]) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(lines, 1) if FAILURE.search(line)][:20]


def _queried(lines: list[str]) -> list[Device]:
    rows = iter(enumerate(lines, 1))
    header = next([field.strip() for field in line.split(",")] for _, line in rows if _is_query(line))
    devices = []
    for number, line in rows:
        if not line.strip() or FAILURE.search(line):
            continue
        try:
            fields = next(csv.reader([line], skipinitialspace=True), [])
        except csv.Error as error:
            raise TopologyError(f"no row of a query: {error}", number, 1) from None
        row = dict(zip(header, (field.strip() for field in fields), strict=False))
        index = single_number(row.get("index"))
        if index is None:
            raise TopologyError("expected a GPU's index first", number, 1)
        model, bus_id = row.get("name") or None, normal_bus_id(row.get("pci.bus_id") or "")
        devices.append(Device(f"GPU{index}", "accelerator", index, bus_id=bus_id, model=model, vendor="nvidia"))
    return devices


def _blocks(lines: list[str]) -> list[Device]:
    """Read `-q`: one block a GPU, in the order of the indices, which are not printed."""
    devices: list[Device] = []
    bus_id, model = None, None
    for line in [*lines, "GPU ffff:ff:ff.7"]:
        if match := BLOCK.fullmatch(line):
            if bus_id is not None:
                number = len(devices)
                devices.append(
                    Device(f"GPU{number}", "accelerator", number, bus_id=bus_id, model=model, vendor="nvidia")
                )
            bus_id, model = normal_bus_id(match[1]), None
        elif (match := FIELD.fullmatch(line)) and match[1] == "Product Name":
            model = match[2]
    return devices
