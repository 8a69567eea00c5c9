"""What a call is to all ranks, who must agree on it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING

from tokenring.errors import TokenRingError
from tokenring.ir.schedule_data import Pass
from tokenring.runtime.agreement import Description, named_digest
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.runtime.caller import Caller
    from tokenring.sequence.request import Request


def describe(cp: Caller, request: Request, direction: Pass, schedule: str, planned: bool) -> Description:
    """What all ranks must agree on. schedule: as text, with all that is in it. planned: whether it is chosen here."""
    transport = cp.made_transport(request.device)
    most = None if transport is None else transport.target.most_connections  # by this rank's environment
    return Description.of(
        {
            "pass": direction,
            **{field.name: getattr(request.workload, field.name) for field in fields(Workload)},
            "mask": request.mask,
            "scale": repr(request.scale),
            "gradients enabled": request.training,
            "device": request.device.type,
            "layout": cp.layout if isinstance(cp.layout, str) else named_digest(cp.layout),
            "schedule": schedule,
            "pieces": cp.pieces,
            "kernel": no_kernel(cp, request, direction) or "computes it",
            **({} if most is None else {"communicators at most": most}),
            **({"planned for": "both passes" if request.backward else "forward"} if planned else {}),
        }
    )


def no_kernel(cp: Caller, request: Request, direction: Pass) -> str | None:
    """Why the call is not computed or merged here, in which ranks may differ by what is installed; None: it is."""
    from tokenring.backends.merging.mergers import merge_refusal
    from tokenring.backends.registry import kernel_refusal

    try:
        kernel = cp.kernel(request.device)
    except TokenRingError as error:
        return str(error)
    reason = kernel_refusal(kernel, request.workload, request.device, direction)
    return reason or (merge_refusal(request.device, request.workload.head_dim) if cp.world_size > 1 else None)
