"""Exchanges between ranks that share no memory: over a Gloo group of their own, whatever moves the payload."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from tokenring.backends.base import Handle
from tokenring.backends.control import Control
from tokenring.backends.meeting import STORE_SECONDS, StoreSilent, bounded, forget
from tokenring.errors import MOST_SAID, BackendUnavailable, one_line
from tokenring.weak import weakly

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

DEVICES: WeakKeyDictionary[Control, list[Any]] = WeakKeyDictionary()
# Up to so many ranks agree in one round, whose messages leave before any others: those of a later round would wait for
# what is queued before them on the same links.
WAYS = 8
TAG = 0  # messages of one tag keep their order, which is all the matching that programs need


def check_gloo(transport: str) -> None:
    """Raises BackendUnavailable where torch has no Gloo."""
    if not dist.is_gloo_available():
        raise BackendUnavailable(f"transport {transport!r} was asked for, but this torch was built without Gloo")


def own_store(control: Control, group: ProcessGroup, channel: str) -> Any:
    """The part of the group's store that no other group and no other transport uses."""
    store = dist.distributed_c10d._get_process_group_store(group)
    return PrefixStore(f"tokenring/{control.name}/{channel}", store)


def connect(control: Control, group: ProcessGroup, channel: str) -> Any:
    """A Gloo group of the members of `group` alone. Raises PeerLost.

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
        raise control.lost(peer, "connected to all ranks", one_line(error, MOST_SAID)) from None
    addresses = [f"0/{rank}" for rank in range(control.world_size)]  # as Gloo calls them
    with suppress(StoreSilent):
        bounded(lambda: forget(apart, "connected", addresses, control.world_size), STORE_SECONDS)
    return made


def _devices(control: Control) -> list[Any]:
    """What all Gloo groups of a control go over, by the interfaces that torch would take, with one thread for all.

    A thread for each group takes more processor time: it wakes up for itself, a hundred times a second in any case.
    """
    if control not in DEVICES:
        named = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        gloo = dist.ProcessGroupGloo
        DEVICES[control] = [gloo.create_device(interface=name) for name in named] or [gloo.create_default_device()]
    return DEVICES[control]


def release(control: Control) -> None:
    """What `connect` made for all groups of a control, and they hold: its thread ends with the last of them."""
    DEVICES.pop(control, None)


class GlooHandle:
    """One Gloo message on its way."""

    def __init__(self, work: Any, control: Control, peer: int, what: str) -> None:
        self._work, self._control, self._peer, self._what = work, control, peer, what

    def wait(self) -> None:
        control = self._control
        control.board.note_waiting(self._peer)
        try:
            done = self._work.wait(timedelta(seconds=control.timeout_seconds))
        except RuntimeError as error:
            raise control.lost(self._peer, self._what, one_line(error, MOST_SAID)) from None
        if done is False:
            raise control.lost(self._peer, self._what, "no answer")
        control.board.note_waiting(None)


class Apart:
    """The exchange of a control whose ranks share no memory.

    First all find out whether everybody says the same, as nearly always, with few messages; if not, each tells each.
    """

    def __init__(self, control: Control, group: ProcessGroup) -> None:
        self._control, self._group = control, connect(control, group, "control")
        control.gather_apart = weakly(self._gather)

    @staticmethod
    def where_needed(control: Control, group: ProcessGroup) -> Apart | None:
        """For whoever made the control to hold; None where ranks share memory."""
        return Apart(control, group) if control.shared is None else None

    def _gather(self, payload: bytes) -> Callable[[], list[bytes]]:
        alike = self._compare(payload)
        return lambda: [payload] * self._control.world_size if alike() else self._tell_each(payload)

    def _compare(self, payload: bytes) -> Callable[[], bool]:
        """Whether all ranks say the same, to which all come alike; the first messages leave at once.

        As in the n-way dissemination barrier (Hoefler et al., "Fast Barrier Synchronization for InfiniBand", IPDPS
        2006): in each round a rank hears from WAYS - 1 others, each of which speaks for all that it has heard of.
        """
        world_size, mine = self._control.world_size, payload + b"\1"

        def begin(step: int, said: bytes) -> tuple[dict[int, torch.Tensor], list[Handle]]:
            return self._swap(range(step, min(WAYS * step, world_size), step), said)

        def hear() -> bool:
            step, said, (heard, handles) = 1, mine, first
            while True:
                for handle in handles:
                    handle.wait()
                if any(bytes(each.numpy()) != mine for each in heard.values()):
                    said = payload + b"\0"
                step *= WAYS
                if step >= world_size:
                    return said == mine
                heard, handles = begin(step, said)

        first = begin(1, mine)
        return hear

    def _tell_each(self, payload: bytes) -> list[bytes]:
        """What all ranks say, in equal sizes. Not by a collective: it could not say whom it waits for."""
        world_size = self._control.world_size
        heard, handles = self._swap(range(1, world_size), payload)
        for handle in handles:
            handle.wait()
        said = {rank: bytes(each.numpy()) for rank, each in heard.items()}
        return [said.get(rank, payload) for rank in range(world_size)]

    def _swap(self, steps: range, said: bytes) -> tuple[dict[int, torch.Tensor], list[Handle]]:
        """Say it to the ranks so many steps onwards, and hear as much from those so many steps back, by rank."""
        rank, world_size = self._control.rank, self._control.world_size
        mine = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        heard = {(rank - step) % world_size: torch.empty_like(mine) for step in steps}
        received = [self._start("recv", peer, data) for peer, data in heard.items()]  # first: Gloo waits for them
        return heard, received + [self._start("send", (rank + step) % world_size, mine) for step in steps]

    def _start(self, what: str, peer: int, data: torch.Tensor) -> Handle:
        label = "exchanged with all ranks"
        try:
            work = getattr(self._group, what)([data], peer, TAG)
        except RuntimeError as error:
            raise self._control.lost(peer, label, one_line(error, MOST_SAID)) from None
        return GlooHandle(work, self._control, peer, label)
