"""A patch as calls that an operator has: every visible pair in exactly one of them.

An operator computes full rectangles and causal squares; some also bands, some also causal tiles with more rows than
columns. Whatever else a mask leaves of a tile is cut: empty rows and columns are trimmed away (so no operator ever
meets a row that sees nothing), unequal steps become strided sub-tiles with equal ones, and bands fall into
rectangles and triangles. Pure: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import gcd
from typing import NamedTuple

import torch

from tokenring.sequence.region import Patch, tidy

Says = Callable[[Patch], bool]  # whether one call computes this patch, which lies at its corner


class Part(NamedTuple):
    """Some rows × columns of a tile as one patch at its corner. turned: both are read from the last to the first."""

    rows: slice
    cols: slice
    patch: Patch
    turned: bool = False

    def of_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's rows of a tile's [B, H, rows, ...]; a view unless it is turned."""
        return self._of(x, self.rows)

    def of_cols(self, x: torch.Tensor) -> torch.Tensor:
        """Return the part's columns of a tile's [B, H, columns, ...]; a view unless it is turned."""
        return self._of(x, self.cols)

    def back(self, x: torch.Tensor) -> torch.Tensor:
        """Return a result of the part in the tile's order of rows or columns."""
        return x.flip(2) if self.turned else x

    def _of(self, x: torch.Tensor, where: slice) -> torch.Tensor:
        return self.back(x[:, :, where])


class Cut(NamedTuple):
    """A patch of steps 1 at its corner, and where it lies in the one that it was cut from."""

    row: int
    col: int
    patch: Patch
    turned: bool = False


def parts(patch: Patch, says: Says) -> tuple[Part, ...]:
    """Return the calls for a patch; none where nothing is visible. A part that `says` refuses is cut no further."""
    whole = tidy(patch.shifted(-patch.row0, -patch.col0))
    if whole is None:
        return ()
    return tuple(_strided(whole, says))


def _strided(whole: Patch, says: Says) -> Iterator[Part]:
    """Yield the parts by classes of rows and columns, so that those of one class differ by equal steps."""
    corner = whole.shifted(-whole.row0, -whole.col0)
    if (whole.row_step, whole.col_step) == (1, 1) or says(corner):
        yield from _placed(whole, says, (0, 1), (0, 1))
        return
    common = gcd(whole.row_step, whole.col_step)
    row_stride, col_stride = whole.col_step // common, whole.row_step // common
    for row in range(row_stride):
        for col in range(col_stride):
            by = whole.col_step * col - whole.row_step * row
            step = whole.row_step * row_stride
            each = Patch(
                0, len(range(row, whole.rows, row_stride)), 0, len(range(col, whole.cols, col_stride)),
                None if whole.low is None else whole.low - by, None if whole.high is None else whole.high - by,
                step, step,
            )  # fmt: skip
            if (found := tidy(each)) is not None:
                rows, cols = (whole.row0 + row, row_stride), (whole.col0 + col, col_stride)
                yield from _placed(found, says, rows, cols)


def _placed(patch: Patch, says: Says, rows: tuple[int, int], cols: tuple[int, int]) -> Iterator[Part]:
    """Yield the cuts of a trimmed patch whose row i is the tile's row rows[0] + rows[1]·i, and columns likewise."""
    for row, col, each, turned in _cuts(patch.shifted(-patch.row0, -patch.col0), says):
        yield Part(
            _slice(rows, patch.row0 + row, each.rows), _slice(cols, patch.col0 + col, each.cols), each, turned
        )  # fmt: skip


def _slice(at: tuple[int, int], first: int, count: int) -> slice:
    start, step = at
    return slice(start + step * first, start + step * (first + count - 1) + 1, step)


def _cuts(patch: Patch, says: Says) -> Iterator[Cut]:
    """Yield the cuts of a trimmed patch at its corner."""
    if says(patch) or patch.is_full:
        yield Cut(0, 0, patch)
    elif patch.low is None:
        yield from _upper_bound(patch, says)
    elif patch.high is None:
        yield from _lower_bound(patch, says)
    else:
        yield from _band(patch, says)


def _upper_bound(patch: Patch, says: Says) -> Iterator[Cut]:
    """Yield the cuts of a patch whose row i sees columns up to i + high.

    Rows that see all are cut off, then columns that all see, then a square.
    """
    assert patch.high is not None
    bounded = patch.cols - patch.high  # from this row on everything is visible
    if patch.rows > bounded:
        yield from _rows_apart(patch, bounded, says)
    elif patch.high > 0:
        yield from _cols_apart(patch, (patch.high,), says)
    else:
        yield Cut(0, 0, patch)


def _lower_bound(patch: Patch, says: Says) -> Iterator[Cut]:
    """Yield the cuts of a patch whose row i sees columns from i + low on.

    Rows that see all are cut off; the rest, read backwards, ends in a bound.
    """
    assert patch.low is not None
    if patch.low < 0:
        yield from _rows_apart(patch, 1 - patch.low, says)
        return
    turned = Patch(0, patch.rows, 0, patch.cols, None, patch.cols - patch.rows - patch.low)
    for row, col, each, _ in _cuts(turned, says):
        yield Cut(patch.rows - row - each.rows, patch.cols - col - each.cols, each, not each.is_full)


def _band(patch: Patch, says: Says) -> Iterator[Cut]:
    """Yield the cuts of a band.

    Columns that only the lower bound cuts, columns that all rows see, columns that only the upper one cuts.
    """
    assert patch.low is not None and patch.high is not None
    last_begins = max(0, patch.low + patch.rows - 1)
    first_ends = min(patch.cols, patch.high + 1)
    if last_begins <= first_ends:
        yield from _cols_apart(patch, (last_begins, first_ends), says)
    else:
        yield from _rows_apart(patch, patch.rows // 2, says)


def _rows_apart(patch: Patch, row: int, says: Says) -> Iterator[Cut]:
    for each in (patch.cut_rows(0, row), patch.cut_rows(row, patch.rows)):
        if each is not None:
            yield from _moved(each, says)


def _cols_apart(patch: Patch, at: tuple[int, ...], says: Says) -> Iterator[Cut]:
    for start, stop in zip((0, *at), (*at, patch.cols), strict=True):
        low = None if patch.low is None else patch.low - start
        high = None if patch.high is None else patch.high - start
        each = tidy(Patch(0, patch.rows, 0, stop - start, low, high))
        if each is not None:
            yield from _moved(each.shifted(0, start), says)


def _moved(patch: Patch, says: Says) -> Iterator[Cut]:
    for row, col, each, turned in _cuts(patch.shifted(-patch.row0, -patch.col0), says):
        yield Cut(patch.row0 + row, patch.col0 + col, each, turned)
