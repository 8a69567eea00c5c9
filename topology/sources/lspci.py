"""`lspci -tv`: the PCI tree as drawn in text. No NUMA nodes, and no links but PCIe."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import MAX_DEVICES, Device, DeviceKind, Facts, Note
from tokenring.topology.model.tree import pcie_links

HOST = "host"
MAX_DEPTH = 64
ROOT = re.compile(r"[-+\\| ]*-\[[0-9a-f]{4,8}:[0-9a-f]{2}(?:-[0-9a-f]{2})?\]-", re.ASCII)
DRAWING = re.compile(r"[-+\\|` ]*", re.ASCII)
BUS = re.compile(r"\[(?:([0-9a-f]{4,8}):)?([0-9a-f]{2})(?:-[0-9a-f]{2})?\]", re.ASCII)
SLOT = re.compile(r"([0-9a-f]{2}\.[0-7])(?:  +(.{0,300}))?", re.ASCII)
NOT_ONE = r"(?!.*(?:Audio|USB|UCSI|Serial|Switch|Bridge|Memory|Controller))"
ACCELERATORS = {
    "nvidia": re.compile(rf"NVIDIA Corporation {NOT_ONE}"),
    "amd": re.compile(rf"Advanced Micro Devices.*(?:Instinct|Vega [12]0|Arcturus|Aldebaran|Aqua Vanjaram){NOT_ONE}"),
    "huawei": re.compile(r"Huawei Technologies.*(?:Ascend|Device d[158]0[0-9])"),
}
NIC = re.compile(r"Ethernet|Gigabit|InfiniBand|ConnectX|Omni-Path|Slingshot|Network Connection|Elastic Fabric")


@dataclass
class _Node:
    column: int
    id: str
    bus: str  # that what hangs below it is on: "0000:c1"


@dataclass
class _Tree:
    devices: dict[str, Device] = field(default_factory=dict)
    above: list[_Node] = field(default_factory=list)

    def add(self, device: Device, line: int) -> None:
        if device.id in self.devices:
            raise TopologyError(f"{device.id} is there twice", line, 1)
        if len(self.devices) >= 8 * MAX_DEVICES:
            raise TopologyError("too many devices", line, 1)
        self.devices[device.id] = device


def recognises(text: str) -> bool:
    """Return whether a text has the root of a drawn tree; see SourceParser."""
    return any(ROOT.match(line[:200]) for line in text[:20_000].splitlines())


def parse(text: str) -> Facts:
    """Parse the tree: accelerators, NICs and what they hang from. Raises TopologyError."""
    tree = _Tree({HOST: Device(HOST, "host")})
    for number, line in enumerate(text.splitlines(), 1):
        _line(line[:2000], number, tree)
    if not any(device.kind == "host-bridge" for device in tree.devices.values()):
        raise TopologyError("no root of a tree in it", text.count("\n") + 1, 1)
    devices = _used(tree.devices)
    notes = [Note("lspci shows no NUMA nodes: between two root complexes is the longest way, SYS")]
    links = pcie_links(devices, host_bridges=True)
    return Facts("pcie", tuple(devices), tuple(links), notes=tuple(notes))


def _line(line: str, number: int, tree: _Tree) -> None:
    at = 0
    while True:
        drawing = DRAWING.match(line, at)
        at = drawing.end() if drawing else at
        while tree.above and tree.above[-1].column >= at:
            tree.above.pop()
        if match := BUS.match(line, at):
            _bus(match, at, number, tree)
        elif (match := SLOT.match(line, at)) and tree.above:
            _slot(match, at, number, tree)
        else:
            return
        at = match.end()


def _bus(match: re.Match[str], column: int, number: int, tree: _Tree) -> None:
    domain, bus = match.groups()
    if tree.above:  # below a bridge
        up = tree.above[-1]
        tree.above.append(_Node(column, up.id, f"{domain or up.bus[:-3]}:{bus}"))
    elif domain:
        root = f"pci{domain}:{bus}"
        tree.add(Device(root, "host-bridge", parent=HOST), number)
        tree.above.append(_Node(column, root, f"{domain}:{bus}"))


def _slot(match: re.Match[str], column: int, number: int, tree: _Tree) -> None:
    """Add a device with its name, or a bridge, which has what follows in its place."""
    slot, words = match.groups()
    if len(tree.above) > MAX_DEPTH:
        raise TopologyError(f"deeper than {MAX_DEPTH}", number, 1)
    up = tree.above[-1]
    address = f"{up.bus}:{slot}"
    kind, vendor = _kind(words or "")
    model = words.strip() if words and kind != "pcie-switch" else None
    tree.add(Device(address, kind, bus_id=address, parent=up.id, vendor=vendor, model=model), number)
    tree.above.append(_Node(column, address, up.bus))


def _kind(words: str) -> tuple[DeviceKind, str | None]:
    for vendor, pattern in ACCELERATORS.items():
        if pattern.search(words):
            return "accelerator", vendor
    return ("nic", None) if NIC.search(words) else ("pcie-switch", None)


def _used(devices: dict[str, Device]) -> list[Device]:
    """Keep accelerators, NICs, and what they hang from."""
    kept: dict[str, None] = {}
    for device in devices.values():
        at: Device | None = device if device.kind in ("accelerator", "nic") else None
        while at is not None and at.id not in kept:
            kept[at.id] = None
            at = devices.get(at.parent or "")
    return [device for device in devices.values() if device.id in kept]
