"""Points at which a rank uses what it receives: messages of one point can go, or be waited for, together."""

from __future__ import annotations

from functools import lru_cache

from tokenring.ir.schedule_data import PARTIALS, Block, Pass
from tokenring.lowering.storage import Message, Storage

Point = tuple[int, int]  # step and, of a tile, its place among the rank's tiles; -1 for what is passed on before them
Uses = dict[tuple[int, Block], Point]  # rank and request → when the rank first uses it


@lru_cache(maxsize=16)
def first_uses(storage: Storage, direction: Pass) -> Uses:
    """Return the first use of each block at each rank; a use is a tile, or passing a request on."""
    found: Uses = {}

    def note(rank: int, block: Block, point: Point) -> None:
        found[rank, block] = min(point, found.get((rank, block), point))

    for rank in range(storage.schedule.world_size):
        for place, tile in enumerate(storage.tiles(rank)):
            for block in (*tile.q, *tile.kv):
                note(rank, block, (tile.step, place))
    for move in storage.schedule.moves_in(direction):
        if move.channel != PARTIALS:
            note(move.src, move.block, (move.step, -1))
    return found


def points(message: Message, uses: Uses) -> set[Point]:
    """Return the points at which the receiver waits for a message; none where nobody uses a part of it.

    None, too, where each part is waited for by itself. Partials that have come home are merged together; those that a
    relay adds, or passes on, are waited for one by one.
    """
    if message.channel == PARTIALS:
        return set() if message.add or message.dst != message.owner else {(message.step, 0)}
    asked = [(message.dst, block) for block in message.blocks]
    return {uses[each] for each in asked} if all(each in uses for each in asked) else set()
