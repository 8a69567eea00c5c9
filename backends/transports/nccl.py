"""NCCL: two-sided messages between CUDA tensors, over process groups of torch's own kind.

Requests and partials have a group each, with one communicator of all its ranks and one stream of high priority:
what is posted on one never stands behind the other. Within a channel the messages that are posted in a row are one
group of sends and receives (`go` begins it): they move together, in any order, and are waited for together.

A group begins when those before it on its stream have ended. All ranks post in the one total order of
`passes.order`; cut into groups anyhow, that cannot hang: the first message that has not moved stands in the group
that is at work at both its ends, since what either end posted before it comes before it in the order. A program's row
ends where the channel changes, so that this holds where a device does one group of both channels at a time, too.

A wait orders streams and does not block the host, unless TORCH_NCCL_BLOCKING_WAIT is set. What torch's watchdog or
our own finds wrong is raised at the next call, as PeerLost. docs/cuda-transports.md has the settings. Not yet run on
a GPU.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from tokenring.backends.control.control import Control, own_store
from tokenring.backends.control.dissemination import Apart
from tokenring.backends.control.watch import Watch, Watched
from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Work
from tokenring.backends.transports import driver
from tokenring.backends.transports.accelerated import TAG, Accelerated, from_the_post
from tokenring.errors import BackendUnavailable, ConfigurationError, PeerLost
from tokenring.ir.schedule_data import CHANNELS
from tokenring.launch.background import Background
from tokenring.launch.groups import held
from tokenring.lowering.target import Link, Target

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName

    from tokenring.launch.groups import Held

T = TypeVar("T")
LATE = "what NCCL finds wrong with a message is said at a later call; TORCH_NCCL_BLOCKING_WAIT=1 says it in place"
FIRST_CONTACT = "all ranks of the group must make their first contact together"


class NcclPost(NamedTuple):
    """An end of a message: "send" or "recv", the tensor, and the peer."""

    kind: str
    data: torch.Tensor
    peer: int


class Together:
    """A group of messages of one channel that move as one. Their tensors live until it is waited for."""

    def __init__(self) -> None:
        self.posts: list[NcclPost] = []
        self.stream: Any = None  # on which they were posted: NCCL's own stream follows it
        self.work: Any = None
        self.begun: Any = None  # the event before the first wait for it


class NcclTransport(Watched, Accelerated):
    """A transport over NCCL: payload between the ranks of one group, on NCCL groups of its own."""

    name = "nccl"
    device_type, device_name, finds_which = "cuda", "GPU", "CUDA_LAUNCH_BLOCKING=1"
    vendor_says = re.compile(r"nccl|\btime[d-]? ?out|remote error|connection", re.IGNORECASE)
    target = Target(early_receives=False, pair_serial=True, grouping=True)
    contact_seconds = 60.0  # at least, for the first contact: most of it is work, and more with more ranks

    def __init__(self, group: Held, timeout_seconds: float) -> None:
        self._check_available()
        group = held(group)
        self.control = Control(self.name, group, timeout_seconds)
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.sent_bytes: dict[int, int] = defaultdict(int)
        self._apart = Apart.where_needed(self.control, group)
        self._groups = {channel: self._make(group, channel) for channel in CHANNELS}
        self._open: dict[str, Together] = {}  # by channel: what has been posted and has not begun
        self._connected: set[Link] = set()
        self._device: torch.device | None = None  # of the tensors that it moves
        groups = self._groups  # not the transport, which the watch must not hold
        begin = driver.stay_out_of_captures if self.device_type == "cuda" else None
        self._watch = Watch(self.control, lambda: _abort(groups), begin)

    # ---------- groups

    def _check_available(self) -> None:
        """Raise BackendUnavailable where torch has no NCCL, or no device for it."""
        if reason := unavailable():
            raise BackendUnavailable(f"transport {self.name!r} was requested, but {reason}")

    def _make(self, group: Held, channel: str) -> Any:
        """Make an NCCL group of the members of `group` alone; not by dist.new_group, as `gloo.connect` says."""
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=limit_seconds(os.environ, self.control.timeout_seconds))
        options.global_ranks_in_group = held(group).global_ranks()
        options.group_name = cast("GroupName", f"tokenring {self.control.name[:8]} {channel}")
        store = own_store(self.control, group, channel)
        return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)

    def _begin_group(self, group: Any) -> None:
        """Gather sends and receives from now on: ncclGroupStart."""
        group._start_coalescing()

    def _end_group(self, group: Any) -> Any:
        """Begin to move them, as one work: ncclGroupEnd."""
        return group._end_coalescing()

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Connect all links that are new, in one group for each channel. Raises ConfigurationError, PeerLost.

        NCCL makes a communicator at its first use, and connections in it when a message first needs them: both block
        the host until the other ranks come. In one group of all ranks nobody waits in a circle.
        """
        self._serve(device)
        new = sorted({link for link in links if link not in self._connected})
        for channel in self._groups:
            self._touch([link for link in new if link[2] == channel], channel, device)
        self._connected |= set(new)

    def _touch(self, links: list[Link], channel: str, device: torch.device) -> None:
        """Send a byte over each link, and before the first one make the communicator, on all ranks.

        NCCL has no time limit here, and no abort reaches a communicator that is not made: so a thread does it.
        """
        if not links:
            return
        group, batch, first = self._groups[channel], Together(), next(iter(links))
        meets = not any(link[2] == channel for link in self._connected)
        word = torch.zeros(1, dtype=torch.int32, device=device)
        for src, dst, _ in links:
            for kind, own, peer in (("send", src, dst), ("recv", dst, src)):  # both where a rank sends to itself
                if self.rank == own:
                    batch.posts.append(NcclPost(kind, torch.zeros(1, dtype=torch.uint8, device=device), peer))
        peer = next((post.peer for post in batch.posts), first[0])

        def meet() -> list[Any]:
            works = [group.allreduce([word], dist.AllreduceOptions())] if meets else []
            if batch.posts:
                self._start(batch, channel)
                works.append(batch.work)
            for work in works:
                work.wait()
            return works

        contact, what = Background(_on_this_stream(meet, device)), f"connected ({channel})"
        limit_seconds = max(self.control.timeout_seconds, self.contact_seconds)
        self.control.wait(contact.ended, self._missing, what, limit_seconds)
        try:
            works = contact.result()
        except PeerLost:
            raise
        except RuntimeError as error:
            raise self._failed(error, peer, what, FIRST_CONTACT) from error
        for work in works:  # the device may wait still
            self._watch.add(work.is_completed, peer, what)

    def _missing(self) -> int | None:
        """Return a rank whose process is gone, or None.

        All wait for each other, and it is no use to wait for the next one.
        """
        members = self.control.members
        return next((rank for rank, each in enumerate(members) if each.state(members[self.rank]) == "gone"), None)

    # ---------- messages

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send into the channel's open group; see Transport.send. Raises ConfigurationError, PeerLost."""
        self._check_movable(data, f"send of {label}")
        self._check_link((self.rank, dst, channel), f"send of {label}")
        self.sent_bytes[dst] += data.numel() * data.element_size()
        return self._post(NcclPost("send", data, dst), channel, f"sent {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive into the channel's open group; see Transport.recv. Raises ConfigurationError, PeerLost."""
        self._check_movable(data, f"receive of {label}")
        self._check_link((src, self.rank, channel), f"receive of {label}")
        return self._post(NcclPost("recv", data, src), channel, f"waited for {label}")

    def _check_link(self, link: Link, what: str) -> None:
        self._watch.check()
        if link not in self._connected:
            raise ConfigurationError(
                f"{what}: ranks {link[0]} and {link[1]} have no connection for it ({link[2]}): prepare() makes those "
                f"of a program before it runs, on all ranks together"
            )

    def _post(self, post: NcclPost, channel: str, what: str) -> Work:
        batch = self._open.setdefault(channel, Together())
        batch.posts.append(post)
        batch.stream = device_of(post.data).current_stream()
        return _Handle(self, batch, post.peer, what)

    def go(self) -> None:
        """Begin to move what was posted; the channel first that was posted on first."""
        begun, self._open = self._open, {}
        for channel, batch in begun.items():
            self._start(batch, channel)

    def _start(self, batch: Together, channel: str) -> None:
        group, first = self._groups[channel], batch.posts[0]
        device = device_of(first.data)
        try:
            # Channels are posted on streams of their own, and one is current when all begin.
            with device.on(device.current_stream() if batch.stream is None else batch.stream):
                self._begin_group(group)
                for post in batch.posts:
                    getattr(group, post.kind)([post.data], post.peer, TAG)
                batch.work = self._end_group(group)
        except RuntimeError as error:
            raise self._failed(error, first.peer, f"cannot begin to {first.kind} ({channel})", LATE) from error

    def wait_for(self, batch: Together, peer: int, what: str) -> None:
        """Let the current stream wait for the whole group of messages. Raises PeerLost."""
        self.check()
        if batch.work is None:
            self.go()
        if batch.begun is None:
            batch.begun = device_of(batch.posts[0].data).current_stream().record_event()
        self._watch.add(batch.work.is_completed, peer, what, batch.begun.query)
        try:
            batch.work.wait()
        except RuntimeError as error:
            raise self._failed(error, peer, what, LATE) from error
        batch.posts.clear()  # whatever frees them now does so behind this wait

    # ---------- errors, end

    def close(self) -> None:
        """Give back all groups. The watch goes last: the device is waited for, and a peer may be lost meanwhile."""
        self._open.clear()
        try:
            super().close()
        finally:
            self._watch.close()
            self._connected.clear()


class _Handle:
    """One message of a group."""

    def __init__(self, transport: NcclTransport, batch: Together, peer: int, what: str) -> None:
        self._transport, self._batch, self._peer, self._what = transport, batch, peer, what

    def wait(self) -> None:
        """Let the current stream wait for the message's whole group; see Work.wait."""
        self._transport.wait_for(self._batch, self._peer, self._what)


def _on_this_stream(act: Callable[[], T], device: torch.device) -> Callable[[], T]:
    """Return the call, to be made in any thread, on the device's current stream of this thread.

    A thread has a current device and stream of its own.
    """
    where = device_of(device)
    stream = where.current_stream()

    def there() -> T:
        with where.on(stream):
            return act()

    return there


def _abort(groups: dict[str, Any]) -> None:
    """End what is under way, so that streams go on; the messages bring nothing."""
    for group in list(groups.values()):
        group.abort()


def unavailable() -> str | None:
    """Return None, or why this process has no NCCL. Nothing is started."""
    if not dist.is_available() or not dist.is_nccl_available():
        return "this torch was built without NCCL"
    return None if torch.cuda.is_available() else "torch sees no CUDA device here"


def limit_seconds(environment: Mapping[str, str], timeout_seconds: float) -> float:
    """Return the seconds after a message's post on the host at which torch may give it up.

    Where waits block the host that is our own limit. Else torch's watchdog ends the process by default: later than our
    own watch.
    """
    blocking = environment.get("TORCH_NCCL_BLOCKING_WAIT", environment.get("NCCL_BLOCKING_WAIT", "0")).strip()
    if blocking not in ("", "0"):
        return timeout_seconds
    return from_the_post(timeout_seconds)
