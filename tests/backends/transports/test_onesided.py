"""The one-sided protocol on streams that run late and out of step; and what happens to it with one thing left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from nvshmem_ops import Emulated, Operators
from plays import CHANNELS, MESSAGES, Parts, Play, played
from stream_world import FakeMemory, Refused

from tokenring.backends.transports import onesided
from tokenring.backends.transports.onesided import Receiving, Sending
from tokenring.lowering import mailboxes as mailbox
from tokenring.lowering.mailboxes import ALIGNED_BYTES, Mailboxes
from tokenring.lowering.target import Link

SEEDS = range(15)


APART = pytest.mark.parametrize("apart", [False, True])
ROOM = pytest.mark.parametrize(("ring", "boxes"), [(1, None), (3, None), (64, None), (3, 1), (64, 2)])


@APART
@ROOM
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_message_is_read_whole(
    ranks: int, ring: int, boxes: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever runs first; also where the host is done before anything runs."""
    monkeypatch.setattr(onesided, "RING", ring)
    for seed in SEEDS:
        for steps in (True, False):
            assert played(ranks, seed, Parts(posts_apart=apart, boxes=boxes), steps=steps) == 2 * MESSAGES


@APART
@ROOM
def test_streams_that_share_a_queue(
    ring: int, boxes: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue for everything that a rank does: posts in one total order need no more, as long as credits go out."""
    monkeypatch.setattr(onesided, "RING", ring)
    for seed in SEEDS:
        assert played(4, seed, Parts(posts_apart=apart, boxes=boxes), merged=True) == 2 * MESSAGES


@APART
@pytest.mark.parametrize(("ring", "boxes"), [(3, None), (64, None), (64, 2)])
def test_replays(ring: int, boxes: int | None, apart: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is queued can be queued again as it is, and brings the new contents: words are clear when all is done."""
    monkeypatch.setattr(onesided, "RING", ring)
    for seed in SEEDS:
        assert played(3, seed, Parts(posts_apart=apart, boxes=boxes), replays=3) == 4 * 2 * MESSAGES


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
    """Credits for more messages than there are words, or boxes."""

    def post(self, take: Any = None) -> int:
        number, self._posted = self._posted, self._posted + 1
        if take is not None:
            self._taking[number] = take
        self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, number))
        return number


class PostsUnordered(Receiving):
    """A post does not look on which stream its word was waited for."""

    def post(self, take: Any = None) -> int:
        number, self._posted = self._posted, self._posted + 1
        if self._waited <= number - self.room:
            self.wait(number - self.room)
        if take is not None:
            self._taking[number] = take
        self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, number))
        return number


class CreditTooLate(Receiving):
    """Put off until its word (or box) is free, instead of waiting for that in its place."""

    def post(self, take: Any = None) -> int:
        self.held = getattr(self, "held", 0)
        if take is not None:
            self._taking[self._posted] = take
        self._posted += 1
        self.give()
        return self._posted - 1

    def wait(self, number: int) -> Any:
        made = super().wait(number)
        self.give()
        return made

    def give(self) -> None:
        while self.held < self._posted and self.held - self._waited < self.room:
            self._memory.signal(self._peer, self._words.credit(self._channel, self._rank, self.held))
            self.held += 1


class CreditBeforeCopy(Receiving):
    """The next message's credit goes out when the one before is there, and not yet taken out of the box."""

    def post(self, take: Any = None) -> int:
        held, self._taking = self._taking, {}
        if self._posted >= self.room:
            self.wait(self._posted - self.room)
        self._taking = {number: act for number, act in held.items() if number >= self._waited}
        number = super().post(take)
        for each in sorted(held.keys() - self._taking.keys()):
            held[each]()
        return number


class TakesNothing(Emulated):
    def take(self, data: torch.Tensor, place: int) -> None:
        """Mutant: the message stays in its box."""


class PutsFirst(Emulated):
    """What is put is what was in the box before."""

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        box = self._box(data, place)
        with self.operators:
            self._put(box, peer, word)
            box.copy_(data)


class SignalsBeforeThePut(Emulated):
    """The arrival is said by a put of its own, and what is put says nothing."""

    def put(self, data: torch.Tensor, peer: int, place: int, word: int) -> None:
        self.signal(peer, word)
        spare = self._halves.numel() // 2 - 1
        super().put(data, peer, place, spare)


class SignalsFlyAhead(Operators):  # type: ignore[no-untyped-call]
    """Of the operators, not of ours: a put that does not keep its promise is found out."""

    def delivered(self, there: torch.Tensor, data: torch.Tensor, signal: Any) -> list[Any]:
        return list(reversed(super().delivered(there, data, signal)))


def apart_at_receivers(messages: Mapping[Link, Sequence[int]]) -> Mailboxes:
    """Colours that collide: what a rank sends itself is forgotten."""
    boxes, ends = mailbox.lay(messages), dict[int, int]()
    places = {}
    for link, its in boxes.places.items():
        start = ends.get(link[1], 0)
        places[link] = tuple(start + at - its[0] for at in its)
        ends[link[1]] = start + ALIGNED_BYTES * len(its)
    return replace(boxes, places=places)


def all_in_one(messages: Mapping[Link, Sequence[int]]) -> Mailboxes:
    boxes = mailbox.lay(messages)
    return replace(boxes, places={link: tuple(at - its[0] for at in its) for link, its in boxes.places.items()})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (Parts(boxes=1, boxed=TakesNothing), "is read as"),
        (Parts(boxes=1, boxed=PutsFirst), "is read as"),
        (Parts(boxes=2, boxed=SignalsBeforeThePut), "is read as"),
        (Parts(boxes=2, operators=SignalsFlyAhead), "is read as"),
        (Parts(boxes=1, receiving=CreditBeforeCopy), "is read as another message"),
        (Parts(boxes=1, receiving=CreditTooSoon), "is read as|stuck"),
        (Parts(boxes=1, receiving=CreditTooLate), "stuck"),
        (Parts(boxes=1, sending=WithoutCredit), "is read as|stuck"),
        (Parts(boxes=1, lay=apart_at_receivers), "is read as"),
        (Parts(boxes=1, lay=all_in_one), "is read as"),
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
    monkeypatch.setattr(onesided, "RING", 1 if parts.boxes is None else 64)
    refused(lambda seed: played(3, seed, parts), says)


def test_a_post_waits_for_the_copy_out_of_its_box() -> None:
    """On whatever stream that stands."""
    parts = Parts(boxes=1, receiving=PostsUnordered, posts_apart=True)
    refused(lambda seed: played(2, seed, parts), "is read as another message")


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
