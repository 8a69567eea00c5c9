"""Transports that go on as another one when there is no room: for all contexts that share them."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from tokenring.backends.control.control import Control, Controlled
from tokenring.backends.interfaces import Transport, Work
from tokenring.backends.transports.shm import ShmTransport
from tokenring.errors import BackendUnavailable
from tokenring.launch.groups import held
from tokenring.lowering.target import Target
from tokenring.tables.kept_files import TRANSPORTS_MEASURED, may_have
from tokenring.tables.transport_choice import PAIRS, Domain, TransportChoice, choose

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

LOG = logging.getLogger("tokenring")


class Preferring(Controlled):
    """A one-sided transport that becomes a two-sided one, on all ranks alike, when it has no room for a larger pool.

    That happens in `allocate`, between calls, when nothing is on its way. Programs that are bound already go on in
    the memory that they have.
    """

    auto: ClassVar[str]  # what messages call it
    chooses: ClassVar[bool] = True  # among several, and so wants to know of what size messages are
    kind: ClassVar[str]  # of device that it moves tensors of
    why = ""  # the reason for what was taken, where there is one to tell
    now: Transport
    control: Control

    def __init__(self, group: Held, timeout_seconds: float, message_bytes: int | None = None) -> None:
        """Make the transport that is preferred for this group, and take it.

        message_bytes: of the messages that are expected, where known; rank 0's count.
        """
        group = self._group = held(group)
        self._timeout_seconds, self._message_bytes = timeout_seconds, message_bytes
        self._own_bytes = 0
        self._take(self._first())

    @abstractmethod
    def _first(self) -> Transport:
        """Make the transport that is preferred. Raises BackendUnavailable."""

    @abstractmethod
    def _second(self) -> Transport:
        """Make the transport that this one becomes."""

    def _chosen(
        self, domain: Domain, unavailable: Mapping[str, str | None], rank: int, ranks: int,
        gather: Callable[[str, str], list[str]],
    ) -> TransportChoice:  # fmt: skip
        """Return rank 0's choice for all ranks, sent by `gather`: no two ranks need have kept the same table."""
        mine = choice_of(self.kind, domain, unavailable, ranks, self._message_bytes) if rank == 0 else None
        return TransportChoice(**json.loads(gather("the choice", "" if mine is None else json.dumps(asdict(mine)))[0]))

    def _take(self, now: Transport) -> None:
        self.now, self.control = now, now.control  # type: ignore[attr-defined]
        self.target = self._target(now)
        self.rank, self.world_size, self.sent_bytes = now.rank, now.world_size, now.sent_bytes

    def _target(self, now: Transport) -> Target:
        """Return what it can do as that transport.

        Never deferring: a program that was bound before it fell back does not settle.
        """
        return replace(now.target, deferring=False)

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send on the transport in use; see Transport.send."""
        return self.now.send(data, dst, channel, label)

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive on the transport in use; see Transport.recv."""
        return self.now.recv(data, src, channel, label)

    def allocate(self, nbytes: int) -> torch.Tensor | None:
        """Return memory to receive into, uint8; None if what it gave last is enough. A collective call."""
        if self.target.one_sided:
            try:
                return self.now.allocate(nbytes)
            except BackendUnavailable as error:  # on all ranks alike
                self._fall_back(error)
        if nbytes <= self._own_bytes:
            return None
        self._own_bytes = nbytes
        return self._own(nbytes)

    def _own(self, nbytes: int) -> torch.Tensor:
        """Return memory, uint8, that no peer reaches."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Give back what it holds; see Transport.close."""
        self.now.close()
        self.pool = None

    def _fall_back(self, error: BackendUnavailable) -> None:
        second, sent_bytes = self._second(), self.sent_bytes
        self.why = "{} went on as {}: {}".format(*PAIRS[self.kind], error)
        LOG.warning("transport %r goes on with %s: %s", self.auto, getattr(second, "name", "gloo"), error)
        self.now.close()
        self._take(second)
        second.sent_bytes = self.sent_bytes = sent_bytes


def choice_of(
    kind: str, domain: Domain, unavailable: Mapping[str, str | None], ranks: int, message_bytes: int | None = None
) -> TransportChoice:
    """Choose the transport by the rules, and by the kept table of so many ranks.

    The reason says where that table cannot be used.
    """
    if any(unavailable[name] is not None for name in PAIRS[kind]) or not may_have(TRANSPORTS_MEASURED):
        return choose(kind, domain, unavailable, message_bytes)
    from tokenring.backends.table_keys import transfers_key
    from tokenring.tables.transport_times import kept

    table, note = kept(transfers_key(kind, domain, ranks))
    found = choose(kind, domain, unavailable, message_bytes, table)
    if note:
        LOG.warning("measured transports: %s", note)
    return replace(found, reason=f"{found.reason}; {note}") if note else found


class AutoTransport(Preferring):
    """A transport over shared memory for as long as there is room, then Gloo; Gloo where it was measured faster.

    Raises BackendUnavailable if no memory is shared.
    """

    auto, kind = "auto", "cpu"

    def _first(self) -> Transport:
        shm = ShmTransport(self._group, self._timeout_seconds)

        def gather(what: str, text: str) -> list[str]:
            return [each.decode() for each in shm.exchange_text(text.encode(), what)]

        both: dict[str, str | None] = dict.fromkeys(PAIRS["cpu"])
        chosen = self._chosen("reached", both, shm.rank, shm.world_size, gather)
        if chosen == choose("cpu", "reached", both):
            return shm
        self.why = chosen.reason
        LOG.info("transport 'auto' takes %s: %s", chosen.transport, self.why)
        if chosen.transport == "shm":
            return shm
        shm.close()
        return self._second()

    def _second(self) -> Transport:
        from tokenring.backends.transports.gloo import GlooTransport

        return GlooTransport(self._group, self._timeout_seconds)
