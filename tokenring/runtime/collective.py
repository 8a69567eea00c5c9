"""Collectives of a program bound to a transport, and its bundles: posts sent as one, handles that messages share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from tokenring.backends.interfaces import Transport, Work
from tokenring.lowering.footprint import contacts
from tokenring.lowering.program import ALL_GATHER, BUNDLE, Collective, Recv, Send
from tokenring.proof.verify import verify_lowered
from tokenring.runtime.call import ActiveCall, Step
from tokenring.runtime.pool import Landed, Views

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Pass, ScheduleData

Data = Callable[[ActiveCall], torch.Tensor]  # a message's bytes, wherever they lie


def connect(transport: Transport, schedule: ScheduleData, direction: Pass, device: torch.device) -> None:
    """Prepare all links and groups that the programs of a pass need, on all ranks alike.

    Programs that were not proved with the schedule are proved before the first of them runs.
    Raises ConfigurationError, PeerLost, and ScheduleError if that proof fails.
    """
    needed = contacts(schedule, transport.target, (direction,))
    transport.prepare(needed.links, device)
    target = transport.target
    verify_lowered(schedule, target if needed.groups else replace(target, collectives=False))
    if needed.groups:
        transport.prepare_groups(needed.groups, device)


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
