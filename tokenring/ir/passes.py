"""Passes from schedule to schedule: fuse, prune, keep_for_last, order. None knows any mask or scheme by name."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from typing import TypeVar

from tokenring.ir.schedule_data import PARTIALS, Block, Move, ScheduleData, Tile

S = TypeVar("S", bound=ScheduleData)


def fuse(schedule: S) -> S:
    """Merge tiles of one rank, step and head group into one tile where together they are all q × all kv of theirs."""
    groups: dict[tuple[int, int, int], list[Tile]] = defaultdict(list)
    for tile in schedule.tiles:
        groups[tile.step, tile.rank, tile.heads].append(tile)
    tiles: list[Tile] = []
    for (step, rank, _heads), group in groups.items():
        q, kv = {tile.q for tile in group}, {tile.kv for tile in group}
        if len(group) > 1 and set(product(q, kv)) == {(tile.q, tile.kv) for tile in group}:
            tiles.append(Tile(step, rank, _sequence_order(schedule, q), _sequence_order(schedule, kv)))
        else:
            tiles.extend(group)
    return schedule.replace(tiles=tuple(tiles))


def _sequence_order(schedule: ScheduleData, parts: set[tuple[Block, ...]]) -> tuple[Block, ...]:
    return tuple(sorted({block for part in parts for block in part}, key=schedule.positions))


def prune(schedule: S) -> S:
    """Drop tiles that the mask hides, then moves that bring what no tile needs or carry what no tile made."""
    sees = _visibility(schedule)
    tiles = []
    for tile in schedule.tiles:
        q = tuple(a for a in tile.q if any(sees(a, b) for b in tile.kv))
        kv = tuple(b for b in tile.kv if any(sees(a, b) for a in tile.q))
        if q:
            tiles.append(Tile(tile.step, tile.rank, q, kv))
    kept = {*_needed_requests(schedule, tiles), *_fed_partials(schedule, tiles)}
    return schedule.replace(tiles=tuple(tiles), moves=tuple(m for m in schedule.moves if m in kept))


class _visibility:
    """A test of whether a q block sees anything of a kv block, remembered for each pair of units."""

    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule = schedule
        self.known: dict[tuple[int, int, int, int], bool] = {}

    def __call__(self, q: Block, kv: Block) -> bool:
        key = (q.chunk, q.piece, kv.chunk, kv.piece)
        seen = self.known.get(key)
        if seen is None:
            schedule = self.schedule
            seen = schedule.mask.visible(schedule.positions(q), schedule.positions(kv))
            self.known[key] = seen
        return seen


def _needed_requests(schedule: ScheduleData, tiles: list[Tile]) -> set[Move]:
    """Return the request moves that are used: a hop stays if its destination uses the block or passes it on."""
    needed = {(block, tile.rank) for tile in tiles for block in (*tile.q, *tile.kv)}
    kept = set()
    for move in sorted(schedule.moves, key=lambda move: -move.step):
        if move.channel != PARTIALS and (move.block, move.dst) in needed:
            needed.add((move.block, move.src))
            kept.add(move)
    return kept


def _fed_partials(schedule: ScheduleData, tiles: list[Tile]) -> set[Move]:
    """Return the partial moves that carry anything: a hop stays if its source made or received something for it."""
    fed = {
        block.partial(tile.rank)
        for tile in tiles
        for block in (*tile.q, *tile.kv)
        if schedule.owner(block) != tile.rank
    }
    held = {(block, block.made_at) for block in fed}
    kept = set()
    for move in sorted(schedule.moves, key=lambda move: move.step):
        if move.channel == PARTIALS and (move.block, move.src) in held:
            held.add((move.block._replace(made_at=move.dst) if move.add else move.block, move.dst))
            kept.add(move)
    return kept


def keep_for_last(schedule: S) -> S:
    """Cut each rank's local tile in two and compute the second half last.

    While a rank computes the first half its first blocks arrive; while it computes the second, the last partials
    come home. Only where the rank sends or gets a partial after its local tile, and the tile has two units of q
    or of kv to cut between. A half may be two tiles, as of a causal zigzag rank: the two chunks with themselves
    are as much work as one with the other.
    """
    last: dict[int, int] = {}
    for move in schedule.moves:
        if move.channel == PARTIALS:
            for rank in (move.src, move.dst):
                last[rank] = max(last.get(rank, 0), move.step)
    for tile in schedule.tiles:
        if tile.rank in last:
            last[tile.rank] = max(last[tile.rank], tile.step)
    sees, tiles = _visibility(schedule), []
    for tile in schedule.tiles:
        local = all(schedule.owner(block) == tile.rank for block in (*tile.q, *tile.kv))
        first, second = _halves(schedule, tile, sees) if local and tile.step < last.get(tile.rank, 0) else ([tile], [])
        tiles += [*first, *(part._replace(step=last[tile.rank] + 1) for part in second)]
    return schedule.replace(tiles=tuple(tiles))


Halves = tuple[list[Tile], list[Tile]]


def _halves(schedule: ScheduleData, tile: Tile, sees: _visibility) -> Halves:
    """Return the tile in two that are as equal as can be: cut by q, by kv, or by both and put together crosswise."""
    (q0, q1), (kv0, kv1) = ((some[: len(some) // 2], some[len(some) // 2 :]) for some in (tile.q, tile.kv))

    def part(q: tuple[Block, ...], kv: tuple[Block, ...]) -> list[Tile]:
        seen = _seen(tile, q, kv, sees)
        return [seen] if seen.q else []

    cuts: list[Halves] = [
        (part(q0, tile.kv), part(q1, tile.kv)),
        (part(tile.q, kv0), part(tile.q, kv1)),
        (part(q0, kv0) + part(q1, kv1), part(q0, kv1) + part(q1, kv0)),
    ]
    possible = [cut for cut in cuts if all(cut)]
    if not possible:
        return [tile], []
    return min(possible, key=lambda cut: abs(_pairs(schedule, cut[0]) - _pairs(schedule, cut[1])))


def _pairs(schedule: ScheduleData, tiles: list[Tile]) -> int:
    """Return how many (query, key) pairs are visible in these tiles."""
    where, mask = schedule.positions, schedule.mask
    units = ((where(q), where(kv)) for tile in tiles for q, kv in product(tile.q, tile.kv))
    return sum(patch.pairs() for q, kv in units for patch in mask.region(q, kv))


def _seen(tile: Tile, q: tuple[Block, ...], kv: tuple[Block, ...], sees: _visibility) -> Tile:
    """Return the tile with these blocks alone, without those that see or show nothing."""
    kept = tuple(a for a in q if any(sees(a, b) for b in kv))
    return tile._replace(q=kept, kv=tuple(b for b in kv if any(sees(a, b) for a in kept)))


def order(schedule: S) -> S:
    """Sort tiles and moves: by step, lower rank sending first, first pieces first, then by ranks and block."""
    moves = sorted(schedule.moves, key=move_order)
    tiles = sorted(schedule.tiles, key=tile_order)
    return schedule.replace(moves=tuple(moves), tiles=tuple(tiles))


def tile_order(tile: Tile) -> tuple[int, int, tuple[Block, ...], tuple[Block, ...]]:
    """Return the sort key of a tile: by step, then rank, then blocks."""
    return tile.step, tile.rank, tile.q, tile.kv


def move_order(move: Move) -> tuple[int, bool, int, int, int, Block]:
    """Return the sort key of a move among all moves of its channel: both ends of a pair agree on it."""
    return move.step, move.src > move.dst, move.block.piece, move.src, move.dst, move.block
