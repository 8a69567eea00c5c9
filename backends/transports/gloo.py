"""Gloo: two-sided messages between CPU tensors, over TCP.

Gloo moves nothing before the receive is posted, and announces messages in band, one connection
for each pair and group: so requests and partials have groups of their own, and receives are
posted first (the executor's programs do that).

Its messages carry the key of their call as Gloo's tag: 31 bits of the digest on which ranks agree. Those of calls
that differ do not meet, so between machines they are on their way while the ranks still find out whether they do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from tokenring.backends.control.control import Control, Controlled, own_store
from tokenring.backends.control.dissemination import Apart
from tokenring.backends.control.sockets import CONNECTS, interfaces
from tokenring.backends.control.store_gather import STORE_SECONDS, StoreSilent, bounded, forget
from tokenring.backends.interfaces import Work
from tokenring.errors import MOST_SAID, BackendUnavailable, ConfigurationError, one_line
from tokenring.ir.schedule_data import CHANNELS
from tokenring.launch.groups import held
from tokenring.lowering.target import Target

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

NO_CALL = 0  # the key before the first call, and after one on which the ranks did not agree
BUNDLE_BYTES = 512 << 10  # whose copies, at both ends, take a core no longer than the message that they save
AHEAD_BYTES = 512 << 10  # memory that is worth as many announcements that need not wait behind what a rank sends
DEVICES: WeakKeyDictionary[Control, list[Any]] = WeakKeyDictionary()


def check_gloo() -> None:
    """Raise BackendUnavailable where torch has no Gloo."""
    if not dist.is_gloo_available():
        raise BackendUnavailable("transport 'gloo' was requested, but this torch was built without Gloo")


def connect(control: Control, group: Held, channel: str) -> Any:
    """Make a Gloo group of the members of `group` alone. Raises PeerLost.

    Not by dist.new_group: it wants every rank of the world, or else names groups by how many a rank
    has made before, on which members of overlapping groups disagree, and then wait for each other.
    """
    apart = own_store(control, group, channel)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=control.timeout_seconds)
    options._threads = 1  # for collectives, of which there are none
    try:
        options._devices = _devices(control)
        made = dist.ProcessGroupGloo(apart, control.rank, control.world_size, options)
    except RuntimeError as error:
        peer = (control.rank + 1) % control.world_size
        raise control.lost(peer, CONNECTS, one_line(error, MOST_SAID)) from None
    addresses = [f"0/{rank}" for rank in range(control.world_size)]  # as Gloo calls them
    with suppress(StoreSilent):
        bounded(lambda: forget(apart, "connected", addresses, control.world_size), STORE_SECONDS)
    return made


def _devices(control: Control) -> list[Any]:
    """Return the devices of all Gloo groups of a control, by the interfaces that torch would take.

    They have one thread for all. A thread for each group takes more processor time: it wakes up for itself, a hundred
    times a second in any case.
    """
    if control not in DEVICES:
        gloo = dist.ProcessGroupGloo
        named = [gloo.create_device(interface=name) for name in interfaces()]
        DEVICES[control] = named or [gloo.create_default_device()]
    return DEVICES[control]


def release(control: Control) -> None:
    """Give back the devices that `connect` made for all groups of a control.

    The groups hold them: their thread ends with the last group.
    """
    DEVICES.pop(control, None)


class GlooHandle:
    """One Gloo message on its way."""

    def __init__(self, work: Any, control: Control, peer: int, what: str) -> None:
        self._work, self._control, self._peer, self._what = work, control, peer, what

    def wait(self) -> None:
        """Wait until the message has arrived or left; see Work.wait. Raises PeerLost."""
        control = self._control
        control.board.note_waiting(self._peer)
        try:
            done = self._work.wait(timedelta(seconds=control.timeout_seconds))
        except RuntimeError as error:
            raise control.lost(self._peer, self._what, one_line(error, MOST_SAID)) from None
        if done is False:
            raise control.lost(self._peer, self._what, "no answer")
        control.board.note_waiting(None)


class GlooTransport(Controlled):
    """A transport over Gloo: payload between the ranks of one group, on two Gloo groups of its own."""

    target = Target(bundle_bytes=BUNDLE_BYTES, ahead_bytes=AHEAD_BYTES, deferring=True)

    def __init__(self, group: Held, timeout_seconds: float) -> None:
        check_gloo()
        group = held(group)
        self.control = Control("gloo", group, timeout_seconds)
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._group, self._key, self._generation = group, NO_CALL, 0
        self._judge: Callable[[], None] | None = None  # of the call that is not settled yet
        self._groups = self._connect()
        self._apart = Apart.where_needed(self.control, group)

    def _connect(self) -> dict[str, Any]:
        names = {channel: f"{channel}/{self._generation}" for channel in CHANNELS}
        return {channel: connect(self.control, self._group, name) for channel, name in names.items()}

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send, with the call's key as tag; see Transport.send. Raises PeerLost."""
        self.control.check_usable()
        self.sent_bytes[dst] += data.numel() * data.element_size()
        try:
            work = self._groups[channel].send([data], dst, self._key)
        except RuntimeError as error:
            raise self.control.lost(dst, f"cannot send {label}", one_line(error, MOST_SAID)) from None
        return GlooHandle(work, self.control, dst, f"sent {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive, with the call's key as tag; see Transport.recv. Raises PeerLost."""
        self.control.check_usable()
        try:
            work = self._groups[channel].recv([data], src, self._key)
        except RuntimeError as error:
            raise self.control.lost(src, f"cannot receive {label}", one_line(error, MOST_SAID)) from None
        return GlooHandle(work, self.control, src, f"waited for {label}")

    def begin_call(self, digest: bytes, what: str, judge: Callable[[list[bytes]], None]) -> None:
        """Send the call's digest, and take 31 bits of it as the key of its messages; see Transport.begin_call."""
        self.settle()
        self._key = (int.from_bytes(digest[:4], "little") >> 1) or 1
        hear = self.control.ask(digest, what)
        self._judge = lambda: judge(hear())
        if self.control.shared is not None:  # which answers before a message could be posted
            self.settle()

    def settle(self) -> None:
        """Hear whether all ranks make this call; see Transport.settle. Drops its messages if they do not."""
        judge, self._judge = self._judge, None
        if judge is None:
            return
        try:
            judge()
        except ConfigurationError:
            self._drop_messages()
            raise

    def _drop_messages(self) -> None:
        """Make new groups on all ranks: in the old ones messages may still move, or wait for ever."""
        self._key = NO_CALL
        if self.control.shared is None and self.control.broken is None:
            self._generation += 1
            self._groups = self._connect()

    def before_exchange(self) -> None:
        """Settle the call that is not settled yet, before each exchange."""
        self.settle()

    def fail(self, error: BaseException) -> None:
        """Give up in the middle of a call, without settling it; see Transport.fail."""
        self._judge = None
        super().fail(error)

    def close(self) -> None:
        """Give back all groups."""
        self.control.closed = True
        release(self.control)
        self._groups.clear()
        self._apart = self._judge = None
