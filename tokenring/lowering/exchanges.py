"""Exchanges: moves that together are one operation of a transport, an all-to-all or an all-gather.

Found from the schedule alone, so that every rank finds the same: messages of one step, channel and kind by which every
rank of some ranks gives every other one as many rows. They are posted at one point of each rank's program, and are
one operation only where a rank also uses all that it receives by them at one point: where tiles begin as blocks
arrive, messages stay messages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from tokenring.ir.schedule_data import PARTIALS, Block, Pass
from tokenring.ir.text import LETTERS, ranges
from tokenring.lowering.program import ALL_GATHER, ALL_TO_ALL
from tokenring.lowering.storage import Message, Storage
from tokenring.lowering.uses import Uses, first_uses, points

LEAST_RANKS = 3  # between two, a collective is the same two messages
Pairs = dict[tuple[int, int], list[Message]]


class Exchange(NamedTuple):
    """Messages that go as one operation of these ranks, or where they are cut as `parts` of them, one for each unit."""

    kind: str
    ranks: tuple[int, ...]
    messages: tuple[Message, ...]
    parts: int
    number: int = 1  # among those of which all else that the label says is equal

    @property
    def label(self) -> str:
        """Name of the exchange: the same at every rank, and of no other exchange of the pass."""
        first = self.messages[0]
        said = f"step {first.step}, {self.kind} of {LETTERS[first.block.kind]} of ranks {ranges(self.ranks)}"
        return said if self.number == 1 else f"{said}, number {self.number}"


@lru_cache(maxsize=16)
def exchanges(storage: Storage, direction: Pass) -> tuple[Exchange, ...]:
    """Return all exchanges of a pass, in the order in which every rank posts them."""
    uses = first_uses(storage, direction)
    alike: dict[tuple[object, ...], list[Message]] = defaultdict(list)
    for message in _all_messages(storage, direction):
        if (key := _key(message, uses)) is not None:
            alike[key].append(message)
    found = [_exchange(storage, direction, part) for some in alike.values() for part in _complete(some)]
    found.sort(key=lambda each: (each.messages[0].step, each.messages[0].channel == PARTIALS))
    times = Counter[str]()
    for at, each in enumerate(found):
        times[each.label] += 1
        found[at] = each._replace(number=times[each.label])
    return tuple(found)


def _all_messages(storage: Storage, direction: Pass) -> Iterable[Message]:
    """Yield all messages of a pass, each once."""
    for rank in range(storage.schedule.world_size):
        yield from (message for message in storage.messages(rank, direction) if message.src == rank)


def _key(message: Message, uses: Uses) -> tuple[object, ...] | None:
    """Return what messages of one exchange share, with the step in which they are used; None: it is in none."""
    steps = {step for step, _ in points(message, uses)}
    if len(steps) != 1:
        return None
    return message.step, message.channel, message.kind, message.full_precision, steps.pop()


def _complete(messages: Sequence[Message]) -> Iterable[Pairs]:
    """Yield, of messages that are alike, those between ranks of which each gives every other one as many rows."""
    pairs: Pairs = defaultdict(list)
    for message in messages:
        pairs[message.src, message.dst].append(message)
    for ranks in joined(pairs):
        own = {pair: some for pair, some in pairs.items() if pair[0] in ranks}
        rows = {sum(message.rows for message in some) for some in own.values()}
        cut = any(not each.whole for some in own.values() for each in some)
        even = len(rows) == 1 and not (cut and any(len(some) > 1 for some in own.values()))
        if len(ranks) >= LEAST_RANKS and len(own) == len(ranks) * (len(ranks) - 1) and even:
            yield own


def joined(pairs: Iterable[tuple[int, int]]) -> list[set[int]]:
    """Return the sets of ranks that messages join, directly or through others."""
    parts: list[set[int]] = []
    for pair in pairs:
        touched = [part for part in parts if not part.isdisjoint(pair)]
        parts = [part for part in parts if part not in touched] + [set(pair).union(*touched)]
    return sorted(parts, key=min)


def _exchange(storage: Storage, direction: Pass, pairs: Pairs) -> Exchange:
    ranks = tuple(sorted({src for src, _ in pairs}))
    whole = all(len(some) == 1 for some in pairs.values())
    parts = 1 if whole else sum(len(message.blocks) for message in next(iter(pairs.values())))
    kind = ALL_GATHER if _gathers(storage, direction, pairs) else ALL_TO_ALL
    return Exchange(kind, ranks, tuple(message for some in pairs.values() for message in some), parts)


def _gathers(storage: Storage, direction: Pass, pairs: Pairs) -> bool:
    """Return whether each rank gives all others the same, in memory that it does not use until it has all of theirs.

    That memory is an operand of the whole operation, into which it may write.
    """
    given: dict[int, set[tuple[tuple[Block, int, int], ...]]] = defaultdict(set)
    taken: dict[int, set[Block]] = defaultdict(set)
    for (src, dst), some in pairs.items():
        given[src].add(tuple((move.block, start, stop) for each in some for move, start, stop in each.parts))
        taken[dst].update(block for message in some for block in message.blocks)
    if any(len(different) > 1 for different in given.values()):
        return False
    sent = {id(message) for some in pairs.values() for message in some}
    return all(
        _rests(storage, direction, src, {block for block, _, _ in rows}, taken[src], sent)
        for src, same in given.items()
        for rows in same
    )


def _rests(
    storage: Storage, direction: Pass, rank: int, own: set[Block], taken: set[Block], sent: set[int]
) -> bool:
    """Return whether what the rank does with its own of these blocks waits for what it takes by the same operation."""
    for message in storage.messages(rank, direction):
        if message.src == rank and id(message) not in sent and not own.isdisjoint(message.blocks):
            return False
    for tile in storage.tiles(rank):
        blocks = {*tile.q, *tile.kv}
        read = [block for block in own & blocks if not storage.slab(rank, block).own_only]
        if read and taken.isdisjoint(blocks):
            return False
    return True
