"""Emulated NPUs over Gloo: for tests of everything but HCCL, whose rules the messages do not keep here."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ascend.device import raw
from tokenring.backends.interfaces import Work
from tokenring.backends.transports.gloo import GlooTransport
from tokenring.lowering.target import Link


class OverGloo(GlooTransport):
    """Sends the memory below NPU tensors."""

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Takes tensors on NPUs, too."""

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        return super().send(raw(data), dst, channel, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        return super().recv(raw(data), src, channel, label)
