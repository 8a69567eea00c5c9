"""Log of rank 0 when training starts: what joins the ranks, and the schedule of each kind of layer."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tokenring.launch.groups import hold
from tokenring.topology.ranks import Topology

if TYPE_CHECKING:
    from tokenring.api.context import ContextParallel
from tokenring.sequence.workload import Request

LOG = logging.getLogger("tokenring")
MOST_SHOWN = 4  # slices of a mask


class Announcer:
    """A logger of one line for a group, and one for each kind of call."""

    def __init__(self) -> None:
        self._said: set[tuple[object, ...]] = set()

    def announce(self, cp: ContextParallel, request: Request) -> None:
        """Log a kind of call, once. All ranks of the group call this after each call, and probe together if need be."""
        key = (cp.schedule, request.workload, request.mask)
        if key in self._said or not _has_rank_0(cp):
            return
        first = not self._said
        self._said.add(key)
        topology = _topology(cp, request.device) if first else None
        if dist.get_rank() == 0:
            if topology is not None:
                LOG.info("topology: %s", verdict_of(topology))
            LOG.info("%s", described(cp, request))


def verdict_of(topology: Topology) -> str:
    """Describe the topology in one sentence."""
    if topology.graph is None or topology.verdict is None:
        return topology.name
    from tokenring.topology.report.text import sentence

    return sentence(topology.graph, topology.verdict)


def described(cp: ContextParallel, request: Request) -> str:
    """Describe the kind of layer, and its plan."""
    size, plan = request.workload, cp.plan(request)
    dtype = str(size.dtype).removeprefix("torch.")
    dims = f"{size.head_dim}" if size.value_dim == size.head_dim else f"{size.head_dim}, values of {size.value_dim}"
    heads = f"{size.q_heads} query and {size.kv_heads} kv heads of {dims}"
    tokens = f"{size.batch} × {size.q_length:,} tokens in {dtype}"
    why = plan.reason if plan.reason.startswith(plan.name) else f"{plan.name}, {plan.reason}"
    return f"attention of {heads}, {tokens}, {_mask_text(request)}, over {cp.world_size} ranks: {why}"


def _mask_text(request: Request) -> str:
    """Return the mask as text; of many slices, which packed documents are, only how many."""
    slices = request.mask.slices
    return str(request.mask) if slices is None or len(slices) <= MOST_SHOWN else f"a mask of {len(slices)} slices"


def _topology(cp: ContextParallel, device: torch.device) -> Topology | None:
    """Return the topology that was given, else what a probe finds, or this machine's cache of it; None: unknown."""
    if cp.topology is not None:
        return cp.topology if isinstance(cp.topology, Topology) else None
    if device.type == "cpu":
        return Topology("machine without accelerators", cp.world_size)
    return Topology.probe(hold(cp.group), device)


def _has_rank_0(cp: ContextParallel) -> bool:
    held = hold(cp.group)
    return held is not None and 0 in held.global_ranks()
