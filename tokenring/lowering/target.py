"""The target that programs are lowered for: all that a transport says of itself to lowering, planner and runtime.

And what follows from it: which connections a schedule needs, and which programs are to be proved beside the usual ones.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from tokenring.ir.schedule_data import PARTIALS, PASSES, REQUEST_OF, REQUESTS, Pass, ScheduleData

Link = tuple[int, int, str]  # source, destination, channel
LOWERED = ("early_receives", "collectives", "bundle_bytes", "ahead_bytes")  # the flags that programs depend on


@dataclass(frozen=True)
class Target:
    """The abilities of a transport; but for early_receives and channels each flag is off where nothing is said.

    Read by the lowering (LOWERED), so that they decide what programs are:

    early_receives: the two directions of a pair are matched apart, so receives may be posted before sends.
    collectives: it has `prepare_groups`, `all_to_all` and `all_gather`, and exchanges (`lowering.exchanges`) go as
    collectives; not with early receives. bundle_bytes: up to how many bytes what one rank gives another at once goes
    as one message, where it would be several (`lowering.bundles`); ahead_bytes: up to how many bytes of requests, in
    all, a rank receives from the start, in slots of their own; both with early receives only.

    Read by whoever counts memory and time:

    channels: how many channels move at once. pair_serial: both directions with one peer share one queue in each
    channel. connection_bytes: device memory that a connection of two ranks takes at each of them, beside the pool:
    one for each channel (if there are several), and for each direction unless they share a queue. group_bytes: what a
    connection of all ranks of an exchange takes at each of them. most_connections: how many a rank may have in all,
    None without a limit; advised_connections: how many are advised, None without advice; why_few_connections says whose
    either is. mailboxes: messages go by way of boxes beside the pool
    (`lowering.mailboxes`), which take device memory at every rank. batching: messages move in batches
    (`lowering.rounds`) over one connection of all ranks for each channel; one_pair: of one send and one receive each.

    Read by the runtime, which calls the methods of `backends.interfaces.Transport` that they stand for:

    one_sided: the sender writes into the receiver's slot, in memory from `allocate`. capturable: the device moves
    messages by itself, so that posts and waits may be captured in a graph and are done again by launching it, once
    `try_capture` has seen it. placing: senders know beforehand where each message of a bound program goes (`place`,
    `begin`). grouping: messages move in groups, which begin at `go`. deferring: messages carry the key of their call,
    so they may be posted while the ranks still find out whether they make the same call (`begin_call`, `settle`).
    modal: there are several ways to divide messages (`in_mode`).
    """

    early_receives: bool = True
    collectives: bool = False
    bundle_bytes: int = 0
    ahead_bytes: int = 0

    channels: int = 2
    pair_serial: bool = False
    connection_bytes: int = 0
    group_bytes: int = 0
    most_connections: int | None = None
    advised_connections: int | None = None
    why_few_connections: str = ""
    mailboxes: bool = False
    batching: bool = False
    one_pair: bool = False

    one_sided: bool = False
    capturable: bool = False
    placing: bool = False
    grouping: bool = False
    deferring: bool = False
    modal: bool = False

    @property
    def needs_all(self) -> bool:
        """True if a rank's programs, or what is prepared for them, depend on moves of which it is neither end."""
        return bool(self.bundle_bytes or self.ahead_bytes or self.collectives or self.batching or self.mailboxes)

    @property
    def lowered(self) -> Target:
        """Target with only the fields that programs depend on: targets that are equal in this have the same ones."""
        return Target(**{name: getattr(self, name) for name in LOWERED})


IDEAL = Target()  # of a transport of which nothing is known
APART = (Target(), Target(early_receives=False))  # whose programs the proof of a schedule replays
NO_END = sys.maxsize


def beyond(target: Target) -> list[Target]:
    """Return the targets whose programs prove those of this one, beside APART: by sizes it makes either of them.

    What stays within a limit in bytes depends on the workload, so limits have no end: all that there can be.
    """
    most = replace(target.lowered, bundle_bytes=NO_END if target.bundle_bytes else 0)
    ahead = [replace(most, ahead_bytes=NO_END)] if target.ahead_bytes else []
    return [each for each in (replace(most, ahead_bytes=0), *ahead) if each not in APART]


def links(schedule: ScheduleData, passes: Iterable[Pass] = PASSES) -> set[Link]:
    """Return (source, destination, channel) of all messages of these passes."""
    moving = {kind for direction in passes for kind in schedule.moving(direction)}
    return {
        (src, dst, PARTIALS if kind in REQUEST_OF else REQUESTS)
        for src, dst, kind in schedule.moves_by_pair
        if kind in moving
    }


class Contacts(NamedTuple):
    """Connections that messages and collectives need: of two ranks, and of all ranks of an exchange."""

    links: frozenset[Link]
    groups: frozenset[tuple[int, ...]] = frozenset()


def contacts(schedule: ScheduleData, target: Target, passes: Iterable[Pass] = PASSES) -> Contacts:
    """Return what a transport has to connect for these passes: with collectives, no two ranks for what goes as one."""
    if not target.collectives:
        return Contacts(frozenset(links(schedule, passes)))
    from tokenring.lowering.exchanges import exchanges
    from tokenring.lowering.storage import storage_of

    storage = storage_of(schedule)
    found: set[Link] = set()
    groups: set[tuple[int, ...]] = set()
    for direction in passes:
        together = exchanges(storage, direction)
        groups.update(each.ranks for each in together)
        apart = {message for rank in range(schedule.world_size) for message in storage.messages(rank, direction)}
        apart.difference_update(message for each in together for message in each.messages)
        found.update((message.src, message.dst, message.channel) for message in apart)
    return Contacts(frozenset(found), frozenset(groups))
