"""Messages of a program bound to a transport, where they are more than single ones.

Collectives; bundles, which are posts sent as one, with a handle that their messages share; and groups, which transports
want to know beside single messages: where all go, which begin together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import torch

from tokenring.backends.interfaces import Transport, Work
from tokenring.ir.schedule_data import CHANNELS
from tokenring.lowering.program import ALL_GATHER, BUNDLE, Collective, Instruction, Pack, Program, Recv, Send, Wait
from tokenring.lowering.target import Contacts, Link, beyond, contacts, links
from tokenring.runtime.call import ActiveCall, Step
from tokenring.runtime.pool import Landed, Views

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Pass, ScheduleData

COUNTED_RANKS = 64  # of which each finds the links of all by itself; of more, one exchange takes less
RANK_BYTES = 4

T = TypeVar("T")
Data = Callable[[ActiveCall], torch.Tensor]  # a message's bytes, wherever they lie


def connect(transport: Transport, schedule: ScheduleData, direction: Pass, device: torch.device) -> None:
    """Prepare all links and groups that the programs of a pass need, on all ranks alike.

    Programs that were not proved with the schedule are proved before the first of them runs.
    Raises ConfigurationError, PeerLost, and ScheduleError if that proof fails.
    """
    large = schedule.world_size > COUNTED_RANKS and not transport.target.needs_all
    needed = _own(transport, schedule, direction) if large else contacts(schedule, transport.target, (direction,))
    transport.prepare(needed.links, device)
    target = transport.target if needed.groups else replace(transport.target, collectives=False)
    if beyond(target) or target.batching:  # else its programs were proved with the schedule
        from tokenring.proof.verify import verify_lowered

        verify_lowered(schedule, target)
    if needed.groups:
        transport.prepare_groups(needed.groups, device)


def _own(transport: Transport, schedule: ScheduleData, direction: Pass) -> Contacts:
    """Return the links of which this rank is an end, and in each channel one of each rank that sends there.

    It knows no more than its part of the schedule. Ranks without a link in a channel hear by it that others have some:
    where a transport makes one communicator for a channel, all ranks must come.
    """
    own = {each for each in links(schedule.of_rank(transport.rank), (direction,)) if transport.rank in each[:2]}
    word = first_sends(own, transport.rank)
    for src, said in enumerate(transport.exchange(word, "the connections")):
        for at, channel in enumerate(CHANNELS):
            dst = int.from_bytes(said[at * RANK_BYTES : (at + 1) * RANK_BYTES], "little")
            if dst != src:
                own.add((src, dst, channel))
    return Contacts(frozenset(own))


def first_sends(some: Iterable[Link], rank: int) -> bytes:
    """Return the first rank to which a rank sends in each channel, as it tells others; itself where there is none."""
    sent = [(dst, channel) for src, dst, channel in some if src == rank]
    first = (min((dst for dst, of in sent if of == channel), default=rank) for channel in CHANNELS)
    return b"".join(each.to_bytes(RANK_BYTES, "little") for each in first)


class Collectives:
    """The messages of one program that are parts of collectives. Posts are bound in their order."""

    def __init__(self, views: Views, transport: Transport | None) -> None:
        self._views, self._transport = views, transport
        self._of = {message: each for each in views.program.collectives for message in each.messages}
        self._bound: dict[Collective, list[tuple[Send | Recv, Data]]] = defaultdict(list)

    def __contains__(self, message: int) -> bool:
        return message in self._of

    def bind(self, post: Send | Recv, data: Data) -> Step:
        """Return a step that does nothing; for the last post of a collective, one that begins the collective."""
        found = self._of[post.message]
        self._bound[found].append((post, data))
        if len(self._bound[found]) < len(found.messages):
            return _nothing
        bound = self._bound.pop(found)
        assert self._transport is not None  # whose target is why there are collectives
        if found.kind == BUNDLE:
            return _bundled(found, bound, self._transport, self._views)
        return _step(found, bound, self._transport)


class _Shared:
    """The handle that all messages of a collective share: the first wait for any of them waits for all."""

    def __init__(self, parts: list[Work]) -> None:
        self._parts = parts

    def wait(self) -> None:
        parts, self._parts = self._parts, []
        for each in parts:
            each.wait()


def _bundled(bundle: Collective, bound: Sequence[tuple[Send | Recv, Data]], transport: Transport, views: Views) -> Step:
    """Copy messages together and send them as one, or receive them as one; the first wait for any waits for all."""
    whole, at = views.bundle(bundle), 0
    parts: list[tuple[torch.Tensor, Data]] = []
    for each, data in bound:
        size = views.record(each.span.slot).nbytes * each.span.rows
        parts.append((whole[at : at + size], data))
        at += size
    post, label = bound[0][0], bundle.label

    def begin(call: ActiveCall) -> None:
        lie = [(part, data(call)) for part, data in parts]
        if isinstance(post, Send):
            for part, own in lie:
                part.copy_(own)
            handle = transport.send(whole, post.dst, post.channel, label)
        else:
            handle = Landed(transport.recv(whole, post.src, post.channel, label), lie)
        call.handles.update(dict.fromkeys(bundle.messages, _Shared([handle])))

    return begin


def _step(collective: Collective, bound: Sequence[tuple[Send | Recv, Data]], transport: Transport) -> Step:
    kind, ranks, messages, count, label = collective
    to: dict[int, list[Data]] = defaultdict(list)
    by: dict[int, list[Data]] = defaultdict(list)
    for post, data in bound:
        (to[post.dst] if isinstance(post, Send) else by[post.src]).append(data)

    def begin(call: ActiveCall) -> None:
        out = {rank: _cut(call, some, count) for rank, some in to.items()}
        into = {rank: _cut(call, some, count) for rank, some in by.items()}
        parts: list[Work] = []
        for part in range(count):
            taken = {rank: some[part] for rank, some in into.items()}
            name = label if count == 1 else f"{label}, part {part + 1} of {count}"
            if kind == ALL_GATHER:
                given = next(iter(out.values()))[part]
                parts.append(transport.all_gather(given, taken, ranks, name))
            else:
                given_to = {rank: some[part] for rank, some in out.items()}
                parts.append(transport.all_to_all(given_to, taken, ranks, name))
        shared = _Shared(parts)
        call.handles.update(dict.fromkeys(messages, shared))

    return begin


def _cut(call: ActiveCall, some: list[Data], count: int) -> list[torch.Tensor]:
    """Cut all bytes for or from one rank into `count` equal parts; each part lies in one message."""
    whole = [data(call) for data in some]
    size = sum(each.numel() for each in whole) // count
    return [each[start : start + size] for each in whole for start in range(0, each.numel(), size)]


def _nothing(call: ActiveCall) -> None:
    """Do nothing, for a post that goes with a later one."""


# ---------- groups


def placed(transport: Transport | None, views: Views, instructions: Sequence[Instruction]) -> Callable[[], object]:
    """Send the ranks the places of a program's messages; return what is to be called whenever the program begins.

    This is a collective call where the transport is a placing one.
    """
    if transport is None or not transport.target.placing:
        return lambda: None
    landings = []
    for each in instructions:
        if isinstance(each, Recv):
            landing = views.landing(each.span)
            landings.append((each.src, each.channel, views.message(each.span) if landing is None else landing))
    placement = transport.place(landings)
    return lambda: transport.begin(placement)


def grouped(
    transport: Transport | None, program: Program, steps: list[Callable[[T], None]]
) -> list[Callable[[T], None]]:
    """Return the steps, where posts that stand in a row, or are of one round, begin to move at the last of them."""
    if transport is None or not transport.target.grouping:
        return steps
    made = list(steps)
    for at in _round_ends(program) if transport.target.batching else last_posts(program.instructions):
        made[at] = _in_turn(made[at], lambda call: transport.go())
    return made


def _round_ends(program: Program) -> list[int]:
    from tokenring.lowering.rounds import rounds

    return [each.end for each in rounds(program.instructions, program.steps)]


def last_posts(instructions: Sequence[Instruction]) -> list[int]:
    """Return the positions where rows of posts on one channel end; only copies into what is sent stand inside rows.

    Of one channel, so that rows follow each other in the order of posts that all ranks share: groups of both channels
    at once would begin in an order that depends on how each rank's rows happen to be cut.
    """
    found: list[int] = []
    last: int | None = None
    row = ""  # its channel
    for at, instruction in enumerate([*instructions, None]):
        if isinstance(instruction, Pack):
            continue
        channel = instruction.channel if isinstance(instruction, Recv | Send) else ""
        if last is not None and channel != row:
            found.append(last)
        last, row = at if channel else None, channel
    return found


def settled(
    transport: Transport | None, instructions: Sequence[Instruction], steps: list[Callable[[T], None]]
) -> list[Callable[[T], None]]:
    """Return the steps, of which the first that waits for a message also makes sure that all ranks agree."""
    at = next((at for at, each in enumerate(instructions) if isinstance(each, Wait)), None)
    if at is None or transport is None or not transport.target.deferring:
        return steps
    made = list(steps)
    made[at] = _in_turn(lambda call: transport.settle(), made[at])
    return made


def _in_turn(*steps: Callable[[T], None]) -> Callable[[T], None]:
    def each(call: T) -> None:
        for step in steps:
            step(call)

    return each
