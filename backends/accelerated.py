"""What transports over a vendor's process groups share: messages of device tensors, whose waits order streams.

Calls return before their work is done, so an error may be found at a later call than the one at fault, and a
tensor must live until the stream that uses it has been waited for.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch

from tokenring.backends.apart import Apart, first_line
from tokenring.backends.control import Control, Controlled
from tokenring.backends.devices import device_of
from tokenring.errors import ConfigurationError, PeerLost


class Accelerated(Controlled):
    """A transport between accelerators of one type, on process groups of its own."""

    name: ClassVar[str]
    device_type: ClassVar[str]  # torch's word for it
    device_name: ClassVar[str]  # what its users call one: "NPU"
    vendor_says: ClassVar[re.Pattern[str]]  # in errors that are about a message, and so about a peer
    finds_which: ClassVar[str]  # what makes calls say at once what is wrong
    rank: int
    world_size: int
    control: Control
    _apart: Apart | None
    _groups: dict[str, Any]
    _device: torch.device | None  # of the tensors that it moves

    def _serve(self, device: torch.device) -> None:
        """Its tensors are moved from now on. Raises ConfigurationError for those of another type."""
        self.control.check_usable()
        if device.type != self.device_type:
            raise ConfigurationError(
                f"transport {self.name!r} moves tensors on {self.device_name}s, and these are on {device}: "
                f"use transport='auto'"
            )
        self._device = device

    def _check_movable(self, data: torch.Tensor, what: str) -> None:
        """Raises ConfigurationError for what cannot be moved, PeerLost if the group is broken."""
        self.control.check_usable()
        if data.device.type != self.device_type or not data.is_contiguous():
            found = f"one on {data.device}" if data.device.type != self.device_type else "one that is not contiguous"
            raise ConfigurationError(
                f"{what}: rank {self.rank} gave {found}, transport {self.name!r} moves contiguous tensors on "
                f"{self.device_name}s"
            )

    def _failed(self, error: RuntimeError, peer: int, what: str, hint: str) -> PeerLost:
        """Who is to blame: the peer, if the vendor's library says so; else this rank, an earlier call of which failed.

        Calls return before they are done, and the next one raises their errors, whatever it is for.
        """
        if self.vendor_says.search(str(error)):
            return self.control.lost(peer, what, f"{first_line(error)}; {hint}")
        self.control.fail(error)
        assert self.control.broken is not None
        return PeerLost(
            f"rank {self.rank} (this one) failed, and {what} when it was found: {first_line(error)}. No peer is to "
            f"blame: an earlier call on this {self.device_name} failed, and calls say so late; {self.finds_which} "
            f"finds which",
            self.rank,
            True,
        )

    def close(self) -> None:
        """Give back all groups, and with them their communicators, once no message is on its way.

        A host runs ahead of its device, so that messages it has waited for may still move.
        """
        if self._device is not None and self._groups and self.control.broken is None:
            device_of(self._device).synchronize()
        self.control.closed = True
        self._groups.clear()
        self._apart = None
