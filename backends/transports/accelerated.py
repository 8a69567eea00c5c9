"""A base of transports over a vendor's process groups: messages of device tensors, whose waits order streams.

Calls return before their work is done, so an error may be found at a later call than the one at fault, and a
tensor must live until the stream that uses it has been waited for.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar

import torch

from tokenring.backends.control.control import Control, Controlled
from tokenring.backends.control.dissemination import Apart
from tokenring.backends.devices import device_of
from tokenring.errors import MOST_SAID, ConfigurationError, PeerLost, one_line

LEAD_SECONDS = 600  # how far a host may be ahead of its device
TAG = 0  # messages of one tag keep their order, which is all the matching that programs need


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
        """Move tensors of this device from now on. Raises ConfigurationError for one of another type."""
        self.control.check_usable()
        if device.type != self.device_type:
            raise elsewhere(self.name, f"{self.device_name}s", device)
        self._device = device

    def _check_movable(self, data: torch.Tensor, what: str) -> None:
        """Raise ConfigurationError for what cannot be moved, PeerLost if the group is broken."""
        self.control.check_usable()
        check_movable(data, self.device_type, what, self.rank, f"transport {self.name!r}", f"{self.device_name}s")

    def _failed(self, error: RuntimeError, peer: int, what: str, hint: str) -> PeerLost:
        """Make the error that names who is to blame.

        That is the peer, if the vendor's library says so; else this rank, an earlier call of which failed.
        Calls return before they are done, and the next one raises their errors, whatever it is for.
        """
        if self.vendor_says.search(str(error)):
            return self.control.lost(peer, what, f"{one_line(error, MOST_SAID)}; {hint}")
        self.control.fail(error)
        assert self.control.broken is not None
        return PeerLost(
            f"rank {self.rank} (this one) failed, and {what} when it was found: {one_line(error, MOST_SAID)}. "
            f"No peer is to blame: an earlier call on this {self.device_name} failed, and calls say so late; "
            f"{self.finds_which} finds which",
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


def elsewhere(name: str, places: str, device: torch.device, how: str = "") -> ConfigurationError:
    """Make the error for tensors on a device that a transport does not serve; how: what to do other than "auto"."""
    return ConfigurationError(
        f"transport {name!r} moves tensors on {places}, and these are on {device}: {how}use transport='auto'"
    )


def check_movable(data: torch.Tensor, device_type: str, what: str, rank: int, mover: str, places: str) -> None:
    """Raise ConfigurationError for a tensor on a device of another type, or one that is not contiguous."""
    there = data.device.type == device_type
    if not there or not data.is_contiguous():
        found = "one that is not contiguous" if there else f"one on {data.device}"
        raise ConfigurationError(f"{what}: rank {rank} gave {found}, {mover} moves contiguous tensors on {places}")


def from_the_post(seconds: float) -> float:
    """Return a time limit, in seconds, from a message's post on the host.

    seconds: the limit of its wait on the device. A host may be many layers ahead of its device, so that a message is
    old before its turn.
    """
    return seconds + LEAD_SECONDS
