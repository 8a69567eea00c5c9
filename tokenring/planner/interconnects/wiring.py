"""Turn a topology into the interconnect of its ranks: ways and wires, with what a transfer really reaches.

What a topology leaves open is assumed, by the table below, and said in the notes of the interconnect, which a
plan's reason repeats: measure (`tokenring topology --measure`) to replace it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from itertools import pairwise
from operator import attrgetter
from types import MappingProxyType

from tokenring.errors import ConfigurationError
from tokenring.planner.interconnects.interconnect import Interconnect, LinkFabric, Way
from tokenring.planner.machines.server_spec import NETWORK, nics_of
from tokenring.topology.model.facts import PCIE_PATHS, Device, unordered
from tokenring.topology.model.graph import Edge, Graph
from tokenring.topology.model.verdict import Verdict
from tokenring.topology.ranks import Topology

# Of published rates, what a copy reaches where a topology does not know; by kind of link (sources: docs/presets.md).
REACHED: Mapping[str, float] = MappingProxyType(
    {"nvlink": 0.85, "hccs": 0.94, "sio": 0.89, "xgmi": 0.75, "pcie": 0.85, "sys": 1.0, "network": 0.97}
)
# GB/s one way where nothing is known. "link" is one of an accelerator's own, "sio" joins the dies of a package (both
# as on the presets), "memory" is what ranks of a CPU share.
ASSUMED: Mapping[str, float] = MappingProxyType(
    {"pcie": 25.0, "sys": 16.0, "link": 25.0, "sio": 199.0, "network": 12.5, "memory": 8.0}
)
TREE_KINDS = ("pcie", "sys", "uplink")
_OF_DEVICE = attrgetter(*(field.name for field in fields(Device) if field.name not in ("id", "host", "parent")))
_OF_EDGE = attrgetter(*(field.name for field in fields(Edge) if field.name not in ("a", "b")))
Ids = tuple[str | None, ...]
Pairs = frozenset[tuple[str, str]]  # of devices, in the order of their names


def interconnect_of(topology: Topology) -> Interconnect:
    """Return the interconnect of a topology's ranks. Raises ConfigurationError for a topology of no ranks."""
    if topology.world_size < 1:
        raise ConfigurationError("this topology has no ranks: name one with accelerators, or a preset")
    hosts = topology.hosts or ("",) * topology.world_size
    devices = topology.devices or (None,) * topology.world_size
    number = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    ranks_of: dict[str, list[int]] = {host: [] for host in number}
    places = []
    for rank, host in enumerate(hosts):
        places.append((number[host], len(ranks_of[host])))
        ranks_of[host].append(rank)
    maker = _Maker(topology, several=len(ranks_of) > 1)
    fabrics = tuple(
        maker.fabric(host, ranks, tuple(devices[rank] for rank in ranks)) for host, ranks in ranks_of.items()
    )
    return Interconnect(topology.name, fabrics, tuple(places), (*maker.notes, *maker.reached.notes()))


class _Reached:
    """Shares of published widths that a copy reaches, by kind of link; remembers of which kinds that was assumed."""

    def __init__(self, given: Mapping[str, float]) -> None:
        self._given = given
        self._assumed: dict[str, float] = {}

    def share(self, kind: str) -> float:
        if kind not in self._given and kind not in REACHED and kind in PCIE_PATHS:
            kind = "pcie"
        if kind in self._given:
            return self._given[kind]
        return self._assumed.setdefault(kind, REACHED.get(kind, 1.0))

    def notes(self) -> tuple[str, ...]:
        """Return one note for all kinds whose share was assumed; none if there is no such kind."""
        shares = ", ".join(f"{kind} {share:g}" for kind, share in sorted(self._assumed.items()))
        return (f"shares of published widths are assumed: {shares}",) if shares else ()


class _Maker:
    """The fabrics of all hosts; equal hosts share one."""

    def __init__(self, topology: Topology, several: bool) -> None:
        self.topology, self.several, self.reached = topology, several, _Reached(topology.reached)
        self.notes: dict[str, None] = {}
        self._parts = {} if topology.graph is None else _by_host(topology.graph)
        self._verdicts = dict(topology.verdict.inside) if topology.verdict is not None else {}
        self._known: dict[object, LinkFabric] = {}

    def fabric(self, host: str, ranks: list[int], ids: Ids) -> LinkFabric:
        if self.topology.graph is None or None in ids:
            return self._bare(ranks)
        part = self._parts.get(host, Graph())
        own = tuple(_tail(each or "", host) for each in ids)
        half = _half_duplex(self.topology.graph, host)
        key = (_but_for_names(part, host), own, half)
        if key not in self._known:
            part = _local(part, host)
            verdict = self._verdicts.get(host) or self.topology.verdict
            self._known[key] = _Host(part, own, half, verdict, self.reached, self.notes, host).fabric(self.several)
        return self._known[key]

    def _bare(self, ranks: list[int]) -> LinkFabric:
        """Return the fabric of ranks of which only bandwidths between pairs are known, or nothing."""
        gbs: dict[str, float] = {}
        ways: dict[tuple[int, int], Way] = {}
        for a, src in enumerate(ranks):
            for b, dst in enumerate(ranks):
                if a == b:
                    continue
                known = self.topology.bandwidth_gbs.get((src, dst))
                if known is not None:
                    ways[a, b] = (f"{a}>{b}",)
                    gbs[f"{a}>{b}"] = known
                else:
                    ways[a, b] = ("memory",)
                    gbs["memory"] = ASSUMED["memory"]
                    self.notes[f"between ranks of one machine {ASSUMED['memory']:g} GB/s in all are assumed"] = None
        return _networked(LinkFabric(len(ranks), ways, gbs), self.several, self.notes)


def _networked(fabric: LinkFabric, several: bool, notes: dict[str, None]) -> LinkFabric:
    """Return the fabric with one assumed NIC, where there are other hosts and no NIC is known."""
    if not several:
        return fabric
    notes[f"no NIC is known: one of {ASSUMED['network']:g} GB/s a host is assumed"] = None
    out, into = ((("nic>",),) * fabric.size, ((">nic",),) * fabric.size)
    return replace(
        fabric, gbs={**fabric.gbs, "nic>": ASSUMED["network"], ">nic": ASSUMED["network"]}, out=out, into=into
    )


class _Host:
    """One host's graph as ways between the ranks' devices."""

    def __init__(
        self, graph: Graph, ids: tuple[str, ...], half: Pairs, verdict: Verdict | None, reached: _Reached,
        notes: dict[str, None], host: str,
    ) -> None:  # fmt: skip
        self.graph, self.ids, self.reached, self.notes, self.host = graph, ids, reached, notes, host
        self.devices: dict[str, Device] = {device.id: device for device in graph.devices}
        self.between = graph.between()
        self.behind = _behind_switches(graph, verdict, host)
        self.measured = any(each.source == "measured" for each in graph.edges) and all(
            each.source == "measured" or each.kind in ("path", "network") for each in graph.edges
        )
        self.half = half if self.measured else frozenset()
        self.gbs: dict[str, float] = {}
        self.neighbours = self._neighbours()

    def fabric(self, several: bool) -> LinkFabric:
        ways = {
            (a, b): self._way(src, dst) for a, src in enumerate(self.ids) for b, dst in enumerate(self.ids) if a != b
        }
        out, into = self._to_network() if several else ((), ())
        made = LinkFabric(len(self.ids), ways, dict(self.gbs), out, into)
        return made if out or not several else _networked(made, several, self.notes)

    # ---------- inside

    def _way(self, src: str, dst: str) -> Way:
        if src == dst:
            return ()
        edge = self.between.get((src, dst) if src <= dst else (dst, src))
        if edge is not None and edge.is_peer:
            switch = self.behind.get(src)
            if edge.kind != "sio" and switch is not None and switch == self.behind.get(dst):
                return self._wire(f"{src}>", edge), self._wire(f">{dst}", edge)
            return (self._wire(self._link(src, dst), edge),)
        if not self.measured and (ports := self._ports(src, dst)):
            return ports
        if path := self._path(src, dst):
            return path
        return self._labelled(src, dst, edge)

    def _ports(self, src: str, dst: str) -> Way:
        """Return the way through switches that both are linked to, which together are one."""
        mine, other = (self._switches(end) for end in (src, dst))
        shared = mine.keys() & other.keys()
        if not shared:
            return ()
        for links, name in ((mine, f"{src}>"), (other, f">{dst}")):
            total = sum(self._gbs_of(links[switch]) for switch in sorted(shared))
            self.gbs[name] = max(self.gbs.get(name, 0.0), total)
        return f"{src}>", f">{dst}"

    def _switches(self, end: str) -> dict[str, Edge]:
        return {
            other: edge
            for other, edge in self.neighbours.get(end, {}).items()
            if self.devices[other].kind == "switch" and other != NETWORK
        }

    def _neighbours(self) -> dict[str, dict[str, Edge]]:
        """Return the edges that are resources: accelerators' links, the tree of PCIe, what was measured to lead out."""
        found: dict[str, dict[str, Edge]] = defaultdict(dict)
        for edge in self.graph.edges:
            ends = {self.devices[end].kind for end in (edge.a, edge.b) if end in self.devices}
            tree = edge.kind in TREE_KINDS and (self.measured or not ends <= {"accelerator", "nic"})
            tree = tree or (self.measured and edge.kind == "network")
            if edge.a in self.devices and edge.b in self.devices and (tree or edge.is_peer):
                found[edge.a][edge.b] = found[edge.b][edge.a] = edge
        return found

    def _path(self, src: str, dst: str) -> Way:
        """Return the shortest way over edges that are resources; through other ranks only where that was measured."""
        came: dict[str, str] = {src: src}
        queue = deque([src])
        while queue and dst not in came:
            here = queue.popleft()
            if here != src and self.devices[here].kind in ("accelerator", "nic") and not self.measured:
                continue
            for other in self.neighbours.get(here, {}):
                if other not in came:
                    came[other] = here
                    queue.append(other)
        if dst not in came:
            return ()
        nodes = [dst]
        while nodes[-1] != src:
            nodes.append(came[nodes[-1]])
        return tuple(self._wires_of(nodes[::-1]))

    def _wires_of(self, nodes: list[str]) -> Iterator[str]:
        for a, b in pairwise(nodes):
            edge = self.neighbours[a][b]
            if edge.bandwidth_gbs is not None or edge.is_peer:  # inside a CPU nothing limits
                yield self._wire(self._link(a, b), edge)

    def _link(self, a: str, b: str) -> str:
        """Return the name of the wire from one to the other; the same both ways where it is half duplex."""
        return "-".join(unordered(a, b)) if unordered(a, b) in self.half else f"{a}>{b}"

    def _labelled(self, src: str, dst: str, edge: Edge | None) -> Way:
        """Return the way where only its name is known: a slot each, and the link between NUMA nodes."""
        if edge is not None and edge.kind == "path":
            return self._shapeless(src, dst, edge)
        kind = edge.kind if edge is not None and edge.kind in PCIE_PATHS else "pcie"
        known = edge.bandwidth_gbs if edge is not None else None
        slot = ASSUMED["pcie"] if known is None else known * self._share(edge)
        if known is None:
            self.notes[f"PCIe has no known bandwidth: {ASSUMED['pcie']:g} GB/s a slot is assumed"] = None
        for wire in (f"{src}>pcie", f"pcie>{dst}"):
            self.gbs[wire] = max(self.gbs.get(wire, 0.0), slot)
        if kind != "sys":
            return f"{src}>pcie", f"pcie>{dst}"
        numa = [self.devices[end].numa_node for end in (src, dst)]
        if known is None:
            self.notes[f"between NUMA nodes {ASSUMED['sys']:g} GB/s are assumed"] = None
        crossing = "sys" if None in numa else f"numa{numa[0]}>numa{numa[1]}"
        self.gbs[crossing] = max(self.gbs.get(crossing, 0.0), ASSUMED["sys"] if known is None else slot)
        return f"{src}>pcie", crossing, f"pcie>{dst}"

    def _shapeless(self, src: str, dst: str, edge: Edge) -> Way:
        """Return the way of a pair that fits no shape: what it reached alone when measured, through one port a rank."""
        if edge.bandwidth_gbs is None:
            self.notes[f"between ranks of one machine {ASSUMED['memory']:g} GB/s in all are assumed"] = None
            self.gbs["memory"] = ASSUMED["memory"]
            return ("memory",)
        self.notes["no shape fits what was measured: one port a rank is assumed, as wide as its fastest pair"] = None
        way = f"{src}>", f"{src}>{dst}", f">{dst}"
        for wire in way:
            self.gbs[wire] = max(self.gbs.get(wire, 0.0), edge.bandwidth_gbs)
        return way

    # ---------- to other hosts

    def _to_network(self) -> tuple[tuple[Way, ...], tuple[Way, ...]]:
        nics = nics_of(self.graph)
        if not all(nics.get(each) for each in self.ids):
            return (), ()
        out, into = [], []
        for each in self.ids:
            mine = nics[each]
            name = "+".join(mine)
            total = sum(self._nic_gbs(nic) for nic in mine)
            self.gbs[f"{name}>"] = self.gbs[f">{name}"] = total
            out.append((*self._path(each, mine[0]), f"{name}>"))
            into.append((f">{name}", *self._path(mine[0], each)))
        return tuple(out), tuple(into)

    def _nic_gbs(self, nic: str) -> float:
        known = self.devices[nic].gbs
        if known is None:
            self.notes[f"a NIC's rate is not known: {ASSUMED['network']:g} GB/s are assumed"] = None
            return ASSUMED["network"]
        return known * self.reached.share("network")

    # ---------- widths

    def _wire(self, name: str, edge: Edge) -> str:
        self.gbs[name] = max(self.gbs.get(name, 0.0), self._gbs_of(edge))
        return name

    def _gbs_of(self, edge: Edge) -> float:
        if edge.bandwidth_gbs is not None:
            return edge.bandwidth_gbs * self._share(edge)
        each = ASSUMED.get(edge.kind, ASSUMED["link"])
        self.notes[f"links of kind {edge.kind} have no known bandwidth: {each:g} GB/s each is assumed"] = None
        return each * (edge.count or 1)

    def _share(self, edge: Edge | None) -> float:
        if edge is None or edge.source == "measured":
            return 1.0
        return self.reached.share(edge.kind)


def _behind_switches(graph: Graph, verdict: Verdict | None, host: str) -> dict[str, int]:
    """Return which switch each accelerator has whose pair links are in truth one port of a switch."""
    if verdict is None:
        return {}
    if verdict.name == "switch":
        return {device.id: 0 for device in graph.accelerators}
    return {
        _tail(member, host): number
        for number, island in enumerate(verdict.islands)
        if island.shape == "switch"
        for member in island.members
    }


# ---------- parts of a graph


def _by_host(graph: Graph) -> dict[str, Graph]:
    """Return the graph of each host, in one walk; what joins hosts is left out."""
    hosts = {device.id: device.host or "" for device in graph.devices}
    devices: dict[str, list[Device]] = defaultdict(list)
    edges: dict[str, list[Edge]] = defaultdict(list)
    for device in graph.devices:
        devices[device.host or ""].append(device)
    for edge in graph.edges:
        if hosts.get(edge.a) == hosts.get(edge.b):
            edges[hosts[edge.a]].append(edge)
    return {host: Graph(tuple(devices[host]), tuple(edges[host])) for host in devices}


def _half_duplex(graph: Graph, host: str) -> Pairs:
    """Return pairs of a host's devices that were measured to carry both ways at once no more than one way."""
    ends = ((_tail(each.a, host), _tail(each.b, host)) for each in graph.measurements if each.is_half_duplex)
    return frozenset(unordered(a, b) for a, b in ends)


def _but_for_names(graph: Graph, host: str) -> object:
    """Return a key, equal for graphs that _local makes equal, at far less cost: there may be hundreds."""
    names = {each.id: _tail(each.id, host) for each in graph.devices}
    devices = ((names[each.id], each.parent and _tail(each.parent, host), _OF_DEVICE(each)) for each in graph.devices)
    edges = ((names[each.a], names[each.b], _OF_EDGE(each)) for each in graph.edges)
    return tuple(devices), tuple(edges)


def _local(graph: Graph, host: str) -> Graph:
    """Return the graph with the host's name taken off."""
    devices = tuple(
        replace(each, id=_tail(each.id, host), host=None, parent=each.parent and _tail(each.parent, host))
        for each in graph.devices
    )
    edges = tuple(replace(edge, a=_tail(edge.a, host), b=_tail(edge.b, host)) for edge in graph.edges)
    return Graph(devices, edges)


def _tail(name: str, host: str) -> str:
    return name.removeprefix(f"{host}:") if host else name
