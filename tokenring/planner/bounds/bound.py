"""A lower bound on the time of any schedule: of computing, and of what wires into groups of ranks must carry.

The derivation is in docs/bounds.md. It holds for every schedule that starts from a balanced sequence-sharded
layout, leaves its results there, computes equally much on every rank and each pair of a pass in one place, whatever it
keeps, prunes or overlaps, and whether or not it splits the batch. `uneven/G` does not compute equally much, and may go
below where all ranks share one wire.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokenring.ir.schedule_data import Pass
from tokenring.lowering.footprint import flops_per_pair
from tokenring.planner.bounds.cut import foreign_bytes, work_bytes
from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.sequence.mask import Full, Mask
from tokenring.sequence.workload import Workload
from tokenring.tables.rates import Rates

MOST_RANKS = 64  # of a group that is looked at, and of all where hosts differ
MOST_OUTSIDE = 64  # senders that are looked at: of equal hosts a few stand for all

Groups = Sequence[tuple[int, ...]]
OwnPairs = Callable[[Groups], int]


@dataclass(frozen=True)
class Bound:
    """The bound of some passes together. `cut`: the group of ranks whose wires are the narrowest."""

    compute_seconds: float
    transfer_seconds: float
    cut: str

    @property
    def seconds(self) -> float:
        """Seconds of the bound, with everything hidden behind everything."""
        return max(self.compute_seconds, self.transfer_seconds)


def is_attainable(mask: Mask, kv_heads: int, ranks: int) -> bool:
    """Return whether some schedule is known to attain the bound where wires allow it: docs/bounds.md, Known values."""
    return mask == Full() and kv_heads % ranks == 0


def lower_bound(
    workload: Workload,
    visible_pairs: int,
    interconnect: Interconnect,
    rates: Rates,
    passes: Sequence[Pass],
    own_pairs: OwnPairs | None = None,
) -> Bound:
    """Return the lower bound on the time of these passes, under any schedule.

    visible_pairs: (query, key) pairs that the mask leaves, of one head and one batch entry. own_pairs: how many of
    them have their query and key in one group, at most, given groups that are all ranks together; None: in no layout
    more than all that a group has.
    """
    compute = sum(_compute_seconds(workload, visible_pairs, interconnect.world_size, rates, each) for each in passes)
    best, name = 0.0, "none"
    for label, groups in _partitions(interconnect):
        nbytes = _bytes_into(workload, visible_pairs, groups, interconnect.world_size, own_pairs)
        for wires in _cuts(interconnect, groups):
            passing = nbytes - sum(map(interconnect.burst_bytes, wires))  # when a pass begins wires have been idle
            seconds = len(passes) * passing / (sum(map(interconnect.gbs, wires)) * 1e9)
            if seconds > best:
                best, name = seconds, label
    return Bound(compute, best, name)


def _bytes_into(
    workload: Workload, visible_pairs: int, groups: Groups, ranks: int, own_pairs: OwnPairs | None
) -> float:
    """Return the bytes of one pass that must come into these groups together, which may stand for others like them."""
    pairs, every = workload.q_length * workload.kv_length, _all_groups(groups, ranks)
    parts = [len(group) / ranks for group in every]
    own = sum(part**2 for part in parts) * pairs if own_pairs is None else own_pairs(every)
    foreign = foreign_bytes(workload, max(0.0, visible_pairs - own) / pairs, parts)
    by_work = sum(work_bytes(workload, visible_pairs / pairs, len(group), ranks) for group in groups)
    return max(by_work, foreign * len(groups) / len(every))


def _compute_seconds(workload: Workload, pairs: int, ranks: int, rates: Rates, direction: Pass) -> float:
    """Return the seconds of computing of one pass, at the best rate that the table has."""
    a_pair = flops_per_pair(direction, workload.head_dim, workload.value_dim)
    flops = a_pair * workload.batch * workload.q_heads * pairs
    samples = rates.forward if direction == "forward" else rates.backward
    return flops / ranks / (max(rate for _, rate in samples) * 1e12)


# ---------- groups of ranks, and what can come into them


def _partitions(net: Interconnect) -> Iterator[tuple[str, Groups]]:
    """Yield the ranks in groups: each for itself; hosts; and runs of neighbours of every power of two.

    Where all hosts are equal, one host, or one group of hosts, stands for the others.
    """
    world, alike = net.world_size, _hosts_alike(net)
    if world < 2 or (alike is None and world > MOST_RANKS):
        return
    yield "one rank", [(rank,) for rank in range(alike or world)]
    if len(net.fabrics) > 1:
        hosts = [tuple(rank for rank in range(world) if net.hosts[rank] == host) for host in range(len(net.fabrics))]
        yield "one host", hosts[:1] if alike else [each for each in hosts if each]
    size = 2
    while size < min(world, MOST_RANKS):
        if world % size == 0 and (alike is None or alike % size == 0 or size % alike == 0):
            stop = max(alike, size) if alike else world
            yield f"{size} neighbours", [tuple(range(first, first + size)) for first in range(0, stop, size)]
        size *= 2


def _hosts_alike(net: Interconnect) -> int | None:
    """Return the ranks a host has, where all hosts are equal; None where they are not."""
    first = net.fabrics[0]
    same = net.local is not None and all(each is first or each == first for each in net.fabrics)
    in_order = all(device == rank % (net.local or 1) for rank, (_, device) in enumerate(net.places))
    return net.local if same and in_order else None


def _all_groups(groups: Groups, ranks: int) -> Groups:
    """Return all groups of a division of which those of one host may stand for the others."""
    if sum(map(len, groups)) == ranks:
        return groups
    size = len(groups[0])
    return [tuple(range(first, first + size)) for first in range(0, ranks, size)]


def _cuts(net: Interconnect, groups: Groups) -> Iterator[set[str]]:
    """Yield a few sets of wires of which every way into one of the groups passes one.

    Yields nothing where a way passes no wire, as between ranks that share a device: what comes by it takes no time.
    """
    complete = net.world_size - len(groups[0]) <= MOST_OUTSIDE
    picks: dict[str, set[str]] = {"last": set(), "first": set(), "narrowest": set(), "commonest": set()}
    for group in groups:
        ways = [net.way(src, dst) for src in _outside(net, set(group)) for dst in group]
        if not all(ways):
            return
        times = Counter(wire for way in ways for wire in way)
        for way in ways:
            picks["last"].add(way[-1])
            picks["first"].add(way[0])
            picks["narrowest"].add(min(way, key=net.gbs))
            picks["commonest"].add(max(way, key=times.__getitem__))
    yield from picks.values() if complete else [picks["last"]]


def _outside(net: Interconnect, inside: set[int]) -> list[int]:
    """Return the ranks outside a group, or enough of them to know its wires: all of its hosts, and of the next."""
    if net.world_size - len(inside) <= MOST_OUTSIDE:
        return [rank for rank in range(net.world_size) if rank not in inside]
    near = {net.hosts[rank] for rank in inside}
    near.add(next(host for host in net.hosts if host not in near))
    return [rank for rank, host in enumerate(net.hosts) if host in near and rank not in inside]
