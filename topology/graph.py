"""Devices and the links between them: as the planner needs them, and merged from all that sources said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from tokenring.topology.bandwidth import published
from tokenring.topology.facts import PEER_KINDS, Coverage, Device, Facts, Link, Measurement, Note, unordered

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenring.backends.base import Transport

COVERAGES: tuple[Coverage, ...] = ("links", "pcie", "devices")  # what shows most first
BandwidthSource = Literal["measured", "published", "label"]


@dataclass(frozen=True)
class Topology:
    """`bandwidth_gbs` of each directed (source, destination) link, one way; None where unknown."""

    name: str
    world_size: int
    bandwidth_gbs: Mapping[tuple[int, int], float | None] = field(default_factory=dict)

    @staticmethod
    def measure(
        group: ProcessGroup | None = None, transport: str | Transport = "auto", seconds: float = 60.0
    ) -> Topology:
        """What transfers between the ranks of a group show, equal on all of them, which all call it."""
        from tokenring.topology.measure.run import measured_topology

        return measured_topology(group, transport, seconds)


def full_mesh(world_size: int, bandwidth_gbs: float | None = None) -> Topology:
    """Every pair of ranks has a link of its own."""
    pairs = {(a, b): bandwidth_gbs for a in range(world_size) for b in range(world_size) if a != b}
    return Topology("full mesh", world_size, pairs)


@dataclass(frozen=True)
class Edge:
    """A link of the merged graph. `source` says where `bandwidth_gbs` (one way, all `count` links) comes from:
    measured, published for the model, or the source's label, which may leave it unknown."""

    a: str
    b: str
    kind: str
    count: int | None = None
    bandwidth_gbs: float | None = None
    source: BandwidthSource = "label"
    switched: bool = False
    label: str | None = None

    @property
    def is_peer(self) -> bool:
        return self.kind in PEER_KINDS


@dataclass(frozen=True)
class Graph:
    """Every device once, every link once, whichever sources named them. The order is that of the sources."""

    devices: tuple[Device, ...] = ()
    edges: tuple[Edge, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[Note, ...] = ()
    coverage: Coverage = "devices"

    @property
    def accelerators(self) -> tuple[Device, ...]:
        return self.of_kind("accelerator")

    @property
    def hosts(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.host or "" for device in self.accelerators))

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        return tuple(device for device in self.devices if device.kind == kind)

    def on_host(self, host: str) -> Graph:
        """The part of one host."""
        devices = tuple(device for device in self.devices if (device.host or "") == host)
        known = {device.id for device in devices}
        edges = tuple(edge for edge in self.edges if edge.a in known and edge.b in known)
        return replace(self, devices=devices, edges=edges)

    def between(self) -> dict[tuple[str, str], Edge]:
        """The best edge of each pair that has one: an accelerator's own link before PCIe."""
        best: dict[tuple[str, str], Edge] = {}
        for edge in self.edges:
            pair = unordered(edge.a, edge.b)
            if pair not in best or (edge.is_peer and not best[pair].is_peer):
                best[pair] = edge
        return best


def merge(facts: Iterable[Facts]) -> Graph:
    """One graph of several sources. Two outputs of one tool, with no host named, are two hosts."""
    sources = _with_hosts(list(facts))
    devices: list[Device] = []
    edges: dict[tuple[str, str, str], Edge] = {}
    measurements: list[Measurement] = []
    notes: list[Note] = []
    several = len({device.host for source in sources for device in source.accelerators}) > 1
    for source in sources:
        names = _take_devices(source, devices, several)
        for link in source.links:
            _take_link(link, names, edges)
        measurements += [replace(each, a=names[each.a], b=names[each.b]) for each in source.measurements]
        notes += source.notes
    by_id = {device.id: device for device in devices}
    found = tuple(_with_bandwidth(edge, by_id, measurements) for edge in edges.values())
    coverage = min((source.coverage for source in sources), key=COVERAGES.index, default=COVERAGES[-1])
    return Graph(tuple(devices), found, tuple(measurements), tuple(notes), coverage)


def _with_hosts(sources: list[Facts]) -> list[Facts]:
    """Name the hosts where one format is there several times and says of no host."""
    formats = [source.origin.format for source in sources if source.origin]
    placed: list[Facts] = []
    for number, source in enumerate(sources):
        origin = source.origin
        host = origin.host if origin else None
        if host is None and origin and formats.count(origin.format) > 1:
            host = origin.file or f"host{number}"
        devices = tuple(replace(each, host=each.host or host) for each in source.devices)
        placed.append(replace(source, devices=devices))
    return placed


def _take_devices(source: Facts, devices: list[Device], several: bool) -> dict[str, str]:
    """Add a source's devices, or what it says about those known; what its ids are called in the graph."""
    names: dict[str, str] = {}
    taken: set[int] = set()
    before = len(devices)
    used = {each.id for each in devices}
    for device in source.devices:
        at = next((i for i in range(before) if i not in taken and _same(devices[i], device)), None)
        if at is None:
            name = f"{device.host}:{device.id}" if several and device.host else device.id
            while name in used:
                name += "'"
            used.add(name)
            devices.append(replace(device, id=name))
            at = len(devices) - 1
        else:
            devices[at] = _completed(devices[at], device)
        taken.add(at)
        names[device.id] = devices[at].id
    for i in taken:
        parent = devices[i].parent
        devices[i] = replace(devices[i], parent=names.get(parent, parent) if parent else None)
    return names


def _same(a: Device, b: Device) -> bool:
    """Whether two sources speak of one device: bus id, else physical id, else index or name."""
    if a.kind != b.kind or (a.host and b.host and a.host != b.host):
        return False
    if a.bus_id and b.bus_id and a.die == b.die:
        return a.bus_id == b.bus_id and a.id.rpartition(":")[2] == b.id.rpartition(":")[2]
    for one, other in ((a.phy_id, b.phy_id), (a.index, b.index), (a.name, b.name)):
        if one is not None and other is not None:
            return one == other
    return False


def _completed(known: Device, more: Device) -> Device:
    """What the first source left open, from the second."""
    return replace(known, **{k: v for k, v in vars(more).items() if getattr(known, k) is None and v is not None})


def _take_link(link: Link, names: Mapping[str, str], edges: dict[tuple[str, str, str], Edge]) -> None:
    a, b = names.get(link.a), names.get(link.b)
    if a is None or b is None or link.state == "down":
        return
    key = (*unordered(a, b), link.kind)
    known = edges.get(key)
    if known is None:
        edges[key] = Edge(a, b, link.kind, link.count, link.bandwidth_gbs, "label", link.switched, link.label)
    else:
        edges[key] = replace(
            known,
            count=link.count if known.count is None else known.count,
            bandwidth_gbs=link.bandwidth_gbs if known.bandwidth_gbs is None else known.bandwidth_gbs,
            switched=known.switched or link.switched,
        )


def _with_bandwidth(edge: Edge, by_id: Mapping[str, Device], measurements: Iterable[Measurement]) -> Edge:
    """Measured beats published beats label."""
    measured = [each.gbs for each in measurements if unordered(each.a, each.b) == unordered(edge.a, edge.b)]
    known = [gbs for gbs in measured if gbs is not None]
    if known:
        return replace(edge, bandwidth_gbs=min(known), source="measured")
    entry = next((p for end in (edge.a, edge.b) if (p := published(edge.kind, by_id[end]))), None)
    if entry is None:
        return edge
    count = edge.count if edge.count is not None else entry.links if edge.switched else _one(edge.kind)
    return edge if count is None else replace(edge, bandwidth_gbs=round(count * entry.link_gbs, 3), source="published")


def _one(kind: str) -> int | None:
    """Links of a pair whose label does not count them: HCCS meshes have one, xGMI is not always one."""
    return 1 if kind == "hccs" else None
