"""The PCI tree of a Linux machine as the kernel shows it: the fallback that every machine has."""

from __future__ import annotations

import os
import re
from pathlib import Path

from tokenring.topology.model.facts import Device, DeviceKind, Facts, Note, SourceOrigin
from tokenring.topology.model.pci import ACCELERATORS, VENDORS
from tokenring.topology.model.tree import pcie_links

ROOT = Path("/sys")
ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
BRIDGE = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")


def read_sysfs(root: Path = ROOT) -> Facts:
    """Read accelerators, NICs and what they hang from. No accelerator is an answer too."""
    origin = SourceOrigin("sysfs")
    try:
        addresses = sorted(path for path in os.listdir(root / "bus/pci/devices") if ADDRESS.fullmatch(path))
    except OSError as error:
        note = Note(f"{root}/bus/pci/devices cannot be read: {error.strerror}")
        return Facts("pcie", notes=(note,), origin=origin)
    devices: dict[str, Device] = {}
    for address in addresses:
        kind = _kind(root / "bus/pci/devices" / address)
        if kind is not None:
            _take(root / "bus/pci/devices" / address, kind, devices)
    found = tuple(devices.values())
    notes: tuple[Note, ...] = ()
    if not any(device.kind == "accelerator" for device in found):
        notes = (Note(f"the kernel shows {len(addresses)} PCI devices, none of them a known accelerator"),)
    return Facts("pcie", found, tuple(pcie_links(found, host_bridges=True)), notes=notes, origin=origin)


def _kind(path: Path) -> DeviceKind | None:
    vendor, pci_class = _word(path / "vendor"), _word(path / "class")
    if pci_class is None or (path / "physfn").exists():  # a virtual function: a part of a device that is there too
        return None
    if pci_class.startswith("0x02"):
        return "nic"
    if pci_class.startswith(ACCELERATORS.get(vendor or "", ())):
        return "accelerator"
    return None


def _take(path: Path, kind: DeviceKind, devices: dict[str, Device]) -> None:
    """Add a device, and the switches, host bridge and NUMA node above it."""
    node = _word(path / "numa_node")
    numa = int(node) if node is not None and re.fullmatch(r"[0-9]{1,4}", node) else None
    above = [part for part in os.path.realpath(path).split("/") if ADDRESS.fullmatch(part) or BRIDGE.fullmatch(part)]
    parent = None
    if numa is not None:
        parent = f"NUMA{numa}"
        devices.setdefault(parent, Device(parent, "numa", numa, numa_node=numa))
    for part in above[:-1]:
        if BRIDGE.fullmatch(part):
            devices.setdefault(part, Device(part, "host-bridge", numa_node=numa, parent=parent))
        else:
            devices.setdefault(part, Device(part, "pcie-switch", bus_id=part, numa_node=numa, parent=parent))
        parent = part
    vendor = VENDORS.get(_word(path / "vendor") or "")
    affinity = _word(path / "local_cpulist") or None
    name = _interface(path) if kind == "nic" else None
    devices[path.name] = Device(
        path.name,
        kind,
        bus_id=path.name,
        vendor=vendor,
        name=name,
        numa_node=numa,
        cpu_affinity=affinity,
        parent=parent,
    )


def _interface(path: Path) -> str | None:
    for folder in ("infiniband", "net"):
        try:
            return sorted(os.listdir(path / folder))[0]
        except (OSError, IndexError):
            continue
    return None


def _word(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None
