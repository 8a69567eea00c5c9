"""Passes from schedule to schedule: fuse, prune, keep_for_last, order. None knows any mask or scheme by name."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from functools import lru_cache
from itertools import product
from typing import TypeVar

from tokenring.ir.schedule_data import ATTENTION, ATTENTION_OUT, PARTIALS, Block, Move, ScheduleData, Tile, units_of
from tokenring.sequence.layout import Layout, Positions
from tokenring.sequence.mask import Mask

S = TypeVar("S", bound=ScheduleData)
SEEN_RANKS = 16  # up to which a rank makes the tiles of all anyway


def fuse(schedule: S) -> S:
    """Merge tiles of one rank, step and head group into one tile where together they are all q × all kv of theirs."""
    groups: dict[tuple[int, int, int], list[Tile]] = defaultdict(list)
    for tile in schedule.tiles:
        step, rank, q_blocks, _ = tile
        groups[step, rank, q_blocks[0][2]].append(tile)
    tiles: list[Tile] = []
    for (step, rank, _heads), group in groups.items():
        if len(group) == 1:
            tiles += group
            continue
        q, kv = {tile.q for tile in group}, {tile.kv for tile in group}
        if len(group) >= len(q) * len(kv) == len({(tile.q, tile.kv) for tile in group}):
            tiles.append(Tile(step, rank, in_sequence(schedule, q), in_sequence(schedule, kv)))
        else:
            tiles.extend(group)
    return schedule.replace(tiles=tuple(tiles))


def in_sequence(schedule: ScheduleData, parts: Iterable[tuple[Block, ...]]) -> tuple[Block, ...]:
    """Return all blocks of these parts, of one kind, each once, in the order of the sequence."""
    blocks = {block for part in parts for block in part}
    if not blocks:
        return ()
    kind = next(iter(blocks))[0]
    positions, pieces = schedule.unit_positions[kind[0]], schedule.pieces_of(kind)
    return tuple(sorted(blocks, key=lambda block: positions[block[1] * pieces + block[3]]))


def prune(schedule: S) -> S:
    """Drop tiles that the mask hides, then moves that bring what no tile needs or carry what no tile made."""
    sees = sight_of(schedule)
    tiles = [seen for tile in schedule.tiles if (seen := sees.part(tile, tile.q, tile.kv)).q]
    if not schedule.moves:
        return schedule.replace(tiles=tuple(tiles))
    used = {(block, rank) for _, rank, q, kv in tiles for block in (*q, *kv)}
    kept = {*_needed_requests(schedule, used), *_fed_partials(schedule, used)}
    moves = tuple(move for at, move in enumerate(schedule.moves) if at in kept)
    return schedule.replace(tiles=tuple(tiles), moves=moves)


class UnitSight:
    """A test of which q units see anything of which kv units, remembered: many schedules ask for the same."""

    def __init__(
        self, mask: Mask, q: tuple[Positions, ...], kv: tuple[Positions, ...], q_pieces: int, kv_pieces: int
    ) -> None:
        self._mask, self._q, self._kv = mask, q, kv
        self._q_pieces, self._kv_pieces = q_pieces, kv_pieces
        self._seen: list[frozenset[int] | None] = [None] * len(q)
        self._everything = frozenset(unit for unit, positions in enumerate(kv) if len(positions))

    def part(self, tile: Tile, q: tuple[Block, ...], kv: tuple[Block, ...]) -> Tile:
        """Return the tile with these blocks alone, without those that see or show nothing."""
        units = [each[1] * self._kv_pieces + each[3] for each in kv]
        here = frozenset(units)
        seen = [here & self.seen_by(each[1] * self._q_pieces + each[3]) for each in q]
        shown = frozenset().union(*seen)
        if len(shown) == len(here) and all(seen):
            return Tile(tile.step, tile.rank, q, kv)
        seeing = tuple(each for each, of in zip(q, seen, strict=True) if of)
        return Tile(tile.step, tile.rank, seeing, tuple(b for b, unit in zip(kv, units, strict=True) if unit in shown))

    def seen_by(self, unit: int) -> frozenset[int]:
        """Return the kv units of which a q unit sees anything."""
        known = self._seen[unit]
        if known is None:
            known = self._mask.seen(self._q[unit], self._kv) if len(self._q[unit]) else frozenset()
            if known >= self._everything:  # one set for all that see everything, which has no unit beyond the end
                known = self._everything
            elif len(self._everything) < len(self._kv):
                known &= self._everything
            self._seen[unit] = known
        return known


def sight_of(schedule: ScheduleData) -> UnitSight:
    """Return which units of a schedule see which, under its mask."""
    each = schedule
    return _sight(each.mask, each.q_layout, each.kv_layout, each.q_pieces, each.kv_pieces)


@lru_cache(maxsize=8)
def _sight(mask: Mask, q_layout: Layout, kv_layout: Layout, q_pieces: int, kv_pieces: int) -> UnitSight:
    return UnitSight(mask, units_of(q_layout, q_pieces), units_of(kv_layout, kv_pieces), q_pieces, kv_pieces)


def _needed_requests(schedule: ScheduleData, used: Set[tuple[Block, int]]) -> Iterator[int]:
    """Yield the numbers of request moves that are used: a hop stays if its destination uses the block or passes it on.

    used: blocks that tiles read, with the tiles' ranks.
    """
    needed, moves = set(used), schedule.moves
    requests = [(-move[0], at) for at, move in enumerate(moves) if move[4] != PARTIALS]
    requests.sort()
    for _, at in requests:
        _, block, src, dst, _, _, _ = moves[at]
        if (block, dst) in needed:
            needed.add((block, src))
            yield at


def _fed_partials(schedule: ScheduleData, used: Set[tuple[Block, int]]) -> Iterator[int]:
    """Yield the numbers of partial moves that carry anything: a hop stays if its source made or received some for it.

    used: as of `_needed_requests`; a tile makes a partial of each block that it reads and its rank does not own.
    """
    held = {(block.partial(rank), rank) for block, rank in used if schedule.owner(block) != rank}
    moves = schedule.moves
    partials = [(move[0], at) for at, move in enumerate(moves) if move[4] == PARTIALS]
    partials.sort()
    for _, at in partials:
        _, block, src, dst, _, add, _ = moves[at]
        if (block, src) in held:
            held.add((block._replace(made_at=dst) if add else block, dst))
            yield at


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
    sees, tiles = sight_of(schedule), []
    for tile in schedule.tiles:
        local = all(schedule.owner(block) == tile.rank for block in (*tile.q, *tile.kv))
        first, second = _halves(schedule, tile, sees) if local and tile.step < last.get(tile.rank, 0) else ([tile], [])
        tiles += [*first, *(part._replace(step=last[tile.rank] + 1) for part in second)]
    return schedule.replace(tiles=tuple(tiles))


Halves = tuple[list[Tile], list[Tile]]


def _halves(schedule: ScheduleData, tile: Tile, sees: UnitSight) -> Halves:
    """Return the tile in two that are as equal as can be: cut by q, by kv, or by both and put together crosswise."""
    (q0, q1), (kv0, kv1) = ((some[: len(some) // 2], some[len(some) // 2 :]) for some in (tile.q, tile.kv))

    def part(q: tuple[Block, ...], kv: tuple[Block, ...]) -> list[Tile]:
        seen = sees.part(tile, q, kv)
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


def for_call(schedule: S, wants_lse: bool) -> S:
    """Return the schedule as calls take it that want the lse of their rows at home, or that do not."""
    if wants_lse:
        return schedule.replace(operator=ATTENTION) if schedule.operator == ATTENTION_OUT else schedule
    return without_lse(schedule)


def without_lse(schedule: S) -> S:
    """Return the schedule with results that go home without their lse, for calls that want none.

    Only where some rank makes all of each row, so that nothing is merged at home: otherwise the schedule itself. That
    takes the tiles of all ranks, so that schedules of many stay as they are.
    """
    if schedule.world_size > SEEN_RANKS:
        return schedule
    makers: dict[Block, int] = {}
    for tile in schedule.tiles:
        for block in tile.q:
            if makers.setdefault(block, tile.rank) != tile.rank:
                return schedule
    returns = any(schedule.owner(block) != rank for block, rank in makers.items())
    return schedule.replace(operator=ATTENTION_OUT) if returns and schedule.operator == ATTENTION else schedule


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
    step, block, src, dst, _, _, _ = move
    return step, src > dst, block[3], src, dst, block
