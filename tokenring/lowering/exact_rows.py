"""Exact rows: a move carries of its unit only the rows that its receiver uses or passes on, or that its sender has.

Which rows are used is what kernel calls read (`used_rows`), in both passes alike, for they have the same tiles. Rows
keep their places in slots, so calls are the same as if whole units came; what did not come is never read.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import pairwise
from typing import TypeVar

from tokenring.ir.schedule_data import PARTIALS, Block, Kind, Move, Runs, ScheduleData, Tile
from tokenring.lowering.calls import anything, calls
from tokenring.lowering.exchanges import LEAST_RANKS, joined
from tokenring.lowering.storage import Storage

S = TypeVar("S", bound=ScheduleData)
Place = tuple[int, Block]  # a rank and a block there

# Each run is a message of its own. So few rows cost less than one more message: 16 rows of K and V of 8 heads of 128 in
# bf16 are 64 KiB, which pass in 3 us at 25 GB/s.
JOINED_ROWS = 16  # between two runs, that go with them
MOST_RUNS = 4  # of a move: beyond, the runs with the fewest rows between them are joined
WORTH_AN_EXCHANGE = 1 / 8  # of its rows


def exact(schedule: S) -> S:
    """Return the schedule with the rows that each move carries, where that is less than its unit."""
    used = used_rows(Storage(schedule))
    rows = _carried(schedule, used, frozenset())
    if whole := _for_exchanges(schedule, rows):
        rows = _carried(schedule, used, whole)
    moves = []
    for at, move in enumerate(schedule.moves):
        moves.append(move if rows[at] == _whole(schedule, move) else move._replace(rows=rows[at]))
    return schedule.replace(moves=tuple(moves))


def _carried(schedule: ScheduleData, used: dict[Place, Runs], whole: Set[int]) -> dict[int, Runs]:
    """Return the rows of each move, by its number; whole: the numbers of those that go whole."""
    return {**dict(_requested_rows(schedule, used, whole)), **dict(_returned_rows(schedule, used, whole))}


def _whole(schedule: ScheduleData, move: Move) -> Runs:
    return ((0, schedule.rows(move.block)),)


def _for_exchanges(schedule: ScheduleData, rows: Mapping[int, Runs]) -> set[int]:
    """Return the numbers of moves that go whole: those of an exchange that loses little by it.

    Of some ranks each gives every other one as much, which a transport may move as one operation of equal parts
    (`lowering.exchanges`). That is worth more than the few rows of, say, padding.
    """
    alike: dict[tuple[int, str, Kind], list[int]] = defaultdict(list)
    for at, move in enumerate(schedule.moves):
        alike[move.step, move.channel, move.block.kind].append(at)
    found: set[int] = set()
    for (*_, kind), some in alike.items():
        if not schedule.layout_of(kind).is_even:
            continue  # its units are not equal anyway
        for ranks in joined({schedule.moves[at][2:4] for at in some}):
            there = [at for at in some if schedule.moves[at].src in ranks]
            if _is_worth_an_exchange(schedule, there, len(ranks), rows):
                found.update(there)
    return found


def _is_worth_an_exchange(schedule: ScheduleData, some: list[int], ranks: int, rows: Mapping[int, Runs]) -> bool:
    """Tell whether moves between so many ranks are an exchange, and nearly all of their rows move anyway."""
    pairs = Counter((schedule.moves[at].src, schedule.moves[at].dst) for at in some)
    if ranks < LEAST_RANKS or len(pairs) < ranks * (ranks - 1) or len(set(pairs.values())) > 1:
        return False
    whole = sum(schedule.rows(schedule.moves[at].block) for at in some)
    needed = sum(stop - start for at in some for start, stop in rows[at])
    return 0 < whole - needed <= whole * WORTH_AN_EXCHANGE


def used_rows(storage: Storage) -> dict[Place, Runs]:
    """Return the rows of each unit that kernel calls of each rank read, and of which they make results."""
    found: dict[Place, list[tuple[int, int]]] = defaultdict(list)
    for rank in range(storage.schedule.world_size):
        for tile in storage.tiles(rank):
            for block, start, stop in tile_rows(storage, tile):
                found[rank, block].append((start, stop))
    return {place: union(runs) for place, runs in found.items()}


def tile_rows(storage: Storage, tile: Tile) -> Iterator[tuple[Block, int, int]]:
    """Yield the rows [start, stop) of each unit of a tile that a kernel call reads, call by call."""
    made = calls(storage, tile, anything)
    for blocks, spans in (
        (tile.q, [(call.q_row, call.q_row + call.patch.rows) for call in made]),
        (tile.kv, [(call.kv_row, call.kv_row + call.patch.cols) for call in made]),
    ):
        length = storage.schedule.unit_length(blocks[0].kind)
        placed = sorted((storage.row(tile.rank, block), block) for block in blocks)
        rows = [row for row, _ in placed]
        for start, stop in dict.fromkeys(spans):
            for row, block in placed[max(0, bisect_right(rows, start) - 1) : bisect_right(rows, stop - 1)]:
                low, high = max(start, row), min(stop, row + length)
                if low < high:
                    yield block, low - row, high - row


def _requested_rows(
    schedule: ScheduleData, used: dict[Place, Runs], whole: Set[int]
) -> Iterator[tuple[int, Runs]]:
    """Yield, for each request, its number and the rows that its destination uses or passes on."""
    needed, moves = dict(used), schedule.moves
    for at in sorted(range(len(moves)), key=lambda at: -moves[at].step):
        _, block, src, dst, channel, *_ = moves[at]
        if channel != PARTIALS:
            rows = _whole(schedule, moves[at]) if at in whole else bounded(needed[dst, block])
            needed[src, block] = union((*needed.get((src, block), ()), *rows))
            yield at, rows


def _returned_rows(
    schedule: ScheduleData, used: dict[Place, Runs], whole: Set[int]
) -> Iterator[tuple[int, Runs]]:
    """Yield, for each partial move, its number and the rows that its source made or received for it."""
    held = {(rank, block.partial(rank)): rows for (rank, block), rows in used.items()}
    moves = schedule.moves
    for at in sorted(range(len(moves)), key=lambda at: moves[at].step):
        _, block, src, dst, channel, add, _ = moves[at]
        if channel == PARTIALS:
            rows = _whole(schedule, moves[at]) if at in whole else bounded(held[src, block])
            there = dst, block._replace(made_at=dst) if add else block
            held[there] = union((*held.get(there, ()), *rows))
            yield at, rows


def union(runs: Iterable[tuple[int, int]]) -> Runs:
    """Return the rows of all of these runs, in order, those that touch as one."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return tuple(found)


def bounded(runs: Runs) -> Runs:
    """Return the runs with small gaps closed, MOST_RUNS at most."""
    if len(runs) < 2:
        return runs
    gaps = sorted(b[0] - a[1] for a, b in pairwise(runs))
    closed = max(JOINED_ROWS, gaps[-MOST_RUNS] if len(gaps) >= MOST_RUNS else 0)
    found = [runs[0]]
    for start, stop in runs[1:]:
        if start - found[-1][1] <= closed:
            found[-1] = found[-1][0], stop
        else:
            found.append((start, stop))
    return tuple(found)


def outside(runs: Runs, held: Runs) -> tuple[int, int] | None:
    """Return the first rows of these runs that are not among those held; None if all are."""
    for start, stop in runs:
        at = start
        for low, high in held:
            if low <= at < high:
                at = high
        if at < stop:
            return at, min([low for low, _ in held if low > at] + [stop])
    return None
