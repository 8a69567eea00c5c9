"""The topology file of the Ascend 950 driver (/usr/local/Ascend/driver/topo/*.json): NPUs, ports, meshes, switches."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from tokenring.topology.model.facts import Device, Facts, Link, Note, pairs, unordered
from tokenring.topology.sources.jsontext import Document, load, number, word

MAX_PEERS = 128  # of one server; today 16 at most. Each pair may be a link
MAX_EDGES = 100_000
PROTOCOLS = {"UB_CTP": "ub", "UB_TP": "ub", "UB_MEM": "ub", "HCCS": "hccs", "PCIE": "pcie"}


def recognises(text: str) -> bool:
    """Return whether a text has the lists of peers and edges; see SourceParser."""
    start = text[:200_000]
    return "{" in start[:1000] and '"peer_list"' in start and ('"edge_list"' in start or '"peer_count"' in start)


@dataclass
class _Found:
    """The links that the edges add up to."""

    meshes: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # two NPUs and a kind: ports
    switches: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # NPU, switch, kind: ports
    on_pcie: dict[str, None] = field(default_factory=dict)
    networks: Counter[str] = field(default_factory=Counter)


def parse(text: str) -> Facts:
    """Parse NPUs, meshes and switches; networks become notes. Raises TopologyError."""
    document = load(text)
    peers = _peers(document)
    found = _edges(document, peers)
    devices = [
        Device(name, "accelerator", index=local, arch="950", vendor="huawei") for local, name in sorted(peers.items())
    ]
    devices += [Device(name, "switch") for name in dict.fromkeys(switch for _, switch, _ in found.switches)]
    links = [Link(a, b, kind, ports) for (a, b, kind), ports in found.meshes.items()]
    links += [Link(npu, at, kind, ports, switched=True) for (npu, at, kind), ports in found.switches.items()]
    notes = [Note(f"{count} NPUs reach a network: {name}") for name, count in sorted(found.networks.items())]
    links += [Link(a, b, "pcie", label="PCIE") for a, b in pairs(found.on_pcie)]
    if hardware := word(document.root.get("hardware_type")):
        notes.insert(0, Note(f"hardware type {hardware}"))
    return Facts("links", tuple(devices), tuple(links), notes=(*document.notes, *notes[:32]))


def _peers(document: Document) -> dict[int, str]:
    listed = document.objects(document.root, "peer_list")
    if len(listed) > MAX_PEERS:
        raise document.fail(f"{len(listed)} peers; at most {MAX_PEERS}", "peer_list")
    peers: dict[int, str] = {}
    for each in listed:
        local = number(each.get("local_id"))
        if local is None:
            raise document.fail("a peer without a number as its 'local_id'", "local_id")
        if local in peers:
            raise document.fail(f"local_id {local} stands twice", "peer_list")
        peers[local] = f"NPU{local}"
    return peers


def _edges(document: Document, peers: dict[int, str]) -> _Found:
    found = _Found()
    listed = document.objects(document.root, "edge_list")
    if len(listed) > MAX_EDGES:
        raise document.fail(f"{len(listed)} edges; at most {MAX_EDGES}", "edge_list")
    for each in listed:
        kinds = _kinds(each)
        a = _end(document, each, "local_a", peers)
        if kinds and each.get("link_type") == "PEER2PEER":
            b = _end(document, each, "local_b", peers)
            if a == b:
                raise document.fail(f"an edge from {a} to itself", "local_b")
            first, second = unordered(a, b)
            found.meshes[first, second, kinds[0]] += _ports(each, "local_a_ports")
        elif "pcie" in kinds:
            found.on_pcie[a] = None
        elif kinds and each.get("topo_type") == "CLOS":
            name = f"CLOS{number(each.get('net_layer')) or 0}.{number(each.get('topo_instance_id')) or 0}"
            found.switches[a, name, kinds[0]] += _ports(each, "local_a_ports")
        else:
            words = "/".join(word(one) or "?" for one in _list(each, "protocols")[:8])
            found.networks[f"layer {number(each.get('net_layer'))}, {words or 'no protocol given'}"] += 1
    return found


def _kinds(edge: dict[str, Any]) -> list[str]:
    return [PROTOCOLS[one] for one in _list(edge, "protocols") if isinstance(one, str) and one in PROTOCOLS]


def _end(document: Document, edge: dict[str, Any], key: str, peers: dict[int, str]) -> str:
    local = number(edge.get(key))
    if local is None or local not in peers:
        raise document.fail(f"an edge whose {key!r} is not one of the peers", key)
    return peers[local]


def _ports(edge: dict[str, Any], key: str) -> int:
    """Count the ports of an edge: at least the one that the edge is."""
    return max(1, len(_list(edge, key)))


def _list(edge: dict[str, Any], key: str) -> list[Any]:
    value = edge.get(key)
    return value if isinstance(value, list) else []
