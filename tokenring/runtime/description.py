"""The description of a call on which all ranks must agree."""

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
    """Describe all that ranks must agree on. schedule: as text, with all its content. planned: if it is chosen here."""
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
    """Return the reason why this rank cannot compute or merge the call; None: it can.

    Ranks may differ in it by what is installed on them.
    """
    from tokenring.backends.merging.mergers import merge_refusal
    from tokenring.backends.registry import kernel_refusal

    try:
        kernel = cp.kernel(request.device)
    except TokenRingError as error:
        return str(error)
    reason = kernel_refusal(kernel, request.workload, request.device, direction)
    return reason or (merge_refusal(request.device, request.workload.head_dim) if cp.world_size > 1 else None)
