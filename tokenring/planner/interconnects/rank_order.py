"""The ranks that compute together: a context-parallel group inside a larger world, and how to number its ranks best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from math import fsum

from tokenring.errors import ConfigurationError
from tokenring.planner.interconnects.interconnect import Interconnect, LinkFabric
from tokenring.sequence.workload import Workload

MOST_LOOKED_AT = 32  # ranks of a host, of which the pairs are compared
AS_WIDE = 0.8  # of the widest way between two ranks: wider ones are as good as it, since measured links differ a little


def context_parallel_group(net: Interconnect, tensor_parallel: int, first: int = 0) -> Interconnect:
    """Return a context-parallel group where neighbours share heads by tensor parallelism: the first, or another one.

    Its ranks are first, first + tp, first + 2·tp, ...; the tp groups run at once, so that each gets its part of a wire
    that several pass. Raises ConfigurationError unless tp divides the world, and the ranks of each host.
    """
    tp, world = tensor_parallel, net.world_size
    if tp < 1 or world % tp:
        raise ConfigurationError(f"tensor parallelism of {tp} does not divide {world} ranks: choose a divisor")
    if tp == 1:
        return net
    if net.local is None or (net.local % tp and len(net.fabrics) > 1):
        raise ConfigurationError(f"tensor parallelism of {tp} does not fit hosts of {net.local or 'unequal'} ranks")
    found = one_of_groups(net, [rank % tp for rank in range(world)], first, world // tp)
    return replace(found, name=f"{net.name}, every {tp}th rank")


def narrowest_group(net: Interconnect, groups: Sequence[Sequence[int]]) -> tuple[Interconnect, Sequence[int]]:
    """Return the group whose ways are the narrowest while all exchange, and its ranks; of equals the first.

    groups: the ranks of each, all of them of equally many. A group of all ranks is the interconnect as it is.
    """
    if len(groups) == 1:
        return net, groups[0]
    number = {rank: at for at, ranks in enumerate(groups) for rank in ranks}
    group_of = [number.get(rank) for rank in range(net.world_size)]
    nets = [one_of_groups(net, group_of, at, len(ranks)) for at, ranks in enumerate(groups)]
    at = max(range(len(nets)), key=lambda each: _narrowness(nets[each]))
    return nets[at], groups[at]


def _narrowness(net: Interconnect) -> tuple[float, float]:
    """Return the seconds of a GB from each rank to each other: one after another, and at once, of the busiest wire."""
    pairs = [(a, b) for a in range(net.world_size) for b in range(net.world_size) if a != b]
    passed = Counter(wire for pair in pairs for wire in net.way(*pair))
    busiest = max((times / net.gbs(wire) for wire, times in passed.items()), default=0.0)
    return fsum(1 / net.pair_gbs(*pair) for pair in pairs), busiest


def most_sharing(group: Interconnect, whole: Interconnect, ranks: Sequence[int]) -> int:
    """Return among how many groups at most a wire is divided that this one passes.

    group: as of one_of_groups. ranks: of each of its ranks, which of the whole it is.
    """
    pairs = ((a, b) for a in range(len(ranks)) for b in range(len(ranks)) if a != b)
    ways = ((group.way(a, b), whole.way(ranks[a], ranks[b])) for a, b in pairs)
    parts = (whole.gbs(of_all) / group.gbs(own) for way, every in ways for own, of_all in zip(way, every, strict=True))
    return round(max(parts, default=1.0))


def one_of_groups(net: Interconnect, group_of: Sequence[Hashable], mine: Hashable, size: int) -> Interconnect:
    """Return the ranks of one group, on the hosts where it has some, where all groups exchange at once.

    group_of: of each rank; None where it is in none. size: ranks of each group, also of those that are not all here.
    A wire that several groups pass is divided by their number; to the network pass those with ranks on other hosts.
    """
    devices_on: dict[int, dict[Hashable, list[int]]] = {}
    for (host, device), group in zip(net.places, group_of, strict=True):
        if group is not None:
            devices_on.setdefault(host, {}).setdefault(group, []).append(device)
    number = {host: index for index, host in enumerate(sorted(host for host in devices_on if mine in devices_on[host]))}
    known: dict[object, LinkFabric] = {}
    fabrics = []
    for host in number:
        groups = [(tuple(devices), len(devices) < size) for devices in devices_on[host].values()]
        own = tuple(devices_on[host][mine])
        key = (id(net.fabrics[host]), own, tuple(groups))
        if key not in known:
            known[key] = _divided(net.fabrics[host], own, groups)
        fabrics.append(known[key])
    places = [
        (number[host], devices_on[host][mine].index(device))
        for (host, device), group in zip(net.places, group_of, strict=True)
        if group == mine
    ]
    return Interconnect(net.name, tuple(fabrics), tuple(places), net.notes, net.machine)


def _divided(fabric: LinkFabric, own: Sequence[int], groups: Iterable[tuple[Sequence[int], bool]]) -> LinkFabric:
    """Return these devices alone, and of each wire what is left where all groups use it at once.

    groups: the devices here of each, and whether it has ranks on other hosts.
    """
    users: Counter[str] = Counter()
    for devices, leaves in groups:
        ways = [fabric.ways[a, b] for a in devices for b in devices if a != b and (a, b) in fabric.ways]
        if leaves:
            ways += [side[device] for side in (fabric.out, fabric.into) if side for device in devices]
        users.update({wire for way in ways for wire in way})
    place = {device: index for index, device in enumerate(own)}
    ways_kept = {(place[a], place[b]): way for (a, b), way in fabric.ways.items() if a in place and b in place}
    out = tuple(fabric.out[device] for device in own) if fabric.out else ()
    into = tuple(fabric.into[device] for device in own) if fabric.into else ()
    shared = {wire: gbs / max(1, users[wire]) for wire, gbs in fabric.gbs.items()}
    return LinkFabric(len(own), ways_kept, shared, out, into, fabric.burst_bytes)


def heads_of_group(workload: Workload, tensor_parallel: int) -> Workload:
    """Return one rank's share of the heads under tensor parallelism; KV heads are repeated where there are too few.

    Raises ConfigurationError if the heads do not split.
    """
    tp = tensor_parallel
    if workload.q_heads % tp:
        raise ConfigurationError(f"{workload.q_heads} query heads do not split over tensor parallelism of {tp}")
    if workload.kv_heads % tp and tp % workload.kv_heads:
        raise ConfigurationError(f"{workload.kv_heads} kv heads do not split over tensor parallelism of {tp}")
    return replace(workload, q_heads=workload.q_heads // tp, kv_heads=max(1, workload.kv_heads // tp))


def node_sizes(net: Interconnect) -> tuple[int, ...]:
    """Return the ranks a node has, for schedules of two levels.

    Nodes are hosts, and islands in a host, where they are equal and in the order in which schedules number them
    (good_order), however the job does.
    """
    hosts, world = _by_host(net), net.world_size
    local = len(hosts[0]) if len({len(ranks) for ranks in hosts}) == 1 else None
    sizes = []
    if local is not None and local < world:
        sizes.append(local)
    island = _island_size(net, _ring_of(net, hosts[0]))
    if len(hosts) == 1 and island:
        sizes.append(world)  # schedules of one level, as meshes of all, fit as well
    if island and local is not None and world % island == 0 and 1 < island < local:
        sizes.append(island)
    return tuple(dict.fromkeys(sizes)) or (world,)


def _by_host(net: Interconnect) -> list[list[int]]:
    """Return the ranks of each host that has some."""
    ranks_of: dict[int, list[int]] = {}
    for rank, host in enumerate(net.hosts):
        ranks_of.setdefault(host, []).append(rank)
    return [ranks_of[host] for host in sorted(ranks_of)]


def _island_size(net: Interconnect, ranks: Sequence[int]) -> int | None:
    """Return how many ranks the shortest and widest ways join, None if those are not equal runs of neighbours."""
    if not 4 <= len(ranks) <= MOST_LOOKED_AT:
        return None
    pairs = [(a, b) for a in ranks for b in ranks if a != b]
    shortest = min(len(net.way(a, b)) for a, b in pairs)
    widest = max(net.pair_gbs(a, b) for a, b in pairs if len(net.way(a, b)) == shortest)
    near = {(a, b) for a, b in pairs if len(net.way(a, b)) == shortest and net.pair_gbs(a, b) >= AS_WIDE * widest}
    island: list[int] = []
    parts = 0
    for place, rank in enumerate(ranks):
        friends = [other for other in range(place) if (rank, ranks[other]) in near]
        island.append(island[friends[0]] if friends else parts)
        parts += not friends
    size = len(ranks) // parts
    return size if island == [place // size for place in range(len(ranks))] and parts > 1 else None


def good_order(net: Interconnect) -> tuple[int, ...]:
    """Return the ranks host by host, inside a host round a ring of wide and short ways; identity where that is one."""
    found: list[int] = []
    alike: dict[tuple[int, ...], list[int]] = {}  # by fabric and devices: a host's ring, as indices of its ranks
    for ranks in _by_host(net):
        host = net.places[ranks[0]][0]
        key = id(net.fabrics[host]), *(net.places[rank][1] for rank in ranks)
        if key not in alike:
            index_of = {rank: index for index, rank in enumerate(ranks)}
            alike[key] = [index_of[rank] for rank in _ring_of(net, ranks)]
        found += [ranks[index] for index in alike[key]]
    return tuple(found)


def _ring_of(net: Interconnect, ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a host in the order in which a ring should pass them.

    That is the order as it is, unless its narrowest step is narrower than the widest pair: then greedily the best way
    on.
    """
    if not 4 <= len(ranks) <= MOST_LOOKED_AT:
        return list(ranks)

    def cost(a: int, b: int) -> tuple[float, int]:
        return -net.pair_gbs(a, b), len(net.way(a, b))

    def worst(ring: Sequence[int]) -> tuple[float, int]:
        return max(cost(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))

    best = list(ranks)
    if worst(best) == min(cost(ranks[0], other) for other in ranks[1:]):
        return best
    improved = True
    while improved:  # exchange the ends of a part, as long as the worst step, then the sum, gets better
        improved = False
        for i in range(1, len(best) - 1):
            for j in range(i + 1, len(best)):
                turned = best[:i] + best[i : j + 1][::-1] + best[j + 1 :]
                if _score(turned, cost) < _score(best, cost):
                    best, improved = turned, True
    return best


def _score(ring: Sequence[int], cost: object) -> tuple[tuple[float, int], ...]:
    """Return the costs of all steps of a ring, worst first."""
    steps = zip(ring, [*ring[1:], ring[0]], strict=True)
    return tuple(sorted((cost(a, b) for a, b in steps), reverse=True))  # type: ignore[operator]
