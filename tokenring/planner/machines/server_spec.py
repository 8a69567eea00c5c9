"""A server as data, and the graph of one or of many: `tokenring topology` reads both, the planner finds ways in them.

How to read contention from such a graph. An edge is a resource with `bandwidth_gbs` in each direction, which all
transfers that pass it share; one without bandwidth (the inside of a CPU) limits nothing. A transfer takes

- an accelerators' own link between its two ends, or their two links to a common switch (the switch itself blocks
  nothing), where there are any;
- else the path along the edges of kind `pcie` and `sys` from `parent` to `parent`: slot, uplink of a PCIe switch,
  host bridge, NUMA node, the link between NUMA nodes, and down again. Who shares an uplink shares its edge;
- to another host, the path to a NIC, its edge of kind `network` to the switch `network`, and the same from there.
  A NIC that is on the accelerator hangs from it; else it hangs from the PCIe tree. `nics_of` says whose NIC is which.

Edges between two accelerators, or an accelerator and a NIC, of kind pix, pxb, phb, node, sys are no resources: they
name the path that the tree has, as vendors' tools do, and bear what one transfer alone would get of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

from tokenring.planner.machines.sourced import Figure
from tokenring.topology.model.facts import PCIE_PATHS, Device, DeviceKind, Facts, Link, changed, unordered
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.tree import pcie_links
from tokenring.topology.model.verdict import Verdict, classify
from tokenring.topology.ranks import Topology

NETWORK = "network"  # the switch between hosts: full bisection is assumed
ANY_HOST = "\0"  # stands for a host's name where no text has it


@dataclass(frozen=True)
class Links:
    """Accelerators' own links between pairs: (one, other, how many)."""

    kind: str
    gbs: Figure  # of one link
    pairs: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Switch:
    """A switch of accelerators, which each reaches by so many links. Several that act together are one."""

    name: str
    kind: str
    gbs: Figure  # of one link
    count: int


@dataclass(frozen=True)
class Level:
    """A level of the PCIe tree, top down: so many below each of the level above, and the edge up from each.

    Of NUMA nodes `up` is what joins two of them.
    """

    kind: DeviceKind
    each: int
    up: Figure


@dataclass(frozen=True)
class Nics:
    """NICs of a server: on the accelerators themselves (`level` None), or spread over a level of the PCIe tree."""

    count: int
    gbs: Figure
    level: int | None = None


@dataclass(frozen=True)
class Server:
    """A server. slot: of each accelerator and NIC into the PCIe tree. dies: accelerators in one package."""

    count: int
    prefix: str
    model: str
    vendor: str
    nics: Nics
    links: tuple[Links, ...] = ()
    switch: Switch | None = None
    levels: tuple[Level, ...] = ()
    slot: Figure | None = None
    dies: int = 1

    def figures(self) -> Iterator[tuple[str, Figure]]:
        """Yield every figure with what it is of, in GB/s one way."""
        for each in self.links:
            yield f"{each.kind} link", each.gbs
        if self.switch is not None:
            yield f"{self.switch.kind} link to {self.switch.name}", self.switch.gbs
        if self.slot is not None:
            yield "PCIe slot", self.slot
        for above, level in zip((None, *self.levels), self.levels, strict=False):
            if level.up.value is not None and not (above is None and level.each == 1):
                yield _edge_name(above, level), level.up
        yield "NIC", self.nics.gbs


def _edge_name(above: Level | None, level: Level) -> str:
    return "between NUMA nodes" if above is None else f"{level.kind} to {above.kind}"


def full_mesh(members: range, count: int = 1) -> tuple[tuple[int, int, int], ...]:
    """Return the links of a mesh: (a, b, count) of every two members."""
    return tuple((a, b, count) for a, b in combinations(members, 2))


# ---------- one server


def facts(server: Server, host: str | None = None, networked: bool = False) -> Facts:
    """Return what a probe of all links of one server would have found."""
    tree = _tree(server)
    ends = [*_accelerators(server, tree), *_nics(server, tree)]
    devices = [*tree, *ends]
    if host is not None:
        devices = [replace(each, host=host) for each in devices]
    links = [*_own_links(server), *_tree_links(server, devices), *_nic_links(server)]
    links += _ways(server, devices, links)
    if server.switch is not None:
        devices.append(Device(server.switch.name, "switch", host=host))
    if networked:
        devices.append(Device(NETWORK, "switch", name=NETWORK))
        gbs = server.nics.gbs.value
        links += [Link(each.id, NETWORK, "network", bandwidth_gbs=gbs) for each in ends if each.kind == "nic"]
    return Facts("links", tuple(devices), tuple(links))


def _tree(server: Server) -> list[Device]:
    found: list[Device] = []
    above: list[Device] = []
    for level in server.levels:
        here: list[Device] = []
        first = sum(each.kind == level.kind for each in found)
        for index in range(level.each * max(len(above), 1)):
            parent = above[index // level.each].id if above else None
            number = index if level.kind == "numa" else None
            here.append(Device(f"{level.kind}{first + index}", level.kind, numa_node=number, parent=parent))
        found += here
        above = here
    return found


def _level(server: Server, tree: list[Device], level: int) -> list[Device]:
    """Return the devices of one level of the tree."""
    sizes = [0]
    for each in server.levels:
        sizes.append(each.each * (sizes[-1] or 1))
    start = sum(sizes[: level + 1])
    return tree[start : start + sizes[level + 1]]


def _numa(device: Device | None, tree: list[Device]) -> int | None:
    by_id = {each.id: each for each in tree}
    while device is not None:
        if device.numa_node is not None:
            return device.numa_node
        device = by_id.get(device.parent) if device.parent is not None else None
    return None


def _accelerators(server: Server, tree: list[Device]) -> Iterator[Device]:
    above = _level(server, tree, len(server.levels) - 1) if server.levels else []
    for index in range(server.count):
        parent = above[index * len(above) // server.count] if above else None
        die, package = (index % server.dies, str(index // server.dies)) if server.dies > 1 else (None, None)
        yield Device(
            f"{server.prefix}{index}",
            "accelerator",
            index=index,
            die=die,
            package=package,
            model=server.model,
            vendor=server.vendor,
            numa_node=_numa(parent, tree),
            parent=parent.id if parent else None,
        )


def _nics(server: Server, tree: list[Device]) -> Iterator[Device]:
    nics = server.nics
    above = [f"{server.prefix}{index}" for index in range(server.count)]
    if nics.level is not None:
        above = [each.id for each in _level(server, tree, nics.level)]
    for index in range(nics.count):
        parent = above[index * len(above) // nics.count]
        yield Device(f"NIC{index}", "nic", name=f"NIC{index}", gbs=nics.gbs.value, parent=parent)


def _own_links(server: Server) -> list[Link]:
    found = []
    for links in server.links:
        for a, b, count in links.pairs:
            gbs = links.gbs.times(count).value
            found.append(Link(f"{server.prefix}{a}", f"{server.prefix}{b}", links.kind, count, gbs))
    if (switch := server.switch) is not None:
        gbs = switch.gbs.times(switch.count).value
        for index in range(server.count):
            found.append(Link(f"{server.prefix}{index}", switch.name, switch.kind, switch.count, gbs, switched=True))
    return found


def _tree_links(server: Server, devices: list[Device]) -> list[Link]:
    """Return the edges of the PCIe tree, and between its NUMA nodes."""
    up = _up(server, devices)
    found = [Link(end, parent, "pcie", bandwidth_gbs=gbs) for end, (parent, gbs) in up.items()]
    numa = [each.id for each in devices if each.kind == "numa"]
    return found + [Link(a, b, "sys", bandwidth_gbs=server.levels[0].up.value) for a, b in combinations(numa, 2)]


def _up(server: Server, devices: list[Device]) -> dict[str, tuple[str, float | None]]:
    """Return, of everything in the PCIe tree but the NUMA nodes, what is above it and the GB/s of the edge there."""
    widths: dict[str, float | None] = {}
    for number, level in enumerate(server.levels):
        for each in _level(server, [each for each in devices if each.kind not in ("accelerator", "nic")], number):
            widths[each.id] = level.up.value
    slot = server.slot.value if server.slot is not None else None
    own = {each.id for each in devices if each.kind == "accelerator"}
    return {
        each.id: (each.parent, widths.get(each.id, slot))
        for each in devices
        if each.parent is not None and each.parent not in own
    }


def _nic_links(server: Server) -> list[Link]:
    """Return the links of NICs that are on the accelerator: the port is the limit, nothing else."""
    if server.nics.level is not None:
        return []
    gbs = server.nics.gbs.value
    owners = [f"{server.prefix}{index * server.count // server.nics.count}" for index in range(server.nics.count)]
    return [Link(owner, f"NIC{index}", "network", bandwidth_gbs=gbs) for index, owner in enumerate(owners)]


def _ways(server: Server, devices: list[Device], links: list[Link]) -> list[Link]:
    """Return the ways through PCIe of accelerators without links of their own, and to NICs, by their names."""
    kinds = {each.id: each.kind for each in devices}
    linked = {unordered(each.a, each.b) for each in links}
    nested = any(each.kind == "pcie-switch" and kinds.get(each.parent or "") == "pcie-switch" for each in devices)
    in_tree = [each for each in devices if each.parent is None or kinds[each.parent] != "accelerator"]
    found = []
    for way in pcie_links(in_tree, host_bridges=not nested):
        both = (kinds[way.a], kinds[way.b])
        if unordered(way.a, way.b) in linked or both == ("nic", "nic"):
            continue
        if both == ("accelerator", "accelerator") and server.switch is not None:
            continue
        found.append(replace(way, bandwidth_gbs=_narrowest(server, devices, way.a, way.b)))
    return found


def _narrowest(server: Server, devices: list[Device], a: str, b: str) -> float | None:
    """Return the GB/s that one transfer alone gets on its way through the tree."""
    up = _up(server, devices)
    ways = [dict(_climb(up, end)) for end in (a, b)]
    shared = ways[0].keys() & ways[1].keys()
    widths = [gbs for way in ways for node, gbs in way.items() if node not in shared]
    tops = {list(way)[-1] for way in ways}
    if len(tops) > 1:
        widths.append(server.levels[0].up.value)
    return min((gbs for gbs in widths if gbs is not None), default=None)


def _climb(up: dict[str, tuple[str, float | None]], end: str) -> Iterator[tuple[str, float | None]]:
    """Yield each thing from an end upwards, with the GB/s of its edge up; the top has none."""
    at: str | None = end
    while at is not None:
        above, gbs = up.get(at, (None, None))
        yield at, gbs
        at = above


# ---------- many servers


def cluster_facts(server: Server, hosts: int) -> list[Facts]:
    """Return what probes of all hosts would have found."""
    if hosts == 1:
        return [facts(server)]
    return [facts(server, host, networked=True) for host in host_names(hosts)]


def host_names(hosts: int) -> list[str]:
    """Return the names of so many hosts: node0, node1, ..."""
    return [f"node{number}" for number in range(hosts)]


def topology(server: Server, hosts: int = 1) -> Topology:
    """Return the topology of one rank on each accelerator, host by host.

    The same as merging and classifying the facts of all hosts, in time proportional to these.
    """
    one = merge([facts(server)])
    if hosts == 1:
        return Topology.of(one)
    plain = merge([facts(server, networked=True)])
    names = host_names(hosts)
    parts = [_named(plain, name) for name in names]
    network = [each for each in plain.devices if each.id == NETWORK]
    first, *rest = [tuple(each for each in part.devices if each.id != NETWORK) for part in parts]
    devices = (*first, *network, *(each for part in rest for each in part))
    edges = tuple(edge for part in parts for edge in part.edges)
    graph = Graph(devices, edges, seen=tuple(seen for part in parts for seen in part.seen))
    of_any = classify(_named(one, ANY_HOST))
    inside = tuple((name, _on_host(of_any, name)) for name in names)
    verdict = Verdict("multi-node", "high", (f"{hosts} hosts",), inside=inside)
    ids = tuple(f"{name}:{each.id}" for name in names for each in one.accelerators)
    of = tuple(name for name in names for _ in one.accelerators)
    return Topology("multi node", len(ids), _pairs(Topology.of(one), hosts), ids, of, graph, verdict)


def _named(graph: Graph, host: str) -> Graph:
    """Return the graph of one host among several."""
    names = {each.id: each.id if each.id == NETWORK else f"{host}:{each.id}" for each in graph.devices}
    devices = tuple(
        each
        if each.id == NETWORK
        else changed(each, id=names[each.id], host=host, parent=names[each.parent] if each.parent else None)
        for each in graph.devices
    )
    edges = tuple(changed(edge, a=names[edge.a], b=names[edge.b]) for edge in graph.edges)
    seen = tuple((coverage, tuple(names[each] for each in shown)) for coverage, shown in graph.seen)
    return changed(graph, devices=devices, edges=edges, seen=seen)


def _on_host(verdict: Verdict, host: str) -> Verdict:
    """Return a verdict on ANY_HOST as one on this host."""

    def named(texts: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(text.replace(f"{ANY_HOST}:", f"{host}:") for text in texts)

    islands = tuple(changed(each, members=named(each.members)) for each in verdict.islands)
    evidence, warnings = named(verdict.evidence), named(verdict.warnings)
    return changed(verdict, evidence=evidence, islands=islands, warnings=warnings)


def _pairs(one: Topology, hosts: int) -> dict[tuple[int, int], float | None]:
    """Return the pairs of ranks with a known link, those inside hosts, and their GB/s."""
    size = one.world_size
    return {
        (host * size + a, host * size + b): gbs for host in range(hosts) for (a, b), gbs in one.bandwidth_gbs.items()
    }


def nics_of(graph: Graph) -> dict[str, tuple[str, ...]]:
    """Return, of each accelerator, the NICs that it sends through: on it, else at the end of the shortest way.

    Accelerators with the same nearest NICs divide them in order, and share where there are fewer NICs.
    """
    nearest = {end: tuple(ways[min(ways)]) for end, ways in _ways_to_nics(graph).items()}
    sharers: dict[tuple[str, ...], list[str]] = {}
    for device in graph.accelerators:
        if device.id in nearest:
            sharers.setdefault(nearest[device.id], []).append(device.id)
    found = {}
    for nics, ends in sharers.items():
        for place, end in enumerate(ends):
            first = place * len(nics) // len(ends)
            found[end] = nics[first : max((place + 1) * len(nics) // len(ends), first + 1)]
    return found


def _ways_to_nics(graph: Graph) -> Mapping[str, dict[int, list[str]]]:
    """Return, of each accelerator, the NICs by how far they are."""
    kinds = {each.id: each.kind for each in graph.devices}
    order = {kind: far for far, kind in enumerate((NETWORK, *PCIE_PATHS))}
    found: dict[str, dict[int, list[str]]] = {}
    for edge in graph.edges:
        for end, other in ((edge.a, edge.b), (edge.b, edge.a)):
            if kinds[end] == "accelerator" and kinds[other] == "nic" and edge.kind in order:
                found.setdefault(end, {}).setdefault(order[edge.kind], []).append(other)
    return found
