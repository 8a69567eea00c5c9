"""HcclBatchSendRecv, emulated: what torch_npu's `ProcessGroupHCCL.batch_isend_irecv` begins on a group's communicator.

Bound to the vendor's sources:

- arguments, the group's communicator and its one stream: Ascend/pytorch 9e73e708,
  torch_npu/csrc/distributed/Init.cpp:410 and ProcessGroupHCCL.cpp:4829. All wheels from 2.7.1 on have the method.
- the order inside a batch: sends on one stream and receives on another, sorted by how far the peer is: sends go down
  from the own rank and receives go up (libochao-huawei/hcomm 8958adbf,
  src/legacy/ascend910/algorithm/impl/coll_executor/coll_send_receive/coll_batch_send_recv_executor.cc:70-139, 242-263).
- with retries, pairs of the n-th send and the n-th receive one after another (coll_batch_send_recv_retry_executor.cc,
  which batchsendrecv_operator.cc selects).
- both ends of a message are synchronous, and correspond one to one (hicann/hccl 09300b70,
  docs/zh/api_ref/comm_op_interface/HcclBatchSendRecv.md). CANN 8.0's page also excludes two tasks to, or from, the
  same rank in a list; later pages do not. They are refused here.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from patience import patient

from ascend.hccl_ledger import HcclError, label, labelled, limits
from ascend.hccl_streams import SLICE_SECONDS, Batch, Mail, Transfer

KINDS = {"isend": "send", "irecv": "recv"}


class PairwiseBatch(Batch):
    """Messages of one call: sends one after another, and beside them receives one after another."""

    apart = True

    def __init__(self, transfers: list[Transfer], rank: int, size: int, in_pairs: bool) -> None:
        super().__init__(transfers)
        self.in_pairs, self.told = in_pairs, set[Transfer]()

        def far(each: Transfer) -> int:
            return (rank - each.peer if each.kind == "send" else each.peer - rank) % size

        self.ways = {
            kind: deque(sorted((each for each in transfers if each.kind == kind), key=far)) for kind in KINDS.values()
        }
        self.through = dict.fromkeys(self.ways, 0)

    def tell(self, mail: Mail) -> None:
        self.poll(mail)

    def poll(self, mail: Mail) -> None:
        while came := [each for each in self._at_work(mail) if mail.is_there(each)]:
            for each in came:
                mail.fetch(each)
                self.ways[each.kind].popleft()
                self.through[each.kind] += 1
        self.done = not any(self.ways.values())

    def _at_work(self, mail: Mail) -> list[Transfer]:
        """The send and the receive that it is at, told to their other ends."""
        found = [queue[0] for kind, queue in self.ways.items() if queue and not self._held_up(kind)]
        for each in found:
            if each not in self.told:
                self.told.add(each)
                mail.publish(each)
        return found

    def _held_up(self, kind: str) -> bool:
        other = "recv" if kind == "send" else "send"
        return self.in_pairs and bool(self.ways[other]) and self.through[kind] > self.through[other]

    def await_any(self, mail: Mail, seconds: float) -> bool:
        """Whichever of the two comes first."""
        until = time.monotonic() + seconds
        while True:
            if self.done or any(mail.is_there(each) for each in self._at_work(mail)):
                return True
            if time.monotonic() >= until:
                return False
            time.sleep(SLICE_SECONDS)

    def missing(self) -> str:
        return "; ".join(queue[0].missing() for kind, queue in self.ways.items() if queue and not self._held_up(kind))


class SendsBatches:
    """A process group's `batch_isend_irecv`. Labels of several messages are lines of one."""

    def batch_isend_irecv(self: Any, kinds: list[str], tensors: list[torch.Tensor], peers: list[int]) -> Any:
        """HcclBatchSendRecv, on the group's communicator, which the first such call makes with all ranks."""
        self._check_mode()
        memory = check_tasks(self.rank(), self.size(), kinds, tensors, peers, self._checked)
        self._meet("HcclBatchSendRecv")
        self._link(peers)
        names = label.get().split("\n") if label.get() else [""] * len(kinds)
        transfers = []
        for kind, each, peer, name in zip(kinds, memory, peers, names, strict=True):
            with labelled(name):
                transfers.append(Transfer(KINDS[kind], each, self.rank(), peer, self.group_id))
        batch = PairwiseBatch(transfers, self.rank(), self.size(), retries())
        return self._in_turn(batch, "; ".join(each.name for each in transfers))

    def _link(self: Any, peers: list[int]) -> None:
        """What is new in a batch is connected first, and blocks the host until the other end comes. Raises HcclError.

        As CalcIncreLinkRequest has it, and what it leads to.
        """
        new = [peer for peer in dict.fromkeys(peers) if peer not in self._links]
        for peer in new:
            self._store.set(f"link {self.rank()} {peer}", "1")
        for peer in new:
            try:
                self._store.wait([f"link {peer} {self.rank()}"], timedelta(seconds=patient(limits.connect)))
            except dist.DistStoreError:
                raise HcclError(
                    f"HCCL_CONNECT_TIMEOUT: rank {self.rank()} connects rank {peer} in group {self.group_id} for a "
                    f"batch, and rank {peer} did not within {limits.connect:g} s"
                ) from None
        self._links.update(new)


def retries() -> bool:
    """Whether HCCL retries operations: on A3 alone."""
    asked = any(f"L{level}:1" in os.environ.get("HCCL_OP_RETRY_ENABLE", "").replace(" ", "") for level in range(3))
    return asked and torch.get_device_module("npu").get_device_name().startswith("Ascend910_93")


def check_tasks(
    rank: int, size: int, kinds: Sequence[str], tensors: Sequence[torch.Tensor], peers: Sequence[int],
    checked: Callable[[torch.Tensor, str], torch.Tensor],
) -> list[torch.Tensor]:  # fmt: skip
    """Refuse what HCCL refuses of a list of tasks; return the memory of each."""
    if not kinds or not len(kinds) == len(tensors) == len(peers):
        raise HcclError(f"rank {rank}: {len(kinds)} kinds, {len(tensors)} tensors and {len(peers)} ranks in a batch")
    if wrong := set(kinds) - KINDS.keys():
        raise HcclError(f"rank {rank}: sendRecvType of {sorted(wrong)} is neither isend nor irecv")
    if wrong_ranks := [peer for peer in peers if peer == rank or not 0 <= peer < size]:
        raise HcclError(f"rank {rank} of {size} has no peer {wrong_ranks[0]} in a batch")
    if len(set(zip(kinds, peers, strict=True))) < len(kinds):
        raise HcclError(f"rank {rank}: two tasks of one kind with the same rank in a batch, which CANN 8.0 excludes")
    return [checked(each, f"{kind} with rank {peer}") for each, kind, peer in zip(tensors, kinds, peers, strict=True)]
