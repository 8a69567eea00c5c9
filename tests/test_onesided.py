"""The one-sided protocol on streams that run late and out of step; and what happens to it with one thing left out."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from stream_world import POISON, Event, FakeDevice, FakeMemory, Refused, Stream, World

from tokenring.backends import onesided
from tokenring.backends.onesided import Receiving, Sending, Words

CHANNELS = ("requests", "partials")
SIZE, SLOTS, SOURCES = 8, 3, 2  # bytes of a message; places of a rank to receive into, and to send from
MESSAGES = 40
SEEDS = range(15)


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
        values = [[0] * words.count for _ in range(ranks)]
        self.ranks: list[Rank] = []
        for rank in range(ranks):
            device = FakeDevice(self.world, rank)
            memory = parts.memory(device, heaps, values)
            made = Rank(self.world, device, heaps[rank])
            made.sources.extend(torch.full((SIZE,), POISON, dtype=torch.uint8) for _ in range(SOURCES))
            for line in [(channel, peer) for channel in CHANNELS for peer in range(ranks) if peer != rank]:
                made.sending[line] = parts.sending(memory, device, words, rank, line)  # type: ignore[arg-type]
                made.receiving[line] = parts.receiving(memory, device, words, rank, line)  # type: ignore[arg-type]
            self.ranks.append(made)

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
            receiver.received.append((message, slot, line, line.post()))
        if not self.parts.reads_before_reuse:
            receiver.free.append(slot)
        if not sender.sources:
            self.reclaim(sender)
        source = sender.sources.popleft()
        sender.device.current_stream().add("compute", lambda: source.fill_(self.content(message)))  # type: ignore[arg-type]
        made = sender.device.current_stream().record_event()
        with self.posting(sender, channel, made):
            sender.sent.append((source, sender.sending[channel, dst].send(source, slot * SIZE).done))

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


def played(ranks: int, seed: int, parts: Parts, merged: bool = False, steps: bool = True, replays: int = 0) -> int:
    """Runs it to its end; how many halves were read and right."""
    play = Play(ranks, seed, parts, merged)
    play.queue(steps and not replays)
    again = play.world.capture() if replays else lambda: None
    play.world.run()
    for _ in range(replays):
        play.world.turn += 1
        again()
        play.world.run()
    return play.world.checked


APART = pytest.mark.parametrize("apart", [False, True])


@APART
@pytest.mark.parametrize("ring", [1, 3, 64])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_message_is_read_whole(ranks: int, ring: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever runs first; also where the host is done before anything runs."""
    monkeypatch.setattr(onesided, "RING", ring)
    for seed in SEEDS:
        for steps in (True, False):
            assert played(ranks, seed, Parts(posts_apart=apart), steps=steps) == 2 * MESSAGES


@APART
@pytest.mark.parametrize("ring", [1, 3, 64])
def test_streams_that_share_a_queue(ring: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One queue for everything that a rank does: posts in one total order need no more, as long as credits go out."""
    monkeypatch.setattr(onesided, "RING", ring)
    for seed in SEEDS:
        assert played(4, seed, Parts(posts_apart=apart), merged=True) == 2 * MESSAGES


@APART
@pytest.mark.parametrize("ring", [3, 64])
def test_replays(ring: int, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued can be queued again as it is, and brings the new contents: words are clear when all is done."""
    monkeypatch.setattr(onesided, "RING", ring)
    for seed in SEEDS:
        assert played(3, seed, Parts(posts_apart=apart), replays=3) == 4 * 2 * MESSAGES


def test_a_graph_must_end_in_the_stream_it_began_in() -> None:
    """Posts stand on streams of their own; without a wait for these at the end the capture fails."""
    with pytest.raises(Refused, match=r"unjoined: .* does not lead back to the first stream"):
        played(3, 0, Parts(posts_apart=True, joins=False), replays=1)


# ---------- mutants


class DropsASignal(FakeMemory):
    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        self.copy(data, peer, place)
        if self.device.rank != 1:
            self.signal(peer, word)


class SignalsFirst(FakeMemory):
    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        self.signal(peer, word)
        self.copy(data, peer, place)


class NeverClears(FakeMemory):
    """Words that stay set, as counters do that only grow."""

    def wait(self, word: int) -> None:
        own = self.words[self.device.rank]
        self.stream.add("wait", ready=lambda: own[word] == 1)


class WithoutCredit(Sending):
    def send(self, data: torch.Tensor, place: int) -> Any:
        wait, self._memory.wait = self._memory.wait, lambda word: None  # type: ignore[method-assign]
        try:
            return super().send(data, place)
        finally:
            self._memory.wait = wait  # type: ignore[method-assign]


class WithoutCompute(Sending):
    """Its stream does not wait for what makes the data."""

    def send(self, data: torch.Tensor, place: int) -> Any:
        if self._stream is None:
            self._stream = self._device.new_stream()
        wait, self._stream.wait_stream = self._stream.wait_stream, lambda other: None
        try:
            return super().send(data, place)
        finally:
            self._stream.wait_stream = wait


class CreditOnCompute(Sending):
    """The credit is waited for on the compute stream, which so waits for other ranks' hosts."""

    def send(self, data: torch.Tensor, place: int) -> Any:
        self._memory.wait(self._words.credit(self._channel, self._peer, self._sent))
        wait, self._memory.wait = self._memory.wait, lambda word: None  # type: ignore[method-assign]
        try:
            return super().send(data, place)
        finally:
            self._memory.wait = wait  # type: ignore[method-assign]


class CreditTooSoon(Receiving):
    """Credits for more messages than there are words."""

    def post(self) -> int:
        number, self._posted = self._posted, self._posted + 1
        self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, number))
        return number


class PostsUnordered(Receiving):
    """A post does not look on which stream its word was waited for."""

    def post(self) -> int:
        number, self._posted = self._posted, self._posted + 1
        if self._waited <= number - onesided.RING:
            self.wait(number - onesided.RING)
        self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, number))
        return number


class CreditTooLate(Receiving):
    """Put off until its word is free, instead of waiting for that in its place."""

    def post(self) -> int:
        self.held = getattr(self, "held", 0)
        self._posted += 1
        self.give()
        return self._posted - 1

    def wait(self, number: int) -> Any:
        made = super().wait(number)
        self.give()
        return made

    def give(self) -> None:
        while self.held < self._posted and self.held - self._waited < onesided.RING:
            self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, self.held))
            self.held += 1


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (Parts(memory=DropsASignal), "stuck: .*waits for word"),
        (Parts(memory=SignalsFirst), "is read as poison"),
        (Parts(sending=WithoutCredit), "is read as|stuck"),
        (Parts(sending=WithoutCompute), "is read as"),
        (Parts(waits_for_sends=False), "is read as"),
        (Parts(waits_for_receives=False), "is read as poison"),
        (Parts(reads_before_reuse=False), "is read as another message"),
        (Parts(receiving=CreditTooSoon), "is read as|stuck"),
        (Parts(receiving=CreditTooLate), "stuck"),
        (Parts(receiving=PostsUnordered, posts_apart=True), "is read as|stuck"),
    ],
    ids=lambda each: "" if isinstance(each, str) else None,
)
def test_mutants(parts: Parts, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each leaves out one thing; some order of events shows it."""
    monkeypatch.setattr(onesided, "RING", 1)
    refused(lambda seed: played(3, seed, parts), says)


def test_words_that_stay_set_do_not_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right once, where no word is used twice; a replay then waits for nothing."""
    monkeypatch.setattr(onesided, "RING", MESSAGES)
    for seed in SEEDS:
        assert played(3, seed, Parts(memory=NeverClears)) == 2 * MESSAGES
    refused(lambda seed: played(3, seed, Parts(memory=NeverClears), replays=1), "is read as")


@pytest.mark.parametrize(("sending", "goes_on"), [(Sending, True), (CreditOnCompute, False)])
def test_a_missing_credit_holds_up_no_kernel(sending: type[Sending], goes_on: bool) -> None:
    """Nobody has posted a receive yet; what is computed after the send is computed."""
    play, done = Play(2, 0, Parts(sending=sending), merged=False), []
    sender = play.ranks[0]
    sender.sending[CHANNELS[0], 1].send(sender.sources[0], 0)
    sender.device.current_stream().add("compute", lambda: done.append(True))
    with pytest.raises(Refused, match=r"stuck: .*waits for word"):
        play.world.run()
    assert bool(done) == goes_on


def refused(attempt: Callable[[int], int], says: str) -> None:
    """In some order of events at least."""
    found = []
    for seed in SEEDS:
        try:
            attempt(seed)
        except Refused as error:
            found.append(str(error))
    assert found, "no order of events shows it"
    assert any(re.search(says, each) for each in found), found
