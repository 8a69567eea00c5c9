"""The route of each message, as the wires that it uses, and the time that a wire needs for its bytes.

A wire is the unit of sharing: one direction of a link, or both directions if they share one rate. The routes are
computed from the same links and routing entries that the emulation creates, so they cannot differ from these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tokenring.emulate.shapes import EmulatedFabric, rank_node

BITS = 8e-9  # Gbit in a byte
Pair = tuple[int, int]  # from rank to rank


class EmulatedHop(NamedTuple):
    """A hop across one link: it leaves a node through `device`, uses `wire`, and enters the node `to`."""

    device: str
    to: str
    wire: str


class Load(NamedTuple):
    """The wire that needs most time for its bytes alone, and that time."""

    wire: str
    seconds: float


def wires(fabric: EmulatedFabric) -> dict[str, float]:
    """Return the rate of each wire, Gbit/s."""
    return {name: link.gbit for link in fabric.links for name in (link.a_to_b, link.b_to_a)}


def ways(fabric: EmulatedFabric) -> dict[Pair, tuple[str, ...]]:
    """Return the route from every rank to every other: the wires that it uses, in order."""
    hops: dict[str, list[EmulatedHop]] = {node: [] for node in fabric.nodes}
    for link in fabric.links:
        hops[link.a[0]].append(EmulatedHop(link.a[1], link.b[0], link.a_to_b))
        hops[link.b[0]].append(EmulatedHop(link.b[1], link.a[0], link.b_to_a))
    devices = {(route.rank, route.to): route.device for route in fabric.routes}
    return {pair: _walk(fabric, hops, devices, *pair) for pair in devices}


def _walk(
    fabric: EmulatedFabric, hops: Mapping[str, list[EmulatedHop]], devices: Mapping[Pair, str], src: int, dst: int
) -> tuple[str, ...]:
    passed: list[str] = []
    node = rank_node(src)
    while node != rank_node(dst):
        if node in fabric.switches:
            steps = _across(fabric, hops, node, rank_node(dst))
        else:
            rank = int(node.removeprefix("r"))
            steps = [next(hop for hop in hops[node] if hop.device == devices[rank, dst])]
        passed += [step.wire for step in steps]
        node = steps[-1].to
    return tuple(passed)


def _across(
    fabric: EmulatedFabric, hops: Mapping[str, list[EmulatedHop]], switch: str, target: str
) -> list[EmulatedHop]:
    """Return the hops from a switch to a rank's port on this switch, or on another one of the tree of switches.

    Raises LookupError if no port is found.
    """
    waiting: list[tuple[str, list[EmulatedHop]]] = [(switch, [])]
    seen = {switch}
    while waiting:
        at, steps = waiting.pop()
        for hop in hops[at]:
            if hop.to == target:
                return [*steps, hop]
            if hop.to in fabric.switches and hop.to not in seen:
                seen.add(hop.to)
                waiting.append((hop.to, [*steps, hop]))
    raise LookupError(f"{switch} leads nowhere near {target}")


def heaviest(fabric: EmulatedFabric, link_bytes: Mapping[Pair, int]) -> Load | None:
    """Return the wire that needs most time for these bytes from rank to rank; None if nothing moves."""
    seconds = dict.fromkeys(wires(fabric), 0.0)
    gbit, passed = wires(fabric), ways(fabric)
    for pair, nbytes in link_bytes.items():
        for wire in passed[pair]:
            seconds[wire] += nbytes * BITS / gbit[wire]
    most = max(seconds, key=lambda wire: seconds[wire])
    return Load(most, seconds[most]) if seconds[most] else None
