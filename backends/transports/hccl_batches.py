"""HCCL in batches: all messages go over one communicator of all ranks for each channel, however many ranks there are.

Transport `hccl` makes up to four communicators for each pair of ranks: 28 at each of 8 ranks, 60 at each of 16. Each
takes time to make and memory, and HCCL advises few of them where it retries. Here requests have one communicator, and
partials another. What a rank posts in one round of a program (`lowering.rounds`) begins as one HcclBatchSendRecv: by
the group's own `batch_isend_irecv`, which torch_npu's torch.distributed.batch_isend_irecv calls as well.

In a batch HCCL sends one message after another and receives one after another, both beside each other; a batch begins
when the one before it on its stream has ended. Between two ranks order is the match. `lowering.rounds` cuts rounds so
that no batch has two messages of one way (older releases of CANN exclude that); where HCCL retries, which it does pair
by pair, a batch is one pair. That no ranks wait for each other in a circle is proved when a schedule is connected
(`proof.batches`).

A communicator takes 2 × HCCL_BUFFSIZE (200 MB where it is not set) at every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Work
from tokenring.backends.transports.hccl import LATE, HcclTransport
from tokenring.backends.transports.hccl_environment import GROUP_MEGABYTES, MEGABYTE, group_bytes
from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import CHANNELS
from tokenring.lowering.rounds import PostEnd, batches
from tokenring.lowering.target import Link, Target

FIRST_CONTACT = (
    "all ranks of the group must make their first contact within HCCL_CONNECT_TIMEOUT (120 s where it is not set)"
)


class BatchPost(NamedTuple):
    """An end of a message, and what to say of it."""

    end: PostEnd
    data: torch.Tensor
    label: str


class HcclBatch:
    """Messages that move as one. Their tensors live until they are waited for: HCCL may use them until then."""

    def __init__(self, posts: list[BatchPost]) -> None:
        self.posts = posts
        self.work: Any = None


class OpenRound:
    """The posts of a rank on a channel that have not begun, each with its handle; and the stream of the posts."""

    def __init__(self) -> None:
        self.posts: list[BatchPost] = []
        self.handles: list[HcclBatchHandle] = []
        self.stream: Any = None


class HcclBatchTransport(HcclTransport):
    """A transport with one communicator for each channel, over HcclBatchSendRecv."""

    name = "hccl/batch"
    by_pairs = False
    target = Target(
        early_receives=False, batching=True, grouping=True, connection_bytes=2 * GROUP_MEGABYTES * MEGABYTE
    )

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self._open: dict[str, OpenRound] = {}  # by channel
        self._ready = frozenset[Link]()  # connected, of all ranks

    @classmethod
    def target_in(cls, environment: Mapping[str, str]) -> Target:
        """Return its target: buffers as this environment asks for; where HCCL retries, batches of one pair."""
        found = super().target_in(environment)
        return replace(found, connection_bytes=group_bytes(environment), one_pair=found.most_connections is not None)

    def _lanes(self) -> list[str]:
        return list(CHANNELS)

    def _lane(self, channel: str, src: int, dst: int) -> str:
        return channel

    # ---------- connecting

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Make the communicators that these links need, and their connections, on all ranks in one order.

        Both block the hosts until all ranks come. Raises ConfigurationError, PeerLost.
        """
        self._serve(device)
        links = frozenset(links)
        self._allow(links=links)
        for channel in self._lanes():
            new = sorted({(src, dst) for src, dst, where in links - self._ready if where == channel})
            if new:
                self._touch_all(new, channel, device)
        self._ready |= links

    def _touch_all(self, pairs: list[tuple[int, int]], channel: str, device: torch.device) -> None:
        """Meet all ranks where the communicator is new, then send a byte over each of these links."""
        group, own = self._groups[channel], [pair for pair in pairs if self.rank in pair]
        ends = [PostEnd(self.rank == src, dst if self.rank == src else src) for src, dst in own]
        posts = [BatchPost(end, torch.zeros(1, dtype=torch.uint8, device=device), "") for end in ends]
        first = ends[0].peer if ends else pairs[0][0]
        try:
            if not any(where == channel for _, _, where in self._ready):
                group.allreduce([torch.zeros(1, dtype=torch.int32, device=device)], dist.AllreduceOptions()).wait()
            for some in self._batches(posts):
                self._begin(group, [posts[at] for at in some]).wait()
        except RuntimeError as error:
            raise self._failed(error, first, f"connected ({channel})", FIRST_CONTACT) from error

    # ---------- messages

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send into the channel's round; see Transport.send. Raises ConfigurationError, PeerLost."""
        self._check(data, (self.rank, dst, channel), f"send of {label}")
        self.sent_bytes[dst] += data.numel() * data.element_size()
        return self._post(BatchPost(PostEnd(True, dst), data, label), channel, f"sent {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive into the channel's round; see Transport.recv. Raises ConfigurationError, PeerLost."""
        self._check(data, (src, self.rank, channel), f"receive of {label}")
        return self._post(BatchPost(PostEnd(False, src), data, label), channel, f"waited for {label}")

    def _check(self, data: torch.Tensor, link: Link, what: str) -> None:
        self._check_movable(data, what)
        if link not in self._ready:
            raise ConfigurationError(
                f"{what}: ranks {link[0]} and {link[1]} have no connection for it ({link[2]}): prepare() makes those "
                f"of a program before it runs, on all ranks together"
            )

    def _post(self, post: BatchPost, channel: str, what: str) -> Work:
        found = self._open.setdefault(channel, OpenRound())
        found.stream = device_of(post.data).current_stream()
        found.posts.append(post)
        found.handles.append(HcclBatchHandle(self, post.end.peer, what))
        return found.handles[-1]

    def go(self) -> None:
        """Begin to move what was posted: a round of one channel."""
        begun, self._open = self._open, {}
        for channel, found in begun.items():
            # Channels are posted on streams of their own, and one is current when all begin.
            with device_of(found.posts[0].data).on(found.stream):
                for some in self._batches(found.posts):
                    batch = HcclBatch([found.posts[at] for at in some])
                    self._begin_on(channel, batch)
                    for at in some:
                        found.handles[at].batch = batch

    def _batches(self, posts: list[BatchPost]) -> list[list[int]]:
        return batches([post.end for post in posts], self.rank, self.world_size, self.target.one_pair)

    def _begin_on(self, channel: str, batch: HcclBatch) -> None:
        first = batch.posts[0]
        try:
            batch.work = self._begin(self._groups[channel], batch.posts)
        except RuntimeError as error:
            raise self._failed(error, first.end.peer, f"cannot begin {first.label} ({channel})", LATE) from error

    def _begin(self, group: Any, posts: list[BatchPost]) -> Any:
        """Begin a batch, as torch_npu's batch_isend_irecv does, and return its work."""
        kinds = ["isend" if post.end.sends else "irecv" for post in posts]
        return group.batch_isend_irecv(kinds, [post.data for post in posts], [post.end.peer for post in posts])

    def wait_for(self, handle: HcclBatchHandle) -> None:
        """Let the current stream wait for the message's whole batch; the host does not. Raises PeerLost."""
        if handle.batch is None:
            self.go()
        batch = handle.batch
        assert batch is not None
        board = self.control.board
        board.note_waiting(handle.peer)
        try:
            batch.work.wait()
        except RuntimeError as error:
            raise self._failed(error, handle.peer, handle.what, LATE) from error
        board.note_waiting(None)
        batch.posts.clear()  # whatever frees them now does so behind this wait

    def close(self) -> None:
        """Give back both communicators, once no message is on its way."""
        self._open.clear()
        self._ready = frozenset()
        super().close()


class HcclBatchHandle:
    """One message of a batch, which is made when its round begins."""

    def __init__(self, transport: HcclBatchTransport, peer: int, what: str) -> None:
        self._transport, self.peer, self.what = transport, peer, what
        self.batch: HcclBatch | None = None

    def wait(self) -> None:
        """Let the current stream wait for the message's whole batch; see Work.wait."""
        self._transport.wait_for(self)
