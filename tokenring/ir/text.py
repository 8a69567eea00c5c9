"""The schedule as a grid to read: one line a step, one column a rank. It reads back exactly.

A cell names, in the order of a step, the requests that the rank sends, its tiles, and the partials
that it sends: `kv0,7>1  q0,7×kv0,7  o1,6>1`. Every move stands once, at its sender.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from tokenring.ir.json import known_layout
from tokenring.ir.schedule_data import ATTENTION, PARTIAL_OF, Block, Kind, Move, Runs, ScheduleData, Tile
from tokenring.sequence.layout import Layout

LETTERS: dict[Kind, str] = {"q": "q", "kv": "kv", "q_partial": "o", "kv_partial": "dkv"}
WORD = r'[\w./+-]+|"(?:[^"\\]|\\.)*"'
Unit = tuple[int, int | None, int | None, Runs]  # chunk; piece, or None for all; where made, or None for here; rows

NO_ROWS: Mapping[Block, Runs] = {}

LEGEND = (
    "# A cell: requests sent (kv3>2: kv chunk 3, to rank 2), tiles computed (q × kv), partials sent.",
    "# Partials: o is out, in backward dq; dkv is dk and dv, in backward only; + is added to the receiver's own.",
)
PIECES_LEGEND = "# Pieces: kv3.p1 is piece 1 of kv chunk 3; kv3 is all of them."
HEADS_LEGEND = "# Heads: h2:q3 is q chunk 3, of head group 2."
ROWS_LEGEND = "# Rows: kv3[0:4+60:64]>2 sends only rows 0 to 3 and 60 to 63 of each unit."


def to_text(schedule: ScheduleData) -> str:
    """Return the schedule as header lines and a grid. Its moves read back in their total order."""
    header = _align([[key, *words] for key, *words in _header(schedule)])
    return "\n".join([*header, *_legend(schedule), *_grid(schedule)])


def _header(schedule: ScheduleData) -> Iterator[tuple[str, ...]]:
    yield "schedule", word(schedule.name)
    yield "ranks", str(schedule.world_size)
    yield "mask", str(schedule.mask)
    if schedule.q_layout == schedule.kv_layout:
        yield from _layout("", schedule.q_layout)
    else:
        yield from _layout("q_", schedule.q_layout)
        yield from _layout("kv_", schedule.kv_layout)
    for field in ("head_groups", "q_pieces", "kv_pieces"):
        if getattr(schedule, field) != 1:
            yield field, str(getattr(schedule, field))
    if schedule.keep:
        yield "keep", " ".join(sorted(schedule.keep))
    if schedule.slack is not None:
        yield "slack", str(schedule.slack)
    if schedule.operator != ATTENTION:
        yield "operator", schedule.operator.name
    if schedule.codecs:
        yield "codecs", " ".join(f"{kind}={word(codec)}" for kind, codec in schedule.codecs)


def _layout(prefix: str, layout: Layout) -> Iterator[tuple[str, ...]]:
    owned = " | ".join(ranges(layout.owned_by(rank)) for rank in range(layout.world_size))
    yield f"{prefix}layout", f"{word(layout.name)} of {layout.length}: {owned}"
    if known_layout(layout.name, layout.world_size, layout.length, len(layout.chunks)) != layout:
        chunks = (f"{c.start}:{c.stop}" + (f":{c.step}" if c.step != 1 else "") for c in layout.chunks)
        yield f"{prefix}chunks", " ".join(chunks)


def word(name: str) -> str:
    """Return a name as it is, or quoted as in JSON if it would not read back."""
    return name if re.fullmatch(WORD, name, re.ASCII) and name[0] != '"' else json.dumps(name)


def _legend(schedule: ScheduleData) -> Iterator[str]:
    yield from LEGEND
    if max(schedule.q_pieces, schedule.kv_pieces) > 1:
        yield PIECES_LEGEND
    if schedule.head_groups > 1:
        yield HEADS_LEGEND
    if schedule.cuts_rows:
        yield ROWS_LEGEND


class Cell(NamedTuple):
    """Tiles and moves of one rank in one step."""

    requests: list[Move]
    tiles: list[Tile]
    partials: list[Move]


def cells(schedule: ScheduleData, moves: Iterable[Move]) -> dict[tuple[int, int], Cell]:
    """Return the cells by (step, rank): the rank's tiles, and those of the moves that it sends."""
    found: dict[tuple[int, int], Cell] = defaultdict(lambda: Cell([], [], []))
    for tile in schedule.tiles:
        found[tile.step, tile.rank].tiles.append(tile)
    for move in moves:
        cell = found[move.step, move.src]
        (cell.requests if move.block.kind in PARTIAL_OF else cell.partials).append(move)
    return dict(found)


def _grid(schedule: ScheduleData) -> list[str]:
    found = cells(schedule, schedule.moves)
    steps = sorted({step for step, _ in found})
    columns = [["step", *(f"{step:4}" for step in steps)]]
    for rank in range(schedule.world_size):
        parts = [_parts(schedule, found.get((step, rank), Cell([], [], []))) for step in steps]
        columns.append([f"rank {rank}", *_align(parts)])
    width = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return [" | ".join(cell.ljust(width[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def _parts(schedule: ScheduleData, cell: Cell) -> tuple[str, str, str]:
    tiles = [tile_text(schedule, tile) for tile in cell.tiles]
    return " ".join(sends(schedule, cell.requests)), " ".join(tiles), " ".join(sends(schedule, cell.partials))


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return each row as one string, its parts in columns; a column that is empty everywhere takes no room."""
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    width = [max(map(len, column)) for column in columns]
    kept = zip(*columns, strict=True) if columns else ([] for _ in rows)
    return ["  ".join(part.ljust(size) for part, size in zip(row, width, strict=True)).rstrip() for row in kept]


def tile_text(schedule: ScheduleData, tile: Tile) -> str:
    """Return a tile as `q0,7×kv0,7`, after `h1:` for head group 1 of several."""
    names = (_names(_units(schedule, blocks, tile.rank), blocks[0].kind) for blocks in (tile.q, tile.kv))
    return _heads(schedule, tile.q[0]) + "×".join(names)


def sends(schedule: ScheduleData, moves: Iterable[Move]) -> list[str]:
    """Return what one rank sends in a step, blocks with the same destinations together: `q6>2,3`, `dkv1,6>0+`."""
    to: dict[tuple[str, int, bool, int], list[Move]] = defaultdict(list)
    for move in moves:
        to[move.block.kind, move.block.heads, move.add, move.dst].append(move)
    together: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for (_, _, add, dst), group in to.items():
        together[_payload(schedule, group), add].append(dst)
    return [f"{payload}>{ranges(dsts)}{'+' if add else ''}" for (payload, add), dsts in together.items()]


def _payload(schedule: ScheduleData, moves: Sequence[Move]) -> str:
    """Return the blocks of one rank's moves to another: in their order by chunk, as moves have one of their own."""
    first = moves[0]
    rows = {move.block: move.rows or () for move in moves}
    blocks = sorted(rows, key=lambda block: (block.made_at or 0, block.chunk, block.piece))
    units = _units(schedule, blocks, first.src, rows)
    units.sort(key=lambda unit: (*(-1 if part is None else part for part in (unit[2], unit[1])), unit[3], unit[0]))
    return _heads(schedule, first.block) + _names(units, first.block.kind)


def _heads(schedule: ScheduleData, block: Block) -> str:
    return f"h{block.heads}:" if schedule.head_groups > 1 else ""


def _units(
    schedule: ScheduleData, blocks: Sequence[Block], rank: int, rows: Mapping[Block, Runs] = NO_ROWS
) -> list[Unit]:
    """Return a unit for each block, or for all pieces of a chunk if they stand one after another with the same rows.

    rows: of the blocks of which only some go.
    """
    pieces = schedule.pieces_of(blocks[0].kind)
    units: list[Unit] = []
    at = 0
    while at < len(blocks):
        first = blocks[at]
        made_at = None if first.made_at == rank else first.made_at
        together, own_rows = blocks[at : at + pieces], rows.get(first, ())
        alike = not rows or all(rows.get(block, ()) == own_rows for block in together)
        if alike and tuple(together) == tuple(first._replace(piece=piece) for piece in range(pieces)):
            units.append((first.chunk, None, made_at, own_rows))
            at += pieces
        else:
            units.append((first.chunk, first.piece, made_at, own_rows))
            at += 1
    return units


def _names(units: Sequence[Unit], kind: Kind) -> str:
    """Return the units as `kv0-3,6.p1`: all of chunks 0 to 3, and piece 1 of chunk 6."""
    names = (
        f"{numbers}{suffix}"
        for suffix, group in groupby(units, key=_suffix)
        for numbers in _runs([chunk for chunk, *_ in group])
    )
    return LETTERS[kind] + ",".join(names)


def _suffix(unit: Unit) -> str:
    _, piece, made_at, rows = unit
    name = ("" if piece is None else f".p{piece}") + ("" if made_at is None else f"@{made_at}")
    return name + (f"[{'+'.join(f'{start}:{stop}' for start, stop in rows)}]" if rows else "")


def ranges(numbers: Sequence[int]) -> str:
    """Return the numbers as `0-3,6`: three or more that follow each other as a range."""
    return ",".join(_runs(numbers))


def _runs(numbers: Sequence[int]) -> Iterator[str]:
    """Yield three or more numbers that follow each other as a range, others alone."""
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        yield from [f"{run[0]}-{run[-1]}"] if len(run) > 2 else map(str, run)
