"""The schedule as a grid to read: one line a step, one column a rank. It reads back exactly.

A cell names, in the order of a step, the requests that the rank sends, its tiles, and the partials
that it sends: `kv0,7>1  q0,7×kv0,7  o1,6>1`. Every move stands once, at its sender.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from tokenring.errors import ConfigurationError
from tokenring.layout import Layout
from tokenring.mask import Mask, parse_mask
from tokenring.schedule.interchange import known_layout, mask_document
from tokenring.schedule.ir import REQUESTS, Block, Move, Schedule, Tile

LETTERS = {"q": "q", "kv": "kv", "q_partial": "o", "kv_partial": "dkv"}
WORD = r'[\w./+-]+|"(?:[^"\\]|\\.)*"'
LEGEND = (
    "# A cell: requests (kv3>2: kv chunk 3 goes to rank 2), then tiles (q × kv), then partials to where they belong",
    "# (o: out, in backward dq; dkv: dk, dv, in backward only; +: the next rank adds them to its own partial).",
)
PIECES_LEGEND = "# kv3.p1 is piece 1 of kv chunk 3, and kv3 all its pieces."
HEADS_LEGEND = "# h2: in front of blocks says that they are of head group 2."


def to_text(schedule: Schedule) -> str:
    """The schedule as header lines and a grid. Its moves read back in their total order."""
    header = _align([[key, *words] for key, *words in _header(schedule)])
    return "\n".join([*header, *_legend(schedule), *_grid(schedule)])


def _header(schedule: Schedule) -> Iterator[tuple[str, ...]]:
    yield "schedule", word(schedule.name)
    yield "ranks", str(schedule.world_size)
    yield "mask", _mask(schedule.mask)
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
    if schedule.codecs:
        yield "codecs", " ".join(f"{kind}={word(codec)}" for kind, codec in schedule.codecs)


def _layout(prefix: str, layout: Layout) -> Iterator[tuple[str, ...]]:
    owned = " | ".join(ranges(layout.owned_by(rank)) for rank in range(layout.world_size))
    yield f"{prefix}layout", f"{word(layout.name)} of {layout.length}: {owned}"
    if known_layout(layout.name, layout.world_size, layout.length, len(layout.chunks)) != layout:
        chunks = (f"{c.start}:{c.stop}" + (f":{c.step}" if c.step != 1 else "") for c in layout.chunks)
        yield f"{prefix}chunks", " ".join(chunks)


def _mask(mask: Mask) -> str:
    """str(mask), or all three numbers where that does not say everything."""
    try:
        if parse_mask(str(mask)) == mask:
            return str(mask)
    except ConfigurationError:
        pass
    return json.dumps(mask_document(mask))


def word(name: str) -> str:
    """A name as it is, or quoted if it would not read back."""
    return name if re.fullmatch(WORD, name, re.ASCII) and name[0] != '"' else json.dumps(name)


def _legend(schedule: Schedule) -> Iterator[str]:
    yield from LEGEND
    if max(schedule.q_pieces, schedule.kv_pieces) > 1:
        yield PIECES_LEGEND
    if schedule.head_groups > 1:
        yield HEADS_LEGEND


class Cell(NamedTuple):
    """What one rank does in one step."""

    requests: list[Move]
    tiles: list[Tile]
    partials: list[Move]


def cells(schedule: Schedule, moves: Iterable[Move]) -> dict[tuple[int, int], Cell]:
    """By step and rank: the rank's tiles, and those of the moves that it sends."""
    found: dict[tuple[int, int], Cell] = defaultdict(lambda: Cell([], [], []))
    for tile in schedule.tiles:
        found[tile.step, tile.rank].tiles.append(tile)
    for move in moves:
        cell = found[move.step, move.src]
        (cell.requests if move.block.kind in PARTIAL_OF else cell.partials).append(move)
    return dict(found)


def _grid(schedule: Schedule) -> list[str]:
    found = cells(schedule, schedule.moves)
    steps = sorted({step for step, _ in found})
    columns = [["step", *(f"{step:4}" for step in steps)]]
    for rank in range(schedule.world_size):
        parts = [_parts(schedule, found.get((step, rank), Cell([], [], []))) for step in steps]
        columns.append([f"rank {rank}", *_align(parts)])
    width = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    return [" | ".join(cell.ljust(width[i]) for i, cell in enumerate(row)).rstrip() for row in rows]


def _parts(schedule: Schedule, cell: Cell) -> tuple[str, str, str]:
    tiles = [tile_text(schedule, tile) for tile in cell.tiles]
    return " ".join(sends(schedule, cell.requests)), " ".join(tiles), " ".join(sends(schedule, cell.partials))


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Each row as one string, its parts in columns; a column that is empty everywhere takes no room."""
    columns = [column for column in zip(*rows, strict=True) if any(column)]
    width = [max(map(len, column)) for column in columns]
    kept = zip(*columns, strict=True) if columns else ([] for _ in rows)
    return ["  ".join(part.ljust(size) for part, size in zip(row, width, strict=True)).rstrip() for row in kept]


def tile_text(schedule: Schedule, tile: Tile) -> str:
    """`q0,7×kv0,7`, after `h1:` for head group 1 of several."""
    names = (_names(schedule, blocks, tile.rank) for blocks in (tile.q, tile.kv))
    return _heads(schedule, tile.q[0]) + "×".join(names)


def sends(schedule: Schedule, moves: Iterable[Move]) -> list[str]:
    """What one rank sends in one step, blocks with the same destinations together: `q6>2,3`, `dkv1,6>0+`."""
    to: dict[tuple[str, int, bool, int], list[Block]] = defaultdict(list)
    for move in moves:
        to[move.block.kind, move.block.heads, move.add, move.dst].append(move.block)
    together: dict[tuple[tuple[Block, ...], bool], list[int]] = defaultdict(list)
    for (_, _, add, dst), blocks in to.items():
        together[tuple(sorted(blocks)), add].append(dst)
    return [_send(schedule, blocks, add, dsts) for (blocks, add), dsts in together.items()]
