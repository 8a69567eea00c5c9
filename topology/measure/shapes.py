"""Models of the shapes that are known: wires with what was measured of them, and the ways through."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from tokenring.topology.measure.lab import Flow
from tokenring.topology.measure.model import Model, Wire, name
from tokenring.topology.measure.rings import Ring
from tokenring.topology.measure.survey import Tables

SWITCH = "switch0"


def mesh_model(tables: Tables, evidence: str) -> Model:
    """Return the model of a full mesh: every pair of ranks has a wire of its own."""
    wires = mesh_wires(tables, range(tables.ranks))
    ways = {(a, b): (name(a), name(b)) for a, b in tables.alone}
    return Model(tables.ranks, wires, ways, {}, [evidence, *half_duplex(wires, "links")])


def switch_model(tables: Tables, evidence: str, ports: Mapping[int, float] | None = None) -> Model:
    """Return the model of a switch; ports: the GB/s of each rank's port, None: those of its pairs."""
    wires = switch_wires(tables, range(tables.ranks), SWITCH, ports)
    ways = {(a, b): (name(a), SWITCH, name(b)) for a, b in tables.alone}
    return Model(tables.ranks, wires, ways, {SWITCH: "switch"}, [evidence, *half_duplex(wires, "ports")])


def ring_model(tables: Tables, ring: Ring) -> Model:
    """Return the model of a ring: each rank has a wire to its two neighbours."""
    order, ranks = ring.order, len(ring.order)
    wires = [pair_wire(tables, order[at], order[(at + 1) % ranks]) for at in range(ranks)]
    ways = {flow: tuple(map(name, ring.way(*flow))) for flow in tables.alone}
    text = "a rank sends to all others at once twice what it sends to one; round the ring "
    text += f"{', '.join(map(str, order))} all links carry both ways at once what each carries alone"
    return Model(ranks, wires, ways, {}, [text, *half_duplex(wires, "links")])


def mesh_wires(tables: Tables, members: Sequence[int]) -> list[Wire]:
    """Return a wire for each pair of these ranks."""
    return [pair_wire(tables, a, b) for at, a in enumerate(members) for b in members[at + 1 :]]


def pair_wire(tables: Tables, a: int, b: int) -> Wire:
    """Return the wire of a pair: the slower direction alone, and both ways at once, GB/s."""
    flows: tuple[Flow, Flow] = ((a, b), (b, a))
    alone = min(tables.alone[flow] for flow in flows)
    return Wire(name(a), name(b), "link", alone, sum(tables.both[flow] for flow in flows))


def switch_wires(
    tables: Tables, members: Sequence[int], switch: str, ports: Mapping[int, float] | None = None
) -> list[Wire]:
    """Return a port to the switch for each rank, as wide as one of its pairs unless measured to be wider."""
    wires = []
    for rank in members:
        others = [other for other in members if other != rank]
        gbs = statistics.median(tables.alone[flow] for other in others for flow in ((rank, other), (other, rank)))
        both = statistics.median(tables.both[rank, other] + tables.both[other, rank] for other in others)
        if ports is not None:
            gbs, both = ports[rank], both / gbs * ports[rank]
        wires.append(Wire(name(rank), switch, "link", gbs, both))
    return wires


def half_duplex(wires: Sequence[Wire], what: str) -> list[str]:
    """Return, as evidence, how many of these wires are half duplex; nothing where none is."""
    half = sum(wire.half_duplex for wire in wires)
    return [f"half duplex: {half} of {len(wires)} {what} carry no more both ways at once than one way"] if half else []
