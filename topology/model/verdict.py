"""The verdict on a graph: a class of a closed list, islands, the evidence, and how sure it is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from tokenring.topology.model.bandwidth import WHOLE_DEVICE, links_per_device, published
from tokenring.topology.model.facts import ASSUMED, PCIE_PATHS, Device, pairs, unordered
from tokenring.topology.model.graph import PEERS, Edge, Graph
from tokenring.topology.model.shapes import Neighbours, is_clique, is_cube_mesh, is_ring, neighbours, parts

Class = Literal[
    "single", "full-mesh", "cube-mesh", "switch", "islands", "ring", "partial-mesh",
    "pcie-bridge", "pcie-host", "pcie-numa", "pcie", "multi-node", "unknown",
]  # fmt: skip
Confidence = Literal["high", "medium", "low"]
FROM_A100_ON = 8  # NVLinks: devices with fewer may have some to CPUs, or not to every peer
PATH_CLASSES: dict[str, Class] = {
    "sys": "pcie-numa", "node": "pcie-host", "phb": "pcie-bridge", "pxb": "pcie-bridge", "pix": "pcie-bridge",
}  # fmt: skip


@dataclass(frozen=True)
class Island:
    """Accelerators that reach each other over links of their own, and the shape of these links."""

    members: tuple[str, ...]
    shape: Class


@dataclass(frozen=True)
class Verdict:
    """A verdict on a graph. `inside`: of a multi-node graph, the verdict on each host."""

    name: Class
    confidence: Confidence
    evidence: tuple[str, ...]
    islands: tuple[Island, ...] = ()
    warnings: tuple[str, ...] = ()
    inside: tuple[tuple[str, Verdict], ...] = ()


@dataclass(frozen=True)
class _Links:
    """The links of one host: pairs with a link of their own, those behind a common switch, and all edges by pair."""

    direct: dict[tuple[str, str], Edge]
    switched: frozenset[tuple[str, str]]
    edges: dict[tuple[str, str], Edge]
    around: Neighbours
    wider: Mapping[str, list[str]]  # switches that take links of the kind that a mesh has too: the level above it

    @cached_property
    def known(self) -> frozenset[tuple[str, str]]:
        """The pairs of which it is known what is between them."""
        above = (unordered(*pair) for attached in self.wider.values() for pair in pairs(attached))
        return frozenset(self.edges).union(self.switched, above)

    def within(self, group: tuple[str, ...]) -> dict[tuple[str, str], Edge]:
        """Return the direct links of a group's own pairs."""
        if len(group) == len(self.around):
            return self.direct
        inside = set(group)
        return {pair: edge for pair, edge in self.direct.items() if inside.issuperset(pair)}

    def unknown(self, names: tuple[str, ...]) -> list[tuple[str, str]]:
        """Return the pairs of these names of which nothing is known."""
        if len(names) == len(self.around) and len(self.edges) == len(names) * (len(names) - 1) // 2:
            return []  # every pair has its edge
        known = self.known
        return [pair for pair in pairs(names) if pair not in known and pair[::-1] not in known]


def classify(graph: Graph) -> Verdict:
    """Classify a graph; it always gets a verdict: "unknown" with its reason at worst."""
    return _with_notes(_classify(graph), graph)


def _classify(graph: Graph) -> Verdict:
    if len(graph.hosts) > 1:
        parts = [(host, graph.on_host(host)) for host in graph.hosts]
        inside = tuple((host, _with_notes(_of_host(part), part)) for host, part in parts)
        return Verdict("multi-node", "high", (f"{len(graph.hosts)} hosts",), inside=inside)
    return _of_host(graph)


def _with_notes(verdict: Verdict, graph: Graph) -> Verdict:
    """Add notes for and against: a measurement's on its own shape, and what a dump lacks that was cut."""
    evidence = [str(note) for note in graph.notes if note.role == "evidence"]
    doubts = [str(note) for note in graph.notes if note.role == "doubt"]
    if verdict.name == "unknown" or not (evidence or doubts):  # unknown: all notes are its evidence
        return verdict
    confidence: Confidence = "medium" if doubts and verdict.confidence == "high" else verdict.confidence
    return replace(verdict, confidence=confidence, evidence=(*verdict.evidence, *evidence, *doubts))


def _of_host(graph: Graph) -> Verdict:
    names = tuple(device.id for device in graph.accelerators)
    if not names:
        return _unknown("no accelerator is named", graph)
    if len(names) == 1 and not any(edge.switched for edge in graph.edges):
        return _single(graph)
    links = _links(graph, names)
    if not links.direct and not links.switched:
        verdict = _by_ports(graph, names) or _by_pcie(graph, names, links)
    else:
        verdict = _by_links(graph, names, links)
    hidden = [name for name, coverage in graph.shown.items() if coverage == "pcie"]
    if len(hidden) in (0, len(names)):
        return verdict
    text = f"{len(hidden)} of {len(names)} accelerators are in the PCI tree only, and no tool names them (a container?)"
    return replace(verdict, confidence="low", evidence=(*verdict.evidence, f"{text}: links of theirs are invisible"))


def _single(graph: Graph) -> Verdict:
    """Return the verdict on one accelerator: a list of devices that was cut after the first looks like this."""
    if graph.coverage == "links":
        return Verdict("single", "high", ("one accelerator",))
    return Verdict("single", "medium", ("one accelerator is listed, and nothing says that the list is whole",))


def _unknown(reason: str, graph: Graph) -> Verdict:
    return Verdict("unknown", "low", (reason, *(str(note) for note in graph.notes)))


def _links(graph: Graph, names: tuple[str, ...]) -> _Links:
    inside = set(names)
    edges = graph.between()
    if len(graph.devices) > len(names):
        edges = {pair: edge for pair, edge in edges.items() if inside.issuperset(pair)}
    peers = edges
    if not {edge.kind for edge in edges.values()} <= PEERS:
        peers = {pair: edge for pair, edge in edges.items() if edge.kind in PEERS}
    switched = {pair for pair, edge in peers.items() if edge.switched}
    direct = {pair: edge for pair, edge in peers.items() if not edge.switched} if switched else peers
    wider: dict[str, list[str]] = {}
    fabric: list[tuple[str, str]] = []
    meshed = {edge.kind for edge in direct.values()}
    switches = dict.fromkeys(device.id for device in graph.of_kind("switch"))
    for edge in graph.edges if switches else ():
        if edge.kind == "uplink":  # many share it: what it joins are islands
            continue
        for end, other in ((edge.a, edge.b), (edge.b, edge.a)):
            if end in switches and (other in inside or other in switches):
                if edge.kind in meshed:
                    wider.setdefault(end, []).append(other)
                else:
                    fabric.append((end, other))
    for part in parts(neighbours([*switches, *names], fabric)):  # switches that are linked are one
        if len(part) > 1:
            switched |= {unordered(*pair) for pair in pairs(end for end in part if end in inside)}
    return _Links(direct, frozenset(switched), edges, neighbours(names, [*direct, *switched]), wider)


def _by_ports(graph: Graph, names: tuple[str, ...]) -> Verdict | None:
    """Tell a switch by the number of links, where all are known to be up and none where it leads.

    It is a switch if there are as many as no mesh of these devices can have; None where this says nothing.
    """
    ports = {device.ports for device in graph.accelerators}
    count = max((number for number in ports if number), default=0)
    if graph.coverage == "links" or not count or len(names) < 2:
        return None
    entry = published("nvlink", graph.accelerators[0])
    whole = entry is not None and entry.links >= FROM_A100_ON
    if len(ports) == 1 and whole and count > len(names) and count % (len(names) - 1):
        why = f"each device has {count} links up, which {len(names) - 1} peers cannot share evenly"
        return Verdict("switch", "medium", (why,), (Island(names, "switch"),))
    return _unknown(f"devices have up to {count} links up, and where they lead is not said", graph)


def _by_pcie(graph: Graph, names: tuple[str, ...], links: _Links) -> Verdict:
    """Classify a host without links of its own: by the longest way between two accelerators."""
    if {edge.kind for edge in links.edges.values()} == {"path"}:
        return _unknown("no shape fits what was measured", graph)
    if graph.coverage == "devices":
        return _unknown("the source leaves the links between accelerators out", graph)
    ways = Counter(edge.kind for edge in links.edges.values())
    unknown = links.unknown(names)
    seen = ", ".join(f"{_pairs(number)} {kind.upper()}" for kind, number in ways.most_common())
    evidence = [seen or "no pair has a known way"]
    if graph.coverage == "pcie":
        evidence.append("the source shows PCIe only: faster links may exist")
    confidence: Confidence = "high" if graph.coverage == "links" and not unknown else "low"
    worst = next((kind for kind in reversed(PCIE_PATHS) if kind in ways), None)
    if worst == "sys" or (worst is not None and not unknown and "pcie" not in ways):
        return Verdict(PATH_CLASSES[worst], confidence, tuple(evidence))
    if ways.get("pcie") and not unknown:
        return Verdict("pcie", confidence, tuple(evidence))
    return _unknown(f"{len(unknown)} of {len(pairs(names))} pairs have no known way; {evidence[0]}", graph)


def _by_links(graph: Graph, names: tuple[str, ...], links: _Links) -> Verdict:
    groups = parts(links.around)
    islands = tuple(Island(group, _shape(group, links, graph)) for group in groups if len(group) > 1)
    alone = [group[0] for group in groups if len(group) == 1]
    if len(islands) == 1 and not alone:
        return _whole(graph, islands[0], links)
    if len(islands) == 1 and len(alone) == 1 and islands[0].shape == "switch":
        verdict = _whole(graph, islands[0], links)
        return replace(verdict, warnings=(*verdict.warnings, f"{alone[0]} is not linked to the switch: degraded"))
    unknown = links.unknown(names)
    if graph.coverage == "devices" and len(unknown) == len(pairs(names)) - len({*links.direct, *links.switched}):
        return _unknown(f"{_shapes(islands, alone)}, and {len(unknown)} pairs that the source does not speak of", graph)
    between = Counter(edge.kind.upper() for edge in links.edges.values() if not edge.is_peer)
    joined = f"joined by {', '.join([*list(links.wider)[:4], *between])}" if between or links.wider else ""
    if any(edge.kind == "uplink" for edge in graph.edges):
        joined = "joined by uplinks that the members of an island share"
    joined = joined or "nothing is known of what joins them"
    evidence = [f"{_shapes(islands, alone)}; {joined}"]
    if unknown:
        evidence.append(f"without a known way: {_pairs(len(unknown))}")
    return Verdict("islands", "high" if not unknown else "medium", tuple(evidence), islands)


def _pairs(count: int) -> str:
    return f"{count} pair{'' if count == 1 else 's'}"


def _shapes(islands: tuple[Island, ...], alone: list[str]) -> str:
    words = Counter(f"{island.shape} of {len(island.members)}" for island in islands)
    text = ", ".join(f"{number} × {word}" for word, number in words.items())
    return text + (f", {len(alone)} alone" if alone else "")


def _whole(graph: Graph, island: Island, links: _Links) -> Verdict:
    unknown = links.unknown(island.members)
    if unknown and graph.coverage == "devices" and island.shape != "switch":
        return _unknown(f"{len(unknown)} of {len(pairs(island.members))} pairs are not known", graph)
    evidence = [_why(graph, island, links)]
    if unknown:
        evidence.append(f"not in the source: {_pairs(len(unknown))}")
    if links.wider:
        evidence.append(f"a switch is there besides, the level above: {', '.join(list(links.wider)[:4])}")
    assumed = island.shape == "switch" and any(edge.label == ASSUMED for edge in graph.edges)
    confidence: Confidence = "medium" if unknown or assumed else "high"
    return Verdict(island.shape, confidence, tuple(evidence), (island,), _uneven(island, links))


def _shape(group: tuple[str, ...], links: _Links, graph: Graph) -> Class:
    inside = set(group)
    clique = is_clique(group, links.around)
    if any(inside.issuperset(pair) for pair in links.switched):
        unknown = {unordered(*pair) for pair in links.unknown(group)}
        apart = {unordered(*pair) for pair in pairs(group)} - {*links.direct, *links.switched} - unknown
        return "partial-mesh" if apart else "switch"
    if clique:
        needed, there = _budget(group, links, graph)
        return "switch" if there is not None and needed > there else "full-mesh"
    if _more_than_there_are(group, links, graph):
        return "switch"
    if is_cube_mesh(group, links.around):
        return "cube-mesh"
    return "ring" if is_ring(group, links.around) else "partial-mesh"


def _more_than_there_are(group: tuple[str, ...], links: _Links, graph: Graph) -> bool:
    """Return whether a device has more links than there can be, in a dump that was cut.

    That counts only if no pair is known to be apart.
    """
    known = links.within(group)
    if len(known) + len(links.unknown(group)) < len(pairs(group)):
        return False
    _, there = _budget(group, links, graph)
    taken: Counter[str] = Counter()
    for pair, edge in known.items():
        taken.update(dict.fromkeys(pair, edge.count or 0))  # parts of one device share links that nobody counts
    return there is not None and max(taken.values()) > there


def _budget(group: tuple[str, ...], links: _Links, graph: Graph) -> tuple[int, int | None]:
    """Return the links that a mesh of these pairs would take at each device, and how many a device has."""
    inside = set(group)
    edges = links.within(group).values()
    kind, most = next(edge.kind for edge in edges), max({edge.count or 1 for edge in edges})
    devices: list[Device] = [device for device in graph.accelerators if device.id in inside]
    there = links_per_device(kind, devices[0])
    if kind == "nvlink" and most in WHOLE_DEVICE and there is not None:
        there = min(there, most)
    return most * (len(group) - 1), there


def _why(graph: Graph, island: Island, links: _Links) -> str:
    inside = set(island.members)
    if any(inside.issuperset(pair) for pair in links.switched):
        return "links lead to a switch"
    if island.shape in ("full-mesh", "switch"):
        needed, there = _budget(island.members, links, graph)
        most = needed // (len(island.members) - 1)
        has = f"a device has {'an unknown number' if there is None else there}"
        said = "every pair that is not cut off" if links.unknown(island.members) else "every pair"
        return f"{said} is linked; {most} × {len(island.members) - 1} peers = {needed} links, {has}"
    degrees = sorted({len(links.around[name]) for name in island.members})
    return f"each device is linked to {' or '.join(map(str, degrees))} of {len(island.members) - 1} others"


def _uneven(island: Island, links: _Links) -> tuple[str, ...]:
    """Return a warning for a mesh whose pairs differ in width: a link may be down."""
    counts = {edge.count for edge in links.within(island.members).values()}
    if island.shape == "full-mesh" and len(counts - {None}) > 1:
        return (f"pairs have {' or '.join(str(c) for c in sorted(c for c in counts if c))} links",)
    return ()
