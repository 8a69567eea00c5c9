"""One-sided messages on streams: the protocol, in three verbs that a memory has: put, signal and wait.

A line is one direction of a pair of ranks on one channel. Each of its messages has a credit, by which the receiver
says that the place is free, and an arrival, by which the sender says that the bytes are there; both are words of 0
or 1 in the memory of whoever waits for them, and whoever has waited for a word clears it. Everything is queued:

    receiver, at the post       stream that posts   wait for the wait for the message RING before it; signal the
                                                    credit of the message, at the sender
    sender, at the post         line's stream       wait for what the stream that posts has come to, and for the
                                                    credit; put the bytes at their place; signal the arrival
    sender, at the wait         stream that waits   wait for the line's stream as it was behind the put
    receiver, at the wait       stream that waits   wait for the arrival

Where puts do not reach the places of messages but boxes beside them (lowering/mailboxes.py), the receiver queues the
copy out of the box behind the wait for the arrival, and the credit of the next message for that box behind the copy.

docs/cuda-transports.md says why this is right, and why it cannot hang, on streams that share a queue, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tokenring.backends.devices import DeviceRuntime

RING = 256  # messages of one line that may be posted and not waited for; the next one waits for the first of these


Line = tuple[str, int]  # channel, and the rank at the other end


class OneSidedMemory(Protocol):
    """A memory that peers put bytes into and signal words in. Each verb is queued on the current stream."""

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        """Copy contiguous bytes to a place in the peer's memory, and signal its word, never seen before them."""

    def signal(self, peer: int, word: int) -> None:
        """Set a word at a peer, once all that was queued before is done."""

    def wait(self, word: int) -> None:
        """Queue a wait until one's own word is set; then clear it."""

    def release(self) -> None:
        """Let all waits of this rank go on, on a stream of its own: what comes after them is not to be used."""


class OwnMemory(OneSidedMemory, Protocol):
    """A rank's part of a memory that all ranks can put into."""

    def meet(self, words: int, room_bytes: int = 0) -> torch.Tensor:
        """Set up so many words, all clear, and room for puts, uint8 and zero. All ranks call it together.

        Puts go there until the memory grows (or has boxes laid).
        """

    def grow(self, nbytes: int) -> torch.Tensor:
        """Make a new heap, uint8, of nbytes, instead of the one before.

        It is of the same size on all ranks, which call it together.
        """

    def are_set(self, words: Sequence[int]) -> list[bool]:
        """Return which of one's own words are set, as the host sees them now; no stream that waits holds it up."""


class Words:
    """The words of a rank and their meaning: of each line that it is an end of, RING credits or RING arrivals."""

    def __init__(self, channels: tuple[str, ...], world_size: int) -> None:
        self._channels, self._world_size = channels, world_size
        self.count = 2 * len(channels) * world_size * RING

    def credit(self, channel: str, receiver: int, number: int) -> int:
        """Return the word at the sender that says: this receiver has a place for its message of this number."""
        return self._at(self._channels.index(channel), receiver, number)

    def arrival(self, channel: str, sender: int, number: int) -> int:
        """Return the word at the receiver that says: this sender has put its message of this number."""
        return self._at(len(self._channels) + self._channels.index(channel), sender, number)

    def _at(self, row: int, peer: int, number: int) -> int:
        return (row * self._world_size + peer) * RING + number % RING


def signaller(word: int, world_size: int) -> int:
    """Return the rank that signals this word."""
    return word // RING % world_size


class Queued(NamedTuple):
    """The events of a send: its stream has come to where it waits for the credit; the bytes are put."""

    begun: Any
    done: Any


class Sending:
    """The end of a line at its sender. Its stream is its own: a credit that is missing holds up nothing else."""

    def __init__(self, memory: OneSidedMemory, device: DeviceRuntime, words: Words, rank: int, line: Line) -> None:
        self._memory, self._device, self._words, self._rank = memory, device, words, rank
        self._channel, self._peer = line
        self._stream: Any = None
        self._sent = 0

    def send(self, data: torch.Tensor, place: int) -> Queued:
        """Queue the next message. What the current stream queued before is sent."""
        device, number = self._device, self._sent
        if self._stream is None:
            self._stream = device.new_stream(high_priority=True)
        self._sent += 1
        self._stream.wait_stream(device.current_stream())
        begun = self._stream.record_event()
        with device.on(self._stream):
            self._memory.wait(self._words.credit(self._channel, self._peer, number))
            self._memory.put(data, self._peer, place, self._words.arrival(self._channel, self._rank, number))
        return Queued(begun, self._stream.record_event())


class Receiving:
    """The end of a line at its receiver. It all happens on the streams that call, posts maybe on another than waits."""

    def __init__(self, memory: OneSidedMemory, device: DeviceRuntime, words: Words, rank: int, line: Line) -> None:
        self._memory, self._device, self._words, self._rank = memory, device, words, rank
        self._channel, self._peer = line
        self._posted = self._waited = 0
        self._boxes: int | None = None  # how many messages find room beside their places; None: each goes to its place
        self._cleared: dict[int, tuple[Any, Any]] = {}  # word → the stream that waited for it, the event behind that
        self._taking: dict[int, Callable[[], object]] = {}  # message → what is queued behind the wait for it

    def begin(self, boxes: int | None = None) -> None:
        """Begin a pass, all of whose streams come behind what was waited for before.

        So nothing in it waits for an event of another pass: inside a graph that is captured it could not.
        boxes: how many messages the peer has boxes for, which they take in turn; None where it needs none.
        """
        self._boxes = boxes
        self._cleared.clear()

    @property
    def room(self) -> int:
        """The number of messages that may be posted and not waited for."""
        return RING if self._boxes is None else min(RING, self._boxes)

    @property
    def is_full(self) -> bool:
        """True if the next post waits for a message that nobody has waited for yet."""
        return self._posted - self.room >= self._waited

    def post(self, take: Callable[[], object] | None = None) -> int:
        """Signal the credit for the next message, and return its number.

        Its words (and its box) are free when the message that used them last has arrived and its wait has cleared them
        (and taken it out), on whatever stream that stands. Where it was not waited for, that is done now: the credit
        must go out in the order of the posts, or ranks may wait in a circle.

        take: queues the copy out of the message's box.
        """
        number = self._posted
        self._posted += 1
        if number >= self.room:
            self.wait(number - self.room)
        if take is not None:
            self._taking[number] = take
        self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, number))
        return number

    def wait(self, number: int) -> Any:
        """Let the current stream wait for a message, and for all before it, which come first anyhow.

        Returns the event behind. A word is waited for once. Whoever comes later waits for whoever did that.
        """
        current = self._device.current_stream()
        if number < self._waited and (found := self._cleared.get(number % RING)) is not None:
            stream, event = found
            if stream != current:
                current.wait_event(event)
            return event
        first = self._waited
        while self._waited <= number:
            self._memory.wait(self._words.arrival(self._channel, self._peer, self._waited))
            self._taking.pop(self._waited, _nothing)()
            self._waited += 1
        event = current.record_event()
        self._cleared.update((each % RING, (current, event)) for each in range(first, self._waited))
        return event


def _nothing() -> None:
    """Do nothing: a message that is put at its place need not be taken there."""
