"""HCCL: two-sided messages between tensors on Ascend NPUs, over torch_npu's process groups.

HCCL gives the two ranks of a message a communicator of their own in each process group, with one stream: there
both directions stand in one queue, tags are ignored, and a send is as synchronous as a receive, so that order is
the match. Different peers and different groups overlap. So requests and partials have groups of their own, and of
each of them the messages to higher ranks and those to lower ones: no queue then holds both directions. Where the
communicators' memory is too dear, `hccl/channel` and `hccl/pair` do with half and a quarter of them. (With HCCL's own
collectives: `hccl_collectives`; with one communicator for all ranks: `hccl_batches`.)

The streams themselves come round-robin from a pool of the device (32, in older builds of torch_npu 8), so that
communicators may share one: a receive that is posted early would hold up a send to somebody else behind it. So all
ranks post in the one total order of `passes.order`, which needs no more than a single stream at each rank.

A wait orders streams and never blocks the host: what HCCL finds wrong it says at a later call, or in its logs.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from tokenring.backends.control.control import Control, own_store
from tokenring.backends.control.dissemination import Apart
from tokenring.backends.interfaces import Work
from tokenring.backends.transports.accelerated import TAG, Accelerated
from tokenring.backends.transports.hccl_environment import (
    ADVISED_COMMUNICATORS,
    CROWDED,
    MANY,
    MEGABYTE,
    P2P_MEGABYTES,
    check_environment,
    connection_bytes,
    most_communicators,
    watchdog_seconds,
)
from tokenring.errors import MOST_SAID, BackendUnavailable, ConfigurationError, PeerLost, one_line
from tokenring.ir.schedule_data import CHANNELS
from tokenring.launch.groups import held
from tokenring.lowering.footprint import connections
from tokenring.lowering.target import Link, Target

if TYPE_CHECKING:
    from tokenring.launch.groups import Held

Ranks = tuple[int, ...]
CONNECTION_BYTES = 2 * P2P_MEGABYTES * MEGABYTE  # in and out, at each end
LATE = (
    "on an NPU a failed message is found late: HCCL waits HCCL_EXEC_TIMEOUT (1836 s where it is not set) for the other "
    "end, and says so at a later call"
)
FIRST_CONTACT = (
    "both ranks must make their first contact within HCCL_CONNECT_TIMEOUT (120 s where it is not set; 600 and more are "
    "recommended for communicators of two ranks)"
)


class HcclTransport(Accelerated):
    """A transport over HCCL: payload between the ranks of one group, on HCCL groups of its own."""

    name = "hccl"
    device_type, device_name, finds_which = "npu", "NPU", "ASCEND_LAUNCH_BLOCKING=1"
    vendor_says = re.compile(r"hccl|\bERR02\d{3}\b|\bE[IJ]\d{4}\b", re.IGNORECASE)  # torch_npu's and CANN's messages
    by_pairs = True  # each pair of ranks has communicators of its own
    target = Target(early_receives=False, connection_bytes=CONNECTION_BYTES, modal=True)

    def __init__(self, group: Held, timeout_seconds: float, beside: HcclTransport | None = None) -> None:
        """Make the transport for a group.

        beside: the transport of which this is another mode; they share one control, and what is counted.
        """
        self._create, self._of = _creator(self.name), held(group)
        group = self._of
        check_environment(self.name, os.environ, self.by_pairs)
        self.control = Control(self.name, group, timeout_seconds) if beside is None else beside.control
        self.rank, self.world_size = self.control.rank, self.control.world_size
        self.sent_bytes: dict[int, int] = defaultdict(int) if beside is None else beside.sent_bytes
        self.target = self.target_in(os.environ)
        self._apart = Apart.where_needed(self.control, group) if beside is None else None
        self._groups = {lane: self._make(lane, tuple(range(self.world_size))) for lane in self._lanes()}
        self._modes: dict[str, HcclTransport] = {}
        self._connected: set[tuple[str, int]] = set()  # lane and peer
        self._beside = self if beside is None else beside
        self._linked, self._grouped = frozenset[Link](), frozenset[Ranks]()  # this rank's, and some of others
        self._device: torch.device | None = None  # of the tensors that it moves

    @classmethod
    def target_in(cls, environment: Mapping[str, str]) -> Target:
        """Return its target: buffers as large as this environment asks for, communicators as many as it allows."""
        most = most_communicators(environment)
        return replace(
            cls.target, connection_bytes=connection_bytes(environment), most_connections=most,
            advised_connections=ADVISED_COMMUNICATORS if most is None else None,
            why_few_connections=MANY if most is None else CROWDED,
        )  # fmt: skip

    def in_mode(self, name: str) -> HcclTransport:
        """Return the transport of another mode between the same ranks, such as `hccl/pair`; closed with this one.

        All ranks ask together. Its communicators come with its first messages, so that one that is not used has none.
        A name that is no mode of this one gives this one.
        """
        from tokenring.lowering.backend_names import BOUNDED, transport_class

        if name not in BOUNDED.get(self.name, ()):
            return self
        if name not in self._modes:
            self._modes[name] = transport_class(name)(self._of, self.control.timeout_seconds, beside=self)
        return self._modes[name]

    def _make(self, lane: str, ranks: tuple[int, ...]) -> Any:
        """Make a group of these ranks of the transport's group alone, by torch_npu's own constructor.

        Not by dist.new_group: as `gloo.connect` says; and it gives a group that is made again the name, and so
        the keys in the store, of the one before.
        """
        options = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
        options.store = own_store(self.control, self._of, f"{self.name}, {lane}")
        options.group_rank, options.group_size = ranks.index(self.rank), len(ranks)
        options.timeout = timedelta(seconds=watchdog_seconds(os.environ))
        options.group_id = f"tokenring {self.control.name[:8]} {lane}"
        everybody = self._of.global_ranks()
        options.global_ranks_in_group = [everybody[rank] for rank in ranks]
        return self._create(options, None)

    # ---------- lanes

    def _lanes(self) -> list[str]:
        """List the groups, each with a communicator for each pair that uses it."""
        return sorted({self._lane(channel, *ends) for channel in CHANNELS for ends in ((0, 1), (1, 0))})

    def _lane(self, channel: str, src: int, dst: int) -> str:
        """Return the name of the group in which a message goes."""
        target = self.target
        of_channel = channel if target.channels > 1 else "all"
        return of_channel if target.pair_serial else f"{of_channel} {'up' if src < dst else 'down'}"

    def prepare(self, links: Iterable[Link], device: torch.device) -> None:
        """Make the communicators of these links, on all ranks in one order. Raises ConfigurationError, PeerLost.

        HCCL makes one when a message first needs it, and blocks both hosts until they meet there: in the order of
        a program's messages ranks could wait for each other in a circle.
        """
        self._serve(device)
        links = list(links)
        self._allow(links=links)
        for low, high, lane in warm_up_order(
            {(min(src, dst), max(src, dst), self._lane(channel, src, dst)) for src, dst, channel in links},
            self.world_size,
        ):
            if self.rank in (low, high):
                self._touch(low, high, lane, device)

    def _allow(self, links: Iterable[Link] = (), groups: Iterable[Ranks] = ()) -> None:
        """Note new links and groups. Raises ConfigurationError where some rank gets too many communicators.

        All ranks ask together; each counts its own, and tells it: they refuse together.
        """
        before = self._linked, self._grouped
        self._linked, self._grouped = self._linked | frozenset(links), self._grouped | frozenset(groups)
        most = self.target.most_connections
        if most is None:
            return
        some = [self._beside, *self._beside._modes.values()]
        some += [] if self in some else [self]
        mine = sum(each._communicators() for each in some).to_bytes(8, "little")
        found = max(int.from_bytes(each, "little") for each in self.exchange(mine, "communicators"))
        if found > most:
            self._linked, self._grouped = before
            raise ConfigurationError(
                f"transport {self.name!r} would take {found} communicators on a rank for these schedules: "
                f"{self.target.why_few_connections}. Set HCCL_OP_RETRY_ENABLE=\"L1:0,L2:0\", or take transport "
                f"'auto', or 'hccl/batch', which has one for all ranks in each channel"
            )

    def _communicators(self) -> int:
        """Count the communicators that it makes at this rank for all that was to be connected so far."""
        return connections(self._linked, self.target, self.rank) + sum(self.rank in ranks for ranks in self._grouped)

    def _touch(self, low: int, high: int, lane: str, device: torch.device) -> None:
        """Send a message of one byte, in the direction of the lane: to the higher rank where it has both."""
        peer = high if self.rank == low else low
        if (lane, peer) in self._connected:
            return
        byte = torch.zeros(1, dtype=torch.uint8, device=device)
        group, sends = self._groups[lane], (self.rank == low) != lane.endswith("down")
        try:
            work = group.send([byte], peer, TAG) if sends else group.recv([byte], peer, TAG)
            work.wait()
        except RuntimeError as error:
            raise self._failed(error, peer, f"connected ({lane})", FIRST_CONTACT) from error
        self._connected.add((lane, peer))

    # ---------- messages

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Work:
        """Post the send; see Transport.send. Raises ConfigurationError, PeerLost."""
        group = self._group(data, self._lane(channel, self.rank, dst), dst, f"send of {label}")
        self.sent_bytes[dst] += data.numel() * data.element_size()
        try:
            work = group.send([data], dst, TAG)
        except RuntimeError as error:
            raise self._failed(error, dst, f"cannot send {label}", LATE) from error
        return _Handle(self, work, data, dst, f"sent {label}")

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Work:
        """Post the receive; see Transport.recv. Raises ConfigurationError, PeerLost."""
        group = self._group(data, self._lane(channel, src, self.rank), src, f"receive of {label}")
        try:
            work = group.recv([data], src, TAG)
        except RuntimeError as error:
            raise self._failed(error, src, f"cannot receive {label}", LATE) from error
        return _Handle(self, work, data, src, f"waited for {label}")

    def _group(self, data: torch.Tensor, lane: str, peer: int, what: str) -> Any:
        """Return the group for a message that can go. Raises ConfigurationError."""
        self._check_movable(data, what)
        if (lane, peer) not in self._connected:
            raise ConfigurationError(
                f"{what}: ranks {self.rank} and {peer} have no connection for it ({lane}): prepare() makes those of a "
                f"program before it runs, on all ranks together"
            )
        return self._groups[lane]

    def lost_together(self, error: RuntimeError, what: str, hint: str = LATE) -> PeerLost:
        """Return the error for what all ranks do at once: the next rank is the first that is asked whether it lives."""
        return self._failed(error, (self.rank + 1) % self.world_size, what, hint)

    def close(self) -> None:
        """Give back all groups, and with them their communicators, once no message is on its way."""
        for mode in self._modes.values():
            mode.close()
        super().close()
        self._connected.clear()
        self._modes.clear()


class HcclChannelTransport(HcclTransport):
    """A transport with half the communicators: both directions of a pair share a queue in each channel."""

    name = "hccl/channel"
    target = replace(HcclTransport.target, pair_serial=True)


class HcclPairTransport(HcclTransport):
    """A transport with a quarter of the communicators: one queue for everything between two ranks."""

    name = "hccl/pair"
    target = replace(HcclChannelTransport.target, channels=1)


class _Handle:
    """A message on its way. What it moves lives until it is waited for: HCCL may use its memory until then."""

    def __init__(self, transport: HcclTransport, work: Any, data: object, peer: int, what: str) -> None:
        self._transport, self._work, self._data, self._peer, self._what = transport, work, data, peer, what

    def wait(self) -> None:
        """Let the current stream wait; the host does not (but with TORCH_HCCL_BLOCKING_WAIT=1)."""
        board = self._transport.control.board
        board.note_waiting(self._peer)
        try:
            self._work.wait()
        except RuntimeError as error:
            raise self._transport._failed(error, self._peer, self._what, LATE) from error
        board.note_waiting(None)


def warm_up_order(pairs: Iterable[tuple[int, int, str]], world_size: int) -> list[tuple[int, int, str]]:
    """Sort (low, high, lane) so that no rank waits in a circle when all take them in this order, one by one.

    The order has rounds in which no rank is in two pairs: as a tournament is drawn, so that all ranks connect at once.
    """
    odd = world_size - 1 + world_size % 2  # rounds of all pairs

    def turn(low: int, high: int) -> int:
        plays_last = world_size % 2 == 0 and high == world_size - 1  # whoever is left over plays the last rank
        return (2 * low if plays_last else low + high) % odd

    return sorted(pairs, key=lambda each: (each[2], turn(each[0], each[1]), each))


def _creator(name: str) -> Any:
    """Return the maker of HCCL groups: torch_npu registers it when it is imported. Raises BackendUnavailable."""
    if not hasattr(dist.Backend, "HCCL"):
        try:
            import torch_npu  # type: ignore[import-not-found,unused-ignore]  # noqa: F401
        except Exception as error:  # a broken torch_npu raises anything
            raise BackendUnavailable(
                f"transport {name!r} needs torch_npu, which cannot be imported ({one_line(error, MOST_SAID)}): "
                f"`tokenring doctor` says what is missing"
            ) from None
    plugin = dist.Backend._plugins.get("HCCL")
    if plugin is None or not plugin.extended_api:
        raise BackendUnavailable(f"transport {name!r}: this torch_npu registers no HCCL groups that can be made here")
    return plugin.creator_fn
