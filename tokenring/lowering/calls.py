"""Turn a tile into kernel calls: chunks that lie together are one rectangle, if the mask lets them be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tokenring.ir.schedule_data import Block, ScheduleData, Tile
from tokenring.lowering.storage import Storage
from tokenring.sequence.layout import Positions, join_chunks
from tokenring.sequence.mask import Mask
from tokenring.sequence.region import Patch, Region, combine

Supports = Callable[[Patch], "str | None"]  # why a kernel does not take a patch, or None


_known_calls: WeakKeyDictionary[Storage, dict[tuple[int, Supports], list[tuple[Tile, list[KernelCall]]]]]
_known_calls = WeakKeyDictionary()


class KernelCall(NamedTuple):
    """Rows of a q slab against rows of a kv slab, as one patch from their corner."""

    q_row: int
    kv_row: int
    patch: Patch


class CallRun(NamedTuple):
    """Blocks that are neighbours in storage: first row, and the positions of each."""

    row: int
    positions: tuple[Positions, ...]


def calls_of_rank(storage: Storage, rank: int, supports: Supports) -> list[tuple[Tile, list[KernelCall]]]:
    """Return the tiles of a rank, each with its kernel calls: both passes have the same, so they are kept."""
    of_storage = _known_calls.setdefault(storage, {})
    if (rank, supports) not in of_storage:
        of_storage[rank, supports] = [(tile, calls(storage, tile, supports)) for tile in storage.tiles(rank)]
    return of_storage[rank, supports]


def calls(storage: Storage, tile: Tile, supports: Supports) -> list[KernelCall]:
    """Return the kernel calls that compute a tile at its rank, each visible pair in exactly one."""
    made = []
    for q in _runs(storage, tile.rank, tile.q):
        for kv in _runs(storage, tile.rank, tile.kv):
            for patch in _patches(storage.schedule.mask, q.positions, kv.positions):
                for part in split(patch, supports):
                    made.append(_corner(q.row, kv.row, part))
    return made


def split(patch: Patch, supports: Supports) -> Iterator[Patch]:
    """Yield the patch in parts that the kernel takes: halved by rows until it does."""
    if supports(patch) is None or patch.rows == 1:
        yield patch
        return
    middle = (patch.row0 + patch.row1) // 2
    for half in (patch.cut_rows(patch.row0, middle), patch.cut_rows(middle, patch.row1)):
        if half is not None:
            yield from split(half, supports)


def anything(patch: Patch) -> str | None:
    """Return None, for any patch: for proofs, which ask where data goes and not which kernel runs."""
    return None


def _corner(q_row: int, kv_row: int, patch: Patch) -> KernelCall:
    return KernelCall(q_row + patch.row0, kv_row + patch.col0, patch.shifted(-patch.row0, -patch.col0))


def _runs(storage: Storage, rank: int, blocks: tuple[Block, ...]) -> list[CallRun]:
    schedule: ScheduleData = storage.schedule
    length = schedule.unit_length(blocks[0].kind)
    placed = sorted((storage.row(rank, block), schedule.positions(block)) for block in blocks)
    runs: list[tuple[int, list[Positions]]] = []
    for row, positions in placed:
        # Beyond a unit that the end of the sequence cuts lie rows without tokens.
        if runs and row == runs[-1][0] + length * len(runs[-1][1]) and len(runs[-1][1][-1]) == length:
            runs[-1][1].append(positions)
        else:
            runs.append((row, [positions]))
    return [CallRun(row, tuple(positions)) for row, positions in runs]


@lru_cache(maxsize=4096)
def _patches(mask: Mask, q: tuple[Positions, ...], kv: tuple[Positions, ...]) -> Region:
    """Return what chunks that lie together see of chunks that lie together: in one patch, or chunk by chunk."""
    if mask.is_full:  # without looking at each chunk beside each
        whole = Patch(0, sum(map(len, q)), 0, sum(map(len, kv)))
        return (whole,) if whole.rows and whole.cols else ()
    q_parts, kv_parts = join_chunks(q), join_chunks(kv)
    if len(q_parts) == len(kv_parts) == 1:
        return mask.region(q_parts[0], kv_parts[0])
    grid = [[mask.region(a, b) for b in kv_parts] for a in q_parts]
    rows, cols = [len(part) for part in q_parts], [len(part) for part in kv_parts]
    joined = combine(grid, rows, cols) if _in_one_piece(mask, q_parts, grid) else None
    if joined is not None:
        return (joined,)
    return tuple(_joined_columns(_place(grid, rows, cols)))


def _in_one_piece(mask: Mask, rows: list[Positions], grid: list[list[Region]]) -> bool:
    """Return whether all patches of a grid lie in one document, or other piece; only then may they share a kernel call.

    In one call what is hidden has weight 0, and 0 · NaN is NaN. The band of a diagonal goes on from one document into
    the next, as no wider one does.
    """
    return mask.one_piece(
        q.start + patch.row0 * q.step
        for q, line in zip(rows, grid, strict=True)
        for region in line
        for patch in region
    )


def _place(grid: list[list[Region]], rows: list[int], cols: list[int]) -> Iterator[Patch]:
    row = 0
    for line, height in zip(grid, rows, strict=True):
        col = 0
        for region, width in zip(line, cols, strict=True):
            yield from (patch.shifted(row, col) for patch in region)
            col += width
        row += height


def _joined_columns(patches: Iterator[Patch]) -> Iterator[Patch]:
    """Yield the patches, with full ones that are neighbours in one line of the grid as one."""
    last: Patch | None = None
    for patch in patches:
        if last is not None and last.is_full and patch.is_full and _beside(last, patch):
            last = last._replace(col1=patch.col1)
            continue
        if last is not None:
            yield last
        last = patch
    if last is not None:
        yield last


def _beside(a: Patch, b: Patch) -> bool:
    return (a.row0, a.row1, a.col1) == (b.row0, b.row1, b.col0)
