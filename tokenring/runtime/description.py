"""What a call is to all ranks, who must agree on it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from tokenring.errors import TokenRingError
from tokenring.ir.schedule_data import Pass, Schedule
from tokenring.runtime.agreement import Description, named_digest
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.api.context import ContextParallel
    from tokenring.sequence.request import Request


def describe(cp: ContextParallel, request: Request, direction: Pass, planned: bool) -> Description:
    """What all ranks must agree on; a schedule of the user's own counts with all that is in it. planned: here."""
    transport = cp.made_transport(request.device)
    most = None if transport is None else transport.capabilities.most_connections  # by this rank's environment
    return Description.of(
        {
            "pass": direction,
            **{field.name: getattr(request.workload, field.name) for field in fields(Workload)},
            "mask": request.mask,
            "scale": repr(request.scale),
            "gradients enabled": request.training,
            "device": request.device.type,
            "layout": cp.layout if isinstance(cp.layout, str) else named_digest(cp.layout),
            "schedule": _schedule_text(cp, request),
            "pieces": cp.pieces,
            "kernel": no_kernel(cp, request, direction) or "computes it",
            **({} if most is None else {"communicators at most": most}),
            **({"planned for": "both passes" if request.backward else "forward"} if planned else {}),
        }
    )


def no_kernel(cp: ContextParallel, request: Request, direction: Pass) -> str | None:
    """Why the call is not computed or merged here, in which ranks may differ by what is installed; None: it is."""
    from tokenring.backends.merging.mergers import merge_refusal
    from tokenring.backends.registry import kernel_refusal

    try:
        kernel = cp.kernel(request.device)
    except TokenRingError as error:
        return str(error)
    reason = kernel_refusal(kernel, request.workload, request.device, direction)
    return reason or (merge_refusal(request.device, request.workload.head_dim) if cp.world_size > 1 else None)


def _schedule_text(cp: ContextParallel, request: Request) -> str:
    from tokenring.planner.choosing.plan import Plan

    if isinstance(cp.schedule, str):
        return cp.schedule
    if isinstance(cp.schedule, Schedule):
        return named_digest(cp.schedule)
    if isinstance(cp.schedule, Plan):
        return f"{named_digest(cp.schedule.schedule)} over {cp.schedule.transport or 'any transport'}"
    try:  # a Scheme's functions print differently in each process; what they make does not
        return named_digest(cp.plan(request).schedule)
    except TokenRingError as error:
        return f"{cp.schedule.name!r}, which cannot be used: {error}"
