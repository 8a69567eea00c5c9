"""The streams of a device that a program runs on: one computes, and each channel has one to post its messages on.

Kernels, merges and waits for messages stand in the stream that the caller has made current. A transport lets its
messages follow what stands in the current stream when they are posted, and `wait` holds up the current stream until a
message is through; where the transport has streams of its own, that is its affair. So a post on the stream of its
channel waits for what its rows need and for nothing else that the host has queued meanwhile: for the last instruction
that wrote them (or, if the post writes, read them), by an event. An event is recorded only where a post waits for it,
and a stream that is past an event does not wait for it again. At the end of a program the current stream waits for the
channels' streams: nothing stands there that it has not waited for already, but a graph that is captured must end in
the stream that it began in.

What messages read and write outside the pool (kept slots) lives in the call until all of them are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from tokenring.backends.devices import DeviceRuntime
from tokenring.lowering.program import (
    NOTHING,
    OWN,
    Attend,
    Fill,
    Instruction,
    Merge,
    Multiply,
    Pack,
    Recv,
    Send,
    Span,
    Wait,
)

START = -1  # before the first instruction: what earlier calls did with the pool
C = TypeVar("C")
Step = Callable[[C], None]


class Streams:
    """The streams of one pool: programs on it run one after another."""

    def __init__(self, device: DeviceRuntime) -> None:
        self.device = device
        self._of_channel: dict[str, Any] = {}
        self._computing: Any = None  # the stream of the last call

    def of_channel(self, channel: str) -> Any:
        """Return the stream on which a channel's messages are posted."""
        if channel not in self._of_channel:
            self._of_channel[channel] = self.device.new_stream(high_priority=True)
        return self._of_channel[channel]

    def begin(self) -> None:
        """Begin a call on the current stream, after the call before it is done, on whatever stream that ran."""
        current = self.device.current_stream()
        if self._computing is not None and self._computing != current:
            current.wait_stream(self._computing)
        self._computing = current

    def forget(self) -> None:
        """Forget the last call's stream, after the host has waited for everything: the next call may begin at once.

        A call that is captured must begin so.
        """
        self._computing = None


def on_streams(steps: Sequence[Step[C]], instructions: Sequence[Instruction], streams: Streams) -> list[Step[C]]:
    """Return the steps, with posts on their channels' streams after the events that these need.

    The last step waits for all of these streams.
    """
    waits = post_waits(instructions)
    events = {at: streams.device.new_event() for at in set(waits.values())}
    found = list(steps)
    for at, instruction in enumerate(instructions):
        if isinstance(instruction, (Send, Recv)):
            event = events[waits[at]] if at in waits else None
            found[at] = _posted(found[at], streams.of_channel(instruction.channel), event, streams.device)
        if at in events:
            found[at] = _recorded(found[at], events[at], streams.device)
    if START in events:
        found[0] = _started(found[0], events[START], streams.device)
    posts = (each for each in instructions if isinstance(each, (Send, Recv)))
    if used := [streams.of_channel(channel) for channel in dict.fromkeys(each.channel for each in posts)]:
        found[-1] = _joined(found[-1], used, streams.device)
    return found


def post_waits(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Return, for each post that must wait, the last instruction before it that its rows need done, or START.

    A post whose stream has waited for that one, or a later one, need not. Rows count with all their head groups.
    """
    touched: dict[int, list[tuple[Span, int, bool]]] = {}  # slot → rows, instruction, whether it writes
    passed: dict[str, int] = {}  # channel → the last instruction that its stream has waited for
    posts: dict[int, Send | Recv] = {}
    found = {}
    for at, instruction in enumerate(instructions):
        if isinstance(instruction, (Send, Recv)):
            posts[instruction.message] = instruction
            writes = isinstance(instruction, Recv)
            before = (
                number
                for span, number, wrote in touched.get(instruction.span.slot, ())
                if (wrote or writes) and _overlap(span, instruction.span)
            )
            last = max(before, default=START)
            if last > passed.get(instruction.channel, START - 1):
                found[at] = passed[instruction.channel] = last
            continue
        for span, writes in _touches(instruction, posts):
            touched.setdefault(span.slot, []).append((span, at, writes))
    return found


def _touches(instruction: Instruction, posts: dict[int, Send | Recv]) -> list[tuple[Span, bool]]:
    """Return the rows that an instruction of the computing stream reads (False) or writes (True)."""
    match instruction:
        case Pack() | Fill():
            found = [(instruction.into, True)]
        case Merge():
            found = [(instruction.source, False), (instruction.into, True)]
        case Attend():
            read = (instruction.q, instruction.kv, instruction.kept_q)
            found = [(span, False) for span in read if span is not None]
            found += [(result.into, True) for result in instruction.results]
        case Multiply():
            found = [(instruction.q, False), (instruction.kv, False)]
            found += [(result.into, True) for result in instruction.results]
        case Wait(message):  # until then, the message may be reading or writing
            found = [(posts[message].span, isinstance(posts[message], Recv))]
        case _:
            found = []
    return [(span, writes) for span, writes in found if span.slot not in (OWN, NOTHING)]


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.stop and other.start < one.stop


def _posted(step: Step[C], stream: Any, event: Any, device: DeviceRuntime) -> Step[C]:
    def post(call: C) -> None:
        if event is not None:
            stream.wait_event(event)
        with device.on(stream):
            step(call)

    return post


def _recorded(step: Step[C], event: Any, device: DeviceRuntime) -> Step[C]:
    def run(call: C) -> None:
        step(call)
        event.record(device.current_stream())

    return run


def _joined(step: Step[C], others: Sequence[Any], device: DeviceRuntime) -> Step[C]:
    def run(call: C) -> None:
        step(call)
        current = device.current_stream()
        for each in others:
            current.wait_stream(each)

    return run


def _started(step: Step[C], event: Any, device: DeviceRuntime) -> Step[C]:
    def run(call: C) -> None:
        event.record(device.current_stream())
        step(call)

    return run
