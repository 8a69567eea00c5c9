"""The wires that a transfer between two ranks passes, and how wide these are: what the simulator shares out.

A wire is whatever transfers share one way: a link, a port of a switch, an uplink, a NIC. Both ways through
one wire of the same name make it half duplex. Ranks sit in hosts; all ways inside a host are those of its
fabric, and between hosts a transfer leaves by `out` of its source and comes in by `into` of its destination.
So large clusters of equal hosts cost no more than one of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError

if TYPE_CHECKING:
    from tokenring.tables.rates import Machine

Way = tuple[str, ...]


@dataclass(frozen=True)
class LinkFabric:
    """The inside of a host, by its devices 0 to size-1.

    ways: the wires of each (source, destination). gbs: of each wire, GB/s (10^9 bytes). out, into: of each device
    the wires to and from the network between hosts; empty where there is none. burst_bytes: of wires that are token
    buckets, what passes at once after they have been idle.
    """

    size: int
    ways: Mapping[tuple[int, int], Way]
    gbs: Mapping[str, float]
    out: tuple[Way, ...] = ()
    into: tuple[Way, ...] = ()
    burst_bytes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        used = {wire for way in (*self.ways.values(), *self.out, *self.into) for wire in way}
        if missing := used - self.gbs.keys():
            raise ConfigurationError(f"wire {min(missing)!r} is passed but has no bandwidth")
        if narrow := [wire for wire, gbs in self.gbs.items() if not gbs > 0]:
            raise ConfigurationError(f"wire {narrow[0]!r} has {self.gbs[narrow[0]]} GB/s; it must be above 0")


@dataclass(frozen=True)
class Interconnect:
    """Ranks 0 to world_size-1 in hosts. `places`: of each rank its host and its device there.

    notes: what was assumed where the topology did not say. machine: what its ranks compute with, where that is known.
    """

    name: str
    fabrics: tuple[LinkFabric, ...]  # of each host
    places: tuple[tuple[int, int], ...]
    notes: tuple[str, ...] = ()
    machine: Machine | None = None
    _ways: dict[tuple[int, int], Way] = field(default_factory=dict, repr=False, compare=False)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    def way(self, src: int, dst: int) -> Way:
        """Return the wires from one rank to another. Raises ConfigurationError where there is no way."""
        known = self._ways.get((src, dst))
        if known is None:
            known = self._ways[src, dst] = self._find(src, dst)
        return known

    def _find(self, src: int, dst: int) -> Way:
        (host, device), (to_host, to_device) = self.places[src], self.places[dst]
        here, there = self.fabrics[host], self.fabrics[to_host]
        if host == to_host:
            way: Way | None = here.ways.get((device, to_device), () if device == to_device else None)
            wires = None if way is None else tuple(f"{host}:{wire}" for wire in way)
        elif here.out and there.into:
            wires = tuple(f"{host}:{wire}" for wire in here.out[device])
            wires += tuple(f"{to_host}:{wire}" for wire in there.into[to_device])
        else:
            wires = None
        if wires is None:
            raise ConfigurationError(
                f"no way from rank {src} to rank {dst} in {self.name!r}: its topology is not connected"
            )
        return wires

    def gbs(self, wire: str) -> float:
        """Return the width in GB/s of a wire that `way` gave."""
        host, _, name = wire.partition(":")
        return self.fabrics[int(host)].gbs[name]

    def burst_bytes(self, wire: str) -> float:
        """Return the bytes that pass at once over a wire that has been idle."""
        host, _, name = wire.partition(":")
        return self.fabrics[int(host)].burst_bytes.get(name, 0.0)

    def pair_gbs(self, src: int, dst: int) -> float:
        """Return the GB/s that one transfer alone gets."""
        return min((self.gbs(wire) for wire in self.way(src, dst)), default=float("inf"))

    def own_links(self, rank: int) -> int:
        """Return to how many ranks it has a link that no other pair uses, as in a mesh: a ring sends over one."""
        host, device = self.places[rank]
        used = {place[1] for place in self.places if place[0] == host}
        ways = self.fabrics[host].ways
        return len({ways[device, to] for to in used if len(ways.get((device, to), ())) == 1})

    @cached_property
    def port_links(self) -> int:
        """Of how many links a rank's port is made: one to each peer in a full mesh, else 1."""
        peers = self.world_size - 1
        is_mesh = len(set(self.hosts)) == 1 and all(self.own_links(rank) == peers for rank in range(self.world_size))
        return max(1, peers) if is_mesh else 1

    @cached_property
    def hosts(self) -> tuple[int, ...]:
        """Host of each rank."""
        return tuple(host for host, _ in self.places)

    @cached_property
    def local(self) -> int | None:
        """Ranks of each host, where all have equally many and they are numbered host by host; else None."""
        counts = {host: self.hosts.count(host) for host in set(self.hosts)}
        size = next(iter(counts.values()))
        regular = all(host == self.hosts[rank // size * size] for rank, host in enumerate(self.hosts))
        return size if len(set(counts.values())) == 1 and regular else None


def of_one_host(name: str, fabric: LinkFabric, notes: Iterable[str] = ()) -> Interconnect:
    """Return the interconnect of one rank on each device of one host."""
    return Interconnect(name, (fabric,), tuple((0, device) for device in range(fabric.size)), tuple(notes))


# ---------- fabrics of the usual shapes


def mesh_fabric(size: int, link_gbs: float) -> LinkFabric:
    """Return the fabric of a host in which every pair has a link of its own."""
    ways = {(a, b): (f"{a}>{b}",) for a in range(size) for b in range(size) if a != b}
    return LinkFabric(size, ways, dict.fromkeys((way[0] for way in ways.values()), link_gbs))


def switch_fabric(size: int, port_gbs: float) -> LinkFabric:
    """Return the fabric of a host in which every device has one port of a switch."""
    ways = {(a, b): (f"{a}>", f">{b}") for a in range(size) for b in range(size) if a != b}
    return LinkFabric(size, ways, dict.fromkeys((wire for way in ways.values() for wire in way), port_gbs))


def ring_fabric(size: int, link_gbs: float) -> LinkFabric:
    """Make a fabric of neighbours' links; others are passed through, the shorter way; at a tie even sources go up."""
    ways: dict[tuple[int, int], Way] = {}
    for a in range(size):
        for distance in range(1, size):
            up = 2 * distance < size or (2 * distance == size and a % 2 == 0)
            step = 1 if up else -1
            hops = distance if step == 1 else size - distance
            at = [(a + step * hop) % size for hop in range(hops + 1)]
            ways[a, (a + distance) % size] = tuple(f"{src}>{dst}" for src, dst in pairwise(at))
    gbs = {f"{a}>{(a + step) % size}": link_gbs for a in range(size) for step in (1, -1)}
    return LinkFabric(size, ways, gbs)


# ---------- interconnects of the usual shapes


def full_mesh(ranks: int, link_gbs: float) -> Interconnect:
    """Return the interconnect of ranks on one host, each pair with a link of its own of so many GB/s."""
    return of_one_host("full mesh", mesh_fabric(ranks, link_gbs))


def switch(ranks: int, port_gbs: float) -> Interconnect:
    """Return the interconnect of ranks on one host, each with one port of a switch of so many GB/s."""
    return of_one_host("switch", switch_fabric(ranks, port_gbs))


def ring(ranks: int, link_gbs: float) -> Interconnect:
    """Return the interconnect of ranks on one host, with links of so many GB/s between neighbours alone."""
    return of_one_host("ring", ring_fabric(ranks, link_gbs))
