"""A topology as the ranks of a group see it: the device of each rank, and the links between these devices."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError

if TYPE_CHECKING:  # the rest is imported where it is needed: `import tokenring` comes through here
    import torch
    from torch.distributed import ProcessGroup

    from tokenring.backends.interfaces import Transport
    from tokenring.launch.groups import Group, HeldGroup
    from tokenring.topology.model.facts import Device, Facts
    from tokenring.topology.model.graph import Graph
    from tokenring.topology.model.verdict import Verdict
    from tokenring.topology.probing.device_identity import Seat

TIMEOUT_SECONDS = 60.0


def probe_seconds(timeout_seconds: float) -> float:
    """Return how long ranks that wait for each other so long wait in a probe: no less than tools may need to answer."""
    return max(timeout_seconds, TIMEOUT_SECONDS)


@dataclass(frozen=True)
class Topology:
    """The links that join the ranks of a group.

    bandwidth_gbs: of each directed (source, destination) pair of ranks with a known link, GB/s one way; None
        where only the link is known. Links of a shared port are there for each pair with the whole port.
    devices: of each rank the id of its device in the graph; None on a CPU, or where the graph lacks it.
    hosts: of each rank the name of its machine.
    graph, verdict: of all machines; None where nobody looked.
    reached: by kind of link, the share of a published rate that a copy gets, where that is known of these machines;
        beside what a probe finds, and no part of what makes two topologies equal.
    """

    name: str
    world_size: int
    bandwidth_gbs: Mapping[tuple[int, int], float | None] = field(default_factory=dict)
    devices: tuple[str | None, ...] = ()
    hosts: tuple[str, ...] = ()
    graph: Graph | None = None
    verdict: Verdict | None = None
    reached: Mapping[str, float] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def probe(
        group: Group | HeldGroup = None,
        device: torch.device | None = None,
        *,
        cache: bool = True,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Topology:
        """Probe the topology of a group, the same on every rank; all ranks call it together.

        One rank of each machine asks its tools, or takes what the last probe of this boot left in the cache.
        group: as in ContextParallel. device: what this rank computes on; None for its current accelerator.
        Raises PeerLost if a rank does not come, TopologyError if a machine cannot be looked at.
        """
        from tokenring.topology.probing.job import probe

        return probe(group, device, seated, cache=cache, timeout_seconds=timeout_seconds)

    @staticmethod
    def measure(
        group: ProcessGroup | None = None, transport: str | Transport = "auto", seconds: float = 60.0
    ) -> Topology:
        """Measure the topology by transfers between the ranks of a group, which all call it; equal on all of them.

        It takes about `seconds` seconds. Raises PeerLost if a rank does not come, ConfigurationError without a
        group.
        """
        from tokenring.topology.measure.run import measure_group

        return topology_of(measure_group(group, transport, seconds))

    @staticmethod
    def of(graph: Graph, devices: Sequence[str | None] | None = None, hosts: Sequence[str] | None = None) -> Topology:
        """Return the topology of ranks on the devices of a graph, given by their ids; None: one rank an accelerator.

        Raises ConfigurationError for a device that the graph lacks, and for hosts that are not one for each
        rank.
        """
        from tokenring.topology.model.verdict import classify

        by_id = {device.id: device for device in graph.accelerators}
        devices = tuple(by_id) if devices is None else tuple(devices)
        if unknown := [each for each in devices if each is not None and each not in by_id]:
            known = ", ".join(by_id) or "none"
            raise ConfigurationError(f"no accelerator {unknown[0]!r} in the graph; it has {known}")
        if hosts is None:
            hosts = [by_id[each].host or "" if each is not None else "" for each in devices]
        if len(hosts) != len(devices):
            raise ConfigurationError(f"{len(devices)} ranks' devices, and {len(hosts)} ranks' hosts")
        verdict = classify(graph)
        name = verdict.name.replace("-", " ") if by_id else "machine without accelerators"
        return Topology(name, len(devices), _bandwidths(graph, devices), devices, tuple(hosts), graph, verdict)

    @property
    def digest(self) -> str:
        """A hash that is equal for equal topologies, on every rank and in every process."""
        return hashlib.sha256(repr(self).encode("utf-8", "backslashreplace")).hexdigest()

    def __str__(self) -> str:
        """Return the report, and the host and device of each rank."""
        from tokenring.topology.report.text import report

        text = f"{self.name} of {self.world_size} ranks\n"
        if self.graph is not None and self.verdict is not None:
            text = report(self.graph, self.verdict)
        places = zip(self.hosts, self.devices, strict=True)
        rows = [f"rank {rank}  {host}  {device or 'no device'}\n" for rank, (host, device) in enumerate(places)]
        return text + ("\nranks\n" + "".join(f"  {row}" for row in rows) if rows else "")


def full_mesh(world_size: int, bandwidth_gbs: float | None = None) -> Topology:
    """Return a topology in which every pair of ranks has a link of its own, of `bandwidth_gbs` GB/s one way."""
    pairs = {(a, b): bandwidth_gbs for a in range(world_size) for b in range(world_size) if a != b}
    return Topology("full mesh", world_size, pairs)


def topology_of(measured: Facts) -> Topology:
    """Return the ranks' topology with all that was measured: also what several pairs share, unlike a table of pairs."""
    from tokenring.topology.model.graph import merge

    return Topology.of(merge([measured]))


def seated(graph: Graph, seats: Sequence[Seat], hosts: Sequence[str]) -> Topology:
    """Return the topology of ranks that sit on devices of a graph; what does not fit becomes a note of the graph."""
    from tokenring.topology.model.facts import Note

    devices: list[str | None] = []
    notes: list[Note] = []
    for rank, (seat, host) in enumerate(zip(seats, hosts, strict=True)):
        found = _devices_of(seat, [each for each in graph.accelerators if (each.host or "") == host])
        devices.append(found[0].id if len(found) == 1 else None)
        if seat.kind != "cpu" and len(found) != 1:
            notes.append(Note(f"rank {rank} on {host}: {seat.why_unknown or _misfit(seat, found)}"))
    for device in dict.fromkeys(each for each in devices if each is not None and devices.count(each) > 1):
        ranks = ", ".join(str(rank) for rank, each in enumerate(devices) if each == device)
        notes.append(Note(f"ranks {ranks} share {device}: if that is not meant, each sets its device before the probe"))
    return Topology.of(replace(graph, notes=(*graph.notes, *notes)), devices, hosts)


def _devices_of(seat: Seat, here: Sequence[Device]) -> list[Device]:
    """Find a seat's devices by bus id, else by physical id; then by die.

    Never by index, which each process counts for itself.
    """
    found: list[Device] = []
    if seat.bus_id is not None:
        found = [each for each in here if each.bus_id == seat.bus_id]
    if not found and seat.phy_id is not None:
        found = [each for each in here if each.phy_id == seat.phy_id]
    if len(found) > 1 and seat.die is not None:
        found = [each for each in found if each.die == seat.die]
    if len(found) > 1 and seat.phy_id is not None:  # two dies behind one bus id
        found = [each for each in found if each.phy_id == seat.phy_id]
    return found


def _misfit(seat: Seat, found: Sequence[Device]) -> str:
    what = f"bus id {seat.bus_id}" if seat.bus_id is not None else f"physical id {seat.phy_id}"
    if found:
        return f"{what} is that of {' and '.join(each.id for each in found)}: which one is unknown"
    return f"no source names a device with {what}"


def _bandwidths(graph: Graph, devices: Sequence[str | None]) -> dict[tuple[int, int], float | None]:
    from tokenring.topology.model.facts import unordered

    edges, fabric = graph.between(), graph.fabric()
    found: dict[tuple[int, int], float | None] = {}
    for a, one in enumerate(devices):
        for b, other in enumerate(devices):
            if one is None or other is None or one == other:
                continue
            edge = edges.get(unordered(one, other))
            if edge is None or not edge.is_peer:
                edge = fabric.between(one, other) or edge
            if edge is not None:
                found[a, b] = edge.bandwidth_gbs
    return found
