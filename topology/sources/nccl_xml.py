"""NCCL's and RCCL's topology: what NCCL_TOPO_DUMP_FILE writes, and what NCCL_TOPO_FILE is given."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from tokenring.errors import TopologyError
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
from tokenring.topology.model.tree import pcie_links
from tokenring.topology.sources.xmltext import Element, parse_xml

PEER = {"nvlink": "nvlink", "xgmi": "xgmi"}
SWITCH_CLASS = "0x068000"
ACCELERATORS = ("0x0300", "0x0302", "0x0380", "0x1200")
VENDORS = {"0x10de": "nvidia", "0x1002": "amd", "0x19e5": "huawei"}
MAY_HAVE_NVLINK = (60, 70, 80, 90, 100, 103, 107)  # whether they do is left out of files made by hand
HIDDEN_SWITCH = "nvswitch"  # fffffff:ff:ff.0: a virtual machine is not shown which
# Files for Amazon's G instances name no class. So many GPUs have they by size, and no NVLink.
G_INSTANCE = re.compile(r"\bg[4-9][a-z]{0,3}\.(12|24|48)xlarge\b")
G_GPUS = {"12": 4, "24": 4, "48": 8}
GFX = {"906": "gfx906", "908": "gfx908", "910": "gfx90a", "940": "gfx942", "941": "gfx942", "942": "gfx942"}


@dataclass
class _Reading:
    devices: list[Device] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    unsaid: list[Device] = field(default_factory=list)  # PCI devices of no known class
    places: dict[str, int] = field(default_factory=dict)  # of every id ever given, in devices
    gpus: int = 0
    lists_links: bool = False
    line: int = 1  # of the element that is being read

    def add(self, device: Device) -> Device:
        if len(self.devices) >= MAX_DEVICES:
            raise TopologyError(f"more than {MAX_DEVICES} devices", self.line, 1)
        if device.id in self.places:
            device = replace(device, id=f"{device.id}#{len(self.devices)}")
        self.places[device.id] = len(self.devices)
        self.devices.append(device)
        return device

    def named(self, name: str | None) -> Device | None:
        return self.devices[self.places[name]] if name in self.places else None

    def rename(self, old: str, device: Device) -> str:
        self.places[device.id] = self.places[old]
        self.devices[self.places[old]] = device
        return device.id


def recognises(text: str) -> bool:
    """Return whether a text has the root element, or a PCI device; see SourceParser."""
    start = text[:20_000]
    return re.search(r"<system[\s/>]|<pci\s+busid", start) is not None


def parse(text: str) -> Facts:
    """Parse GPUs, NICs, the PCI tree, and links where the file lists them. Raises TopologyError."""
    root = parse_xml(text)
    reading = _Reading()
    waiting: list[tuple[Element, str | None]] = [(root, None)]
    while waiting:
        element, parent = waiting.pop()
        inside = _element(element, parent, reading)
        waiting.extend((child, inside) for child in reversed(element.children))
    if match := G_INSTANCE.search(text[:20_000]):
        _g_instance(match[0], G_GPUS[match[1]], reading)
    if not reading.devices:
        raise TopologyError("no device in it", root.line, root.column)
    return _facts(reading, is_fragment=root.tag != "system")


def _facts(reading: _Reading, is_fragment: bool) -> Facts:
    links, peers = [], []
    by_bus: dict[str, list[str]] = {}
    for device in reading.devices:
        if device.kind == "accelerator" and device.bus_id:
            by_bus.setdefault(device.bus_id, []).append(device.id)
    for link in reading.links:
        peers += _peer_links(link, by_bus, reading)
    if is_fragment:
        reading.notes.append(Note("a part of a file: other devices may be missing"))
    if not reading.lists_links:
        reading.notes.append(Note("made before any library ran: links between accelerators are left to it"))
    links += _both_ways_once(peers)
    links += pcie_links(reading.devices, host_bridges=False)
    seen = reading.lists_links and not any("itself" in note.text for note in reading.notes)
    return Facts("links" if seen else "devices", tuple(reading.devices), tuple(links), notes=tuple(reading.notes))


def _element(element: Element, parent: str | None, reading: _Reading) -> str | None:
    """Take one element in; return the id of what its children hang from."""
    reading.line = element.line
    if element.tag == "cpu":
        numa = single_number(element.get("numaid"))
        host = element.get("host_hash")
        name = f"NUMA{'?' if numa is None else numa}"
        return reading.add(Device(name, "numa", numa, numa_node=numa, host=host)).id
    if element.tag == "pci":
        return _pci(element, parent, reading)
    if element.tag == "gpu" and parent is not None:
        return _gpu(element, parent, reading)
    if element.tag == "net":
        _net(element, parent, reading)
    elif element.tag in PEER and parent is not None:
        target = (element.get("target") or "").lower()
        count = single_number(element.get("count"))
        to_switch = element.get("tclass") == SWITCH_CLASS
        reading.links.append(Link(parent, target, PEER[element.tag], count, switched=to_switch))
        reading.lists_links = True
    elif element.tag not in ("system", "nic", "c2c"):
        reading.notes.append(Note(f"<{element.tag[:40]}> means nothing to us", element.line, element.column))
    return parent


def _pci(element: Element, parent: str | None, reading: _Reading) -> str | None:
    bus_id = element.get("busid") or ""
    pci_class = (element.get("class") or "").lower()
    kind: DeviceKind = "pcie-switch"
    if pci_class.startswith(ACCELERATORS) or any(child.tag == "gpu" for child in element.children):
        kind = "accelerator"
    elif pci_class.startswith("0x02"):
        kind = "nic"
    elif pci_class.startswith("0x0680"):
        kind = "switch"
    elif not element.children and pci_class != "0x060400":
        reading.notes.append(Note(f"what {bus_id[:20]} is, is not said", element.line, element.column))
        unsaid = Device(bus_id or f"pci@{element.line}", "accelerator", bus_id=normal_bus_id(bus_id), parent=parent)
        reading.unsaid.append(_placed(unsaid, reading))
        return parent
    vendor = VENDORS.get((element.get("vendor") or "").lower())
    device = Device(bus_id or f"pci@{element.line}", kind, bus_id=normal_bus_id(bus_id), vendor=vendor, parent=parent)
    return reading.add(_placed(device, reading)).id


def _g_instance(name: str, number: int, reading: _Reading) -> None:
    """Take the first devices for the GPUs of an instance whose file does not say which of them they are."""
    if reading.lists_links or len(reading.unsaid) < number or any(d.kind == "accelerator" for d in reading.devices):
        return
    for device in reading.unsaid[:number]:
        reading.add(replace(device, vendor="nvidia"))
    reading.lists_links = True
    reading.notes.append(Note(f"the first {number} devices are taken for the GPUs of {name}, which have no NVLink"))


def _gpu(element: Element, parent: str, reading: _Reading) -> str:
    """Name the PCI device that a gpu is in after it; a second gpu in one device becomes a device of its own."""
    pci = reading.devices[reading.places[parent]]
    index, sm, gcn = (single_number(element.get(name)) for name in ("dev", "sm", "gcn"))
    arch = GFX.get(str(gcn), f"gfx{gcn}") if gcn is not None else None if sm is None else f"sm{sm}"
    reading.lists_links |= gcn is not None or (sm is not None and sm not in MAY_HAVE_NVLINK)
    reading.gpus += 1
    name = f"GPU{reading.gpus - 1 if index is None else index}"
    if (part := element.get("mlopart")) is not None:
        name += f".{part[:8]}"
    gpu = replace(pci, kind="accelerator", index=index, arch=arch, vendor="amd" if gcn is not None else pci.vendor)
    gpu = replace(gpu, id=name, vendor=gpu.vendor or "nvidia")
    if pci.id != parent:  # renamed: a gpu was here before
        return reading.add(gpu).id
    if name in reading.places:
        gpu = replace(gpu, id=f"{name}@{pci.id}")
    return reading.rename(pci.id, gpu)


def _net(element: Element, parent: str | None, reading: _Reading) -> None:
    speed = single_number(element.get("speed"))  # Mbit/s
    name = element.get("name")
    gbs = speed / 8000 if speed else None
    card = reading.named(parent)
    if card is not None and card.kind == "nic" and card.bus_id is not None:  # a port of the card that it is in
        together = None if gbs is None or (card.name and card.gbs is None) else gbs + (card.gbs or 0.0)
        names = "+".join(part for part in (card.name, name) if part) or None
        reading.rename(card.id, replace(card, name=names, gbs=together))
        return
    reading.add(_placed(Device(name or f"net@{element.line}", "nic", name=name, gbs=gbs, parent=parent), reading))


def _placed(device: Device, reading: _Reading) -> Device:
    above = reading.named(device.parent)
    return replace(device, numa_node=above.numa_node, host=above.host) if above else device


def _peer_links(link: Link, by_bus: dict[str, list[str]], reading: _Reading) -> list[Link]:
    """Return links to devices, for a link to a bus id; a link to a switch brings the switch in."""
    bus_id = normal_bus_id(link.b)
    here = reading.named(link.a)
    if link.switched or link.b.startswith("ffff"):
        name = HIDDEN_SWITCH if link.b.startswith("ffff") or not link.b else link.b
        if name not in reading.places:
            reading.add(Device(name, "switch", bus_id=bus_id))
        return [replace(link, b=name)]
    if bus_id is not None and here is not None and bus_id == here.bus_id:
        reading.notes.append(Note(f"{link.a} is linked to itself: that stands for a peer that is not named"))
        return []
    targets = by_bus.get(bus_id or "", [])
    if not targets:
        reading.notes.append(Note(f"{link.a} has a {link.kind} to {link.b[:40]!r}, which is not in the file"))
    return [replace(link, b=targets[0])] if targets else []


def _both_ways_once(links: list[Link]) -> list[Link]:
    """Return each link once: it is written at both of its ends."""
    kept: dict[tuple[str, str], Link] = {}
    for link in links:
        other = kept.get((link.b, link.a))
        if other is None:
            here = kept.get((link.a, link.b))
            count = None if here is None or here.count is None or link.count is None else here.count + link.count
            kept[link.a, link.b] = link if here is None else replace(here, count=count)
        elif other.count != link.count:
            kept[link.b, link.a] = replace(other, count=None)
    return list(kept.values())
