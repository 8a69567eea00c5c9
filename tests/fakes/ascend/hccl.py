"""An emulated HCCL: a process group "hccl" that keeps the real one's rules, and says so where the real one hangs.

`install()` registers it with torch.distributed, after the device (`ascend.device.install`). What it enforces, and
what it cannot: docs/ascend-hccl.md. Everything it keeps account of is in `hccl_ledger.ledger`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
from patience import patient
from torch._C._distributed_c10d import Work

from ascend.device import NpuTensor, raw
from ascend.hccl_batches import SendsBatches, retries
from ascend.hccl_ledger import MEGABYTE, HcclError, InUse, NotedCollective, extent, label, ledger, limits
from ascend.hccl_names import Named
from ascend.hccl_streams import (
    Batch,
    Entry,
    GroupStream,
    Mail,
    PairStream,
    Transfer,
    bytes_of,
    is_poisoned,
    poison,
)  # fmt: skip
from ascend.hccl_whole import WholeTensors

# Of Atlas A2 and A3; 910A has no bf16, and only the 950 has fp8.
DTYPES = (
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
P2P_MEGABYTES, GROUP_MEGABYTES = 20, 200  # P2P_HCCL_BUFFSIZE and HCCL_BUFFSIZE where they are not set


def install() -> None:
    """Registers "hccl" for device "npu", and its batch_isend_irecv as torch_npu does. Calling it again is fine."""
    if not hasattr(dist.Backend, "HCCL"):
        dist.Backend.register_backend("hccl", _create, extended_api=True, devices=["npu"])
        for module in (dist, dist.distributed_c10d):
            module.batch_isend_irecv = batch_isend_irecv  # type: ignore[attr-defined]
        _watch_synchronize()


def _watch_synchronize() -> None:
    """Once the host has waited for the whole device, no message is on its way."""
    module = torch.get_device_module("npu")
    synchronize = module.synchronize

    def synchronized(*arguments: Any) -> None:
        synchronize(*arguments)
        ledger.running.clear()

    module.synchronize = synchronized


def _create(options: Any, pg_options: Any) -> HcclGroup:
    if limits.meet_when_made and (absent := _absent(options.store, options.group_rank, options.group_size, "made")):
        raise HcclError(f"ranks {absent} did not make group {options.group_id} within {limits.connect:g} s")
    return HcclGroup(options.store, options.group_rank, options.group_size, options.group_id, options.timeout)


def _absent(store: Any, rank: int, size: int, word: str) -> list[int]:
    """Tell all ranks that this one is here, and wait for them; return those that do not come before the limit."""
    keys = [f"{word} {each}" for each in range(size)]
    store.set(keys[rank], "1")
    try:
        store.wait(keys, timedelta(seconds=patient(limits.connect)))
    except dist.DistStoreError:
        return [each for each, key in enumerate(keys) if not store.check([key])]
    return []


def batch_isend_irecv(operations: Sequence[dist.P2POp]) -> list[Any]:
    """One work for all messages, whatever their number, as torch_npu's fused form gives."""
    group = operations[0].group or dist.group.WORLD
    if isinstance(group, HcclGroup):
        group._start_coalescing(torch.device("npu"))
        for each in operations:
            {dist.isend: group.send, dist.irecv: group.recv}[each.op]([each.tensor], each.group_peer, each.tag)
        return [group._end_coalescing(torch.device("npu"))]
    return [each.op(each.tensor, each.peer, each.group, each.tag) for each in operations]


class HcclWork(Work):
    """`wait` makes a received message appear. Without it a message counts as dropped."""

    late: HcclError | None = None  # an error that a wait has not raised, because on the device it would not

    def __init__(self, name: str, finish: Callable[[], None]) -> None:
        super().__init__()
        self.name, self._finish, self._waited = name, finish, False

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._waited:
            return True
        self._waited = True
        HcclWork.raise_late()
        try:
            self._finish()
        except HcclError as error:
            if not limits.late_errors:
                raise
            HcclWork.late = error
        return True

    @staticmethod
    def raise_late() -> None:
        error, HcclWork.late = HcclWork.late, None
        if error is not None:
            raise error

    def is_completed(self) -> bool:
        return self._waited

    def __del__(self) -> None:
        if not self._waited:
            ledger.dropped.append(self.name)


class Collective:
    """A collective in the group's queue: begins when every rank has told the same one."""

    def __init__(
        self, group: HcclGroup, what: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor],
        run: Callable[[Any, list[torch.Tensor], list[torch.Tensor]], Any],
    ) -> None:  # fmt: skip
        """run: on Gloo, from copies of the inputs into copies of the outputs."""
        self.group, self.what, self.run, self.done = group, what, run, False
        self.number, group.collectives = group.collectives, group.collectives + 1
        self.inputs, self.outputs = [raw(x) for x in inputs], [raw(x) for x in outputs]
        self.before = [x.clone() for x in self.inputs]
        self.made = [torch.empty_like(x) for x in self.outputs]
        self.label = label.get()
        self.name = f"{what} {self.number} ({self.label or 'no label'}; group {group.group_id})"
        self.missing_ranks: list[int] = []
        given = sum(x.numel() * x.element_size() for x in self.inputs)
        others = group.size() - 1 if what == "all_gather" else 1
        ledger.collectives.append(NotedCollective(group.group_id, what, group.size(), given * others, self.label))
        by = f"rank {group.rank()}: {self.name}"
        for x in self.inputs:
            ledger.check_read(x, by)
        for x in self.outputs:
            ledger.check_write(x, by)
        self.uses = [InUse("send", *extent(x), by) for x in self.inputs]
        self.uses += [InUse("recv", *extent(x), by) for x in self.outputs]
        for x in self.outputs:
            if not any(x.data_ptr() == y.data_ptr() for y in self.inputs):
                poison(x)
        ledger.in_use += self.uses

    def _key(self, rank: int) -> str:
        return f"collective {self.number}/{rank}"

    def _described(self) -> str:
        given, taken = ([[x.numel(), str(x.dtype)] for x in some] for some in (self.inputs, self.outputs))
        return json.dumps([self.what, self.label, given, taken])

    def _fits(self, rank: int, theirs: str) -> bool:
        """HCCL knows no labels: where they differ, the ranks exchange something else than they think."""
        me = self.group.rank()
        what, name, given, taken = json.loads(self._described())
        other, their_name, their_given, their_taken = json.loads(theirs)
        if (what, name) != (other, their_name):
            return False
        if what == "all_to_all":  # other sizes for each pair, the same at its two ends
            return bool(given[rank] == their_taken[me] and taken[rank] == their_given[me])
        if what == "all_gather":  # parts of one size or of several, in the places that all have for them
            return bool(taken == their_taken and their_given[0] == taken[rank])
        if what == "reduce_scatter":
            return bool(given == their_given and their_taken[0] == given[rank])
        return bool((given, taken) == (their_given, their_taken))

    def tell(self, mail: Mail) -> None:
        mail.store.set(self._key(self.group.rank()), self._described())

    def poll(self, mail: Mail) -> None:
        if not self.await_any(mail, 0.0):
            return
        for rank in range(self.group.size()):
            theirs = mail.store.get(self._key(rank)).decode()
            if not self._fits(rank, theirs):
                raise HcclError(f"rank {self.group.rank()} in {self._described()} meets rank {rank} in {theirs}")
        self.run(self.group.gloo(), self.before, self.made).wait()
        self.done = True

    def await_any(self, mail: Mail, seconds: float) -> bool:
        came = mail.await_keys([self._key(rank) for rank in range(self.group.size())], seconds)
        if not came:
            self.missing_ranks = [r for r in range(self.group.size()) if not mail.await_keys([self._key(r)], 0.0)]
        return came

    def missing(self) -> str:
        return f"rank {self.group.rank()} waited {limits.execute:g} s for ranks {self.missing_ranks} in {self.name}"

    def finish(self) -> None:
        for use in self.uses:
            ledger.in_use.remove(use)
        shared = {x.data_ptr() for x in self.inputs}
        for x in self.outputs:
            if x.data_ptr() not in shared and not is_poisoned(x):
                raise HcclError(f"rank {self.group.rank()}: an output of {self.name} was written before its wait")
        for x, before in zip(self.inputs, self.before, strict=True):
            if x.data_ptr() not in {y.data_ptr() for y in self.outputs} and bytes_of(x) != bytes_of(before):
                raise HcclError(f"rank {self.group.rank()}: an input of {self.name} was changed before its wait")
        for x, made in zip(self.outputs, self.made, strict=True):
            x.copy_(made)


class HcclGroup(SendsBatches, WholeTensors, Named, dist.ProcessGroup):  # type: ignore[misc]
    """One process group: a communicator for each peer, made when first used, and one of all ranks."""

    def __init__(self, store: Any, rank: int, size: int, name: str, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.group_id, self.collectives, self._store = name, 0, store
        self.timeout_seconds = timeout.total_seconds()
        self._pairs: dict[int, PairStream] = {}
        self._all: GroupStream | None = None
        self._gloo: Any = None
        self._met = False  # all ranks, in the communicator of the group
        self._links = set[int]()  # ranks that batches have met there
        self._batch: list[Transfer] | None = None
        self.p2p_bytes = 2 * MEGABYTE * int(os.environ.get("P2P_HCCL_BUFFSIZE", P2P_MEGABYTES))
        self.group_bytes = 2 * MEGABYTE * int(os.environ.get("HCCL_BUFFSIZE", GROUP_MEGABYTES))

    def getBackendName(self) -> str:
        return "hccl"

    # ---------- point to point

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> Any:
        """Tags are ignored: order is the match."""
        return self._message("send", tensors, dst)

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> Any:
        return self._message("recv", tensors, src)

    def _message(self, kind: str, tensors: list[torch.Tensor], peer: int) -> Any:
        self._check_mode()
        (tensor,) = tensors
        memory = self._checked(tensor, f"{kind} with rank {peer}")
        if peer == self.rank() or not 0 <= peer < self.size():
            raise HcclError(f"rank {self.rank()} of {self.size()} has no peer {peer}")
        transfer = Transfer(kind, memory, self.rank(), peer, self.group_id)
        if self._batch is not None:
            self._batch.append(transfer)
            return None
        if not self.p2p_bytes:
            return self._in_turn(Batch([transfer]), transfer.name)
        if peer not in self._pairs:
            self._make_pair(peer)
            self._pairs[peer] = PairStream(self._store, self.rank(), peer, self.group_id, self.p2p_bytes)
        stream = self._pairs[peer]
        stream.post(transfer)
        return self._under_way(transfer.name, partial(stream.finish, transfer))

    def _check_mode(self) -> None:
        HcclWork.raise_late()
        if os.environ.get("HCCL_OP_EXPANSION_MODE") == "AIV":
            raise HcclError(f"rank {self.rank()}: HCCL_OP_EXPANSION_MODE=AIV does not serve send and receive")

    def _make_pair(self, peer: int) -> None:
        """Refuses what the real ones are not known to do, before a communicator of two ranks is made.

        RANK_TABLE_FILE: createHCCLCommSub makes it out of the global one with hcclid = hash("low:high"), the same for
        this pair in every group (Ascend/pytorch 9e73e708, torch_npu/csrc/distributed/ProcessGroupHCCL.cpp:2880).
        HCCL_OP_RETRY_ENABLE: "at most 5 communicators, or they may fill the AI CPU cores" (hicann/hccl,
        docs/zh/user_guide/hccl_env/HCCL_OP_RETRY_ENABLE.md), on A3 with AI CPU expansion alone.
        """
        low, high = min(self.rank(), peer), max(self.rank(), peer)
        same = [each.group for each in ledger.communicators if each.peers == f"{low}:{high}"]
        if os.path.isfile(os.environ.get("RANK_TABLE_FILE", "")) and same:
            raise HcclError(f"rank {self.rank()}: {self.group_id} and {same[0]} have a sub-communicator of one id")
        self._check_room()

    def _check_room(self) -> None:
        if retries() and len(ledger.communicators) >= limits.retrying:
            raise HcclError(f"rank {self.rank()}: AI CPU cores are full with {len(ledger.communicators)} communicators")

    def _under_way(self, name: str, finish: Callable[[], None]) -> HcclWork:
        """The work of what was posted just now: until the host waits for the device, its communicator must live."""
        ledger.running[self.group_id] = name
        return HcclWork(f"rank {self.rank()}'s {name}", partial(self._finish, name, finish, monotonic()))

    def _finish(self, name: str, finish: Callable[[], None], posted: float) -> None:
        """As the watchdog sees it, a message or collective is as old as its post on the host."""
        finish()
        if monotonic() - posted > self.timeout_seconds:
            raise HcclError(
                f"the watchdog of group {self.group_id} ends the process: {name} is older than its "
                f"{self.timeout_seconds:g} s"
            )

    def __del__(self) -> None:
        """Communicators go with the group: nothing may be on its way."""
        if self.group_id in ledger.running:
            ledger.torn.append(f"group {self.group_id} was dropped under {ledger.running.pop(self.group_id)}")

    def _checked(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        what = f"rank {self.rank()}: {what}"
        if not isinstance(tensor, NpuTensor):
            raise HcclError(f"{what}: No backend type associated with device type {tensor.device.type}")
        if not tensor.is_contiguous():
            raise HcclError(f"{what}: the tensor is not contiguous, with strides {tensor.stride()}")
        if tensor.dtype not in DTYPES:
            raise HcclError(f"{what}: HCCL has no data type for {tensor.dtype}")
        return raw(tensor)

    def _start_coalescing(self, device: torch.device) -> None:
        self._batch = []

    def _end_coalescing(self, device: torch.device) -> Any:
        """All messages since the start, on the group's communicator."""
        batch, self._batch = self._batch or [], None
        return self._in_turn(Batch(batch), "; ".join(each.name for each in batch))

    # ---------- the whole group

    def _in_turn(self, entry: Entry, name: str) -> HcclWork:
        if self._all is None:
            self._check_room()
            self._all = GroupStream(self._store, self.rank(), self.group_id, self.group_bytes)
        stream = self._all
        stream.put(entry)
        return self._under_way(name, partial(stream.queue.finish, entry))

    def gloo(self) -> Any:
        """What carries collectives here. All ranks get to it together."""
        if self._gloo is None:
            limit = timedelta(seconds=patient(limits.execute))
            store = dist.PrefixStore("gloo", self._store)  # type: ignore[attr-defined]
            self._gloo = dist.ProcessGroupGloo(store, self.rank(), self.size(), limit)
        return self._gloo

    def _collective(self, what: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], run: Any) -> HcclWork:
        HcclWork.raise_late()
        for each in (*inputs, *outputs):
            self._checked(each, what)
        self._meet(what)
        made = Collective(self, what, inputs, outputs, run)
        return self._in_turn(made, made.name)

    def _meet(self, what: str) -> None:
        """The first collective blocks until all ranks come to make the communicator. Raises HcclError at the limit."""
        if self._met:
            return
        self._met = True
        if absent := _absent(self._store, self.rank(), self.size(), "all here"):
            raise HcclError(
                f"HCCL_CONNECT_TIMEOUT: rank {self.rank()} made the communicator of group {self.group_id} for "
                f"{label.get() or what}, but ranks {absent} did not within {limits.connect:g} s"
            )

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        def run(gloo: Any, given: list[torch.Tensor], into: list[torch.Tensor]) -> Any:
            into[0].copy_(given[0])
            return gloo.allreduce([into[0]], opts or dist.AllreduceOptions())

        return self._collective("all_reduce", tensors, tensors, run)

    def barrier(self, opts: Any = None) -> Work:
        return self._collective("barrier", [], [], lambda gloo, given, into: gloo.barrier(dist.BarrierOptions()))
