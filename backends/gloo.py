"""Gloo: two-sided messages between CPU tensors, over TCP.

Gloo moves nothing before the receive is posted, and announces messages in band, one connection
for each pair and group: so requests and partials have groups of their own, and receives are
posted first (the executor's programs do that).
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import torch

from tokenring.backends.apart import TAG, Apart, GlooHandle, check_gloo, connect
from tokenring.backends.base import Capabilities, Handle
from tokenring.backends.control import Control, Controlled
from tokenring.errors import MOST_SAID, one_line
from tokenring.schedule.ir import PARTIALS, REQUESTS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

BUNDLE_BYTES = 512 << 10  # whose copies, at both ends, take a core no longer than the message that they save


class GlooTransport(Controlled):
    """Payload between the ranks of one group, on two Gloo groups of its own."""

    capabilities = Capabilities(early_receives=True, channels=2, bundle_bytes=BUNDLE_BYTES)

    def __init__(self, group: ProcessGroup, timeout_seconds: float) -> None:
        check_gloo("gloo")
        self.control = Control("gloo", group, timeout_seconds)
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._groups = {channel: connect(self.control, group, channel) for channel in (REQUESTS, PARTIALS)}
        self._apart = Apart.where_needed(self.control, group)

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Handle:
        self.control.check_usable()
        self.sent_bytes[dst] += data.numel() * data.element_size()
        try:
            work = self._groups[channel].send([data], dst, TAG)
        except RuntimeError as error:
            raise self.control.lost(dst, f"cannot send {label}", one_line(error, MOST_SAID)) from None
        return GlooHandle(work, self.control, dst, f"sent {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Handle:
        self.control.check_usable()
        try:
            work = self._groups[channel].recv([data], src, TAG)
        except RuntimeError as error:
            raise self.control.lost(src, f"cannot receive {label}", one_line(error, MOST_SAID)) from None
        return GlooHandle(work, self.control, src, f"waited for {label}")

    def close(self) -> None:
        """Give back all groups."""
        self.control.closed = True
        self._groups.clear()
        self._apart = None
