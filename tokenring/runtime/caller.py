"""The maker of a call as the runtime sees it: the context that users hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.runtime.exclusive import Turn
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.workload import Lengths, Workload


class Caller(Protocol):
    """One rank's part in the calls of a group."""

    rank: int
    world_size: int
    layout: str | Layout
    lengths: Lengths
    pieces: int | None
    kernel_name: str
    turn: Turn

    def kernel(self, device: torch.device) -> AttentionKernel:
        """Return the kernel that computes the tiles of calls with tensors on this device."""

    def made_transport(self, device: torch.device | None) -> Transport | None:
        """Return the transport for tensors on this device, if there is one already."""

    def speaker(self, device: torch.device | None, size: Workload | None = None) -> Transport | None:
        """Return the transport by which ranks agree on a call of tensors on this device; None: this rank is alone."""
