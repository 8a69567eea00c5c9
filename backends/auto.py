"""Shared memory for as long as there is room for it, then Gloo: for all contexts that share the transport."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tokenring.backends.base import Capabilities, Handle
from tokenring.backends.control import Controlled
from tokenring.backends.gloo import GlooTransport
from tokenring.backends.shm import ShmTransport
from tokenring.errors import BackendUnavailable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOG = logging.getLogger("tokenring")


class AutoTransport(Controlled):
    """A ShmTransport that becomes a GlooTransport, on all ranks alike, when /dev/shm has no room for a larger pool.

    That happens in `allocate`, between calls, when nothing is on its way. Programs that are bound already go on in
    the memory that they have. Raises BackendUnavailable if there is no shared memory to begin with.
    """

    def __init__(self, group: ProcessGroup, timeout_seconds: float) -> None:
        self._group, self._timeout_seconds = group, timeout_seconds
        self.now: ShmTransport | GlooTransport = ShmTransport(group, timeout_seconds)
        self.control, self.sent_bytes = self.now.control, self.now.sent_bytes
        self.capabilities: Capabilities = self.now.capabilities
        self.rank, self.world_size = self.now.rank, self.now.world_size
        self.pool: object = None  # the one buffer pool of all that use this transport
        self._own_bytes = 0

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Handle:
        return self.now.send(data, dst, channel, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Handle:
        return self.now.recv(data, src, channel, label)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Memory to receive into, uint8; None if what it gave last is enough. A collective call."""
        if isinstance(self.now, ShmTransport):
            try:
                return self.now.allocate(nbytes)
            except BackendUnavailable as error:  # on all ranks alike
                self._fall_back(error)
        if nbytes <= self._own_bytes:
            return None
        self._own_bytes = nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give back what it holds."""
        self.now.close()
        self.pool = None

    def _fall_back(self, error: BackendUnavailable) -> None:
        LOG.warning("%s; transport 'auto' goes on over gloo", error)
        gloo = GlooTransport(self._group, self._timeout_seconds)
        gloo.sent_bytes = self.sent_bytes
        self.now.close()
        self.now, self.control, self.capabilities = gloo, gloo.control, gloo.capabilities
