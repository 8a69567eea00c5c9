"""The ways of pairs of devices through PCIe, from the tree that they hang in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenring.topology.model.facts import Device, Link, pairs

MAX_ENDS = 512


def pcie_links(devices: Iterable[Device], *, host_bridges: bool) -> list[Link]:
    """Return one link for each pair of accelerators and NICs whose way is known.

    Devices hang (`parent`) from PCIe switches, host bridges, NUMA nodes, hosts. Where a source does not show
    host bridges, two branches of one NUMA node may be one bridge or two: no link. Those that show them show
    the ports of PCIe switches too: a switch is the port above and the ports below.
    """
    by_id = {device.id: device for device in devices}
    kinds = ("accelerator", "nic")  # accelerators before NICs, where there are too many
    kept = {device.id for device in [each for kind in kinds for each in by_id.values() if each.kind == kind][:MAX_ENDS]}
    ends = [name for name in by_id if name in kept]
    above = {end: _ancestors(end, by_id) for end in ends}
    links = []
    for a, b in pairs(ends):
        kind = _way(above[a], above[b], by_id, host_bridges)
        if kind is not None:
            links.append(Link(a, b, kind))
    return links


def _ancestors(end: str, by_id: Mapping[str, Device]) -> list[str]:
    """Return what is above a device, nearest first."""
    found: list[str] = []
    parent = by_id[end].parent
    while parent is not None and parent in by_id and parent not in found:
        found.append(parent)
        parent = by_id[parent].parent
    return found


def _way(above_a: list[str], above_b: list[str], by_id: Mapping[str, Device], host_bridges: bool) -> str | None:
    below_b = set(above_b)
    meeting = next((device for device in above_a if device in below_b), None)
    if meeting is None:
        has_numa = all(any(by_id[up].kind == "numa" for up in above) for above in (above_a, above_b))
        return "sys" if has_numa else None
    kind = by_id[meeting].kind
    if kind == "pcie-switch":
        far = (above_a.index(meeting), above_b.index(meeting))
        one = max(far) <= 1 if host_bridges else max(far) == 0
        return "pix" if one else "pxb"
    if kind == "host-bridge":
        return "phb"
    if kind == "numa":
        return "node" if host_bridges else None
    return "sys" if kind == "host" else None
