"""Islands: groups whose pairs never slow each other down, and the uplinks that join them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tokenring.topology.measure.lab import Flow, Lab, Race
from tokenring.topology.measure.model import Model, Wire, name
from tokenring.topology.measure.shapes import half_duplex, mesh_wires, switch_wires
from tokenring.topology.measure.survey import Tables, add_series, least_disturbed, totals

MOST_SERIES = 5  # of rounds of pairs, in as many orders
NOT_NARROW = 0.85  # of what the flows carry alone: then the uplink is not what limits them
WIDER = 1.15
ABOUT = 0.7
MOST_OF = 0.7
ROOT = "root"
Island = tuple[int, ...]


@dataclass(frozen=True)
class _Inside:
    """The inside of an island: one switch port that leads to everybody, or links of its ranks' own beside a port."""

    members: Island
    switched: bool
    port: bool  # the port that leads out is the one that leads to the others


def find_islands(tables: Tables, lab: Lab, free: float) -> list[Island] | None:
    """Find groups in which pairs are free: at least two, one of them no single rank; None if there are none.

    Further rounds, in other orders, are run until they are: in one order, a pair may have met nobody on its
    way. A few that something else slowed down do no harm.
    """
    for series in range(1, MOST_SERIES):
        groups = _groups(tables, free)
        if all(_holds_together(tables, group, free) for group in groups):
            return groups if 1 < len(groups) < tables.ranks else None
        add_series(lab, tables, series)
    return None


def _groups(tables: Tables, free: float) -> list[Island]:
    """Return the groups of ranks that free pairs connect."""
    left = list(range(tables.ranks))
    groups = []
    while left:
        group, waiting = set(), [left[0]]
        while waiting:
            rank = waiting.pop()
            group.add(rank)
            left = [other for other in left if other != rank]
            waiting += [other for other in left if _free(tables, rank, other, free) and other not in waiting]
        groups.append(tuple(sorted(group)))
    return groups


def _holds_together(tables: Tables, group: Island, free: float) -> bool:
    """Return whether each rank is free with most of its group: two groups joined by chance do not hold together."""
    others = len(group) - 1
    return all(
        sum(_free(tables, rank, other, free) for other in group if other != rank) >= MOST_OF * others for rank in group
    )


def _free(tables: Tables, a: int, b: int, free: float) -> bool:
    """Return whether a pair is never slowed down, and about as fast alone as the best pair of each."""
    alone = min(tables.alone[a, b], tables.alone[b, a])
    best = max(max(tables.alone[end, other] for other in range(tables.ranks) if other != end) for end in (a, b))
    return alone >= ABOUT * best and not tables.slowed(a, b, free)


def model_of_islands(tables: Tables, lab: Lab, groups: list[Island]) -> Model:
    """Measure the insides, ports and uplinks of these islands, and return their model."""
    model = Model(tables.ranks)
    insides = [_inside(tables, lab, group) for group in groups]
    gates = [_add_inside(model, tables, inside, number) for number, inside in enumerate(insides)]
    uplinks = _uplinks(model, tables, lab, groups, gates)
    for group, gate in zip(groups, gates, strict=True):
        model.wires += _ports(model, tables, group, gate, uplinks)
    model.wires += uplinks
    if len(groups) > 2:
        model.nodes[ROOT] = "switch"
    ways: dict[Flow, tuple[str, ...]] = {}
    island_of = {rank: number for number, group in enumerate(groups) for rank in group}
    for a, b in tables.alone:
        one, other = island_of[a], island_of[b]
        if one == other:
            ways[a, b] = (name(a), gates[one], name(b)) if insides[one].switched else (name(a), name(b))
        else:
            middle = (gates[one], ROOT, gates[other]) if len(groups) > 2 else (gates[one], gates[other])
            ways[a, b] = (name(a), *middle, name(b))
    model.ways = ways
    return model


def _inside(tables: Tables, lab: Lab, group: Island) -> _Inside:
    """Measure an island: one to all inside, against what links of their own would allow; and inside and out at once."""
    if len(group) == 1:
        return _Inside(group, False, False)
    port = _one_port(tables, lab, group)
    if len(group) == 2:  # one pair: a link of its own and a switch differ only in the port that leads out
        return _Inside(group, port, port)
    fast = statistics.median(tables.alone[a, b] for a in group for b in group if a != b)
    races = [Race(tuple((rank, other) for other in group if other != rank), total=True) for rank in group]
    within = statistics.median(each.total for each in totals(lab, races, "one to all of an island"))
    return _Inside(group, within < len(group) / 2 * fast, port)


def _one_port(tables: Tables, lab: Lab, group: Island) -> bool:
    """Return whether what goes out slows down what goes to a member.

    Through one port, half of its rate is left to the flow to the member, or what the other flow cannot take.
    """
    outside = next(rank for rank in range(tables.ranks) if rank not in group)
    flows = [((rank, group[at - 1]), (rank, outside)) for at, rank in enumerate(group)]
    found = least_disturbed(lab, tables.alone, [Race(pair) for pair in flows], "inside and out", sure=1)
    kept, shared = [], []
    for (inner, outer), rates in zip(flows, found, strict=True):
        kept.append(rates[inner] / tables.alone[inner])
        shared.append(1 - min(0.5, tables.alone[outer] / tables.alone[inner]))
    return statistics.median(kept) < (1 + statistics.median(shared)) / 2


def _add_inside(model: Model, tables: Tables, inside: _Inside, number: int) -> str:
    """Add the wires of an island; return the node that leads out of it."""
    members, ranks = inside.members, ", ".join(map(str, inside.members))
    gate = f"switch{number}" if inside.switched else f"nic{number}"
    model.nodes[gate] = "switch" if inside.switched else "nic"
    if inside.switched:
        wires = switch_wires(tables, members, gate)
        text = f"ranks {ranks}: one port each to a switch, inwards and outwards"
        if not inside.port:
            text = f"ranks {ranks}: one port each to a switch; a rank has more on its way out"
    else:
        wires = mesh_wires(tables, members)
        text = f"ranks {ranks}: every pair has a link of its own, and each another port that leads out"
        if len(members) == 1:
            text = f"rank {ranks} is alone"
    model.wires += wires
    model.evidence += [text, *half_duplex(wires, f"{'ports' if inside.switched else 'links'} of ranks {ranks}")]
    return gate


def _ports(model: Model, tables: Tables, group: Island, gate: str, uplinks: Sequence[Wire]) -> list[Wire]:
    """Return the ports that lead out beside links inside; how wide they are shows if all uplinks are wider."""
    if model.nodes[gate] == "switch":
        return []
    wires = []
    narrowest = min(wire.gbs or 0.0 for wire in uplinks)
    for rank in group:
        outside = [other for other in range(tables.ranks) if other not in group]
        gbs = max(tables.alone[rank, other] for other in outside)
        seen = gbs if gbs * WIDER < narrowest else None
        wires.append(Wire(name(rank), gate, "network", seen))
    return wires


def _uplinks(model: Model, tables: Tables, lab: Lab, groups: list[Island], gates: list[str]) -> list[Wire]:
    """Measure the uplinks: all of an island send out at once, all of it receive, and both."""
    wires = []
    for number, group in enumerate(groups[:1] if len(groups) == 2 else groups):
        out = _crossing(groups, number)
        into = tuple((b, a) for a, b in out)
        races = [Race(flows, total=True) for flows in (out, into, out + into)]
        sent, received, both = (each.total for each in totals(lab, races, "uplinks"))
        gbs = min(sent, received)
        alone = min(sum(tables.alone[flow] for flow in flows) for flows in (out, into))
        end = gates[1] if len(groups) == 2 else ROOT
        wire = Wire(gates[number], end, "uplink", gbs, both)
        wires.append(wire)
        ranks = ", ".join(map(str, group))
        what = f"between ranks {ranks} and the others" if len(groups) == 2 else f"of ranks {ranks}"
        duplex = "half duplex" if wire.half_duplex else "full duplex"
        model.evidence.append(f"uplink {what}: {sent:.3g} GB/s out, {received:.3g} in, {both:.3g} both, {duplex}")
        if gbs >= NOT_NARROW * alone:
            model.doubts.append(f"the uplink {what} may be wider: the ranks cannot fill it")
        if max(sent, received) > WIDER * gbs:
            model.doubts.append(f"the uplink {what} differs out and in")
    return wires


def _crossing(groups: Sequence[Island], number: int) -> tuple[Flow, ...]:
    """Return a flow from each rank of an island, spread over the other islands, and over the ranks there."""
    others = [group for at, group in enumerate(groups) if at != number]
    flows = []
    for at, rank in enumerate(groups[number]):
        group = others[at % len(others)]
        flows.append((rank, group[at // len(others) % len(group)]))
    return tuple(flows)
