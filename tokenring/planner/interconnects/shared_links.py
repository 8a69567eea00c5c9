"""Wires shared with other groups: what a context-parallel group gets of them while all exchange, as a job sees it.

Tensor parallelism splits the heads over neighbours, each of which is in a group of its own; data parallelism (and
pipeline stages) repeat these groups on the ranks that follow. All of them exchange at once.

Ranks are laid out as Megatron does by default: tensor parallelism fastest, then context parallelism, then the rest. So
rank r of the job is in group (r // (tp · cp), r % tp) of all, and its place there is r // tp % cp.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tokenring.planner.interconnects.interconnect import Interconnect
from tokenring.planner.interconnects.rank_order import context_parallel_group, one_of_groups
from tokenring.planner.interconnects.wiring import interconnect_of
from tokenring.topology.ranks import Topology

Group = tuple[int, int] | None


def group_net(
    given: Topology | Interconnect, world_size: int, tensor_parallel: int, job_ranks: int | None = None
) -> Interconnect:
    """Return the interconnect of one of the groups of `world_size` ranks, each with its part of shared wires.

    given: of the ranks of `tensor_parallel` groups, neighbours in different ones, of which the first group stands for
    all; or of the group alone, where the graph of its machines shows the accelerators of the others: a note says so
    where it does not, and where groups of data parallelism are among them. job_ranks: of all groups, if that is known.
    Raises ConfigurationError where the groups do not fit the hosts.
    """
    net = given if isinstance(given, Interconnect) else interconnect_of(given)
    if tensor_parallel == 1:
        return net
    if given.world_size == world_size * tensor_parallel:
        return context_parallel_group(net, tensor_parallel)
    beside = None if isinstance(given, Interconnect) else _beside_others(given, tensor_parallel, job_ranks)
    note = f"wires are taken to be one group's alone: of tensor_parallel={tensor_parallel} only its own ranks are known"
    return beside or replace(net, notes=(*net.notes, note))


def _beside_others(own: Topology, tensor_parallel: int, job_ranks: int | None) -> Interconnect | None:
    """Return the group's interconnect by the graph, None unless its accelerators lie there as its ranks in the job."""
    if own.graph is None or len(own.devices) != own.world_size or None in own.devices:
        return None
    every = replace(Topology.of(own.graph), name=own.name, reached=own.reached)
    number = {device: rank for rank, device in enumerate(every.devices)}
    at = [number[device] for device in own.devices]
    group_of = _groups(every, at, tensor_parallel, job_ranks)
    if group_of is None:
        return None
    net = one_of_groups(interconnect_of(every), group_of, group_of[at[0]], own.world_size)
    name, notes = f"{own.name}, every {tensor_parallel}th rank", net.notes
    if len({*group_of} - {None}) > tensor_parallel:
        notes = (*notes, f"all accelerators are taken to be one job's, in groups of tensor_parallel={tensor_parallel}")
    place = {rank: net.places[index] for index, rank in enumerate(sorted(at))}
    return replace(net, name=name, places=tuple(place[rank] for rank in at), notes=notes)


def _groups(every: Topology, at: list[int], tensor_parallel: int, job_ranks: int | None) -> list[Group] | None:
    """Return the group of each accelerator, None where it is idle; None if they do not lie as ranks do.

    at: the accelerators of one group.
    """
    first, ranks = min(at), len(at) * tensor_parallel
    start = first - first % tensor_parallel  # of the ranks that tensor and context parallelism have together
    lies = sorted(at) == list(range(first, first + ranks, tensor_parallel)) and start + ranks <= every.world_size
    if not lies or any(count % tensor_parallel for count in Counter(every.hosts).values()):
        return None
    group_of: list[Group] = [((rank - start) // ranks, rank % tensor_parallel) for rank in range(every.world_size)]
    if job_ranks is None or job_ranks >= every.world_size:
        return group_of
    if job_ranks != ranks:  # it has some of the others
        return None
    return [group if rank in range(start, start + ranks) else None for rank, group in enumerate(group_of)]
