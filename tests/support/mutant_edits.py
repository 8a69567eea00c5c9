"""A mutant of a schedule, what the verifier must say of it, and the edits that make one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tokenring.ir.passes import order
from tokenring.ir.schedule_data import PARTIALS, REQUESTS, Block, Move, Tile
from tokenring.schedule.schedule import Schedule

Make = Callable[[], Schedule]


class Mutant(NamedTuple):
    """The message must name one of these steps, ranks and blocks, and match `says`; `make` makes the schedule."""

    make: Make
    steps: set[int]
    ranks: set[int]
    blocks: set[Block]
    says: str


Kind = Callable[[Schedule], Iterator[Mutant]]
NOT_HELD = "but does not hold it yet"
NOTHING = "but holds nothing of it"
NEVER_HOME = "which never reaches its owner"
NEEDLESS = "but never needs it"
HELD = "but holds it already"


def replace_tile(schedule: Schedule, tile: Tile, *by: Tile) -> Make:
    return lambda: order(schedule.replace(tiles=(*(t for t in schedule.tiles if t is not tile), *by)))


def replace_move(schedule: Schedule, move: Move, *by: Move) -> Make:
    return lambda: order(schedule.replace(moves=(*(m for m in schedule.moves if m is not move), *by)))


def another_tile(schedule: Schedule, tile: Tile) -> Make:
    return lambda: order(schedule.replace(tiles=(*schedule.tiles, tile)))


def another_move(schedule: Schedule, move: Move) -> Make:
    return lambda: order(schedule.replace(moves=(*schedule.moves, move)))


def requests(schedule: Schedule) -> list[Move]:
    return [move for move in schedule.moves if move.channel == REQUESTS]


def partials(schedule: Schedule) -> list[Move]:
    return [move for move in schedule.moves if move.channel == PARTIALS]


def of(tile: Tile) -> set[Block]:
    return {*tile.q, *tile.kv}


def later(schedule: Schedule) -> int:
    """A step after all others."""
    return 1 + max(*(tile.step for tile in schedule.tiles), *(move.step for move in schedule.moves))


def steps(least: int = 0) -> set[int]:
    return set(range(least, 100))


def others(schedule: Schedule, *but: int) -> list[int]:
    return [rank for rank in range(schedule.world_size) if rank not in but]


def makers(schedule: Schedule, move: Move) -> list[Tile]:
    """The tiles that make what this partial carries, where it is made."""
    return [t for t in schedule.tiles if t.rank == move.src and move.block.request() in of(t)]


def all_visible(schedule: Schedule, tile: Tile) -> bool:
    where = schedule.positions
    return all(schedule.mask.visible(where(q), where(kv)) for q in tile.q for kv in tile.kv)
