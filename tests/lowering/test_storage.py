"""Messages of a rank are made when that rank is asked for: the same whoever is asked first, and at both ends."""

import pytest

from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.lowering.storage import Message, Storage
from tokenring.schedule.names import make_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import parse_mask

Case = tuple[str, str, str]  # schedule, layout, mask
CASES: list[Case] = [
    ("ring", "zigzag", "causal"),
    ("tokenring", "zigzag", "causal"),
    ("direct-kv/pieces2", "contiguous", "full"),
    ("usp/2/pieces2", "zigzag", "causal"),
    ("ulysses", "striped", "window(20,0)"),
    ("all-gather-kv", "contiguous", "documents(0,13,40,64)"),
]


def made(name: str, layout: str, mask: str) -> Schedule:
    whole = make_layout(layout, 4, 64)
    return make_schedule(name, whole, whole, parse_mask(mask))


def said(message: Message) -> tuple[object, ...]:
    return message.step, message.src, message.dst, message.channel, message.add, message.parts


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
@pytest.mark.parametrize("direction", PASSES)
def test_messages_are_the_same_whoever_asks_first(case: Case, direction: Pass) -> None:
    schedule = made(*case)
    up, down = Storage(schedule), Storage(schedule)
    found = {rank: up.messages(rank, direction) for rank in range(4)}
    for rank in reversed(range(4)):
        assert list(map(said, down.messages(rank, direction))) == list(map(said, found[rank]))


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case))
@pytest.mark.parametrize("direction", PASSES)
def test_messages_carry_each_move_once_and_are_the_same_at_both_ends(case: Case, direction: Pass) -> None:
    schedule = made(*case)
    storage = Storage(schedule)
    for rank in range(4):
        mine = storage.messages(rank, direction)
        carried = [(part.move, part.start, part.stop) for message in mine for part in message.parts]
        moves = [move for move in schedule.moves_in(direction) if rank in (move.src, move.dst)]
        assert carried == [(move, *run) for move in moves for run in schedule.runs(move)]
        for message in mine:
            other = message.src + message.dst - rank
            assert any(message is each for each in storage.messages(other, direction))


def test_only_rows_that_are_neighbours_at_both_ends_go_in_one_message() -> None:
    schedule = made("all-gather-kv", "contiguous", "documents(0,13,40,64)")
    storage = Storage(schedule)
    for message in storage.messages(0, "forward"):
        for before, after in zip(message.parts, message.parts[1:], strict=False):
            assert before.move is not after.move
