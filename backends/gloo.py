"""Gloo: two-sided messages between CPU tensors, over TCP.

Gloo moves nothing before the receive is posted, and announces messages in band, one connection
for each pair and group: so requests and partials have groups of their own, and receives are
posted first (the executor's programs do that).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tokenring.backends.base import Capabilities, Handle
from tokenring.backends.control import Control, Controlled
from tokenring.backends.meeting import STORE_SECONDS, StoreSilent, bounded, forget
from tokenring.errors import BackendUnavailable
from tokenring.schedule.ir import PARTIALS, REQUESTS
from tokenring.weak import weakly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TAG = 0  # messages of one tag keep their order, which is all the matching that programs need


class _Handle:
    def __init__(self, work: Any, control: Control, peer: int, what: str) -> None:
        self._work, self._control, self._peer, self._what = work, control, peer, what

    def wait(self) -> None:
        control = self._control
        control.board.note_waiting(self._peer)
        try:
            done = self._work.wait(timedelta(seconds=control.timeout_seconds))
        except RuntimeError as error:
            raise control.lost(self._peer, self._what, _first_line(error)) from None
        if done is False:
            raise control.lost(self._peer, self._what, "no answer")
        control.board.note_waiting(None)


class GlooTransport(Controlled):
    """Payload between the ranks of one group, on two Gloo groups of its own."""

    capabilities = Capabilities(early_receives=True, channels=2)

    def __init__(self, group: ProcessGroup, timeout_seconds: float) -> None:
        if not dist.is_gloo_available():
            raise BackendUnavailable("transport 'gloo' was asked for, but this torch was built without Gloo")
        self.control = Control("gloo", group, timeout_seconds)
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._groups = {channel: self._connect(group, channel) for channel in (REQUESTS, PARTIALS)}
        if self.control.shared is None:
            self._control_group = self._connect(group, "control")
            self.control.gather_apart = weakly(self._gather)

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Handle:
        self.control.check_usable()
        self.sent_bytes[dst] += data.numel() * data.element_size()
        try:
            work = self._groups[channel].send([data], dst, TAG)
        except RuntimeError as error:
            raise self.control.lost(dst, f"cannot send {label}", _first_line(error)) from None
        return _Handle(work, self.control, dst, f"sent {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Handle:
        self.control.check_usable()
        try:
            work = self._groups[channel].recv([data], src, TAG)
        except RuntimeError as error:
            raise self.control.lost(src, f"cannot receive {label}", _first_line(error)) from None
        return _Handle(work, self.control, src, f"waited for {label}")

    def close(self) -> None:
        """Give back all groups."""
        self.control.closed = True
        self._groups.clear()
        self._control_group = None

    def _connect(self, group: ProcessGroup, channel: str) -> Any:
        """A Gloo group of the members of `group` alone.

        Not by dist.new_group: it wants every rank of the world, or else names groups by how many a rank
        has made before, on which members of overlapping groups disagree, and then wait for each other.
        """
        store = dist.distributed_c10d._get_process_group_store(group)
        apart = PrefixStore(f"tokenring/{self.control.name}/{channel}", store)
        limit = timedelta(seconds=self.control.timeout_seconds)
        try:
            made = dist.ProcessGroupGloo(apart, self.rank, self.world_size, limit)
        except RuntimeError as error:
            peer = (self.rank + 1) % self.world_size
            raise self.control.lost(peer, "connected to all ranks", _first_line(error)) from None
        addresses = [f"0/{rank}" for rank in range(self.world_size)]  # as Gloo calls them
        with suppress(StoreSilent):
            bounded(lambda: forget(apart, "connected", addresses, self.world_size), STORE_SECONDS)
        return made

    def _gather(self, payload: bytes) -> list[bytes]:
        """What all ranks say, in equal sizes. Each tells each: a collective could not say whom it waits for."""
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        heard = [torch.empty_like(mine) for _ in range(self.world_size)]
        heard[self.rank] = mine
        peers = [(self.rank + step) % self.world_size for step in range(1, self.world_size)]
        waits = [self._start("recv", heard[peer], peer, "exchanged with all ranks") for peer in peers]
        waits += [self._start("send", mine, peer, "exchanged with all ranks") for peer in peers]
        for handle in waits:
            handle.wait()
        return [bytes(each.numpy()) for each in heard]

    def _start(self, what: str, data: torch.Tensor, peer: int, label: str) -> Handle:
        try:
            work = getattr(self._control_group, what)([data], peer, TAG)
        except RuntimeError as error:
            raise self.control.lost(peer, label, _first_line(error)) from None
        return _Handle(work, self.control, peer, label)


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
