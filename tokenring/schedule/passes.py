"""Passes from schedule to schedule: fuse, prune, keep_for_last, order. None knows any mask or scheme by name."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

from tokenring.schedule.ir import PARTIALS, Block, Move, Schedule, Tile


def fuse(schedule: Schedule) -> Schedule:
    """One tile for tiles of one rank, step and head group that together are all q × all kv of theirs."""
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


def _sequence_order(schedule: Schedule, parts: set[tuple[Block, ...]]) -> tuple[Block, ...]:
    return tuple(sorted({block for part in parts for block in part}, key=schedule.positions))


def prune(schedule: Schedule) -> Schedule:
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
    """Whether a q block sees anything of a kv block, remembered for each pair of units."""

    def __init__(self, schedule: Schedule) -> None:
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


def _needed_requests(schedule: Schedule, tiles: list[Tile]) -> set[Move]:
    """From the last use backwards: a hop stays if its destination uses or passes on the block."""
    needed = {(block, tile.rank) for tile in tiles for block in (*tile.q, *tile.kv)}
    kept = set()
    for move in sorted(schedule.moves, key=lambda move: -move.step):
        if move.channel != PARTIALS and (move.block, move.dst) in needed:
            needed.add((move.block, move.src))
            kept.add(move)
    return kept


def _fed_partials(schedule: Schedule, tiles: list[Tile]) -> set[Move]:
    """From the first contribution forwards: a hop stays if its source made or received something for it."""
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


def keep_for_last(schedule: Schedule) -> Schedule:
    """Cut each rank's local tile in two and compute the second half last.

    While a rank computes the first half its first blocks arrive; while it computes the second, the last partials
    come home. Only where the rank sends or gets a partial after its local tile, and the tile has two units of q
    or of kv; the first half is the one of the units that see less, since blocks arrive faster than partials.
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
        halves = _halves(tile, sees) if local and tile.step < last.get(tile.rank, 0) else ()
        tiles += [halves[0], halves[1]._replace(step=last[tile.rank] + 1)] if halves else [tile]
    return schedule.replace(tiles=tuple(tiles))


def _halves(tile: Tile, sees: _visibility) -> tuple[Tile, Tile] | tuple[()]:
    """The tile in two, by its q blocks if it has several, else by its kv blocks; each without what it does not see."""
    q, kv = tile.q, tile.kv
    if len(q) > 1:
        middle = len(q) // 2
        first, second = _seen(tile, q[:middle], kv, sees), _seen(tile, q[middle:], kv, sees)
    elif len(kv) > 1:
        middle = len(kv) // 2
        first, second = _seen(tile, q, kv[:middle], sees), _seen(tile, q, kv[middle:], sees)
    else:
        return ()
    return (first, second) if first.q and second.q else ()


def _seen(tile: Tile, q: tuple[Block, ...], kv: tuple[Block, ...], sees: _visibility) -> Tile:
    """The tile with these blocks alone, without those that see or show nothing."""
    kept = tuple(a for a in q if any(sees(a, b) for b in kv))
    return tile._replace(q=kept, kv=tuple(b for b in kv if any(sees(a, b) for a in kept)))


def order(schedule: Schedule) -> Schedule:
    """One total order: by step, lower rank sending first, first pieces first, then by ranks and block."""
    moves = sorted(schedule.moves, key=move_order)
    tiles = sorted(schedule.tiles, key=tile_order)
    return schedule.replace(moves=tuple(moves), tiles=tuple(tiles))


def tile_order(tile: Tile) -> tuple[int, int, tuple[Block, ...], tuple[Block, ...]]:
    """Where a tile stands: by step, then rank, then blocks."""
    return tile.step, tile.rank, tile.q, tile.kv


def move_order(move: Move) -> tuple[int, bool, int, int, int, Block]:
    """Where a move stands among all moves of its channel: both ends of a pair agree on it."""
    return move.step, move.src > move.dst, move.block.piece, move.src, move.dst, move.block
