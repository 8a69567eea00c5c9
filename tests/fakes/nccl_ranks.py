"""Transport `nccl` without a GPU: its own code, on emulated NPUs and over emulated groups that only take groups.

A message that is posted alone would have a communicator of its own in NCCL: it is refused here. What is posted
between start and end moves together, in the one queue of the group, as `ascend.hccl_streams` has it.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
from ascend.hccl import HcclGroup, HcclWork
from ascend.hccl_ledger import HcclError
from ascend.hccl_streams import Batch, Entry, GroupStream
from ranks import Here

from tokenring.backends.control.control import own_store
from tokenring.backends.transports.hccl import HcclTransport
from tokenring.backends.transports.nccl import NcclTransport
from tokenring.lowering import backend_names

NAME = "nccl on npu"


class InGroups(GroupStream):
    """Messages meet by their order in their direction, however many others move with them."""

    def put(self, entry: Entry) -> None:
        if isinstance(entry, Batch):
            for transfer in entry.transfers:
                self.mail.number(transfer, batched=True)
        self.post(entry, self.mail)


class Group(HcclGroup):
    """As ProcessGroupNCCL, of what the transport uses."""

    aborted = False
    sizes: list[int]  # of the groups of messages

    def _start_coalescing(self, device: Any = None) -> None:
        if self.aborted:
            raise HcclError("the communicator was aborted")
        self._batch = []

    def _end_coalescing(self, device: Any = None) -> Any:
        batch, self._batch = self._batch or [], None
        self.__dict__.setdefault("sizes", []).append(len(batch))
        return self._in_turn(Batch(batch), "; ".join(each.name for each in batch))

    def _message(self, kind: str, tensors: list[torch.Tensor], peer: int) -> Any:
        if self._batch is None:
            raise HcclError(f"a {kind} that is posted alone: NCCL makes a communicator for it")
        return super()._message(kind, tensors, peer)

    def _in_turn(self, entry: Entry, name: str) -> HcclWork:
        if self._all is None:
            self._all = InGroups(self._store, self.rank(), self.group_id, self.group_bytes)
        stream = self._all
        stream.put(entry)
        return HcclWork(f"rank {self.rank()}'s {name}", partial(stream.finish, entry))

    def abort(self) -> None:
        self.aborted = True


class OnNpu(NcclTransport):
    """The transport on such groups."""

    name = NAME
    device_type, device_name = "npu", "NPU"
    vendor_says = HcclTransport.vendor_says

    def _check_available(self) -> None:
        """Nothing of NCCL's is needed."""

    def _make(self, group: Any, channel: str) -> Any:
        store = own_store(self.control, group, channel)
        name = f"tokenring {self.control.name[:8]} {channel}"
        return Group(store, self.rank, self.world_size, name, timedelta(seconds=600))


def register(here: Here) -> None:
    """Makes it known by name, in this process, once."""
    from ascend.hccl_ranks import fresh

    if NAME not in backend_names.TRANSPORTS:
        backend_names.TRANSPORTS[NAME] = "nccl_ranks:OnNpu"
        fresh()
