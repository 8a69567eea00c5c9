"""Boxes in boxes, by what hangs from what: NUMA nodes, host bridges, PCIe switches, accelerators and NICs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenring.topology.model.facts import PCIE_PATHS, Device
from tokenring.topology.model.graph import Graph

LEAVES = ("accelerator", "nic")
# From the nearest: what two devices share whose way is of such a kind.
LEVELS = (("pix", "PCIe switch", "pcie-switch"), ("pxb", "PCIe switches", "pcie-switch"),
          ("phb", "host bridge", "host-bridge"), ("node", "NUMA node", "numa"))  # fmt: skip
LABELS = {"numa": "NUMA", "host-bridge": "host bridge", "pcie-switch": "PCIe switch"}


@dataclass
class Box:
    """A device, or a group with a label. `device`: of a group, what it is, where a source names it."""

    label: str
    kind: str
    device: Device | None = None
    inside: list[Box] = field(default_factory=list)

    @property
    def is_leaf(self) -> bool:
        """True for accelerators and NICs."""
        return self.kind in LEAVES


def boxes(graph: Graph) -> list[Box]:
    """Return the outermost boxes of one host; leaves among them are devices whose place is unknown."""
    by_id = {device.id: device for device in graph.devices}
    if any(device.parent in by_id for device in graph.devices if device.kind in LEAVES):
        return _from_parents(graph, by_id)
    return _from_ways(graph)


def says_something(found: Sequence[Box]) -> bool:
    """Return whether any box says more than which accelerators there are."""
    return any(not box.is_leaf or box.kind == "nic" for box in found)


def _from_parents(graph: Graph, by_id: dict[str, Device]) -> list[Box]:
    made: dict[str, Box] = {}
    roots: list[Box] = []
    for leaf in (device for device in graph.devices if device.kind in LEAVES):
        device: Device | None = leaf
        below: Box | None = None
        while device is not None:
            known = made.get(device.id)
            box = known or made.setdefault(device.id, Box(_label(device), device.kind, device))
            if below is not None:
                box.inside.append(below)
            if known is not None:
                break
            below = box
            parent = device.parent
            device = by_id.get(parent) if parent is not None else None
            if device is None:
                roots.append(box)
    return [_without_passages(box) for box in roots]


def _label(device: Device) -> str:
    if device.kind in LEAVES:
        return device.id
    if device.kind == "numa" and device.numa_node is not None:
        return f"NUMA {device.numa_node}"
    return f"{LABELS.get(device.kind, device.kind)} {device.name or device.bus_id or device.id}"


def _without_passages(box: Box) -> Box:
    """Leave out PCI bridges that lead to one thing only: they say nothing."""
    while box.kind == "pcie-switch" and len(box.inside) == 1:
        box = box.inside[0]
    box.inside = [_without_passages(each) for each in box.inside]
    if box.is_leaf and box.inside:  # an accelerator with NICs of its own
        return Box(f"{box.label} and its own", "package", inside=[Box(box.label, box.kind, box.device), *box.inside])
    return box


def _from_ways(graph: Graph) -> list[Box]:
    """Put devices into one box whose way is no longer than the box allows."""
    leaves = [device for device in graph.devices if device.kind in LEAVES]
    tops = {device.id: Box(device.id, device.kind, device) for device in leaves}
    order = {device.id: number for number, device in enumerate(leaves)}
    ways = [edge for edge in graph.edges if edge.kind in PCIE_PATHS and edge.a in tops and edge.b in tops]
    for kind, label, box_kind in LEVELS:
        joined = [(edge.a, edge.b) for edge in ways if edge.kind == kind]
        if kind == "node":
            joined += _of_one_node(leaves)
        groups = [sorted(group, key=lambda box: order[_leaves(box)[0].label]) for group in _joined(tops, joined)]
        for group in groups:
            node = _node(group) if kind == "node" else None
            if len(group) > 1 or node is not None:
                box = Box(label if node is None else f"NUMA {node}", box_kind, inside=group)
                for each in _leaves(box):
                    tops[each.label] = box
    return list({id(box): box for box in tops.values()}.values())


def _joined(tops: dict[str, Box], pairs: Sequence[tuple[str, str]]) -> list[list[Box]]:
    """Return the boxes that these pairs bring together, in their order."""
    group = {id(box): [box] for box in tops.values()}
    for a, b in pairs:
        one, other = group[id(tops[a])], group[id(tops[b])]
        if one is not other:
            one += other
            for box in other:
                group[id(box)] = one
    return list({id(each): each for each in group.values()}.values())


def _of_one_node(leaves: Sequence[Device]) -> list[tuple[str, str]]:
    first: dict[str, str] = {}
    named = [(device, _place(device)) for device in leaves]
    return [(first.setdefault(place, device.id), device.id) for device, place in named if place is not None]


def _place(device: Device) -> str | None:
    return device.numa_affinity if device.numa_node is None else str(device.numa_node)


def _node(group: Sequence[Box]) -> str | None:
    """Return the NUMA node of all in a group that name one; None if they differ or name none."""
    told = {_place(leaf.device) for box in group for leaf in _leaves(box) if leaf.device is not None} - {None}
    return told.pop() if len(told) == 1 else None


def _leaves(box: Box) -> list[Box]:
    return [box] if box.is_leaf else [leaf for each in box.inside for leaf in _leaves(each)]
