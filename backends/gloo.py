"""Gloo: two-sided messages between CPU tensors, over TCP.

Gloo moves nothing before the receive is posted, and announces messages in band, one connection
for each pair and group: so requests and partials have groups of their own, and receives are
posted first (the executor's programs do that).
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tokenring.backends.base import Capabilities, Handle
from tokenring.errors import BackendUnavailable, PeerLost
from tokenring.schedule.ir import PARTIALS, REQUESTS

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

TAG = 0  # messages of one tag keep their order, which is all the matching that programs need


class _Handle:
    def __init__(self, work: Any, timeout: timedelta, what: str) -> None:
        self.work, self.timeout, self.what = work, timeout, what

    def wait(self) -> None:
        try:
            done = self.work.wait(self.timeout)
        except RuntimeError as error:
            raise PeerLost(self._message(_first_line(error))) from None
        if done is False:
            raise PeerLost(self._message("no answer"))

    def _message(self, found: str) -> str:
        return (
            f"{self.what} did not finish within {self.timeout.total_seconds():g} s: {found}. "
            f"Look at that rank's log first; if it is only slow, raise timeout_seconds of ContextParallel"
        )


class GlooTransport:
    """Payload between the ranks of one group, on two Gloo groups of its own."""

    capabilities = Capabilities(early_receives=True, channels=2)

    def __init__(self, group: ProcessGroup, timeout_seconds: float) -> None:
        if not dist.is_gloo_available():
            raise BackendUnavailable("transport 'gloo' was asked for, but this torch was built without Gloo")
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._timeout = timedelta(seconds=timeout_seconds)
        self._groups: dict[str, Any] = _own_groups(group, self.rank, self.world_size, self._timeout)

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Handle:
        self.sent_bytes[dst] += data.numel() * data.element_size()
        try:
            work = self._groups[channel].send([data], dst, TAG)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} cannot send {label} to rank {dst}: {_first_line(error)}") from None
        return _Handle(work, self._timeout, f"rank {self.rank}: send of {label} to rank {dst}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Handle:
        try:
            work = self._groups[channel].recv([data], src, TAG)
        except RuntimeError as error:
            raise PeerLost(f"rank {self.rank} cannot receive {label} from rank {src}: {_first_line(error)}") from None
        return _Handle(work, self._timeout, f"rank {self.rank}: receive of {label} from rank {src}")

    def close(self) -> None:
        """Give back both groups."""
        self._groups.clear()


def _own_groups(group: ProcessGroup, rank: int, world_size: int, timeout: timedelta) -> dict[str, Any]:
    """One Gloo group for each channel, of the members of `group` alone.

    Not by dist.new_group: it wants every rank of the world, or else names groups by how many a rank
    has made before, on which members of overlapping groups disagree, and then wait for each other.
    """
    name = [uuid.uuid4().hex]
    dist.broadcast_object_list(name, group=group, group_src=0)
    store = dist.distributed_c10d._get_process_group_store(group)
    return {
        channel: dist.ProcessGroupGloo(PrefixStore(f"tokenring/{name[0]}/{channel}", store), rank, world_size, timeout)
        for channel in (REQUESTS, PARTIALS)
    }


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
