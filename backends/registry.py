"""Transports and kernels by name, imported only when asked for."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist

from tokenring.backends.interfaces import AttentionKernel, HeadLimited, Transport, refusal_of
from tokenring.errors import MOST_SAID, BackendUnavailable, UnsupportedError, one_line
from tokenring.launch.groups import held
from tokenring.lowering.backend_names import (
    PLANNED_WITH,
    TRANSPORTS,
    bounded,
    kernel_class,
    load,
    transport_class,
)
from tokenring.lowering.target import Target

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Pass
    from tokenring.launch.groups import Held
    from tokenring.sequence.workload import Workload

LOG = logging.getLogger("tokenring")
OF_DEVICE = {"npu": "hccl", "cuda": "cuda"}  # what "auto" takes for tensors there
FASTEST = {"cpu": "cpu-flash", "npu": "npu-fusion"}  # by device type; reference elsewhere
SEVERAL = {"cuda": "tokenring.backends.kernels.auto:for_device"}  # where "auto" chooses for each tile
HOMES = {name: kind for kind, name in FASTEST.items()} | dict.fromkeys(
    ("torch-flash", "torch-cudnn", "torch-efficient", "flash-attn", "flash-attn-3", "flash-attn-4", "flex"), "cuda"
)  # the only device type that a kernel computes on


def modes_of(asked: object, group: Held | None, device: torch.device) -> dict[str, Target]:
    """Return the modes of "auto" that a plan may take to have fewer connections; none for a transport by name."""
    return bounded(automatic(group, device)) if asked == "auto" and group is not None else {}


def automatic(group: Held, device: torch.device | None) -> str:
    """Return the transport that "auto" means: by the tensors' device; without tensors, by what the group serves.

    A group that serves CPU tensors too is taken for one of these, until a call brings others.
    """
    if device is not None:
        return OF_DEVICE.get(device.type, "auto")
    served = {part.partition(":")[0] for part in dist.get_backend_config(held(group)()).split(",")}
    return next((OF_DEVICE[kind] for kind in sorted(served) if kind in OF_DEVICE and "cpu" not in served), "auto")


def make_transport(
    name: str, group: Held, timeout_seconds: float, message_bytes: int | None = None
) -> Transport:
    """Make the transport for a group, the same on all ranks.

    "auto" takes shared memory where the ranks share some, else Gloo.

    message_bytes: of the messages that are expected, where known: those that choose among several may go by it.
    """
    if name == "auto":
        from tokenring.backends.transports.auto import AutoTransport

        try:
            return AutoTransport(group, timeout_seconds, message_bytes)
        except BackendUnavailable as error:
            LOG.info("transport 'auto' takes gloo: %s", error)
        name = "gloo"
    made = transport_class(name)
    expected = {"message_bytes": message_bytes} if getattr(made, "chooses", False) else {}
    return cast(Transport, made(group, timeout_seconds, **expected))


def kernel_refusal(
    kernel: AttentionKernel, workload: Workload, device: torch.device, direction: Pass
) -> str | None:  # fmt: skip
    """Say why a kernel cannot compute calls of this size at all; None: it can.

    Tries the kernel where it was never tried.

    Raises UnsupportedError where that cannot be found out, such as without memory to try it: the next call asks again.
    """
    reason = refusal_of(kernel, workload.head_dim, workload.value_dim, workload.dtype)
    if reason is None and isinstance(kernel, HeadLimited):
        reason = kernel.supports_heads(workload.q_heads)
    reason = reason or _fault(kernel, workload, device, direction)
    return reason and (
        f"kernel {kernel.name!r} cannot compute this call: {reason}; "
        f"choose another, as in ContextParallel(kernel='reference')"
    )


def _fault(kernel: AttentionKernel, workload: Workload, device: torch.device, direction: Pass) -> str | None:
    """Say what is wrong with the results of a kernel on this device, where kernels are tried; None: nothing.

    An error on the way is raised as one of ours, which the ranks tell each other, and is no answer: that would be
    remembered.
    """
    if device.type not in SEVERAL:
        return None
    from tokenring.backends.kernels.numeric_trial import Kind, fault, tries

    if not tries(device):
        return None
    try:
        kind = Kind(direction, workload.head_dim, workload.dtype, device, workload.value_dim)
        return fault(kernel, kind) or None
    except Exception as error:
        raise UnsupportedError(
            f"kernel {kernel.name!r} cannot compute this call: it could not be tried: {one_line(error, MOST_SAID)}; "
            f"call again once that is mended, or choose another, as in ContextParallel(kernel='reference')"
        ) from error


def make_kernel(name: str, device: torch.device) -> AttentionKernel:
    """Make the kernel `name`; "auto": the fastest for the device, or for each tile. Raises BackendUnavailable."""
    if name == "auto":
        if device.type in SEVERAL:
            return _choosing(device)
        name = FASTEST.get(device.type, "reference")
    home = HOMES.get(name, device.type)
    if home != device.type:
        raise BackendUnavailable(
            f"kernel {name!r} takes {home.upper()} tensors; these are on {device}: use 'auto'"
        )
    return cast(AttentionKernel, kernel_class(name)())


def capped_kernel(kernel: AttentionKernel, name: str, softcap: float) -> AttentionKernel:
    """Return the kernel `name` of a device with this soft cap; 0: none. "auto": one that computes it.

    Raises UnsupportedError.
    """
    if softcap == 0:
        return kernel
    from tokenring.backends.interfaces import CappingKernel
    from tokenring.backends.kernels.reference import SoftCapped, with_cap

    if name == "auto" and not isinstance(kernel, CappingKernel):
        return SoftCapped(softcap)
    try:
        return with_cap(kernel, softcap)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"softcap={softcap:g}: {error}; choose another, as in ContextParallel(kernel='auto')"
        ) from None


@lru_cache(maxsize=64)
def _choosing(device: torch.device) -> AttentionKernel:
    """Make one for each device of this process: it finds out about its kernels, and logs that, once."""
    for_device = load("kernels", device.type, SEVERAL)
    return cast(AttentionKernel, for_device(device, lambda name: make_kernel(name, device)))


def kernel_for_planning() -> AttentionKernel:
    """Make the kernel whose cuts count when a schedule is measured without tensors at hand."""
    return cast(AttentionKernel, kernel_class(PLANNED_WITH)())


def transport_for(device_type: str) -> tuple[str | None, str]:
    """Return what "auto" takes for tensors of a device type, and why; None: nothing moves them. Nothing is started."""
    if device_type == "cpu":
        return "shm", "ranks of one machine share memory; gloo where they do not, or where there is no room"
    if device_type == "cuda":
        from tokenring.backends.transports.auto_cuda import choice_here

        return choice_here()
    name = OF_DEVICE.get(device_type)
    if name is not None:
        return name, f"it moves {device_type} tensors from device to device"
    return None, f"this release has no transport for {device_type} tensors: {', '.join(TRANSPORTS)} move those of a CPU"


def measured_transports(device_type: str) -> list[tuple[str, str]]:
    """List the kept tables of transports: of which ranks each is, and what it has or what is wrong with it."""
    from tokenring.backends.table_keys import transfers_key
    from tokenring.tables.transport_times import all_kept

    return list(all_kept(device_type, transfers_key))


def other_transports(device_type: str) -> dict[str, str]:
    """Return the other transports for a device type: that each can be asked for, or why not. Nothing is started."""
    if device_type != "cuda":
        return {}
    from tokenring.backends.transports.auto_cuda import unavailable

    taken, _ = transport_for(device_type)
    found = {name: why for name, why in unavailable().items() if name != taken}
    return {name: why or f"available by name: ContextParallel(transport={name!r})" for name, why in found.items()}
