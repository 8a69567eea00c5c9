"""The part of a (q × kv) rectangle that a mask leaves visible.

A region is a tuple of disjoint patches: none is (), full is one patch without bounds, a
triangle or band one patch with bounds, packed documents one patch for each document.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Positions, as_integer

LIMIT = 2**53 - 1  # of positions and bounds: beyond it JSON readers of other languages lose digits
Window = tuple[int | None, int | None]  # the least and the most that kv - q may be; None: anything


class Patch(NamedTuple):
    """Rows [row0, row1) × columns [col0, col1) where low <= col_step·j - row_step·i <= high.

    i and j count from row0 and col0; None is unbounded. No row and no column is empty when
    both steps are 1, which is so whenever q and kv chunks have the same step.
    """

    row0: int
    row1: int
    col0: int
    col1: int
    low: int | None = None
    high: int | None = None
    row_step: int = 1
    col_step: int = 1

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row1 - self.row0

    @property
    def cols(self) -> int:
        """Number of columns."""
        return self.col1 - self.col0

    @property
    def is_full(self) -> bool:
        """True if every pair is visible: the patch has no bounds."""
        return self.low is None and self.high is None

    @property
    def is_causal(self) -> bool:
        """Top-left aligned: row i sees columns 0..i."""
        return self.low is None and self.high == 0 and self.row_step == self.col_step == 1

    def columns_of(self, row: int) -> range:
        """Return the visible columns of a row, both counted from the patch's corner."""
        first = 0 if self.low is None else max(0, -((-self.low - self.row_step * row) // self.col_step))
        last = self.cols - 1 if self.high is None else (self.high + self.row_step * row) // self.col_step
        return range(first, min(self.cols - 1, last) + 1)

    def pairs(self) -> int:
        """Return how many (row, column) pairs are visible."""
        if self.is_full:
            return self.rows * self.cols
        if self.low is not None and self.high is not None and self.low > self.high:
            return 0
        above = 0 if self.low is None else self._pairs_up_to(self.low - 1)
        return (self.rows * self.cols if self.high is None else self._pairs_up_to(self.high)) - above

    def _pairs_up_to(self, most: int) -> int:
        """Return how many pairs have col_step·j - row_step·i <= most."""
        begins = _clamped(-(most // self.row_step), self.rows)  # the first row that has any
        full_from = (self.cols - 1) * self.col_step - most
        fills = max(begins, _clamped(-(-full_from // self.row_step), self.rows))  # the first that has all
        partly = floor_sum(fills - begins, self.row_step, most + self.row_step * begins, self.col_step)
        return partly + (fills - begins) + (self.rows - fills) * self.cols

    def shifted(self, rows: int, cols: int) -> Patch:
        """Return the same patch seen from a corner that lies so much further up and left."""
        row0, row1, col0, col1, low, high, row_step, col_step = self
        return Patch(row0 + rows, row1 + rows, col0 + cols, col1 + cols, low, high, row_step, col_step)

    def cut_rows(self, row0: int, row1: int) -> Patch | None:
        """Return the patch's rows [row0, row1), counted as its own row0 and row1 are; None if nothing is visible."""
        first, last = max(row0, self.row0), min(row1, self.row1)
        if first >= last:
            return None
        by = (first - self.row0) * self.row_step
        low = None if self.low is None else self.low + by
        high = None if self.high is None else self.high + by
        return tidy(self._replace(row0=first, row1=last, low=low, high=high))


def _clamped(value: int, most: int) -> int:
    return min(max(0, value), most)


def floor_sum(count: int, a: int, b: int, m: int) -> int:
    """Return Σ floor((a·i + b) / m) for i below count, a and b from 0 on: Euclid's algorithm, in logarithmic time."""
    total = 0
    while count:
        total += count * (count - 1) // 2 * (a // m) + count * (b // m)
        a, b = a % m, b % m
        top = a * count + b
        if top < m:
            return total
        count, b, a, m = top // m, top % m, m, a
    return total


Region = tuple[Patch, ...]


def tidy(patch: Patch) -> Patch | None:
    """Return the patch without needless bounds, empty rows and empty columns; None if nothing is visible."""
    if patch.rows <= 0 or patch.cols <= 0:
        return None
    row_step, col_step = patch.row_step, patch.col_step
    least, most = -row_step * (patch.rows - 1), col_step * (patch.cols - 1)
    low = patch.low if patch.low is not None and patch.low > least else None
    high = patch.high if patch.high is not None and patch.high < most else None
    if low is None and high is None:
        return Patch(patch.row0, patch.row1, patch.col0, patch.col1)
    if (low is not None and low > most) or (high is not None and high < least):
        return None
    if row_step == col_step:
        low = None if low is None else -(-low // row_step)
        high = None if high is None else high // row_step
        return _trim(Patch(patch.row0, patch.row1, patch.col0, patch.col1, low, high))
    patch = patch._replace(low=low, high=high)
    return patch if any(len(patch.columns_of(row)) for row in range(patch.rows)) else None


def _trim(patch: Patch) -> Patch | None:
    """Drop rows and columns in which nothing is visible, for steps of 1; None if nothing is left."""
    low, high = patch.low, patch.high
    if low is not None and high is not None and low > high:
        return None
    above = max(0, -high) if high is not None else 0
    left = max(0, low) if low is not None else 0
    rows = patch.rows if low is None else min(patch.rows, patch.cols - low)
    cols = patch.cols if high is None else min(patch.cols, patch.rows + high)
    if rows <= above or cols <= left:
        return None
    moved = Patch(
        patch.row0 + above,
        patch.row0 + rows,
        patch.col0 + left,
        patch.col0 + cols,
        None if low is None else low + above - left,
        None if high is None else high + above - left,
    )
    if (moved.rows, moved.cols) == (patch.rows, patch.cols):
        return moved
    return tidy(moved)


def window_region(q: Positions, kv: Positions, low: int | None, high: int | None) -> Region:
    """Return the region low <= kv position - q position <= high."""
    offset, rows, cols = q.start - kv.start, len(q), len(kv)
    low, high = None if low is None else low + offset, None if high is None else high + offset
    least, most = -q.step * (rows - 1), kv.step * (cols - 1)
    if (low is None or low <= least) and (high is None or high >= most):
        return (Patch(0, rows, 0, cols),) if rows and cols else ()
    if (low is not None and low > most) or (high is not None and high < least):
        return ()
    patch = tidy(Patch(0, rows, 0, cols, low, high, q.step, kv.step))
    return () if patch is None else (patch,)


def window_bound(name: str, given: object) -> int | None:
    """Return a bound of kv - q. Raises ConfigurationError if it is none."""
    bound = as_integer(given)
    if given is not None and (bound is None or abs(bound) > LIMIT):
        raise ConfigurationError(
            f"Mask({name}={given!r}): bounds of kv - q are integers from -{LIMIT} to {LIMIT}, or None for unbounded"
        )
    return bound


def windows_in_both(a: Window, b: Window) -> Window:
    """Return the bounds that both windows keep."""
    lows = [low for low in (a[0], b[0]) if low is not None]
    highs = [high for high in (a[1], b[1]) if high is not None]
    return max(lows, default=None), min(highs, default=None)


def windows_in_any(windows: Iterable[Window]) -> list[Window]:
    """Return as few windows as show what any of these shows."""
    found: list[tuple[int, int]] = []
    ends = ((-LIMIT if low is None else low, LIMIT if high is None else high) for low, high in windows)
    for low, high in sorted(ends):
        if found and low <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        elif low <= high:
            found.append((low, high))
    return [(None if low == -LIMIT else low, None if high == LIMIT else high) for low, high in found]


def seen_in_window(q: Positions, chunks: Sequence[Positions], window: Window) -> frozenset[int]:
    """Return the numbers of the chunks of kv of which the q chunk sees anything in a window."""
    (low, high), (first, _, step), fewest, found = window, q, 1 - len(q), []
    for number, (start, stop, kv_step) in enumerate(chunks):
        if step != kv_step:
            if window_region(q, chunks[number], low, high):
                found.append(number)
            continue
        # Differences kv - q are `nearest` + step · n, for n from 1 - len(q) to len(kv) - 1.
        nearest, least, most = start - first, fewest, (stop - 1 - start) // step
        if low is not None:
            least = max(least, -((nearest - low) // step))
        if high is not None:
            most = min(most, (high - nearest) // step)
        if least <= most:
            found.append(number)
    return frozenset(found)


class Neighbours(NamedTuple):
    """Chunks of which each begins where the one before ends."""

    whole: Positions
    ends: tuple[int, ...]  # counted from the beginning of the whole


@lru_cache(maxsize=64)
def neighbours_of(chunks: tuple[Positions, ...]) -> Neighbours | None:
    """Return several chunks as neighbours; None where they are not, or have steps."""
    apart = any(chunk.step != 1 for chunk in chunks) or any(a.stop != b.start for a, b in pairwise(chunks))
    if len(chunks) < 2 or apart:
        return None
    first = chunks[0].start
    return Neighbours(Positions(first, chunks[-1].stop), tuple(chunk.stop - first for chunk in chunks))


def with_columns(region: Region, chunks: Neighbours) -> frozenset[int]:
    """Return the numbers of the chunks in which a region of them together has columns.

    For steps of 1, where no column of a patch is empty.
    """
    found = set[int]()
    for patch in region:
        found.update(range(bisect_right(chunks.ends, patch.col0), bisect_left(chunks.ends, patch.col1) + 1))
    return frozenset(found)


def inside(chunk: Positions, start: int, stop: int) -> tuple[int, int]:
    """Return the indices [i, j) of the chunk's positions that lie in [start, stop)."""
    first = max(0, -((chunk.start - start) // chunk.step))
    last = max(0, -((chunk.start - stop) // chunk.step))
    return min(first, len(chunk)), min(last, len(chunk))


def combine(grid: Sequence[Sequence[Region]], rows: Sequence[int], cols: Sequence[int]) -> Patch | None:
    """Return the one patch that says the same as a grid of regions with these row and column counts, or None.

    It lets chunks that are not neighbours in the sequence share one kernel call: the two chunks
    that a rank holds in zigzag see each other as one triangle.
    """
    row_at, col_at = _starts(rows), _starts(cols)
    height, width = row_at[-1], col_at[-1]
    if height == 0 or width == 0:
        return None
    guess: Patch | None = Patch(0, height, 0, width)
    for i, line in enumerate(grid):
        for j, region in enumerate(line):
            if len(region) == 1 and not region[0].is_full:
                guess = _extend(region[0], row_at[i], col_at[j], height, width)
    if guess is None:
        return None
    for i, line in enumerate(grid):
        for j, region in enumerate(line):
            if _window(guess, row_at[i], rows[i], col_at[j], cols[j]) != region:
                return None
    return tidy(guess)


def _starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size)
    return starts


def _extend(patch: Patch, row: int, col: int, height: int, width: int) -> Patch | None:
    """Return the patch with its band continued over the whole rectangle, None if its steps are not 1."""
    if patch.row_step != 1 or patch.col_step != 1:
        return None
    by = (col + patch.col0) - (row + patch.row0)
    low = None if patch.low is None else patch.low + by
    high = None if patch.high is None else patch.high + by
    return Patch(0, height, 0, width, low, high)


def _window(band: Patch, row: int, rows: int, col: int, cols: int) -> Region:
    """Return what the band shows of one cell of the grid."""
    by = row - col
    low = None if band.low is None else band.low + by
    high = None if band.high is None else band.high + by
    cell = tidy(Patch(0, rows, 0, cols, low, high))
    return () if cell is None else (cell,)


def shown(value: object) -> str:
    """Return what was found, at most a line of it."""
    if isinstance(value, (list, tuple, range)):
        more = ", ..." if len(value) > 8 else ""
        text = f"[{', '.join(map(repr, value[:8]))}{more}]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
