"""Which messages go as one: what one rank gives another in one step, on one channel, to be used at one point.

What a message costs beside its bytes is paid once for all of them; they cost a copy at each end more, since they lie
apart there: the two chunks of a zigzag layout, q and kv. So only small ones go together (`Capabilities.bundle_bytes`).
Both ends find the same from the schedule alone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from tokenring.schedule.ir import PARTIALS, Block, Pass
from tokenring.schedule.payload import Records
from tokenring.schedule.program import BUNDLE
from tokenring.schedule.storage import Message, Storage

Point = tuple[int, int]  # step and, of a tile, its place among the rank's tiles; -1 for what is passed on before them
Queue = tuple[int, int, str]  # source, destination, channel


class Bundle(NamedTuple):
    """Messages of one queue that follow each other there."""

    ranks: tuple[int, int]
    messages: tuple[Message, ...]
    kind: str = BUNDLE
    parts: int = 1

    @property
    def label(self) -> str:
        """What it is called: the same at both ends, and of no other bundle of the pass."""
        return f"{self.messages[0].label} and {len(self.messages) - 1} more"


def bundles(
    storage: Storage, rank: int, direction: Pass, records: Records, most_bytes: int
) -> tuple[Bundle, ...]:
    """Those that a rank sends or receives in a pass, of at most so many bytes each."""
    due = _first_uses(storage, direction)
    runs: dict[Queue, list[list[Message]]] = {}
    for message in storage.messages(rank, direction):
        some = runs.setdefault((message.src, message.dst, message.channel), [])
        if some and _together(some[-1][-1], message, due) and _nbytes([*some[-1], message], records) <= most_bytes:
            some[-1].append(message)
        else:
            some.append([message])
    found = (run for some in runs.values() for run in some if len(run) > 1)
    return tuple(Bundle((run[0].src, run[0].dst), tuple(run)) for run in found)


def _nbytes(messages: list[Message], records: Records) -> int:
    return sum(records(each.kind, each.full_precision).nbytes * each.rows for each in messages)


def _together(a: Message, b: Message, due: dict[tuple[int, Block], Point]) -> bool:
    return a.step == b.step and (point := _needed(a, due)) is not None and point == _needed(b, due)


def _needed(message: Message, due: dict[tuple[int, Block], Point]) -> Point | None:
    """When the receiver waits for it; None: for parts of it at different points.

    Partials that have come home are merged together; those that a relay adds, or passes on, are waited for one by one.
    """
    if message.channel == PARTIALS:
        return None if message.add or message.dst != message.owner else (message.step, 0)
    points = {due.get((message.dst, block)) for block in message.blocks}
    return points.pop() if len(points) == 1 else None


@lru_cache(maxsize=16)
def _first_uses(storage: Storage, direction: Pass) -> dict[tuple[int, Block], Point]:
    """By rank and request. A use is a tile, or passing a request on."""
    due: dict[tuple[int, Block], Point] = {}

    def note(rank: int, block: Block, point: Point) -> None:
        due[rank, block] = min(point, due.get((rank, block), point))

    for rank in range(storage.schedule.world_size):
        for place, tile in enumerate(storage.tiles(rank)):
            for block in (*tile.q, *tile.kv):
                note(rank, block, (tile.step, place))
    for move in storage.schedule.moves_in(direction):
        if move.channel != PARTIALS:
            note(move.src, move.block, (move.step, -1))
    return due
