"""The proof of the exchanges of cached attention, and mutants of them that it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.ir.cached_exchange import (
    DIRECT_Q,
    ONE_SHOT,
    OPEN,
    TWO_STEP,
    AttendPart,
    ExchangeData,
    MergePart,
    SendPart,
    exchange_data,
)
from tokenring.proof.cached_exchange import verify_exchange

NAMES = (ONE_SHOT, TWO_STEP, DIRECT_Q)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_exchanges_are_proved(name: str, ranks: int) -> None:
    verify_exchange(exchange_data(name, ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bytes_of_the_design(ranks: int) -> None:
    """(P - 1)(o + l); twice (P - 1)/P of it; (P - 1)/P of q, o and l: here with parts of one size each."""
    q, partial, result = 7, 11, 13
    sizes = {"q": q, "partial": partial, "result": result}
    wanted = {ONE_SHOT: partial, TWO_STEP: partial + result, DIRECT_Q: q + partial}
    for name, each in wanted.items():
        for rank in range(ranks):
            assert exchange_data(name, ranks).sent_bytes(rank, sizes) == (ranks - 1) * each  # type: ignore[arg-type]


def without(data: ExchangeData, move: SendPart) -> ExchangeData:
    return replace(data, moves=tuple(each for each in data.moves if each != move))


def with_(data: ExchangeData, old: SendPart | MergePart | AttendPart, new: object) -> ExchangeData:
    lists = {name: getattr(data, name) for name in ("attends", "moves", "merges")}
    changed = {name: tuple(new if each == old else each for each in found) for name, found in lists.items()}
    assert changed != lists
    return replace(data, **changed)  # type: ignore[arg-type]


def lost_partial(data: ExchangeData) -> ExchangeData:
    move = data.of("partial")[1]
    return without(data, move)


def merged_twice(data: ExchangeData) -> ExchangeData:
    merge = data.merges[1]
    return with_(data, merge, merge._replace(shards=(*merge.shards, 0)))


def never_merged(data: ExchangeData) -> ExchangeData:
    merge = data.merges[1]
    return with_(data, merge, merge._replace(shards=merge.shards[1:]))


def without_open(data: ExchangeData) -> ExchangeData:
    merge = data.merges[0]
    return with_(data, merge, merge._replace(shards=tuple(each for each in merge.shards if each != OPEN)))


def sent_before_complete(data: ExchangeData) -> ExchangeData:
    """A result goes on in the step in which it is merged, or a partial result before it is made."""
    late = data.of("result") or data.of("partial")
    move = late[0]
    if not data.of("q") and not data.of("result"):
        attend = next(each for each in data.attends if each.rank == move.src)
        return with_(data, attend, attend._replace(step=1))
    return with_(data, move, move._replace(step=0))


def wrong_home(data: ExchangeData) -> ExchangeData:
    """The last message with a result does not reach one of its homes; without results, a part is due elsewhere."""
    if results := data.of("result"):
        return without(data, results[-1])
    if data.parts > 1:
        return replace(data, homes=(*data.homes[1:], data.homes[0]))
    return replace(data, merges=data.merges[1:])


def moved_kv(data: ExchangeData) -> ExchangeData:
    return replace(data, moves=(*data.moves, SendPart(0, 1, 2, "kv", 0)))


def sent_twice(data: ExchangeData) -> ExchangeData:
    return replace(data, moves=(*data.moves, data.moves[0]))


MUTANTS: dict[str, tuple[Callable[[ExchangeData], ExchangeData], str]] = {
    "lost partial": (lost_partial, "before it is there"),
    "merged twice": (merged_twice, "shard 0 merged twice"),
    "never merged": (never_merged, "without shard 0"),
    "without the open part": (without_open, "without shard open"),
    "sent before it is complete": (sent_before_complete, "before it is"),
    "wrong home": (wrong_home, "never comes to rank"),
    "kv of extent OWN that moves": (moved_kv, "they are of the extent that a rank holds"),
    "sent twice": (sent_twice, "2 times"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_refused(name: str, ranks: int, mutant: str) -> None:
    change, said = MUTANTS[mutant]
    with pytest.raises(ScheduleError, match=rf"exchange '{name}' of {ranks} ranks: .*({said})"):
        verify_exchange(change(exchange_data(name, ranks)))


def test_other_mutants() -> None:
    direct, two = exchange_data(DIRECT_Q, 3), exchange_data(TWO_STEP, 3)
    lost_q = without(direct, direct.of("q")[0])
    with pytest.raises(ScheduleError, match=r"attends from part 0, whose rows it has not got"):
        verify_exchange(lost_q)
    again = replace(two, attends=(*two.attends, AttendPart(1, 0, 0)))
    with pytest.raises(ScheduleError, match="a second time"):
        verify_exchange(again)
    early = with_(two, two.merges[0], two.merges[0]._replace(shards=(0, 1, OPEN)))
    with pytest.raises(ScheduleError, match="sends the result of part 0 without shard 2"):
        verify_exchange(early)
    strange = replace(direct, homes=direct.homes[1:])
    with pytest.raises(ScheduleError, match="homes of 2"):
        verify_exchange(strange)
    unknown = replace(direct, moves=(*direct.moves, SendPart(0, 0, 3, "q", 0)))
    with pytest.raises(ScheduleError, match="goes from rank 0 to rank 3"):
        verify_exchange(unknown)
    foreign = replace(direct, moves=(*direct.moves, SendPart(0, 0, 1, "q", 2)))
    with pytest.raises(ScheduleError, match="rows of part 2 before it has got them"):
        verify_exchange(foreign)
    with pytest.raises(ConfigurationError, match="no exchange is called 'tree'"):
        exchange_data("tree", 3)
