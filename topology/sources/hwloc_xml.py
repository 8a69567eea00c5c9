"""hwloc's XML (`lstopo --of xml`), versions 1 to 3: the PCI tree, and links where NVML or ROCm gave them to hwloc."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tokenring.errors import TopologyError
from tokenring.topology.model.bandwidth import published
from tokenring.topology.model.facts import (
    MAX_DEVICES,
    Device,
    DeviceKind,
    Facts,
    Link,
    Note,
    normal_bus_id,
    single_number,
)
from tokenring.topology.model.pci import ACCELERATORS, VENDORS
from tokenring.topology.model.tree import pcie_links
from tokenring.topology.sources.nvswitch import trunk
from tokenring.topology.sources.xmltext import Element, parse_xml

BANDWIDTHS = {"NVLinkBandwidth": "nvlink", "XGMIBandwidth": "xgmi"}
NUMBERED = ("nvml", "rsmi", "cuda", "ze")  # whose numbers are indices; first the one that counts as tools do
COMPUTING = re.compile(r"(nvml|rsmi|cuda|ze|opencl|ve)([0-9]{1,4})(?:d([0-9]{1,4}))?", re.ASCII)
PCI = re.compile(r"([0-9a-f]{4})(?: ?\[([0-9a-f]{4}):[0-9a-f]{4}\])?.*", re.ASCII)
MAX_ENDS = 256  # of a matrix
FABRIC = ("mlx", "hfi", "bxi", "cxi", "efa", "bnxt", "irdma", "qedr")


@dataclass
class _Reading:
    devices: dict[str, Device] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)  # "OSDev:802", as matrices call them: our id
    notes: list[Note] = field(default_factory=list)

    def add(self, device: Device, element: Element) -> str:
        if len(self.devices) >= MAX_DEVICES:
            raise TopologyError(f"more than {MAX_DEVICES} devices", element.line, element.column)
        if device.id in self.devices:
            device = replace(device, id=f"{device.id}#{len(self.devices)}")
        self.devices[device.id] = device
        self.number(element, device.id)
        return device.id

    def number(self, element: Element, name: str) -> None:
        if gp_index := element.get("gp_index"):
            self.numbers[f"{element.get('type')}:{gp_index}"] = name


def recognises(text: str) -> bool:
    """Return whether a text has hwloc's root element, and an object; see SourceParser."""
    return re.search(r"<topology[\s>]", text[:20_000]) is not None and "<object" in text[:20_000]


def parse(text: str) -> Facts:
    """Parse the PCI tree and the matrices of bandwidths. Raises TopologyError."""
    root = parse_xml(text)
    reading = _Reading()
    waiting: list[tuple[Element, str | None, int | None]] = [(root, None, None)]
    while waiting:
        element, parent, numa = waiting.pop()
        parent, numa = _element(element, parent, numa, reading)
        inner = [child for child in element.children if child.tag == "object"]
        waiting.extend((child, parent, numa) for child in reversed(inner))
    links, says_links = _matrices(root, reading)
    attached: dict[str, set[str]] = {}
    for link in links:
        if reading.devices[link.b].kind == "switch":
            attached.setdefault(link.b, set()).add(link.a)
    more, notes = trunk(attached)
    kept = _used(reading.devices, {end for link in links for end in (link.a, link.b)})
    links += [*more, *pcie_links(kept, host_bridges=True)]
    reading.notes += notes
    return Facts("links" if says_links else "pcie", tuple(kept), tuple(links), notes=tuple(reading.notes))


def _element(
    element: Element, parent: str | None, numa: int | None, reading: _Reading
) -> tuple[str | None, int | None]:
    """Take one object in; return what its children hang from, and their NUMA node."""
    kind = element.get("type")
    inside = [child for child in element.children if child.get("type") == "NUMANode"]
    node = element if kind == "NUMANode" else inside[0] if len(inside) == 1 else None
    if node is not None:  # version 1 puts what is on a node into it, later ones beside it
        numa = single_number(node.get("os_index"))
        name = f"NUMA{numa}"
        if numa is not None and name not in reading.devices:
            parent = reading.add(Device(name, "numa", numa, numa_node=numa), node)
        elif numa is not None:
            parent = name
    if kind in ("Package", "Socket"):
        number = single_number(element.get("os_index"))
        reading.add(Device(f"Package{'?' if number is None else number}", "cpu", number, numa_node=numa), element)
    elif kind == "Bridge":
        bus_id = normal_bus_id(element.get("pci_busid") or "")
        bridge = Device(bus_id or f"pci{element.get('bridge_pci')}", "pcie-switch" if bus_id else "host-bridge")
        return reading.add(replace(bridge, bus_id=bus_id, numa_node=numa, parent=parent), element), numa
    elif kind == "PCIDev":
        return _pci(element, parent, numa, reading), numa
    return parent, numa


def _pci(element: Element, parent: str | None, numa: int | None, reading: _Reading) -> str | None:
    match = PCI.fullmatch(element.get("pci_type") or "")
    pci_class, vendor_id = (f"0x{match[1]}", f"0x{match[2]}") if match else ("", "")
    inside = [child for child in element.children if child.get("type") == "OSDev"]
    names = [child.get("name") or "" for child in inside]
    kind: DeviceKind
    if any(COMPUTING.fullmatch(name) for name in names) or pci_class.startswith(ACCELERATORS.get(vendor_id, ("-",))):
        kind = "accelerator"
    elif element.get("subtype") == "NVSwitch" or (pci_class == "0x0680" and vendor_id == "0x10de"):
        kind = "switch"
    elif pci_class.startswith("0x02") or any(name.startswith(FABRIC) for name in names):
        kind = "nic"
    else:
        return parent
    bus_id = normal_bus_id(element.get("pci_busid") or "")
    device = Device(bus_id or f"pci@{element.line}", kind, bus_id=bus_id, numa_node=numa, vendor=VENDORS.get(vendor_id))
    if kind == "accelerator":
        device = _accelerator(device, names, inside, reading)
    elif kind == "nic":
        device = replace(device, name=next((n for n in names if n.startswith(FABRIC)), names[0] if names else None))
    name = reading.add(replace(device, parent=parent), element)
    for child in inside:
        reading.number(child, name)
    return name


def _accelerator(device: Device, names: list[str], inside: list[Element], reading: _Reading) -> Device:
    """Give an accelerator its number from the software that found it, and its model."""
    found = [match for name in names if (match := COMPUTING.fullmatch(name))]
    ranked = sorted((m for m in found if m[1] in NUMBERED), key=lambda m: NUMBERED.index(m[1]))
    index = int(ranked[0][2]) if ranked else None
    model = next(
        (info.get("value") for child in inside for info in child.children if info.get("name") == "GPUModel"), None
    )
    name = f"GPU{index}"
    if index is None or name in reading.devices:
        return replace(device, model=model)
    return replace(device, id=name, index=index, model=model)


def _matrices(root: Element, reading: _Reading) -> tuple[list[Link], bool]:
    """Read links from matrices of bandwidths, MB/s; a number in the diagonal is the device itself."""
    links: list[Link] = []
    found = False
    for matrix in root.children:
        kind = BANDWIDTHS.get(matrix.get("name") or "")
        if not matrix.tag.startswith("distances2") or kind is None:
            continue
        ends = " ".join(each.text for each in matrix.children if each.tag == "indexes").split()
        values = " ".join(each.text for each in matrix.children if each.tag == "u64values").split()
        if len(values) != len(ends) ** 2 or len(ends) > MAX_ENDS:
            message = f"{len(ends)} devices have a matrix of {len(values)} numbers"
            raise TopologyError(message, matrix.line, matrix.column)
        found = True
        if matrix.tag == "distances2" and matrix.get("type"):
            ends = [f"{matrix.get('type')}:{end}" for end in ends]
        names = [reading.numbers.get(end) for end in ends]
        links += _pairs(kind, names, values, reading.devices)
    return links, found


def _pairs(kind: str, names: list[str | None], values: list[str], devices: Mapping[str, Device]) -> list[Link]:
    links: list[Link] = []
    size = len(names)
    for i, a in enumerate(names):
        for j in range(i + 1, size):
            b = names[j]
            rates = {single_number(values[i * size + j]), single_number(values[j * size + i])} - {None, 0}
            if a is None or b is None or a == b or len(rates) != 1:
                continue
            rate = rates.pop() or 0
            if devices[a].kind != "accelerator":
                a, b = b, a
            if devices[a].kind == "accelerator":
                links.append(_link(kind, a, b, rate, devices))
            a = names[i]
    return links


def _link(kind: str, a: str, b: str, mbs: int, devices: Mapping[str, Device]) -> Link:
    """Make a link of a rate in MB/s, and count the physical links in it, where it is known what one carries."""
    entry = published(kind, devices[a])
    per_link = entry.link_gbs * 1000 if entry else 0
    count = int(mbs // per_link) if per_link and mbs % per_link == 0 else None
    other = devices[b].kind
    kind = "c2c" if other == "cpu" else kind
    return Link(a, b, kind, count, mbs / 1000, switched=other == "switch", label=f"{mbs} MB/s")


def _used(devices: Mapping[str, Device], linked: set[str]) -> list[Device]:
    """Keep accelerators, NICs and what is linked to them, and what they hang from."""
    kept: set[str] = set()
    for device in devices.values():
        ends = device.kind in ("accelerator", "nic", "switch", "numa") or device.id in linked
        at: Device | None = device if ends else None
        while at is not None and at.id not in kept:
            kept.add(at.id)
            at = devices.get(at.parent or "")
    return [device for device in devices.values() if device.id in kept]
