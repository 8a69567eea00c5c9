"""Communicators of the emulated HCCL: each has one queue, in which messages meet in the order of their posts.

With `limits.streams` they take their queues round-robin from so many of the rank, as torch_npu takes streams from
its pool: what stands behind a message to somebody else waits for that one, too.

Ranks tell each other through the group's store what they post: kind, count, dtype and name, and with a send the
bytes as they are at its post. A message is done when the posts before it in its queue are, and both its ends are
there: a send is as synchronous as a receive.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from patience import patient

from ascend.hccl_ledger import Communicator, HcclError, InUse, Noted, extent, label, ledger, limits

PART_BYTES = 4 << 20  # a store takes no larger values
SLICE_SECONDS = 0.002


class Transfer:
    """One end of a message, from its post to its wait."""

    def __init__(self, kind: str, memory: torch.Tensor, rank: int, peer: int, group: str) -> None:
        self.kind, self.memory, self.rank, self.peer = kind, memory, rank, peer
        self.number = ""  # among the messages of this pair on its communicator: the same at both ends
        self.label = label.get()
        nbytes = memory.numel() * memory.element_size()
        way = f"send to rank {peer}" if kind == "send" else f"receive from rank {peer}"
        self.name = f"{way} ({self.label or 'no label'}; {memory.numel()} × {memory.dtype}; group {group})"
        self.before = bytes_of(memory) if kind == "send" else b""
        self.arrived: bytes | None = None
        if kind == "recv":
            ledger.check_write(memory, f"rank {rank}: {self.name}")
            poison(memory)
        else:
            ledger.check_read(memory, f"rank {rank}: {self.name}")
        self.use = InUse(kind, *extent(memory), f"rank {rank}'s {self.name}")
        ledger.in_use.append(self.use)
        ledger.messages.append(Noted(group, kind, peer, nbytes, self.label))

    def said(self) -> dict[str, Any]:
        """What the peer must know of it."""
        size = len(self.before)
        described = {"kind": self.kind, "count": self.memory.numel(), "dtype": str(self.memory.dtype)}
        return {**described, "name": self.name, "label": self.label, "nbytes": size}

    def check(self, theirs: dict[str, Any]) -> None:
        """Raises HcclError if the other end is none of this message.

        HCCL knows no labels: where they differ it would move other bytes than the ranks think, and say nothing.
        """
        both = f"rank {self.rank}: {self.name} meets rank {self.peer}'s {theirs['name']}"
        if theirs["kind"] == self.kind:
            raise HcclError(f"{both}: both {'send' if self.kind == 'send' else 'receive'}, which would hang")
        for what in ("count", "dtype"):
            if theirs[what] != self.said()[what]:
                raise HcclError(f"{both}: the {what}s differ, {self.said()[what]} and {theirs[what]}")
        if self.label and theirs["label"] and theirs["label"] != self.label:
            raise HcclError(f"{both}: another message of the same size, which would go unnoticed")

    def missing(self) -> str:
        """That the other end is."""
        waited = f"rank {self.rank} waited {limits.execute:g} s for the other end of {self.name}"
        return f"{waited}: rank {self.peer} posted no such message"

    def finish(self) -> None:
        """At the wait: what was received appears; neither end's buffer may have been touched before."""
        ledger.in_use.remove(self.use)
        if self.kind == "send":
            if bytes_of(self.memory) != self.before:
                raise HcclError(f"rank {self.rank}: the buffer of {self.name} was changed before it was waited for")
            return
        if not is_poisoned(self.memory):
            raise HcclError(f"rank {self.rank}: the buffer of {self.name} was written before it was waited for")
        assert self.arrived is not None
        come = torch.frombuffer(bytearray(self.arrived), dtype=torch.uint8) if self.arrived else None
        if come is not None:
            self.memory.view(-1).view(torch.uint8).copy_(come)


def bytes_of(memory: torch.Tensor) -> bytes:
    return memory.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def poison(memory: torch.Tensor) -> None:
    """All bits set: a NaN in every floating-point type."""
    memory.view(-1).view(torch.uint8).fill_(255)


def is_poisoned(memory: torch.Tensor) -> bool:
    return bool((memory.contiguous().view(-1).view(torch.uint8) == 255).all())


class Mail:
    """Transfers of one communicator, told through the store."""

    def __init__(self, store: Any, rank: int, name: str) -> None:
        self.store, self.rank = dist.PrefixStore(name, store), rank  # type: ignore[attr-defined]
        self.counts: dict[tuple[int, str], int] = defaultdict(int)  # by peer, and of batches by direction

    def number(self, transfer: Transfer, batched: bool = False) -> None:
        """Both directions share an order, but in a batch, where they move together."""
        ends = (self.rank, transfer.peer) if transfer.kind == "send" else (transfer.peer, self.rank)
        queue = f"batched {ends[0]} to {ends[1]} " if batched else ""
        transfer.number = f"{queue}{self.counts[transfer.peer, queue]}"
        self.counts[transfer.peer, queue] += 1

    def _key(self, of: int, to: int, number: str) -> str:
        return f"{of}>{to}/{number}"

    def publish(self, transfer: Transfer) -> None:
        key = self._key(self.rank, transfer.peer, transfer.number)
        data = transfer.before
        for part, start in enumerate(range(PART_BYTES, len(data), PART_BYTES), 1):
            self.store.set(f"{key}/{part}", data[start : start + PART_BYTES])  # type: ignore[arg-type]
        self.store.set(key, json.dumps(transfer.said()).encode() + b"\n" + data[:PART_BYTES])  # type: ignore[arg-type]

    def is_there(self, transfer: Transfer) -> bool:
        return self.await_peer(transfer, 0.0)

    def await_peer(self, transfer: Transfer, seconds: float) -> bool:
        return self.await_keys([self._key(transfer.peer, self.rank, transfer.number)], seconds)

    def await_keys(self, keys: list[str], seconds: float) -> bool:
        """Whether all are there within so many seconds; with 0, now."""
        if not seconds:
            return bool(self.store.check(keys))
        try:
            self.store.wait(keys, timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True

    def fetch(self, transfer: Transfer) -> None:
        """Take over what the other end has said, and what it sent. Raises HcclError."""
        key = self._key(transfer.peer, self.rank, transfer.number)
        said, _, first = self.store.get(key).partition(b"\n")
        theirs = json.loads(said)
        transfer.check(theirs)
        parts = [first]
        for part in range(1, -(-theirs["nbytes"] // PART_BYTES)):
            parts.append(self.store.get(f"{key}/{part}"))
            self.store.delete_key(f"{key}/{part}")
        self.store.delete_key(key)
        transfer.arrived = b"".join(parts)


class PairStream:
    """The communicator of two ranks. Its queue is the same at both ends, so posts are told at once."""

    def __init__(self, store: Any, rank: int, peer: int, group: str, nbytes: int) -> None:
        low, high = sorted((rank, peer))
        self.shared = shared_stream()
        self.in_shared: dict[Transfer, Batch] = {}
        self.name, self.rank, self.peer, self.group = f"{low}:{high}", rank, peer, group
        self.mail = Mail(store, rank, f"pair {self.name}")
        self.posted: deque[Transfer] = deque()  # whose other end has not been looked at
        self._connect(nbytes)

    def _connect(self, nbytes: int) -> None:
        """Blocks until the peer touches this communicator too. Raises HcclError at the time limit."""
        store = self.mail.store
        store.set(f"here {self.rank}", "1")
        try:
            store.wait([f"here {self.peer}"], timedelta(seconds=patient(limits.connect)))
        except dist.DistStoreError:
            raise HcclError(
                f"HCCL_CONNECT_TIMEOUT: rank {self.rank} made communicator {self.name} of group {self.group} for "
                f"{label.get() or 'a message'}, but rank {self.peer} did not within {limits.connect:g} s"
            ) from None
        ledger.communicators.append(Communicator(self.group, self.name, nbytes))

    def post(self, transfer: Transfer) -> None:
        self.mail.number(transfer)
        if self.shared is not None:
            self.in_shared[transfer] = Batch([transfer])
            self.shared.post(self.in_shared[transfer], self.mail)
            return
        self.mail.publish(transfer)
        self.posted.append(transfer)

    def finish(self, transfer: Transfer) -> None:
        """Until both ends have posted it, and all before it. Raises HcclError at the time limit, or at a mismatch."""
        if self.shared is not None:
            self.shared.finish(self.in_shared.pop(transfer))
            return
        deadline = time.monotonic() + patient(limits.execute)
        while transfer.arrived is None:
            first = self.posted[0]
            await_with_others(partial(self.mail.await_peer, first), first.missing, deadline)
            self.mail.fetch(first)
            self.posted.popleft()
        transfer.finish()


def await_with_others(
    there: Callable[[float], bool], missing: Callable[[], str], deadline: float, own: Stream | None = None
) -> None:
    """Wait for other ends, while queues but one's own move on. Raises HcclError at the time limit."""
    while not there(max(0.001, deadline - time.monotonic()) if set(Stream.busy) <= {own} else 0.0):
        if time.monotonic() >= deadline:
            raise HcclError(f"HCCL_EXEC_TIMEOUT: {missing()}")
        time.sleep(SLICE_SECONDS)
        for stream in list(Stream.busy):
            stream.move_on()


class Entry(Protocol):
    """What stands in a whole group's queue."""

    done: bool

    def tell(self, mail: Mail) -> None:
        """Now it is its turn."""

    def poll(self, mail: Mail) -> None:
        """Do what can be done without waiting."""

    def await_any(self, mail: Mail, seconds: float) -> bool:
        """Whether one of those that it waits for has come."""

    def missing(self) -> str:
        """Who has not."""

    def finish(self) -> None:
        """At the wait."""


class Batch:
    """One message, or several that move together."""

    apart = False  # from one to another and back are counted apart, even of one message

    def __init__(self, transfers: list[Transfer]) -> None:
        self.transfers, self.done = transfers, False

    def tell(self, mail: Mail) -> None:
        for each in self.transfers:
            mail.publish(each)

    def poll(self, mail: Mail) -> None:
        for each in self._waiting:
            if mail.is_there(each):
                mail.fetch(each)
        self.done = not self._waiting

    @property
    def _waiting(self) -> list[Transfer]:
        return [each for each in self.transfers if each.arrived is None]

    def await_any(self, mail: Mail, seconds: float) -> bool:
        return not self._waiting or mail.await_peer(self._waiting[0], seconds)

    def missing(self) -> str:
        return self._waiting[0].missing()

    def finish(self) -> None:
        for each in self.transfers:
            each.finish()


class Stream:
    """Entries one after another, each told when it is its turn."""

    busy: ClassVar[list[Stream]] = []

    def __init__(self) -> None:
        self.entries, self.told = deque[tuple[Entry, Mail]](), False

    def post(self, entry: Entry, mail: Mail) -> None:
        self.entries.append((entry, mail))
        if self not in Stream.busy:
            Stream.busy.append(self)
        self.move_on()

    def move_on(self) -> None:
        """As far as the other ends are there."""
        while self.entries:
            head, mail = self.entries[0]
            if not self.told:
                self.told = True
                head.tell(mail)
            head.poll(mail)
            if not head.done:
                return
            self.told = False
            self.entries.popleft()
        if self in Stream.busy:
            Stream.busy.remove(self)

    def finish(self, entry: Entry) -> None:
        deadline = time.monotonic() + patient(limits.execute)
        while not entry.done:
            head, mail = self.entries[0]
            await_with_others(partial(head.await_any, mail), head.missing, deadline, self)
            self.move_on()
        entry.finish()


class GroupStream(Stream):
    """The communicator of a whole group: one queue for everything with all peers, or what else shares its stream."""

    def __init__(self, store: Any, rank: int, group: str, nbytes: int) -> None:
        super().__init__()
        shared = shared_stream()
        self.queue: Stream = self if shared is None else shared
        self.mail = Mail(store, rank, "all")
        ledger.communicators.append(Communicator(group, "all", nbytes))

    def put(self, entry: Entry) -> None:
        if isinstance(entry, Batch):
            for transfer in entry.transfers:
                self.mail.number(transfer, batched=entry.apart or len(entry.transfers) > 1)
        self.queue.post(entry, self.mail)


pool: list[Stream] = []  # of this rank, filled as communicators of pairs ask for them


def shared_stream() -> Stream | None:
    """The next one of the pool; None: every communicator has a stream of its own."""
    if limits.streams is None:
        return None
    at = len(ledger.communicators) % limits.streams
    while len(pool) <= at:
        pool.append(Stream())
    return pool[at]


def forget_streams() -> None:
    """Queues of groups that are gone, and what still stands in them."""
    pool.clear()
    Stream.busy.clear()
