"""Pair boxes: each rank has one rectangle of a tensor of pairs, and each kernel call a corner in it.

A rank that computes some rows with some columns has a tensor [rows, columns] of just these, in the order of the
sequence: all tokens and its own features where weights stay, its own tokens and all features where tokens stay.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import Block, Kind, ScheduleData, Tile
from tokenring.lowering.calls import KernelCall
from tokenring.lowering.storage import Storage
from tokenring.sequence.layout import Layout

Runs = tuple[tuple[int, int], ...]  # positions [start, stop), ascending


@dataclass(frozen=True)
class PairBox:
    """The rows and columns, by their positions in the sequence, that a rank computes."""

    rank: int
    rows: Runs
    columns: Runs

    @property
    def shape(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return _length(self.rows), _length(self.columns)

    def place(self, kind: Kind, position: int) -> int:
        """Return the row (of q) or column (of kv) where a position lies. Raises KeyError if it does not."""
        before = 0
        for start, stop in self._runs(kind):
            if start <= position < stop:
                return before + position - start
            before += stop - start
        raise KeyError(position)

    def tokens(self, kind: Kind, layout: Layout, first: int, count: int) -> list[tuple[int, int, int]]:
        """Return what lies in so many rows or columns from one on: how many tokens, whose, from which own row on."""
        found, before, stop = [], 0, first + count
        for start, end in self._runs(kind):
            low, high = max(first, before), min(stop, before + end - start)
            at = start + low - before
            while low < high:
                chunk, inside = divmod(at, layout.chunk_length)
                part = min(high - low, layout.chunk_length - inside)
                found.append((part, layout.owners[chunk], layout.local_start[chunk] + inside))
                at, low = at + part, low + part
            before += end - start
        return found

    def _runs(self, kind: Kind) -> Runs:
        return self.rows if kind == "q" else self.columns


def _length(runs: Runs) -> int:
    return sum(stop - start for start, stop in runs)


def pair_box(schedule: ScheduleData, rank: int) -> PairBox:
    """Return the box of a rank's tensors of pairs. Raises ScheduleError unless its tiles are one rectangle."""
    tiles = [tile for tile in schedule.tiles if tile.rank == rank]
    q = {block for tile in tiles for block in tile.q}
    kv = {block for tile in tiles for block in tile.kv}
    if sum(len(tile.q) * len(tile.kv) for tile in tiles) != len(q) * len(kv):
        raise ScheduleError(
            f"{schedule.name}: rank {rank}: its tiles are not all of their rows with all of their columns, once: "
            f"operator {schedule.operator.name!r} has a tensor of pairs, which is one rectangle on each rank"
        )
    return PairBox(rank, _positions(schedule, q), _positions(schedule, kv))


def _positions(schedule: ScheduleData, blocks: set[Block]) -> Runs:
    runs: list[tuple[int, int]] = []
    for start, stop, _ in sorted(map(schedule.positions, blocks)):
        if runs and runs[-1][1] == start:
            runs[-1] = runs[-1][0], stop
        elif start < stop:
            runs.append((start, stop))
    return tuple(runs)


def apart(storage: Storage, box: PairBox, tile: Tile, call: KernelCall) -> Iterator[tuple[KernelCall, tuple[int, int]]]:
    """Yield a kernel call in parts whose rows and columns are neighbours in the tensor of pairs, with their corners."""
    columns = list(_neighbours(storage, box, tile.rank, tile.kv, call.kv_row, call.patch.cols))
    for row, rows, top in _neighbours(storage, box, tile.rank, tile.q, call.q_row, call.patch.rows):
        for column, count, left in columns:
            yield KernelCall(row, column, call.patch._replace(row1=rows, col1=count)), (top, left)


def _neighbours(
    storage: Storage, box: PairBox, rank: int, blocks: tuple[Block, ...], first: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (row in the slab, how many, place in the box) of rows of these blocks that lie together in both."""
    kind, schedule = blocks[0].kind, storage.schedule
    run: tuple[int, int, int] | None = None
    for row, block in sorted((storage.row(rank, block), block) for block in blocks):
        low, high = max(row, first), min(row + schedule.rows(block), first + count)
        if low >= high:
            continue
        place = box.place(kind, schedule.positions(block).start) + low - row
        if run is not None and (run[0] + run[1], run[2] + run[1]) == (low, place):
            run = run[0], run[1] + high - low, run[2]
            continue
        if run is not None:
            yield run
        run = low, high - low, place
    if run is not None:
        yield run
