"""The schedule as a picture: one row a rank, one column a step, as a self-contained SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass
from html import escape
from itertools import groupby
from math import ceil

from tokenring.display.svg import FONT
from tokenring.ir.schedule_data import PARTIAL_OF, Block, Pass, ScheduleData, Tile
from tokenring.ir.text import Cell, cells, ranges, sends, tile_text

# Sizes in SVG units, which viewers show as pixels.
MARGIN, TITLE, HEADING, LEAST_WIDTH = 24, 58, 26, 460
TILE, LINE, PADDING = 24, 15, 9  # heights inside a cell
CHARACTER = 6.3  # mean width of a character of 11 units, generous for digits
REQUEST, PARTIAL = "#1f6fb2", "#d2600a"
INK, PALE, GREY = "#22282f", "#77808a", "#8d959e"
LANE = 5  # how far requests run above the middle of a tile, and partials below
ARROWS = {  # (is a partial, is added)
    (False, False): "request: needed there in a later step",
    (True, False): "partial result, towards its owner",
    (True, True): "partial result, added to the receiver's own",
}
RESULTS = {"forward": "out", "backward": "dq, dk, dv"}


def to_svg(schedule: ScheduleData, direction: Pass = "forward") -> str:
    """Return the tiles and moves of one pass as an SVG: tiles in the colours of their owners, moves as arrows."""
    return _Picture(schedule, direction).draw()


@dataclass(frozen=True)
class _Grid:
    """The coordinates of everything in the picture."""

    steps: Sequence[int]
    ranks: int
    label: float  # width of the rank names
    cell: float
    gutter: float
    row: float
    after: float  # width of the last column, where the last partials arrive

    @property
    def top(self) -> float:
        return MARGIN + TITLE + HEADING

    @property
    def width(self) -> float:
        drawn = self.x(len(self.steps)) + (self.after if self.after else -self.gutter) + MARGIN
        return max(drawn, LEAST_WIDTH)

    @property
    def bottom(self) -> float:
        return self.y(self.ranks)

    def x(self, column: int) -> float:
        return MARGIN + self.label + column * (self.cell + self.gutter)

    def y(self, rank: int) -> float:
        return self.top + rank * self.row

    def lane(self, rank: int, partial: bool) -> float:
        return self.y(rank) + PADDING + TILE / 2 + (LANE if partial else -LANE)


class _Picture:
    def __init__(self, schedule: ScheduleData, direction: Pass) -> None:
        self.schedule, self.direction = schedule, direction
        self.moves = schedule.moves_in(direction)
        self.cells = cells(schedule, self.moves)
        self.lines = {key: list(self._lines(cell)) for key, cell in self.cells.items()}
        self.grid = self._measure()

    def _lines(self, cell: Cell) -> Iterator[tuple[str, str]]:
        """Yield (text, colour) of each line below the tiles."""
        for text in sends(self.schedule, cell.requests):
            yield text.replace(">", " → "), REQUEST
        for text in sends(self.schedule, cell.partials):
            if self.direction == "backward":
                text = text.replace("o", "dq", 1)
            yield text.replace(">", " → ").replace("+", " +"), PARTIAL

    def _measure(self) -> _Grid:
        steps = sorted({step for step, _ in self.cells})
        lines = [text for part in self.lines.values() for text, _ in part]
        tiles = [tile_text(self.schedule, tile) for tile in self.schedule.tiles]
        longest = max(map(len, ["q0×kv0", *lines, *(tile + "    " for tile in tiles)]))
        heights = (max(1, len(c.tiles)) * (TILE + 3) + len(self.lines[key]) * LINE for key, c in self.cells.items())
        ranks = self.schedule.world_size
        last = steps[-1] if steps else 0
        return _Grid(
            steps,
            ranks,
            label=max(CHARACTER * len(self._holds(rank)) for rank in range(ranks)) + 34,
            cell=ceil(longest * CHARACTER) + 8,
            gutter=44 + 5 * min(ranks, 16) if self.moves else 12,
            row=2 * PADDING + max(heights, default=TILE),
            after=CHARACTER * len(RESULTS[self.direction]) + 20 if any(m.step == last for m in self.moves) else 0,
        )

    def _holds(self, rank: int) -> str:
        q, kv = (layout.owned_by(rank) for layout in (self.schedule.q_layout, self.schedule.kv_layout))
        return f"holds {ranges(q)}" if q == kv else f"q{ranges(q)} kv{ranges(kv)}"

    def draw(self) -> str:
        """Return the whole SVG document."""
        width, arrows = self.grid.width, {(move.block.kind not in PARTIAL_OF, move.add) for move in self.moves}
        legend = _Legend(self.grid.bottom + 30, width, arrows)
        height = legend.bottom + MARGIN
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="11" role="img">',
            *self._head(),
            _box(0, 0, width, height, "white", radius=0),
            *self._titles(),
            *self._rows(),
            *self._arrows(),
            *(part for key in sorted(self.cells) for part in self._cell(*key)),
            *self._results(),
            "<g>",
            *legend.parts,
            "</g>",
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    def _about(self) -> list[str]:
        schedule = self.schedule
        layouts = dict.fromkeys(layout.name for layout in (schedule.q_layout, schedule.kv_layout))
        ranks = f"{schedule.world_size} rank{'s' if schedule.world_size > 1 else ''}"
        parts = [ranks, f"{schedule.mask} mask", f"{' and '.join(layouts)} layout", f"{self.direction} pass"]
        return [part if len(part) <= 60 else f"{part[:57]}..." for part in parts]

    def _head(self) -> Iterator[str]:
        yield f"<title>{_escape(self.schedule.name)}: {_escape(', '.join(self._about()))}</title>"
        for name, colour in (("request", REQUEST), ("partial", PARTIAL)):
            size = 'viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
            yield (
                f'<marker id="tokenring-{name}" {size} orient="auto" markerUnits="userSpaceOnUse">'
                f'<path d="M0 0.8 8 4 0 7.2z" fill="{colour}"/></marker>'
            )

    def _titles(self) -> Iterator[str]:
        yield _text(MARGIN, MARGIN + 16, self.schedule.name, size=19, weight="bold")
        yield _text(MARGIN, MARGIN + 37, " · ".join(self._about()), fill=PALE, size=12.5)

    def _rows(self) -> Iterator[str]:
        grid = self.grid
        for column, step in enumerate(grid.steps):
            yield _text(grid.x(column) + grid.cell / 2, grid.top - 9, f"step {step}", anchor="middle", fill=PALE)
        for rank in range(grid.ranks):
            y = grid.y(rank)
            stripe = "#f6f7f9" if rank % 2 == 0 else "white"
            yield _box(MARGIN - 8, y, grid.width - 2 * MARGIN + 16, grid.row, stripe)
            yield _box(MARGIN, y + PADDING, 6, TILE, self._colour(rank), self._colour(rank, 0.55))
            yield _text(MARGIN + 14, y + PADDING + 10, f"rank {rank}", weight="bold", size=12)
            yield _text(MARGIN + 14, y + PADDING + 24, self._holds(rank), fill=PALE)

    def _colour(self, rank: int, lightness: float = 0.83) -> str:
        """Return the colour of a rank: hues round the circle, one for each rank."""
        rgb = hls_to_rgb((0.58 + rank / self.grid.ranks) % 1, lightness, 0.62)
        return "#" + "".join(f"{round(255 * part):02x}" for part in rgb)

    def _cell(self, step: int, rank: int) -> Iterator[str]:
        x, y = self.grid.x(self.grid.steps.index(step)), self.grid.y(rank) + PADDING
        for tile in self.cells[step, rank].tiles:
            yield from self._tile(tile, x, y)
            y += TILE + 3
        y = max(y, self.grid.y(rank) + PADDING + TILE + 3)
        for text, colour in self.lines[step, rank]:
            y += LINE
            yield _text(x + self.grid.cell / 2, y - 3, text, anchor="middle", fill=colour)

    def _tile(self, tile: Tile, x: float, y: float) -> Iterator[str]:
        """Yield two boxes side by side: q in its owner's colour, kv in its owner's."""
        q_text, kv_text = tile_text(self.schedule, tile).split("×")
        width = self.grid.cell * (len(q_text) + 2) / (len(q_text) + len(kv_text) + 4)
        places = ((x, width, q_text, tile.q), (x + width, self.grid.cell - width, kv_text, tile.kv))
        for left, size, text, blocks in places:
            yield from self._owned(blocks, left, y, size)
            yield _text(left + size / 2, y + TILE / 2 + 4, text, anchor="middle")
        yield f'<circle cx="{x + width:.1f}" cy="{y + TILE / 2:g}" r="6" fill="white" opacity="0.9"/>'
        yield _text(x + width, y + TILE / 2 + 4, "×", anchor="middle")

    def _owned(self, blocks: Sequence[Block], x: float, y: float, width: float) -> Iterator[str]:
        """Yield a box in the owner's colour, or in those of several owners side by side."""
        owners = [self.schedule.owner(block) for block in blocks]
        border = self._colour(owners[0], 0.55) if len(set(owners)) == 1 else GREY
        at = x
        for owner, group in groupby(owners):
            size = width * len(list(group)) / len(owners)
            yield _box(at, y, size, TILE, self._colour(owner))
            at += size
        yield _box(x, y, width, TILE, "none", border)

    def _arrows(self) -> Iterator[str]:
        """Yield an arrow for each pair of ranks, step, channel and add, from its step to the next, over the gutter."""
        drawn: dict[int, set[tuple[bool, bool, int, int]]] = {step: set() for step in self.grid.steps}
        for move in self.moves:
            drawn[move.step].add((move.block.kind not in PARTIAL_OF, move.add, move.src, move.dst))
        for column, step in enumerate(self.grid.steps):
            crowd = len(drawn[step]) > 3 * self.grid.ranks
            for partial, add, src, dst in sorted(drawn[step]):
                x = self.grid.x(column) + self.grid.cell
                ends = (x + 2, self.grid.lane(src, partial)), (x + self.grid.gutter - 2, self.grid.lane(dst, partial))
                yield _arrow(*ends, partial, add, 0.8 if crowd else 1.5)

    def _results(self) -> Iterator[str]:
        grid = self.grid
        if not grid.after:
            return
        x = grid.x(len(grid.steps))
        for rank in range(grid.ranks):
            y = grid.y(rank) + PADDING
            yield _box(x, y, grid.after, TILE, "white", self._colour(rank, 0.55), TILE / 2)
            yield _text(x + grid.after / 2, y + TILE / 2 + 4, RESULTS[self.direction], anchor="middle")


def _arrow(start: tuple[float, float], end: tuple[float, float], partial: bool, dashed: bool, width: float) -> str:
    (x0, y0), (x1, y1) = start, end
    name, colour = ("partial", PARTIAL) if partial else ("request", REQUEST)
    middle = (x0 + x1) / 2
    path = f"M{x0:g} {y0:g}C{middle:g} {y0:g} {middle:g} {y1:g} {x1:g} {y1:g}"
    dash = ' stroke-dasharray="4 2.5"' if dashed else ""
    return (
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}" opacity="0.85"{dash} '
        f'marker-end="url(#tokenring-{name})"/>'
    )


class _Legend:
    """A legend that says what boxes and arrows mean, in as many lines as the width needs."""

    def __init__(self, top: float, width: float, arrows: set[tuple[bool, bool]]) -> None:
        self.x, self.bottom, self.width = float(MARGIN), top, width
        self.parts: list[str] = []
        self._tile("tile: q chunks × kv chunks, in the colours of their owners")
        for (partial, add), text in ARROWS.items():
            if (partial, add) in arrows:
                self._arrow(partial, add, text)

    def _place(self, sample: float, text: str) -> float:
        """Write the text, with room for a sample before it, and return where the sample begins."""
        size = sample + 8 + 5.6 * len(text) + 24
        if self.x > MARGIN and self.x + size > self.width:
            self.x, self.bottom = float(MARGIN), self.bottom + 24
        x, self.x = self.x, self.x + size
        self.parts.append(_text(x + sample + 8, self.bottom, text))
        return x

    def _tile(self, text: str) -> None:
        x = self._place(64, text)
        for left, name in ((x, "q1"), (x + 32, "kv2")):
            self.parts.append(_box(left, self.bottom - 13, 32, 18, "#dfe3e8", GREY))
            self.parts.append(_text(left + 16, self.bottom, name, anchor="middle"))

    def _arrow(self, partial: bool, dashed: bool, text: str) -> None:
        x = self._place(34, text)
        self.parts.append(_arrow((x, self.bottom - 4), (x + 34, self.bottom - 4), partial, dashed, 1.5))


def _text(
    x: float, y: float, text: str, anchor: str = "start", fill: str = INK, size: float = 11, weight: str = "normal"
) -> str:
    extra = "" if weight == "normal" else f' font-weight="{weight}"'
    extra += "" if anchor == "start" else f' text-anchor="{anchor}"'
    extra += "" if size == 11 else f' font-size="{size:g}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{extra}>{_escape(text)}</text>'


def _box(x: float, y: float, width: float, height: float, fill: str, stroke: str = "none", radius: float = 3) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} rx="{radius:g}" fill="{fill}" stroke="{stroke}"/>'


def _escape(text: str) -> str:
    """Return the text as XML takes it, which has no place for control characters."""
    return escape("".join(letter if letter.isprintable() else "?" for letter in text))
