"""Large worlds of equal hosts: whether every host does the same for its neighbours' numbers.

A scheme is shift-equivariant if all its routes and places for the owner `unit` ranks further are those of the
owner itself, `unit` ranks further (and, where head groups are spread over hosts, for head groups that much further).
Then one unit of ranks (a host) says it all (`folding.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenring.errors import ConfigurationError
from tokenring.planner.interconnects.interconnect import Interconnect, Way
from tokenring.schedule.routes import Origin
from tokenring.schedule.scheme import Pair, Scheme

PROBES = 3  # owners at which equivariance is checked


@dataclass(frozen=True)
class Symmetry:
    """All ranks `unit` further do the same, with head groups `head_step` further."""

    world_size: int
    unit: int
    head_groups: int = 1
    head_step: int = 0

    def shift_heads(self, heads: int, by: int) -> int:
        """Return the image of a head group when the host of rank `by` becomes host 0."""
        return (heads - by // self.unit * self.head_step) % self.head_groups

    def canonical(self, src: int, dst: int) -> tuple[int, int]:
        """Return the image of a pair whose source is in host 0."""
        here = src % self.unit
        return here, (dst - src + here) % self.world_size


class FoldedNet:
    """An interconnect of equal hosts, of which one stands for all."""

    def __init__(self, net: Interconnect) -> None:
        self.net = net
        self._ways: dict[tuple[int, int], Way] = {}
        self._gbs: dict[str, float] = {}

    def way(self, src: int, dst: int) -> Way:
        """Return the wires from one rank to another, those of host 0 for all hosts; see Wires.way."""
        known = self._ways.get((src, dst))
        if known is None:
            known = tuple(f"0:{wire.partition(':')[2]}" for wire in self.net.way(src, dst))
            self._ways[src, dst] = known
        return known

    def burst_bytes(self, wire: str) -> float:
        """Return the bytes that pass at once over an idle wire; see Wires.burst_bytes."""
        return self.net.burst_bytes(wire)

    def gbs(self, wire: str) -> float:
        """Return the width of a wire in GB/s; see Wires.gbs."""
        known = self._gbs.get(wire)
        if known is None:
            known = self._gbs[wire] = self.net.gbs(wire)
        return known


def symmetry_of(scheme: Scheme, world_size: int, unit: int) -> Symmetry:
    """Return the symmetry of a scheme. Raises ConfigurationError if hosts of `unit` ranks do not all do the same."""
    steps = () if scheme.place_for is not None else (0, scheme.head_groups * unit // world_size)
    for head_step in dict.fromkeys(steps):
        symmetry = Symmetry(world_size, unit, scheme.head_groups, head_step)
        if all(_is_even(scheme, symmetry, probe) for probe in range(PROBES)):
            return symmetry
    raise ConfigurationError(
        f"schedule {scheme.name!r} does not do the same on every host of {unit} ranks: too large to be planned"
    )


def _is_even(scheme: Scheme, symmetry: Symmetry, probe: int) -> bool:
    """Return whether what host 0 does is the image of what another host does."""
    world, unit = symmetry.world_size, symmetry.unit
    owner = probe * (unit - 1) // (PROBES - 1)
    hosts = 1 + probe * (world // unit - 1) // PROBES
    far, by = (owner + unit * hosts) % world, unit * hosts
    for heads in {0, scheme.head_groups - 1}:
        there = (heads + hosts * symmetry.head_step) % scheme.head_groups
        for distance in (0, 1, unit, world // 2):
            kv = (owner + distance) % world
            near = scheme.place(Pair(owner, kv, heads, 0, 0, world))
            if (near + by) % world != scheme.place(Pair(far, (kv + by) % world, there, 0, 0, world)):
                return False
        for gather, pieces in ((scheme.gather_q, scheme.q_pieces), (scheme.gather_kv, scheme.kv_pieces)):
            hops = gather(Origin(owner, world, owner, heads, 0, pieces))
            moved = {hop._replace(src=(hop.src + by) % world, dst=(hop.dst + by) % world) for hop in hops}
            if moved != set(gather(Origin(far, world, far, there, 0, pieces))):
                return False
    return True
