"""Log of rank 0 when training starts: what joins the ranks, and the schedule of each kind of layer."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tokenring.launch.groups import hold
from tokenring.topology.ranks import Topology, probe_seconds

if TYPE_CHECKING:
    from tokenring.api.context import ContextParallel
    from tokenring.sequence.mask import Mask
    from tokenring.sequence.workload import Request

LOG = logging.getLogger("tokenring")
MOST_SHOWN = 4  # slices or documents of a mask
MOST_SAID = 64  # kinds of calls: where lengths differ by step there is no end of them


class Announcer:
    """A logger of one line for a group, and one for each kind of call."""

    def __init__(self) -> None:
        self._said: set[tuple[object, ...]] = set()

    def announce(self, cp: ContextParallel, request: Request) -> None:
        """Log a kind of call, once. All ranks of the group call this after each call, and probe together if need be."""
        key = (cp.schedule, request.workload, _kind_of(request.mask))
        if key in self._said or len(self._said) == MOST_SAID or not _has_rank_0(cp):
            return
        first = not self._said
        self._said.add(key)
        topology = _topology(cp, request.device) if first else None
        if dist.get_rank() == 0:
            if topology is not None:
                LOG.info("topology: %s", verdict_of(topology))
            LOG.info("%s", described(cp, request))


def _kind_of(mask: Mask) -> Hashable:
    """Return the mask, or of one with documents what all packs of a run have in common: a step brings new ends."""
    return mask if mask.is_window else (mask.low, mask.high, mask.chunks, mask.looks_back)


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
    if size.latent_dim is not None:  # which are of all heads
        heads = f"{size.q_heads} heads of {dims}, latents of {size.latent_dim}"
    tokens = f"{size.batch} × {size.q_length:,} tokens in {dtype}"
    why = plan.reason if plan.reason.startswith(plan.name) else f"{plan.name}, {plan.reason}"
    return f"attention of {heads}, {tokens}, {_mask_text(request)}, over {cp.world_size} ranks: {why}"


def _mask_text(request: Request) -> str:
    """Return the mask as text; of many slices or documents, as packs have, only how many."""
    slices, ends = request.mask.slices, request.mask.cu_seqlens or ()
    if slices is not None and len(slices) > MOST_SHOWN:
        return f"a mask of {len(slices)} slices"
    return f"a mask of {len(ends) - 1} documents" if len(ends) > MOST_SHOWN + 1 else str(request.mask)


def _topology(cp: ContextParallel, device: torch.device) -> Topology | None:
    """Return the topology that was given, else what a probe finds, or this machine's cache of it; None: unknown."""
    if cp.topology is not None:
        return cp.topology if isinstance(cp.topology, Topology) else None
    if device.type == "cpu":
        return Topology("machine without accelerators", cp.world_size)
    return Topology.probe(hold(cp.group), device, timeout_seconds=probe_seconds(cp.timeout_seconds))


def _has_rank_0(cp: ContextParallel) -> bool:
    held = hold(cp.group)
    return held is not None and 0 in held.global_ranks()
