"""What a context-parallel group gets of wires that other groups use at the same time, as a job sees it.

Tensor parallelism splits the heads over neighbours, each of which is in a group of its own; these all exchange at once.
"""

from __future__ import annotations

from dataclasses import replace

from tokenring.errors import ConfigurationError
from tokenring.planner.group import context_parallel_group
from tokenring.planner.interconnect import Interconnect
from tokenring.planner.wiring import interconnect_of
from tokenring.topology.ranks import Topology


def group_net(given: Topology | Interconnect, world_size: int, tensor_parallel: int) -> Interconnect:
    """The interconnect of one of `tensor_parallel` groups of `world_size` ranks, each with its part of shared wires.

    given: of all their ranks, neighbours in different groups, of which the first group stands for all; or of the group
    alone, where the graph of its machines shows the accelerators of the others: a note says so where it does not.
    Raises ConfigurationError where the groups do not fit the hosts.
    """
    net = given if isinstance(given, Interconnect) else interconnect_of(given)
    if tensor_parallel == 1:
        return net
    if given.world_size == world_size * tensor_parallel:
        return context_parallel_group(net, tensor_parallel)
    beside = None if isinstance(given, Interconnect) else _beside_others(given, tensor_parallel)
    note = f"wires are taken to be one group's alone: of tensor_parallel={tensor_parallel} only its own ranks are known"
    return beside or replace(net, notes=(*net.notes, note))


def _beside_others(own: Topology, tensor_parallel: int) -> Interconnect | None:
    """By the graph, if its accelerators are those of all ranks, in order; else None."""
    if own.graph is None or len(own.devices) != own.world_size or None in own.devices:
        return None
    every = replace(Topology.of(own.graph), name=own.name, reached=own.reached)
    at = [every.devices.index(device) for device in own.devices]
    first, ranks = min(at), own.world_size * tensor_parallel
    if every.world_size != ranks or sorted(at) != list(range(first, ranks, tensor_parallel)):
        return None
    try:
        net = context_parallel_group(interconnect_of(every), tensor_parallel, first)
    except ConfigurationError:  # hosts of different sizes, or groups across them
        return None
    return Interconnect(net.name, net.fabrics, tuple(net.places[place // tensor_parallel] for place in at), net.notes)
