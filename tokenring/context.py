"""ContextParallel: the group, the layout and the way attention is to be computed over them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from numbers import Real
from time import perf_counter
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from tokenring.errors import ConfigurationError, TokenRingError, UnsupportedError
from tokenring.layout import Layout, as_integer, make_layout, read_name
from tokenring.mask import Mask
from tokenring.runtime.agreement import Description, agree
from tokenring.runtime.trace import Agree, Event, Trace
from tokenring.schedule.build import Scheme, build
from tokenring.schedule.ir import Pass, Schedule
from tokenring.weak import weakly
from tokenring.workload import Workload

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from tokenring.backends.base import AttentionKernel, Transport
    from tokenring.planner.plan import Plan
    from tokenring.runtime.executor import Executor
    from tokenring.runtime.pool import Pool

LOG = logging.getLogger("tokenring")
NOT_A_MEMBER = "this rank is not a member of the group; only members make a ContextParallel"
TIMEOUT_SECONDS = 60.0
LEAST_SECONDS = 0.001  # below, Gloo takes it for no limit at all
MOST_SECONDS = 1e9  # above, clocks overflow
CACHED_PROGRAMS = 64  # bound programs, each for one workload, mask and pass


@dataclass(frozen=True)
class Request:
    """One kind of attention call, as this rank sees it."""

    workload: Workload
    mask: Mask
    scale: float
    training: bool
    device: torch.device


class ContextParallel:
    """Attention over the ranks of a group.

    group: a ProcessGroup, a one-dimensional DeviceMesh (as mesh["cp"]), or None for the world (one
        rank, if torch.distributed is not initialised).
    layout: "contiguous", "zigzag", "striped", a finer cut of one ("zigzag/2"), or a Layout.
    schedule: "auto", "auto:ring,tokenring" (choose among these), a name ("ring", "usp/2": docs/schedules.md),
        or a Scheme or Schedule of your own.
    transport: "auto", a name, or the `transport` of another ContextParallel of the same group.
    kernel: "auto" or a name.
    pieces: in how many parts chunks move; None leaves it to the schedule and the sizes.
    timeout_seconds: how long any wait for a peer may take before it raises PeerLost.

    Raises ConfigurationError and BackendUnavailable. `close`, or a `with`, gives back what it holds.
    """

    def __init__(
        self,
        group: ProcessGroup | DeviceMesh | None = None,
        layout: str | Layout = "zigzag",
        schedule: str | Scheme | Schedule = "auto",
        transport: str | Transport = "auto",
        *,
        kernel: str = "auto",
        pieces: int | None = None,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self.group = process_group(group)
        self.rank = 0 if self.group is None else dist.get_rank(self.group)
        self.world_size = 1 if self.group is None else dist.get_world_size(self.group)
        self.layout = layout
        self.schedule = schedule
        self.pieces, self.kernel_name, self.timeout_seconds = pieces, kernel, _seconds(timeout_seconds)
        self._transport = self._asked_transport = transport
        self._made_here: Transport | None = None
        self._closed = False
        self._pools: dict[torch.device, Pool] = {}
        self._plan = lru_cache(maxsize=CACHED_PROGRAMS)(weakly(self._make_plan))
        self._executor = lru_cache(maxsize=CACHED_PROGRAMS)(weakly(self._make_executor))
        self._description = lru_cache(maxsize=CACHED_PROGRAMS)(weakly(self._describe))
        self._trace: Trace | None = None
        self._check()

    def _check(self) -> None:
        from tokenring.backends.registry import KERNELS

        if not isinstance(self.layout, Layout):
            read_name(self.layout)
        _check_name("kernel", self.kernel_name, KERNELS, "")
        self._check_transport()
        self._check_schedule()

    def _check_transport(self) -> None:
        from tokenring.backends.base import Transport
        from tokenring.backends.registry import TRANSPORTS

        if self._transport is None and self.world_size == 1:  # what `transport` says where there is one rank
            return
        if not isinstance(self._transport, Transport):
            _check_name("transport", self._transport, TRANSPORTS, ", or the `transport` of another ContextParallel")
        elif (self._transport.rank, self._transport.world_size) != (self.rank, self.world_size):
            raise ConfigurationError(
                f"in the transport this is rank {self._transport.rank} of {self._transport.world_size}, in the group "
                f"rank {self.rank} of {self.world_size}: give a transport of the same group"
            )

    def _check_schedule(self) -> None:
        by_name = isinstance(self.schedule, str)
        if not isinstance(self.schedule, (Scheme, Schedule)):
            check_schedule_name(self.schedule)
            if not self.schedule.startswith("auto"):
                self._check_parameters(self.schedule)
        elif isinstance(self.schedule, Schedule) and self.schedule.world_size != self.world_size:
            raise ConfigurationError(
                f"the schedule is for {self.schedule.world_size} ranks, the group has {self.world_size}"
            )
        if self.pieces is None:
            return
        if (as_integer(self.pieces) or 0) < 1:
            raise ConfigurationError(f"pieces={self.pieces!r}: give an integer from 1 on, or None for the default")
        if not by_name or str(self.schedule).startswith("auto"):
            raise ConfigurationError(f"pieces={self.pieces} goes with a schedule by name; others say it themselves")

    def _check_parameters(self, name: str) -> None:
        from tokenring.schedule.families.registry import misfit

        if (reason := misfit(name, self.world_size)) is not None:
            raise ConfigurationError(reason)

    def close(self) -> None:
        """Give back the buffers, and the transport if it was made here; attention then raises ConfigurationError.

        A transport that was given stays open, for whoever made it to close. Closing twice is fine. Closes
        itself at the end of a `with`.
        """
        self._closed = True
        self._executor.cache_clear()
        self._pools.clear()
        if self._made_here is not None:
            self._made_here.close()
        self._made_here, self._transport = None, self._asked_transport

    def __enter__(self) -> ContextParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigurationError(
                "this ContextParallel was closed; make another one, or close it after the last call"
            )

    def layout_for(self, length: int) -> Layout:
        """The layout of a sequence of this length. Raises ConfigurationError when it does not divide."""
        return make_layout(self.layout, self.world_size, length)

    @property
    def transport(self) -> Transport | None:
        """The transport, made when first needed; None for one rank. All ranks must get here together."""
        self._check_open()
        if isinstance(self._transport, str):
            if self.group is None or self.world_size == 1:
                return None
            from tokenring.backends.registry import make_transport

            self._made_here = make_transport(self._transport, self.group, self.timeout_seconds)
            self._transport = self._made_here
        return self._transport

    def plan(self, request: Request) -> Plan:
        """The schedule for a call, and why."""
        return self._plan(request)

    def executor(self, request: Request, direction: Pass) -> Executor:
        """What runs a pass of a call on this rank. Raises ConfigurationError if ranks differ in what they ask for."""
        self._check_open()
        transport = self.transport
        if transport is None:
            return self._bound(request, direction)
        self._agree(transport, self._description(request, direction), direction)
        try:
            return self._bound(request, direction)
        except TokenRingError:  # on all ranks alike
            raise
        except BaseException as error:  # such as Ctrl-C: the others begin the pass
            transport.fail(error)
            raise

    def _bound(self, request: Request, direction: Pass) -> Executor:
        """The executor of a pass, on the memory that the pool has now."""
        pool = self.pool(request.device)
        before = pool.data
        made = self._executor(request, direction)
        if before is not pool.data or made.views.base is not pool.data:  # it has grown: programs hold the old memory
            self._executor.cache_clear()
            made = self._executor(request, direction)
        return made

    def _agree(self, transport: Transport, mine: Description, direction: Pass) -> None:
        began = perf_counter()
        agree(transport, mine)
        if self._trace is not None:
            self._trace.events.append(Event(self.rank, direction, 0, Agree(), began, perf_counter()))

    def pool(self, device: torch.device) -> Pool:
        """The buffer pool of a device: all programs share it, since one runs at a time."""
        from tokenring.runtime.pool import Pool

        if device not in self._pools:
            self._pools[device] = Pool.of(self.transport, device)
        return self._pools[device]

    @contextmanager
    def trace(self) -> Iterator[Trace]:
        """Time every instruction of the calls made inside; costs some microseconds for each."""
        before, self._trace = self._trace, Trace()
        try:
            yield self._trace
        finally:
            self._trace = before

    @property
    def active_trace(self) -> Trace | None:
        return self._trace

    def kernel(self, device: torch.device) -> AttentionKernel:
        from tokenring.backends.registry import make_kernel

        return make_kernel(self.kernel_name, device)

    def _make_plan(self, request: Request) -> Plan:
        from tokenring.planner.select import Plan, named_schedule, select
        from tokenring.topology.ranks import full_mesh

        size, mask = request.workload, request.mask
        q_layout, kv_layout = self.layout_for(size.q_length), self.layout_for(size.kv_length)
        asked = self.schedule
        if isinstance(asked, Schedule):
            _check_made_for(asked, q_layout, kv_layout, mask)
            return Plan(asked.verify(), size, "the schedule that was given", ())
        if isinstance(asked, Scheme):
            return Plan(build(asked, q_layout, kv_layout, mask).verify(), size, "the scheme that was given", ())
        name, _, families = asked.partition(":")
        if name != "auto":
            made = named_schedule(name, size, q_layout, kv_layout, mask, self.pieces)
            return Plan(made, size, f"asked for by name: {name}", ())
        passes: tuple[Pass, ...] = ("forward", "backward") if request.training else ("forward",)
        options = {"families": families.split(",")} if families else {}
        return select(
            size,
            full_mesh(self.world_size),
            q_layout=q_layout,
            kv_layout=kv_layout,
            mask=mask,
            passes=passes,
            **options,
        )

    def _make_executor(self, request: Request, direction: Pass) -> Executor:
        from tokenring.runtime.executor import Executor
        from tokenring.schedule.lower import lower

        schedule, kernel = self.plan(request).schedule, self.kernel(request.device)
        if reason := kernel.supports(request.workload.head_dim, request.workload.dtype):
            raise UnsupportedError(
                f"kernel {kernel.name!r} cannot compute this call: {reason}; "
                f"choose another, as in ContextParallel(kernel='reference')"
            )
        transport = self.transport
        early = transport is None or transport.capabilities.early_receives
        program = lower(schedule, self.rank, direction, request.workload, kernel.supports_patch, early)
        pool = self.pool(request.device)
        with torch.inference_mode(False):  # the pool outlives the call, and later calls may want gradients
            return Executor(schedule, request.workload, program, pool, transport, kernel, request.scale)

    def _describe(self, request: Request, direction: Pass) -> Description:
        """What all ranks must agree on. A schedule of the user's own counts with all that is in it."""
        return Description.of(
            {
                "pass": direction,
                **{field.name: getattr(request.workload, field.name) for field in fields(Workload)},
                "mask": request.mask,
                "scale": repr(request.scale),
                "gradients enabled": request.training,
                "device": request.device.type,
                "layout": self.layout if isinstance(self.layout, str) else _named_digest(self.layout),
                "schedule": self._schedule_text(request),
                "pieces": self.pieces,
            }
        )

    def _schedule_text(self, request: Request) -> str:
        if isinstance(self.schedule, str):
            return self.schedule
        if isinstance(self.schedule, Schedule):
            return _named_digest(self.schedule)
        try:  # a Scheme's functions print differently in each process; what they make does not
            return _named_digest(self.plan(request).schedule)
        except TokenRingError as error:
            return f"{self.schedule.name!r}, which cannot be used: {error}"


def _named_digest(some: Layout | Schedule) -> str:
    """A name, and what tells apart those that share it."""
    text = some.to_json() if isinstance(some, Schedule) else repr(some)
    return f"{some.name!r} ({hashlib.sha256(text.encode()).hexdigest()[:16]})"


def process_group(group: ProcessGroup | DeviceMesh | None) -> ProcessGroup | None:
    """What a user gives as a group, as the group itself; None where there is one process only."""
    if group is None:
        ready = dist.is_available() and dist.is_initialized()
        return dist.group.WORLD if ready else None
    if isinstance(group, dist.ProcessGroup):
        return group
    if isinstance(group, int) and not isinstance(group, bool):  # dist.GroupMember.NON_GROUP_MEMBER
        raise ConfigurationError(NOT_A_MEMBER)
    if not hasattr(group, "get_group"):
        raise ConfigurationError(
            f"group is of type {type(group).__name__}; give a ProcessGroup, a one-dimensional DeviceMesh or None"
        )
    if group.ndim != 1:
        raise ConfigurationError(
            f"a DeviceMesh of {group.ndim} dimensions was given; name the one for context parallelism, as mesh['cp']"
        )
    if group.get_coordinate() is None:
        raise ConfigurationError(NOT_A_MEMBER)
    return group.get_group()


def check_schedule_name(name: object) -> None:
    from tokenring.schedule.families.registry import FAMILIES, forms, is_known, parse

    if not isinstance(name, str):
        raise ConfigurationError(
            f"schedule is of type {type(name).__name__}; choose auto, one of {forms()}, or give a Scheme or a Schedule"
        )
    base, restricted, families = name.partition(":")
    asked = families.split(",") if restricted else [base]
    unknown = [each for each in asked if not is_known(each)]
    if (base != "auto" and (restricted or unknown)) or (restricted and unknown):
        raise ConfigurationError(
            f"unknown schedule {unknown[0] if unknown else name!r} in {name!r}; choose auto, one of "
            f"{forms()}, or restrict the choice, as in 'auto:ring,tokenring'"
        )
    for each in asked if name != "auto" else ():
        if not (restricted and each in FAMILIES):  # auto chooses the parameters of a family
            parse(each)


def _check_made_for(schedule: Schedule, q_layout: Layout, kv_layout: Layout, mask: Mask) -> None:
    for what, made, wanted in (
        ("q layout", schedule.q_layout, q_layout),
        ("kv layout", schedule.kv_layout, kv_layout),
        ("mask", schedule.mask, mask),
    ):
        if made != wanted:
            text = [
                f"{each.name} of {each.length}" if isinstance(each, Layout) else str(each) for each in (made, wanted)
            ]
            raise ConfigurationError(
                f"schedule {schedule.name!r} was made for {what} {text[0]}, but the call has {text[1]}: "
                f"make it for this call, or give its Scheme, which is built for each"
            )


def _check_name(what: str, given: object, known: Iterable[str], more: str) -> None:
    choice = f"choose one of auto, {', '.join(known)}{more}"
    if not isinstance(given, str):
        raise ConfigurationError(f"{what} is of type {type(given).__name__}; {choice}")
    if given != "auto" and given not in known:
        raise ConfigurationError(f"unknown {what} {given!r}; {choice}")


def _seconds(given: object) -> float:
    number = isinstance(given, Real) and not isinstance(given, bool)
    if not number or not LEAST_SECONDS <= float(cast(float, given)) <= MOST_SECONDS:
        raise ConfigurationError(
            f"timeout_seconds={given!r}: give a number of seconds from {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        )
    return float(cast(float, given))
