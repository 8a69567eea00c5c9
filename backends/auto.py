"""Transports that go on as another one when there is no room: for all contexts that share them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from tokenring.backends.base import Capabilities, Handle, OneSided, Transport
from tokenring.backends.control import Control, Controlled
from tokenring.backends.gloo import GlooTransport
from tokenring.backends.shm import ShmTransport
from tokenring.errors import BackendUnavailable

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LOG = logging.getLogger("tokenring")


class Preferring(Controlled, ABC):
    """A one-sided transport that becomes a two-sided one, on all ranks alike, when it has no room for a larger pool.

    That happens in `allocate`, between calls, when nothing is on its way. Programs that are bound already go on in
    the memory that they have.
    """

    auto: ClassVar[str]  # what messages call it
    now: Transport
    control: Control

    def __init__(self, group: ProcessGroup, timeout_seconds: float) -> None:
        self._group, self._timeout_seconds = group, timeout_seconds
        self.pool: object = None  # the one buffer pool of all that use this transport
        self._own_bytes = 0
        self._take(self._first())

    @abstractmethod
    def _first(self) -> Transport:
        """What is preferred. Raises BackendUnavailable."""

    @abstractmethod
    def _second(self) -> Transport:
        """What it becomes."""

    def _take(self, now: Transport) -> None:
        self.now, self.control = now, now.control  # type: ignore[attr-defined]
        self.capabilities: Capabilities = now.capabilities
        self.rank, self.world_size, self.sent_bytes = now.rank, now.world_size, now.sent_bytes

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Handle:
        return self.now.send(data, dst, channel, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Handle:
        return self.now.recv(data, src, channel, label)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Memory to receive into, uint8; None if what it gave last is enough. A collective call."""
        if self.capabilities.one_sided:
            try:
                one_sided: OneSided = self.now  # type: ignore[assignment]
                return one_sided.allocate(nbytes)
            except BackendUnavailable as error:  # on all ranks alike
                self._fall_back(error)
        if nbytes <= self._own_bytes:
            return None
        self._own_bytes = nbytes
        return self._own(nbytes)

    def _own(self, nbytes: int) -> torch.Tensor:
        """Memory that no peer reaches."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give back what it holds."""
        self.now.close()
        self.pool = None

    def _fall_back(self, error: BackendUnavailable) -> None:
        second, sent_bytes = self._second(), self.sent_bytes
        LOG.warning("transport %r goes on with %s: %s", self.auto, getattr(second, "name", "gloo"), error)
        self.now.close()
        self._take(second)
        second.sent_bytes = self.sent_bytes = sent_bytes


class AutoTransport(Preferring):
    """Shared memory for as long as there is room for it, then Gloo. Raises BackendUnavailable if there is none."""

    auto = "auto"

    def _first(self) -> Transport:
        return ShmTransport(self._group, self._timeout_seconds)

    def _second(self) -> Transport:
        return GlooTransport(self._group, self._timeout_seconds)
