"""Devices and the links between them, merged from all that sources said."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tokenring.topology.model.bandwidth import published
from tokenring.topology.model.facts import (
    PEER_KINDS,
    Coverage,
    Device,
    Facts,
    Link,
    Measurement,
    Note,
    between_others,
    unordered,
)
from tokenring.topology.model.shapes import neighbours, parts

COVERAGES: tuple[Coverage, ...] = ("links", "pcie", "devices")  # what shows most first
PEERS = frozenset(PEER_KINDS)
BandwidthSource = Literal["measured", "published", "label"]
_Ends = tuple[str, str, str]  # two devices in order of their names, and the kind of link
_Named = tuple[str, str, Link]  # two devices as the source orders them, and what it says


@dataclass(frozen=True)
class Edge:
    """A link of the merged graph.

    `source` says where `bandwidth_gbs` (one way, all `count` links) comes from: measured, published for the
    model, or the source's label, which may leave it unknown.
    """

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
        """True for a link of accelerators' own."""
        return self.kind in PEERS


@dataclass(frozen=True)
class Graph:
    """A graph that has every device once and every link once, whichever sources named them, in the sources' order."""

    devices: tuple[Device, ...] = ()
    edges: tuple[Edge, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    notes: tuple[Note, ...] = ()
    seen: tuple[tuple[Coverage, tuple[str, ...]], ...] = ()  # of each source: what it would show, of which accelerators
    noted: tuple[frozenset[str], ...] = ()  # of each note: the hosts of the source that has it; else all

    @property
    def shown(self) -> dict[str, Coverage]:
        """The most that a source which names an accelerator would have shown, by accelerator."""
        least = len(COVERAGES) - 1
        best = {device.id: least for device in self.accelerators}
        for coverage, names in self.seen:
            best.update({name: min(best[name], COVERAGES.index(coverage)) for name in names if name in best})
        return {name: COVERAGES[at] for name, at in best.items()}

    @property
    def coverage(self) -> Coverage:
        """The least of what sources would have shown of an accelerator."""
        return max(self.shown.values(), key=COVERAGES.index, default=COVERAGES[-1])

    @property
    def accelerators(self) -> tuple[Device, ...]:
        """The devices that are accelerators."""
        return self.of_kind("accelerator")

    @property
    def hosts(self) -> tuple[str, ...]:
        """The hosts of the accelerators, each once; "" for a host without a name."""
        return tuple(dict.fromkeys(device.host or "" for device in self.accelerators))

    def of_kind(self, kind: str) -> tuple[Device, ...]:
        """Return the devices of a kind."""
        return tuple(device for device in self.devices if device.kind == kind)

    def on_host(self, host: str) -> Graph:
        """Return the part of one host."""
        devices = tuple(device for device in self.devices if (device.host or "") == host)
        known = {device.id for device in devices}
        edges = tuple(edge for edge in self.edges if edge.a in known and edge.b in known)
        noted = (*self.noted, *[frozenset[str]()] * (len(self.notes) - len(self.noted)))
        notes = tuple(note for note, hosts in zip(self.notes, noted, strict=True) if not hosts or host in hosts)
        return replace(self, devices=devices, edges=edges, notes=notes, noted=())

    def between(self) -> dict[tuple[str, str], Edge]:
        """Return the best edge of each pair that has one: an accelerator's own link before PCIe."""
        best: dict[tuple[str, str], Edge] = {}
        for edge in self.edges:
            a, b = edge.a, edge.b
            pair = (a, b) if a <= b else (b, a)
            if best.setdefault(pair, edge) is not edge and edge.kind in PEERS and best[pair].kind not in PEERS:
                best[pair] = edge
        return best

    def fabric(self) -> SwitchFabric:
        """Return the links that lead to and through switches."""
        switches = {device.id for device in self.of_kind("switch")}
        ports: dict[str, dict[str, Edge]] = {}
        joined = []
        for edge in self.edges:
            if edge.is_peer and (edge.a in switches or edge.b in switches):
                joined.append((edge.a, edge.b))
                for end, other in ((edge.a, edge.b), (edge.b, edge.a)):
                    if other in switches and end not in switches:
                        ports.setdefault(end, {})[other] = edge
        groups = parts(neighbours([device.id for device in self.devices], joined))
        return SwitchFabric(ports, {name: number for number, group in enumerate(groups) for name in group})


@dataclass(frozen=True)
class SwitchFabric:
    """The links of devices to switches.

    ports: of each device its links to switches, by switch. part: devices and switches that hang together have
    one number.
    """

    ports: dict[str, dict[str, Edge]]
    part: dict[str, int]

    def between(self, a: str, b: str) -> Edge | None:
        """Return the edge of two devices through switches, as wide as the narrower end; None if there is none.

        Both are linked to these switches, or to switches that are linked.
        """
        if a not in self.ports or b not in self.ports or self.part[a] != self.part[b]:
            return None
        shared = [switch for switch in self.ports[a] if switch in self.ports[b]]
        ends = [[edge for at, edge in self.ports[end].items() if at in shared or not shared] for end in (a, b)]
        widths = [total_gbs(edges) for edges in ends]
        gbs = None if None in widths else min(width for width in widths if width is not None)
        return Edge(a, b, ends[0][0].kind, None, gbs, switched=True)


def total_gbs(edges: Iterable[Edge]) -> float | None:
    """Return the GB/s of all edges together; None if one is not known."""
    widths = [edge.bandwidth_gbs for edge in edges]
    return None if None in widths else sum(width for width in widths if width is not None)


def merge(facts: Iterable[Facts]) -> Graph:
    """Merge several sources, each a file of its own, into one graph; on_machines says which host a file is of."""
    placed = on_machines([(each.origin.file if each.origin else None, [each]) for each in facts])
    named = [_on_host(each, each.origin.host, None) if each.origin and each.origin.host else each for each in placed]
    sources = sorted(named, key=_names_both_ways, reverse=True)
    devices: list[Device] = []
    links: dict[_Ends, _Named] = {}
    measurements: list[Measurement] = []
    notes: list[Note] = []
    noted: list[frozenset[str]] = []
    seen: list[tuple[Coverage, tuple[str, ...]]] = []
    several = len({device.host for source in sources for device in source.accelerators}) > 1
    several = several or len({device.host for source in sources for device in source.devices if device.host}) > 1
    for source in sources:
        names = _take_devices(source, devices, several)
        _take_links(source.links, names, links)
        measurements += [replace(each, a=names[each.a], b=names[each.b]) for each in source.measurements]
        notes += source.notes
        hosts = frozenset(device.host or "" for device in source.accelerators)
        noted += [hosts] * len(source.notes)
        seen.append((source.coverage, tuple(names[device.id] for device in source.accelerators)))
    edges = tuple(_edges(links, devices, measurements))
    return Graph(tuple(devices), edges, tuple(measurements), tuple(notes), tuple(seen), tuple(noted))


def on_machines(files: Sequence[tuple[str | None, Sequence[Facts]]]) -> list[Facts]:
    """Name the hosts of files that do not name theirs.

    The first of a format is of the first machine, the second of the second. A machine is called after its first
    file; of further ones a note says whose they are taken for.
    """
    seen: dict[str, int] = {}
    numbers = []
    for _, facts in files:
        formats = [each.origin.format for each in facts if each.origin and not _says_its_host(each)]
        numbers.append(max((seen.get(each, 0) for each in formats), default=0))
        seen |= dict.fromkeys(formats, numbers[-1] + 1)
    several = any(numbers)
    hosts: dict[int, str] = {}
    placed: list[Facts] = []
    for (file, facts), number in zip(files, numbers, strict=True):
        if several and not all(map(_says_its_host, facts)):
            text = f"{file}: taken for the machine of {hosts[number]}" if number in hosts else None
            name = file if file and file not in hosts.values() else f"host{number}"
            facts = [_on_host(each, hosts.setdefault(number, name), text) for each in facts]
        placed += facts
    return placed


def _says_its_host(source: Facts) -> bool:
    return bool(source.origin and source.origin.host) or any(device.host for device in source.accelerators)


def _on_host(source: Facts, host: str, note: str | None) -> Facts:
    origin = replace(source.origin, host=source.origin.host or host) if source.origin else None
    devices = tuple(replace(each, host=each.host or host) for each in source.devices)
    notes = (*source.notes, Note(note)) if note else source.notes
    return replace(source, devices=devices, notes=notes, origin=origin)


def _names_both_ways(source: Facts) -> bool:
    """Return whether a source says which index has which bus id: it goes first, as others know devices by one."""
    return any(device.index is not None and device.bus_id is not None for device in source.accelerators)


def _take_devices(source: Facts, devices: list[Device], several: bool) -> dict[str, str]:
    """Add a source's devices, or what it says about those known; return its ids' names in the graph."""
    names: dict[str, str] = {}
    taken: set[int] = set()
    before = len(devices)
    used = {each.id for each in devices}
    for device in source.devices:
        same = [i for i in range(before) if i not in taken and _same(devices[i], device)]
        at = next((i for i in same if _tail(devices[i]) == _tail(device)), same[0] if same else None)
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
    """Return whether two sources speak of one device: bus id, else physical id, else index or name."""
    if a.kind != b.kind or (a.host and b.host and a.host != b.host):
        return False
    if a.vendor and b.vendor and a.vendor != b.vendor:  # each vendor's tool counts from 0
        return False
    if a.bus_id and b.bus_id and a.die == b.die:
        return a.bus_id == b.bus_id
    for one, other in ((a.phy_id, b.phy_id), (a.index, b.index), (a.name, b.name)):
        if one is not None and other is not None:
            return one == other
    return False


def _tail(device: Device) -> str:
    """Return a device's own name without its host's: parts of one GPU share a bus id."""
    return device.id.rpartition(":")[2]


def _completed(known: Device, more: Device) -> Device:
    """Return a device with what the first source left open, from the second."""
    return replace(known, **{k: v for k, v in vars(more).items() if getattr(known, k) is None and v is not None})


def _take_links(more: Iterable[Link], names: Mapping[str, str], links: dict[_Ends, _Named]) -> None:
    """Add a source's links, or what it says about those that are known."""
    for link in more:
        a, b = names.get(link.a), names.get(link.b)
        if a is None or b is None or link.state == "down":
            continue
        key = (a, b, link.kind) if a <= b else (b, a, link.kind)
        if (known := links.setdefault(key, (a, b, link)))[2] is not link:
            links[key] = (*known[:2], _completed_link(known[2], link))


def _completed_link(known: Link, more: Link) -> Link:
    """Return a link with what the first source left open, from the second."""
    count = more.count if known.count is None else known.count
    bandwidth_gbs = more.bandwidth_gbs if known.bandwidth_gbs is None else known.bandwidth_gbs
    return replace(known, count=count, bandwidth_gbs=bandwidth_gbs, switched=known.switched or more.switched)


def _edges(
    links: Mapping[_Ends, _Named], devices: Iterable[Device], measurements: Iterable[Measurement]
) -> Iterable[Edge]:
    """Return links with their bandwidth: what was measured, else what is known of links and devices like these.

    An edge is made for each way to be linked; those of a large matrix differ in their ends alone.
    """
    by_id = {device.id: device for device in devices}
    like = {name: (device.kind, device.model, device.arch, device.gbs) for name, device in by_id.items()}
    numbers = {each: number for number, each in enumerate(dict.fromkeys(like.values()))}
    alike = {name: numbers[each] for name, each in like.items()}
    measured = _measured(measurements)
    made: dict[tuple[object, ...], Edge] = {}

    def edge_of(a: str, b: str, link: Link) -> Edge:
        kind = (link.kind, link.count, link.bandwidth_gbs, link.switched, link.label, alike[a], alike[b])
        if (edge := made.get(kind)) is None:
            edge = made[kind] = _with_bandwidth(Edge("", "", *kind[:3], "label", *kind[3:5]), by_id[a], by_id[b])
        gbs = measured.get(unordered(a, b)) if measured else None
        return edge if gbs is None else replace(edge, bandwidth_gbs=gbs, source="measured")

    return between_others((edge_of(a, b, link), a, b) for a, b, link in links.values())


def _measured(measurements: Iterable[Measurement]) -> dict[tuple[str, str], float]:
    """Return the GB/s of each measured pair: the least of one way, else half of what both ways carried at once."""
    one: dict[tuple[str, str], float] = {}
    half: dict[tuple[str, str], float] = {}
    for each in measurements:
        pair = unordered(each.a, each.b)
        if each.gbs is not None:
            one[pair] = min(each.gbs, one.get(pair, each.gbs))
        if each.both_gbs is not None:
            half[pair] = min(each.both_gbs / 2, half.get(pair, each.both_gbs / 2))
    return half | one


def _with_bandwidth(edge: Edge, a: Device, b: Device) -> Edge:
    """Give a bandwidth to an edge between devices like a and b, of which nothing was measured.

    A published figure comes before the label's.
    """
    if not edge.is_peer:  # nobody publishes what a way through PCIe has
        return edge
    entry = published(edge.kind, a) or published(edge.kind, b)
    if entry is None:
        port = a.gbs if a.kind == "accelerator" else None
        if edge.bandwidth_gbs is not None or edge.count is None or port is None:
            return edge
        return replace(edge, bandwidth_gbs=round(edge.count * port, 3))
    count = edge.count if edge.count is not None else entry.links if edge.switched else _one(edge.kind)
    return edge if count is None else replace(edge, bandwidth_gbs=round(count * entry.link_gbs, 3), source="published")


def _one(kind: str) -> int | None:
    """Return the links of a pair whose label does not count them: HCCS meshes have one, xGMI is not always one."""
    return 1 if kind == "hccs" else None
