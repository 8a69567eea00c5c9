"""ContextParallel: the group, the layout and the way attention is to be computed over them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import torch

from tokenring.api.arguments import (
    check_computing,
    check_planning,
    check_schedule,
    check_transport,
    check_wire,
    named_in_mode,
    not_chosen,
    schedule_text,
    seconds_limit,
    wire_text,
)
from tokenring.api.standing import Standing, new_handle
from tokenring.backends import registry
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import Pass
from tokenring.launch.groups import hold
from tokenring.runtime.agreement import Description, agree, beginning, describe, no_kernel, refusing, settle
from tokenring.runtime.exclusive import share_turn, turn_of
from tokenring.schedule.schedule import GivenSchedule, Schedule
from tokenring.schedule.scheme import Scheme
from tokenring.sequence.layout import AUTO, Layout, make_layout
from tokenring.sequence.mask_words import MaskLike, mask_of
from tokenring.sequence.workload import Lengths, Request, Workload
from tokenring.weak_method import weakly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from tokenring.api.cuts import Cuts
    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.launch.groups import Group, HeldGroup
    from tokenring.planner.choosing.plan import Plan
    from tokenring.planner.choosing.planner import Planner
    from tokenring.planner.interconnects.interconnect import Interconnect
    from tokenring.runtime.executor import Executor
    from tokenring.runtime.pool import Pool
    from tokenring.runtime.trace import Trace
    from tokenring.topology.ranks import Topology

SCHEDULE_VARIABLE = "TOKENRING_SCHEDULE"
TIMEOUT_SECONDS = 60.0
CACHED_PROGRAMS = 64  # bound programs, each for one workload, mask and pass


class ContextParallel(Standing):
    """Attention over the ranks of a group: make one, once, and give it to every call.

        cp = tr.ContextParallel(layout="zigzag")        # all ranks, or group=mesh["cp"]: cp.rank of cp.world_size
        x = tr.shard(x, cp, dim=1)                      # this rank's part of the sequence; tr.positions are for RoPE
        out = tr.attention(q, k, v, cp, is_causal=True) # [B, T, H, D]; differentiable
        print(tr.plan(q, k, v, cp, is_causal=True))     # which schedule it takes, and why

    group: a ProcessGroup, a one-dimensional DeviceMesh (as mesh["cp"]), "self" for this rank alone, or None for the
        world (one rank, if torch.distributed is not initialised).
    layout: "contiguous", "zigzag", "striped", a finer cut of one ("zigzag/2"), a Layout, or "auto": for each mask one
        of even work and few bytes (docs/layouts.md).
    schedule: "auto", "auto:ring,tokenring" (choose among these), a name ("ring", "usp/2": docs/schedules.md),
        a Scheme or Schedule of your own, or a Plan. None: what TOKENRING_SCHEDULE says, else "auto".
    topology: what joins the ranks, for "auto": a Topology, or an Interconnect. None: probed at the first call on
        accelerators; on a CPU, what docs/planner.md says is assumed.
    tensor_parallel: how many neighbours share the heads, each in a group of its own; "auto" counts these groups' part
        of shared wires, and from 2 on also that of data-parallel groups, with ranks ordered as in Megatron (tensor
        parallelism fastest, then context, then data). topology may then be that of all ranks that share heads.
    memory_limit_bytes: of each rank, for buffers, connections and what forward keeps: "auto" chooses what fits, over a
        mode of transport "auto" with fewer connections where that is faster.
    transport: "auto", a name (docs/transports.md), or the `transport` of another ContextParallel of the same group.
    kernel: "auto" or a name.
    pieces: in how many parts chunks move; None: by the schedule and the sizes.
    wire: a format in which q, k, v and dout travel, encoded once: "mxfp8", "mxint8", ... (docs/layer.md); not with
        "auto". Its blocks of 32 must divide head dimensions. None: in the tensors' dtype.
    max_error: for "auto", the relative error that a format may add, as 0.05: then it takes one that is faster.
    timeout_seconds: how long any wait for a peer may take before it raises PeerLost.

    Raises ConfigurationError and BackendUnavailable. `close`, or a `with`, gives back what it holds. One thread at a
    time uses it. Copies, deep ones too, are the context itself; it is not pickled.
    """

    _internal = frozenset((
        "active_trace", "adders", "agreed_plan", "agreed_sizes", "check_open", "closed", "cuts", "executor", "handle",
        "kernel", "layout_for", "lengths", "made_transport", "plan", "plans", "pool", "speaker", "transport_for",
        "turn",
    ))  # fmt: skip

    def __init__(
        self,
        group: Group | HeldGroup = None,
        layout: str | Layout = "zigzag",
        schedule: str | Scheme | Schedule | Plan | None = None,
        transport: str | Transport = "auto",
        *,
        topology: Topology | Interconnect | None = None,
        tensor_parallel: int = 1,
        memory_limit_bytes: int | None = None,
        kernel: str = "auto",
        pieces: int | None = None,
        wire: str | None = None,
        max_error: float | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        of = self._group = hold(group)
        del group  # a frame of ours that an error keeps must not keep it
        self.rank, self.world_size = (0, 1) if of is None else (of.rank, of.world_size)
        self.layout, like = layout, "contiguous" if layout == AUTO else layout  # which deals as many tokens
        self.lengths = Lengths(like, self.rank, self.world_size)
        self.schedule = os.environ.get(SCHEDULE_VARIABLE, "auto") if schedule is None else schedule
        self.topology, self.tensor_parallel, self.memory_limit_bytes = topology, tensor_parallel, memory_limit_bytes
        self.pieces, self.kernel_name, self.wire, self.max_error = pieces, kernel, wire, max_error
        self._transport, self._closed, self.timeout_seconds = transport, False, seconds_limit(timeout_seconds)
        self._made_here: dict[str, Transport] = {}
        self.adders: dict[Transport, Any] = {}  # of means of keys: see `collectives`
        self._spoken: Transport | None = None  # by which the ranks agreed last
        self._pools: dict[torch.device, Pool] = {}
        self._plan = lru_cache(maxsize=CACHED_PROGRAMS)(weakly(self._make_plan))
        self._agreed: dict[Request, Plan] = {}
        self.agreed_sizes: dict[object, None] = {}  # of engines' exchanges, on all ranks alike: see `engines`
        self._executor = lru_cache(maxsize=CACHED_PROGRAMS)(weakly(self._make_executor))
        self._description = lru_cache(maxsize=CACHED_PROGRAMS)(weakly(self._describe))
        self.active_trace: Trace | None = None  # to which calls made now add their events
        check_computing(self.layout, self.kernel_name)
        check_planning(self.topology, self.memory_limit_bytes, self.world_size, self.tensor_parallel)
        check_transport(self._transport, self.rank, self.world_size)
        check_schedule(self.schedule, self.pieces, self.world_size)
        check_wire(self.wire, self.schedule, self.max_error)
        self.turn, self.handle = turn_of(transport, self.world_size), new_handle(self)

    def __repr__(self) -> str:
        names = [each if isinstance(each, str) else each.name for each in (self.schedule, self.layout)]
        state = ", closed" if self._closed else ""
        return f"ContextParallel(schedule {names[0]}, layout {names[1]}, rank {self.rank} of {self.world_size}{state})"

    @property
    def closed(self) -> bool:
        """Say whether `close` was called."""
        return self._closed

    def close(self) -> None:
        """Give back the buffers, and the transport if it was made here; attention then raises ConfigurationError.

        A transport that was given stays open: its maker closes it. A `with` closes at its end.
        """
        self._closed = True
        self._executor.cache_clear()
        self._pools.clear()
        self.agreed_sizes.clear()
        for made in (*self.adders.values(), *self._made_here.values()):
            made.close()
        self._made_here.clear()
        self._spoken = None

    def check_open(self) -> None:
        """Raise ConfigurationError once this is closed, or its group destroyed."""
        if self._closed:
            raise ConfigurationError("this ContextParallel was closed; make another, or close it after the last call")
        if self._group is not None:
            self._group.check()

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None for one rank alone. Raises ConfigurationError once it is destroyed."""
        return None if self._group is None else self._group()

    def layout_for(self, length: int, mask: MaskLike = None) -> Layout:
        """Return the layout of a sequence of this length, with "auto" for this mask. Raises ConfigurationError."""
        if self.layout == AUTO:
            return self.cuts.of(length, mask_of(mask))
        return make_layout(self.layout, self.world_size, length)

    @cached_property
    def cuts(self) -> Cuts:
        """Layouts that are not its own."""
        from tokenring.api.cuts import Cuts

        return Cuts(self.world_size, self.topology, self.tensor_parallel)

    @property
    def _is_alone(self) -> bool:
        """True if there is no other rank to agree with."""
        return self.world_size == 1 and (self._transport is None or isinstance(self._transport, str))

    @property
    def transport(self) -> Transport | None:
        """The transport, made at the first use by all ranks; None for one rank. "auto" among NPUs alone: "hccl"."""
        return self.transport_for(None)

    def transport_for(self, device: torch.device | None, size: Workload | None = None) -> Transport | None:
        """Return the transport for tensors on this device; "auto" takes another for NPUs. None: before any are seen.

        size: of the first call, where known: by its messages "auto" chooses. All ranks must get here together.
        """
        self.check_open()
        if not isinstance(self._transport, str):
            return self._transport
        if self._is_alone or self._group is None:
            return None
        name = self._transport_name(device)
        if name not in self._made_here:
            expected = None if size is None else size.ring_bytes(self.world_size)
            self._made_here[name] = registry.make_transport(name, self._group, self.timeout_seconds, expected)
            share_turn(self._made_here[name], self.turn)
        return self._made_here[name]

    def made_transport(self, device: torch.device | None) -> Transport | None:
        """Return the transport for tensors on this device, if there is one already."""
        if not isinstance(self._transport, str):
            return self._transport
        return None if self._is_alone else self._made_here.get(self._transport_name(device))

    def _transport_name(self, device: torch.device | None) -> str:
        assert isinstance(self._transport, str) and self._group is not None
        return registry.automatic(self._group, device) if self._transport == "auto" else self._transport

    def speaker(self, device: torch.device | None, size: Workload | None = None) -> Transport | None:
        """Return the transport by which ranks agree on a call of tensors on this device, made where there is none yet.

        Where one rank has tensors on another device than the others, it is the transport by which they agreed last.
        All ranks must get here together. None: no other rank is there, or none can be reached any more.
        """
        if self._group is not None and not self._group.lives:
            return None
        if not isinstance(self._transport, str):
            return self._transport
        if self._closed or self._is_alone:
            return None
        return self.made_transport(device) or self._spoken or self.transport_for(device, size)

    def _carrier(self, request: Request) -> Transport | None:
        """Return the transport that moves the messages of a call, in the mode that its plan needs."""
        transport, mode = self.transport_for(request.device, request.workload), self._taken(request).transport
        return transport.in_mode(mode) if mode and transport is not None and transport.target.modal else transport

    def plan(self, request: Request) -> Plan:
        """Return the schedule for a call, and why: as agreed at the first call, else what this rank would take.

        On accelerators without a topology the first plan probes, which all ranks do together.
        """
        from tokenring.planner.choosing.plan import plan_of

        return plan_of(self._taken(request), request.workload)

    def _taken(self, request: Request) -> Plan | GivenSchedule:
        """Return what `plan` says, where the schedule was given without anything of the planner."""
        return self._agreed.get(request) or self._plan(request)

    def executor(self, request: Request, direction: Pass, *notes: str) -> Executor:
        """Return the executor of a pass on this rank. Raises ConfigurationError if ranks ask for different calls.

        notes: what the ranks agree on besides; see `agreement.describe`.
        """
        transport = self._begin(request, direction, *notes)
        with beginning(transport):
            return self._bound(request, direction)

    def agreed_plan(self, request: Request) -> Plan:
        """Return the plan of a call that need not be made: all ranks ask together, and get the same answer."""
        with self.turn:
            settle(self._begin(request, "forward"))
            return self.plan(request)

    def _begin(self, request: Request, direction: Pass, *notes: str) -> Transport | None:
        """Begin to agree on a pass with all ranks; return the transport, if there are several ranks."""
        with refusing(self, direction, request.device):
            self.check_open()
            if self._is_alone:
                return None
            mine = self._description(request, direction, *notes)
        speaker = self.speaker(request.device, request.workload)
        assert speaker is not None  # there are several ranks
        self._agree(speaker, mine, direction)
        if speaker is not self._transport and self._transport_name(request.device) not in self._made_here:
            settle(speaker)  # all have come to tensors on another device
        transport = self._spoken = self.transport_for(request.device, request.workload) or speaker
        if self.plans and request not in self._agreed:
            settle(transport)
            self._plan_together(transport, request)
        return transport

    def _bound(self, request: Request, direction: Pass) -> Executor:
        """Return the executor of a pass, on the memory that the pool has now."""
        pool = self.pool(request.device)
        made = self._executor(request, direction)
        if made.views.base is not pool.data:  # another context has made it grow: programs hold the old memory
            self._executor.cache_clear()
            made = self._executor(request, direction)
        return made

    def _agree(self, transport: Transport, mine: Description, direction: Pass) -> None:
        began = perf_counter()
        agree(transport, mine)
        if self.active_trace is not None:
            self.active_trace.agreed(self.rank, direction, began)

    def pool(self, device: torch.device) -> Pool:
        """Return the buffer pool of a device: all programs share it, since one runs at a time."""
        if device not in self._pools:
            from tokenring.runtime.pool import Pool

            self._pools[device] = Pool.of(self.transport_for(device), device)
        return self._pools[device]

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Time every instruction of the calls made inside; costs some microseconds for each."""
        from tokenring.runtime.trace import Trace

        before, self.active_trace = self.active_trace, Trace()
        try:
            yield self.active_trace
        finally:
            self.active_trace = before

    def kernel(self, device: torch.device) -> AttentionKernel:
        """Return the kernel that computes the tiles of calls with tensors on this device."""
        return registry.make_kernel(self.kernel_name, device)

    def _kernel_of(self, request: Request) -> AttentionKernel:
        found = registry.capped_kernel(self.kernel(request.device), self.kernel_name, request.softcap)
        if request.workload.latent_dim is None:
            return found
        from tokenring.runtime.latent_kernel import LatentKernel

        return cast("AttentionKernel", LatentKernel(found))

    def _make_plan(self, request: Request) -> Plan | GivenSchedule:
        layouts, modes = self._layouts(request), registry.modes_of(self._transport, self._group, request.device)
        if self.plans:
            from tokenring.api.given_schedules import planned

            transport = self.transport_for(request.device, request.workload)
            kernel, budget = self._kernel_of(request), self.max_error
            return planned(self._planner, request, layouts, kernel, transport, modes, budget)
        found = not_chosen(self.schedule, request, layouts, self.pieces, self.wire)
        return named_in_mode(found, modes, self._transport, self._group, request)

    @property
    def plans(self) -> bool:
        """True if the schedule is chosen here."""
        return isinstance(self.schedule, str) and self.schedule.partition(":")[0] == "auto"

    @cached_property
    def _planner(self) -> Planner:
        from tokenring.planner.choosing.checks import restricted
        from tokenring.planner.choosing.planner import Planner

        limits = self.memory_limit_bytes, self.tensor_parallel, self.timeout_seconds
        return Planner(self._group, self.world_size, self.topology, restricted(str(self.schedule)), *limits)

    def _layouts(self, request: Request) -> tuple[Layout, Layout]:
        """Return the layouts of q and of kv."""
        if request.layout is not None:
            return request.layout, request.layout
        return self.layout_for(request.workload.q_length), self.layout_for(request.workload.kv_length)

    def _plan_together(self, transport: Transport, request: Request) -> None:
        """Take rank 0's plan on all ranks. Raises ConfigurationError, on every rank, where nothing fits."""
        self._kernel_of(request)  # raises where there is none, before others wait for a plan
        agreed = self._planner.together(transport, request, self._layouts(request), lambda: self.plan(request))
        if len(self._agreed) >= CACHED_PROGRAMS:  # on all ranks alike
            self._agreed.pop(next(iter(self._agreed)))
        self._agreed[request] = agreed

    def _make_executor(self, request: Request, direction: Pass) -> Executor:
        from tokenring.lowering.lower import lower
        from tokenring.lowering.target import IDEAL
        from tokenring.runtime.executor import Executor
        from tokenring.runtime.message_groups import connect

        schedule, kernel = self._taken(request).schedule, self._kernel_of(request)
        if reason := no_kernel(self, request, direction):
            raise UnsupportedError(reason)
        transport = self._carrier(request)
        target = IDEAL if transport is None else transport.target
        if transport is not None:
            connect(transport, schedule, direction, request.device)
        program = lower(schedule, self.rank, direction, request.workload, target, kernel.supports_patch)
        pool = self.pool(request.device)
        before = pool.data
        with torch.inference_mode(False):  # the pool outlives the call, and later calls may want gradients
            made = Executor(schedule, request.workload, program, pool, transport, kernel, request.scale)
        if pool.data is not before:  # it has grown: the programs made before hold the old memory, and this one is kept
            self._executor.cache_clear()
        return made

    def _describe(self, request: Request, direction: Pass, *notes: str) -> Description:
        schedule = schedule_text(self.schedule, lambda: self._taken(request).schedule)
        schedule += wire_text(self.wire, self.max_error, request, lambda: self._taken(request).schedule.name)
        return describe(self, request, direction, schedule, self.plans, notes)
