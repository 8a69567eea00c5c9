"""In which order `nccl` begins groups of messages of both channels, and that a device that does one at a time ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tokenring.backends.transports.nccl import NcclPost, NcclTransport
from tokenring.ir.schedule_data import PARTIALS, REQUESTS
from tokenring.lowering.program import Pack, Recv, Send, Span, Wait
from tokenring.runtime.message_groups import last_posts

RANKS, MESSAGES, SEEDS = 4, 40, range(200)
SPAN = Span(0, 0, 1)
Group = tuple[str, set[int]]  # channel, and the numbers of its messages
Rows = Callable[[Sequence[Any]], list[int]]


class Recorded:
    """As ProcessGroupNCCL, of what a group of messages is: the numbers that were posted in each."""

    def __init__(self, channel: str, begun: list[Group]) -> None:
        self.channel, self.begun, self.numbers = channel, begun, set[int]()

    def _start_coalescing(self) -> None:
        self.numbers = set()

    def _end_coalescing(self) -> None:
        self.begun.append((self.channel, self.numbers))

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> None:
        self.numbers.add(int(tensors[0]))

    recv = send


class OneRank(NcclTransport):
    """What posts and begins, and nothing else of a transport."""

    def __init__(self) -> None:
        self.begun: list[Group] = []
        self._groups = {channel: Recorded(channel, self.begun) for channel in (REQUESTS, PARTIALS)}
        self._open = {}

    def post(self, number: int, channel: str) -> None:
        self._post(NcclPost("send", torch.tensor(number), 1), channel, "")


class RequestsFirst(OneRank):
    """Mutant: as it was before."""

    def go(self) -> None:
        self._open = dict(sorted(self._open.items(), key=lambda each: each[0] != REQUESTS))
        super().go()


def whole_rows(instructions: Sequence[Any]) -> list[int]:
    """Mutant: rows of both channels, as they were before."""
    return last_posts([replaced(each) for each in instructions])


def replaced(instruction: Any) -> Any:
    return Send(0, SPAN, 1, REQUESTS, "") if isinstance(instruction, Send) else instruction


def begun(rows: Rows, make: type[OneRank], program: Sequence[Any]) -> list[Group]:
    """What a rank's program begins, in order."""
    made, ends = make(), set(rows(program))
    for at, each in enumerate(program):
        if isinstance(each, Send):
            made.post(each.message, each.channel)
        if at in ends:
            made.go()
    return made.begun


def stuck(rows: Rows, make: type[OneRank], seed: int) -> int:
    """How many of random messages never move, where a device does one group after another."""
    draw = random.Random(seed)
    messages = [(draw.choice((REQUESTS, PARTIALS)), tuple(draw.sample(range(RANKS), 2))) for _ in range(MESSAGES)]
    queues: list[list[Group]] = []
    for rank in range(RANKS):
        program: list[Any] = []
        for number, (channel, ends) in enumerate(messages):
            if rank in ends:
                program += [Send(number, SPAN, 1, channel, ""), *([Wait(number)] if draw.random() < 0.4 else [])]
        queues.append(begun(rows, make, program))
    moved = True
    while moved:
        moved = False
        for number, (_, ends) in enumerate(messages):
            heads = [queues[rank][0][1] if queues[rank] else set() for rank in ends]
            if all(number in head for head in heads):
                moved = True
                for head in heads:
                    head.discard(number)
        queues = [[group for group in queue if group[1]] for queue in queues]
    return sum(len(numbers) for queue in queues for _, numbers in queue)


def test_the_channel_first_that_was_posted_on_first() -> None:
    made = OneRank()
    for number, channel in enumerate((PARTIALS, REQUESTS, REQUESTS, PARTIALS)):
        made.post(number, channel)
    made.go()
    made.post(4, REQUESTS)
    made.go()
    made.go()
    assert made.begun == [(PARTIALS, {0, 3}), (REQUESTS, {1, 2}), (REQUESTS, {4})]


def test_rows_of_one_channel() -> None:
    """A copy into what is sent ends none, and whatever else comes does."""
    a, b, pack = Recv(0, SPAN, 1, REQUESTS, ""), Send(1, SPAN, 1, PARTIALS, ""), Pack("q", SPAN, SPAN)
    assert last_posts([a, a, b, pack, b, a, Wait(0), a, pack, b]) == [1, 4, 5, 7, 9]


def test_channels_that_exclude_each_other_cannot_hang() -> None:
    assert {stuck(last_posts, OneRank, seed) for seed in SEEDS} == {0}


@pytest.mark.parametrize(("rows", "make"), [(whole_rows, RequestsFirst), (whole_rows, OneRank)])
def test_mutants_of_the_order(rows: Rows, make: type[OneRank]) -> None:
    """Rows are cut differently on each rank, and two ranks begin the channels in opposite orders."""
    assert any(stuck(rows, make, seed) for seed in SEEDS)
