"""What runs a call needs to know of who makes it: the context that users hold, as the runtime sees it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tokenring.backends.interfaces import AttentionKernel, Transport
    from tokenring.runtime.exclusive import Turn
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.workload import Workload


class Caller(Protocol):
    """One rank's part in the calls of a group."""

    world_size: int
    layout: str | Layout
    pieces: int | None
    turn: Turn

    def kernel(self, device: torch.device) -> AttentionKernel:
        """What computes the tiles of calls with tensors on this device."""

    def made_transport(self, device: torch.device | None) -> Transport | None:
        """The transport for tensors on this device, where there is one already."""

    def speaker(self, device: torch.device | None, size: Workload | None = None) -> Transport | None:
        """By what the ranks agree on a call of tensors on this device; None: there is nobody to agree with."""
