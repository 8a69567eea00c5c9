"""A mask as a picture: which rank computes what of it, who owns which rows, and how even the work is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from tokenring.display.svg import Colours, box, heading, opening, style, text_at
from tokenring.planner.layouts.balanced import pairs_by_rank
from tokenring.sequence.layout import Layout, Positions
from tokenring.sequence.mask import Mask
from tokenring.sequence.region import Patch

WIDTH, MARGIN, SIDE, STRIP, GAP = 900, 28, 440, 12, 6
BARS_AT, BAR_WIDTH = MARGIN + STRIP + GAP + SIDE + 110, 190
MOST_CELLS = 509  # of a strip: more than one would see; a prime, so that ranks that take rows in turn all show
NAMED = 32  # ranks whose bars have names
STRIPS = "owners of keys: the strip above; of queries: the strip at the left"
COLOURS: Colours = {
    "paper": ("#ffffff", "#14181d"), "ink": ("#22282f", "#e8ecf0"), "grey": ("#66707b", "#9aa5b1"),
    "none": ("#eef1f4", "#20262d"),
}  # fmt: skip
RULES = ["rect, polygon { shape-rendering: crispEdges }"]  # no seams between neighbours
STROKES: Colours = {"mean": ("#22282f", "#e8ecf0")}
Point = tuple[float, float]


def mask_svg(mask: Mask, q_layout: Layout, kv_layout: Layout, title: str, about: Sequence[str]) -> str:
    """Draw a mask, queries downwards and keys to the right, in the colours of the ranks that own the queries.

    title, about: texts above it. Beside it stands each rank's work over the mean.
    """
    titles, below = heading(MARGIN, 38, WIDTH - 2 * MARGIN, title, 17, about)
    top, left = below + 46, MARGIN + STRIP + GAP
    height = top + SIDE + MARGIN + 20
    ranks = {f"r{rank}": _colours(rank, q_layout.world_size) for rank in range(q_layout.world_size)}
    lines = [*opening(WIDTH, height, title), *style({**COLOURS, **ranks}, STROKES, RULES)]
    lines += [box(0, 0, WIDTH, height, "paper"), *titles]
    lines.append(text_at(left, top - STRIP - GAP - 8, STRIPS, 11, "grey"))
    lines += _strip(kv_layout, left, top - STRIP - GAP, across=True)
    lines += _strip(q_layout, left - STRIP - GAP, top, across=False)
    lines.append(box(left, top, SIDE, SIDE, "none"))
    lines += _visible(mask, q_layout, kv_layout.length, left, top)
    lines += _work(mask, q_layout, kv_layout.length, top)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _colours(rank: int, ranks: int) -> tuple[str, str]:
    """Return a rank's colour for light and for dark surroundings; neighbours differ in lightness, too."""
    hue, odd = rank * 360 // ranks, rank % 2
    return f"hsl({hue} 55% {56 if odd else 42}%)", f"hsl({hue} 50% {66 if odd else 50}%)"


def _cells(layout: Layout) -> list[tuple[int, int]]:
    """Return rows as evenly apart as cells, in the order of the sequence, each with its owner."""
    cells = min(MOST_CELLS, layout.length)
    rows = [cell * layout.length // cells for cell in range(cells)]
    owner_of: dict[int, int] = {}
    for chunk, owner in zip(layout.chunks, layout.owners, strict=True):
        held = range(*chunk)
        owner_of.update((row, owner) for row in rows if row in held)
    return [(row, owner_of[row]) for row in rows]


def _strip(layout: Layout, x: float, y: float, across: bool) -> Iterator[str]:
    """Yield a strip of SIDE units that shows who owns which rows."""
    owners = [owner for _, owner in _cells(layout)]
    unit, first = SIDE / max(1, len(owners)), 0
    for owner, group in groupby(owners):
        length = len(list(group))
        start, long = first * unit, length * unit
        first += length
        yield box(x + start, y, long, STRIP, f"r{owner}") if across else box(x, y + start, STRIP, long, f"r{owner}")


def _visible(mask: Mask, q_layout: Layout, kv_length: int, x: float, y: float) -> Iterator[str]:
    """Yield what queries see, in the colour of their owner."""
    whole = Positions(0, kv_length)
    right = SIDE / max(1, kv_length)
    if any(chunk.step != 1 for chunk in q_layout.chunks):  # rows in turn are too thin to be seen: some stand for all
        cells = _cells(q_layout)
        thick = SIDE / max(1, len(cells))
        for at, (row, owner) in enumerate(cells):
            for patch in mask.region(Positions(row, row + 1), whole):
                yield box(x + patch.col0 * right, y + at * thick, patch.cols * right, thick, f"r{owner}")
        return
    down = SIDE / max(1, q_layout.length)
    for chunk, owner in zip(q_layout.chunks, q_layout.owners, strict=True):
        for patch in mask.region(chunk, whole) if len(chunk) else ():
            points = outline(patch.shifted(chunk.start, 0))
            text = " ".join(f"{x + col * right:.1f},{y + row * down:.1f}" for col, row in points)
            yield f'<polygon class="r{owner}" points="{text}"/>'


def outline(patch: Patch) -> list[Point]:
    """Return the corners (column, row) of what a patch of neighbouring rows and columns shows.

    Pairs are squares of side 1, of which the middle lies inside if the pair is visible.
    """
    corners: list[Point] = [
        (patch.col0, patch.row0), (patch.col1, patch.row0), (patch.col1, patch.row1), (patch.col0, patch.row1),
    ]  # fmt: skip
    offset = patch.col0 - patch.row0
    if patch.high is not None:
        corners = _kept(corners, 1, offset + patch.high + 0.5)
    if patch.low is not None:
        corners = _kept(corners, -1, -(offset + patch.low - 0.5))
    return corners


def _kept(corners: list[Point], sign: int, most: float) -> list[Point]:
    """Return the corners of the part in which sign · (column - row) is at most so much."""
    found: list[Point] = []
    for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True):
        before, after = most - sign * (x0 - y0), most - sign * (x1 - y1)
        if before >= 0:
            found.append((x0, y0))
        if before * after < 0:
            share = before / (before - after)
            found.append((x0 + share * (x1 - x0), y0 + share * (y1 - y0)))
    return found


def _work(mask: Mask, q_layout: Layout, kv_length: int, top: float) -> Iterator[str]:
    """Yield a bar for each rank: the pairs that its queries see, over the mean, which is a line."""
    pairs, ranks = pairs_by_rank(mask, q_layout, kv_length), q_layout.world_size
    mean = sum(pairs) / ranks
    shares = [each / mean if mean else 1.0 for each in pairs]
    most, row = max(1.0, *shares), SIDE / ranks
    busiest = shares.index(max(shares))
    yield text_at(BARS_AT, top - 12, f"work over the mean: rank {busiest} has {shares[busiest]:.2f} ×", 12)
    thick = min(18.0, row * 0.7)
    for rank, share in enumerate(shares):
        y = top + rank * row
        yield box(BARS_AT, y, share / most * BAR_WIDTH, thick, f"r{rank}")
        if ranks <= NAMED:
            size = 11 if row >= 14 else 9
            yield text_at(BARS_AT - 8, y + thick / 2 + 4, f"rank {rank}", size, "grey", "end")
            yield text_at(BARS_AT + BAR_WIDTH + 8, y + thick / 2 + 4, f"{share:.2f}", size, "grey")
    x = BARS_AT + BAR_WIDTH / most
    yield f'<path class="mean" stroke-dasharray="4 4" d="M{x:.1f} {top:.1f}V{top + SIDE:.1f}"/>'
