"""Messages between ranks on streams that run late, as programs post them: what the one-sided protocol is tried with.

Over memory whose puts reach the places of messages, and over NVSHMEM's operators, by way of boxes (`Parts.boxes`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from nvshmem_ops import Emulated, Operators, Streams
from stream_world import POISON, Event, FakeDevice, FakeMemory, Refused, Stream, World

from tokenring.backends.transports.onesided import Receiving, Sending, Words
from tokenring.lowering import mailboxes as mailbox
from tokenring.lowering.mailboxes import Mailboxes
from tokenring.lowering.target import Link

CHANNELS = ("requests", "partials")
SIZE, SLOTS, SOURCES = 8, 3, 2  # bytes of a message; places of a rank to receive into, and to send from
MESSAGES = 40


@dataclass
class Parts:
    """What the protocol is made of; mutants exchange one of them."""

    memory: type[FakeMemory] = FakeMemory
    sending: type[Sending] = Sending
    receiving: type[Receiving] = Receiving
    waits_for_sends: bool = True
    waits_for_receives: bool = True
    reads_before_reuse: bool = True
    posts_apart: bool = False  # on a stream of each channel, behind what the rows need, as the executor posts
    joins: bool = True  # posting streams are waited for at the end
    boxes: int | None = None  # of a line, where puts do not reach the places of messages
    lay: Callable[[Mapping[Link, Sequence[int]]], Mailboxes] = mailbox.lay
    boxed: type[Emulated] = Emulated
    operators: type[Operators] = Operators


@dataclass
class Rank:
    """One rank's host: what it has posted and not waited for, and its free places."""

    world: World
    device: FakeDevice
    heap: torch.Tensor
    sending: dict[Any, Sending] = field(default_factory=dict)
    receiving: dict[Any, Receiving] = field(default_factory=dict)
    free: deque[int] = field(default_factory=lambda: deque(range(SLOTS)))
    received: deque[tuple[int, int, Receiving, int]] = field(default_factory=deque)  # message, slot, line, number
    sources: deque[torch.Tensor] = field(default_factory=deque)
    sent: deque[tuple[torch.Tensor, Any]] = field(default_factory=deque)
    posting: dict[str, Stream] = field(default_factory=dict)
    used: dict[int, Event] = field(default_factory=dict)  # slot → behind the last use of it


class Play:
    """Messages between ranks in one total order, as strict programs post them, with few places that are used again."""

    def __init__(self, ranks: int, seed: int, parts: Parts, merged: bool) -> None:
        self.world, self.parts, self.random = World(ranks, seed, merged), parts, random.Random(seed)
        heaps = [torch.full((SLOTS * SIZE,), POISON, dtype=torch.uint8) for _ in range(ranks)]
        words = Words(CHANNELS, ranks)
        self.values = [[0] * words.count for _ in range(ranks)]
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            device = FakeDevice(self.world, rank)
            memory = self.memory(device, heaps, words)
            made = Rank(self.world, device, heaps[rank])
            made.sources.extend(torch.full((SIZE,), POISON, dtype=torch.uint8) for _ in range(SOURCES))
            for line in [(channel, peer) for channel in CHANNELS for peer in range(ranks) if peer != rank]:
                made.sending[line] = parts.sending(memory, device, words, rank, line)  # type: ignore[arg-type]
                made.receiving[line] = parts.receiving(memory, device, words, rank, line)  # type: ignore[arg-type]
            self.ranks.append(made)

    def memory(self, device: FakeDevice, heaps: list[torch.Tensor], words: Words) -> Any:
        return self.parts.memory(device, heaps, self.values)

    def post(self, src: int, dst: int, channel: str, slot: int) -> int:
        return self.ranks[dst].receiving[channel, src].post()

    def send(self, src: int, dst: int, channel: str, source: torch.Tensor, slot: int) -> Any:
        return self.ranks[src].sending[channel, dst].send(source, slot * SIZE)

    def content(self, message: int) -> int:
        return (7 * message + 101 * self.world.turn) % POISON

    def queue(self, steps: bool = False) -> None:
        """All messages and all that uses them. steps: the devices go on meanwhile."""
        for message in range(MESSAGES):
            src, dst = self.random.sample(range(len(self.ranks)), 2)
            self.move(message, src, dst, self.random.choice(CHANNELS))
            if steps:
                self.world.run(self.random.randrange(12))
        for rank in self.ranks:
            while rank.received:
                self.consume(rank)
            while rank.sent:
                self.reclaim(rank)
            for stream in rank.posting.values() if self.parts.joins else ():
                rank.device.current_stream().wait_stream(stream)

    @contextmanager
    def posting(self, rank: Rank, channel: str, behind: Event | None) -> Iterator[None]:
        """On the stream of the channel, behind the event alone; or on the one that computes."""
        if not self.parts.posts_apart:
            yield
            return
        if channel not in rank.posting:
            rank.posting[channel] = rank.device.new_stream()
            rank.posting[channel].wait_stream(rank.device.current_stream())
        if behind is not None:
            rank.posting[channel].wait_event(behind)
        with rank.device.on(rank.posting[channel]):
            yield

    def move(self, message: int, src: int, dst: int, channel: str) -> None:
        receiver, sender = self.ranks[dst], self.ranks[src]
        if not receiver.free or (not self.parts.reads_before_reuse and len(receiver.received) > SLOTS):
            self.consume(receiver)
        elif self.parts.posts_apart and receiver.received and self.random.random() < 0.5:
            self.consume(receiver)  # while there are places: the next post need not come behind this wait
        slot = receiver.free.popleft()
        line = receiver.receiving[channel, src]
        with self.posting(receiver, channel, receiver.used.get(slot)):
            receiver.received.append((message, slot, line, self.post(src, dst, channel, slot)))
        if not self.parts.reads_before_reuse:
            receiver.free.append(slot)
        if not sender.sources:
            self.reclaim(sender)
        source = sender.sources.popleft()
        sender.device.current_stream().add("compute", lambda: source.fill_(self.content(message)))  # type: ignore[arg-type]
        made = sender.device.current_stream().record_event()
        with self.posting(sender, channel, made):
            sender.sent.append((source, self.send(src, dst, channel, source, slot).done))

    def reclaim(self, rank: Rank) -> None:
        """The oldest send is waited for, and what it sent from is written over."""
        source, done = rank.sent.popleft()
        stream = rank.device.current_stream()
        if self.parts.waits_for_sends:
            stream.wait_event(done)
        stream.add("compute", lambda: source.fill_(POISON))  # type: ignore[arg-type]
        rank.sources.append(source)

    def consume(self, rank: Rank) -> None:
        """The oldest receive is waited for and read; then something else is written there."""
        message, slot, line, number = rank.received.popleft()
        if self.parts.waits_for_receives:
            line.wait(number)
        place, stream = rank.heap[slot * SIZE : (slot + 1) * SIZE], rank.device.current_stream()
        half = SIZE // 2
        stream.add("read", lambda: self.check(place[half:], message))
        stream.add("read", lambda: self.check(place[:half], message))
        if self.parts.reads_before_reuse:
            stream.add("compute", lambda: place.fill_(POISON))  # type: ignore[arg-type]
            rank.used[slot] = stream.record_event()
            rank.free.append(slot)

    def check(self, place: torch.Tensor, message: int) -> None:
        found = place.tolist()
        if found != [self.content(message)] * len(found):
            what = "poison" if POISON in found else "another message"
            raise Refused(f"message {message} is read as {what}")
        self.world.checked += 1


class BoxedPlay(Play):
    """The same over NVSHMEM's operators: transport `nvshmem`'s own memory, and boxes for every line."""

    def __init__(self, ranks: int, seed: int, parts: Parts, merged: bool) -> None:
        assert parts.boxes is not None
        self.symmetric: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        self.numbers: dict[Link, int] = {}
        links = [(a, b, channel) for a in range(ranks) for b in range(ranks) if a != b for channel in CHANNELS]
        self.boxes = parts.lay({link: [SIZE] * parts.boxes for link in links})
        super().__init__(ranks, seed, parts, merged)
        for rank in self.ranks:
            for line in rank.receiving.values():
                line.begin(parts.boxes)

    def memory(self, device: FakeDevice, heaps: list[torch.Tensor], words: Words) -> Any:
        made = self.parts.boxed(len(heaps), Streams(device, self.symmetric), self.parts.operators)
        made.meet(words.count)
        made.lay(self.boxes.nbytes)
        return made

    def post(self, src: int, dst: int, channel: str, slot: int) -> int:
        rank, line = self.ranks[dst], self.ranks[dst].receiving[channel, src]
        self.numbers[src, dst, channel] = self.numbers.get((src, dst, channel), -1) + 1
        place = rank.heap[slot * SIZE : (slot + 1) * SIZE]
        return line.post(partial(line._memory.take, place, self.box(src, dst, channel)))  # type: ignore[attr-defined]

    def send(self, src: int, dst: int, channel: str, source: torch.Tensor, slot: int) -> Any:
        return self.ranks[src].sending[channel, dst].send(source, self.box(src, dst, channel))

    def box(self, *link: Any) -> int:
        """Of the message that was posted last."""
        return self.boxes.place(link, self.numbers[link])


def played(ranks: int, seed: int, parts: Parts, merged: bool = False, steps: bool = True, replays: int = 0) -> int:
    """Runs it to its end; how many halves were read and right."""
    play = (Play if parts.boxes is None else BoxedPlay)(ranks, seed, parts, merged)
    play.queue(steps and not replays)
    again = play.world.capture() if replays else lambda: None
    play.world.run()
    for _ in range(replays):
        play.world.turn += 1
        again()
        play.world.run()
    return play.world.checked
