"""The rows of units, in the proof of a schedule of which moves carry only some."""

from __future__ import annotations

from collections import defaultdict

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import Block, Move, Pass, Runs, ScheduleData, Tile
from tokenring.lowering.exact_rows import outside, tile_rows, union
from tokenring.lowering.storage import storage_of

Read = dict[Tile, dict[Block, Runs]]  # of each tile, the rows of its units that kernel calls read


def rows_read(schedule: ScheduleData) -> Read:
    """Return the rows that the kernel calls of each tile read."""
    storage, read = storage_of(schedule), {}
    for tile in schedule.tiles:
        found: dict[Block, list[tuple[int, int]]] = defaultdict(list)
        for block, start, stop in tile_rows(storage, tile):
            found[block].append((start, stop))
        read[tile] = {block: union(runs) for block, runs in found.items()}
    return read


class MovedRows:
    """The rows that each rank has in one pass, of requests and of partials; told of tiles and moves in their order."""

    def __init__(self, schedule: ScheduleData, direction: Pass, read: Read) -> None:
        self.schedule, self.direction, self.read = schedule, direction, read
        self._held: dict[tuple[int, Block], Runs] = {}  # requests that came
        self._made: dict[tuple[int, Block], Runs] = {}  # partials that were made, and added
        self._passing: dict[tuple[int, Block], Runs] = {}  # partials that came, to be passed on

    def request(self, move: Move) -> None:
        """Note a request. Raises ScheduleError if its source does not have all of these rows."""
        rows = self.schedule.runs(move)
        if self.schedule.owner(move.block) != move.src:
            self._check(move.step, move.src, rows, self._held[move.src, move.block], f"sends {move.block}")
        self._held[move.dst, move.block] = rows

    def tile(self, tile: Tile) -> None:
        """Note what a tile makes. Raises ScheduleError if it reads rows that did not come."""
        for block, rows in self.read[tile].items():
            if self.schedule.owner(block) == tile.rank:
                continue
            self._check(tile.step, tile.rank, rows, self._held[tile.rank, block], f"computes with {block}")
            if block.kind == "q" or self.direction == "backward":
                place = tile.rank, block.partial(tile.rank)
                self._made[place] = union((*self._made.get(place, ()), *rows))

    def partial(self, move: Move) -> None:
        """Note a partial move. Raises ScheduleError if it leaves out rows that there are, or passes on others."""
        step, block, src, dst, _, add, _ = move
        rows = self.schedule.runs(move)
        if block.made_at == src:
            left = outside(self._made[src, block], rows)
        else:
            came = self._passing[src, block]
            self._check(step, src, rows, came, f"sends {block}")
            left = outside(came, rows)
        if left is not None:
            raise self._fail(step, src, f"sends {block} to rank {dst} without its {_named(left)}")
        if dst == self.schedule.owner(block):
            return
        if add:
            into = dst, block._replace(made_at=dst)
            self._made[into] = union((*self._made.get(into, ()), *rows))
        else:
            self._passing[dst, block] = rows

    def _check(self, step: int, rank: int, wanted: Runs, held: Runs, does: str) -> None:
        if (missing := outside(wanted, held)) is not None:
            raise self._fail(step, rank, f"{does} but does not hold its {_named(missing)}")

    def _fail(self, step: int, rank: int, text: str) -> ScheduleError:
        return ScheduleError(f"{self.schedule.name}, {self.direction}: step {step}, rank {rank}: {text}")


def _named(rows: tuple[int, int]) -> str:
    return f"rows {rows[0]} to {rows[1]}"
