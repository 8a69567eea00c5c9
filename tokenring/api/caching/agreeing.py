"""The agreement of all ranks on a step of a cache, or on a call of its exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenring.runtime.agreement import Description, agree, settle

if TYPE_CHECKING:
    import torch

    from tokenring.api.context import ContextParallel
    from tokenring.backends.interfaces import Transport


def agree_together(cp: ContextParallel, device: torch.device, mine: Description) -> None:
    """Agree with the other ranks, of which there are some. Raises Disagreement, on every rank, and PeerLost.

    Where a rank has tensors on another device than the others, all hear of it by the transport that they have.
    """
    speaker = cp.speaker(device)
    assert speaker is not None  # there are several ranks
    _agree(speaker, mine)
    transport = cp.transport_for(device)
    if transport is not None and transport is not speaker:
        _agree(transport, mine)


def _agree(transport: Transport, mine: Description) -> None:
    agree(transport, mine)
    settle(transport)
