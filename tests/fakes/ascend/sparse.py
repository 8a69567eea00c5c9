"""Which pairs a sparse mode hides, and which masks it takes. Hidden is True, as in the operator's own masks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

COMPRESSED = {2, 3, 4, 7, 8}  # modes with a 2048 × 2048 mask, whatever the lengths
SIDE = 2048
PREFIX_SHAPE = (3072, SIDE)
MODES = range(7)
TND_MODES = {0, 1, 2, 3, 4, 6, 7, 8}


class Band(NamedTuple):
    """What a call says about visibility."""

    mode: int
    before: int  # pre_tockens
    after: int  # next_tockens
    inner_precise: int
    prefix: tuple[int, ...] | None


@lru_cache(maxsize=1)
def triangle() -> torch.Tensor:
    """The mask that compressed modes take."""
    return torch.ones(SIDE, SIDE, dtype=torch.bool).triu(1)


def between(rows: int, cols: int, low: int | None, high: int | None) -> torch.Tensor:
    """Hidden where not low <= column - row <= high."""
    difference = torch.arange(cols)[None, :] - torch.arange(rows)[:, None]
    hidden = torch.zeros(rows, cols, dtype=torch.bool)
    if low is not None:
        hidden |= difference < low
    if high is not None:
        hidden |= difference > high
    return hidden


def hidden_pairs(band: Band, mask: torch.Tensor, rows: int, cols: int, mode: int, sequence: int = 0) -> torch.Tensor:
    """[rows, cols], or the mask's own shape in mode 1, for one sequence and the mode that holds for it."""
    offset = cols - rows
    if mode == 0:
        return _default(band, mask, rows, cols)
    if mode == 1:
        return mask.bool()
    if mode == 2:
        return between(rows, cols, None, 0)
    if mode == 3:
        return between(rows, cols, None, offset)
    if mode == 4:
        _check_band(band, rows, cols)
        return between(rows, cols, offset - band.before, offset + band.after)
    assert band.prefix is not None
    length = band.prefix[sequence]
    if not max(0, offset) <= length <= cols:
        raise RuntimeError(f"prefix {length} must be from {max(0, offset)} to {cols}")
    hidden = between(rows, cols, None, offset)
    hidden[:, :length] = False
    return hidden


def _default(band: Band, mask: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """Mode 0: blocks outside the band are skipped, so that the mask must say the same as the band."""
    given = mask.bool()
    if band.before >= rows and band.after >= cols:
        return given
    by_band = between(rows, cols, -band.before, band.after)
    if not torch.equal(given.expand(*given.shape[:-2], rows, cols), by_band.expand(*given.shape[:-2], rows, cols)):
        raise RuntimeError(
            f"sparse mode 0 with pre={band.before}, next={band.after}: the mask must hide what lies outside that band"
        )
    return given


def _check_band(band: Band, rows: int, cols: int) -> None:
    if band.before + band.after < 0 or band.before <= -cols or band.after <= -rows:
        raise RuntimeError(f"pre={band.before} and next={band.after} leave nothing of {rows} × {cols}")


def treats_empty_rows(band: Band, mode: int, rows: int, cols: int) -> bool:
    """Whether rows with every key hidden are found and set to 0."""
    if band.inner_precise == 2:
        return True
    if mode == 3:
        return rows > cols
    if mode == 0:
        return band.after < 0 or band.before + cols < rows
    if mode == 4:
        return band.before < 0 or band.after + cols < rows
    return mode in (5, 6) and rows > cols and band.prefix is not None and 0 in band.prefix


def mode_of_sequence(mode: int, index: int, lengths: Sequence[tuple[int, int]]) -> int:
    """In modes 7 and 8 one sequence is a band: the last that is not empty, or the first."""
    if mode not in (7, 8):
        return mode
    filled = [number for number, (q, kv) in enumerate(lengths) if q and kv]
    if mode == 7:
        return 4 if index == filled[-1] else 3
    return 4 if index == filled[0] else 2


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """torch.equal for two masks whose memory is whole: eight pairs at once, as the largest have four million."""
    if one.is_contiguous() and other.is_contiguous():
        one, other = one.view(torch.int64), other.view(torch.int64)
    return torch.equal(one, other)


def check_mask(mask: torch.Tensor, mode: int, shapes: Sequence[tuple[int, ...]]) -> None:
    """Raises RuntimeError for a mask that the mode does not take. shapes: of a full-size mask."""
    if mask.dtype not in (torch.bool, torch.uint8):
        raise RuntimeError(f"atten_mask must be bool or uint8, not {mask.dtype}")
    if mode in COMPRESSED:
        if tuple(mask.shape) != (SIDE, SIDE):
            raise RuntimeError(f"sparse mode {mode} takes a mask of [{SIDE}, {SIDE}], not {list(mask.shape)}")
        if not _same(mask.bool(), triangle()):
            raise RuntimeError(f"sparse mode {mode} takes the triangle above the diagonal as mask: True is hidden")
    elif mode == 6:
        if tuple(mask.shape) != PREFIX_SHAPE:
            raise RuntimeError(f"sparse mode 6 takes a mask of {list(PREFIX_SHAPE)}, not {list(mask.shape)}")
    elif tuple(mask.shape) not in shapes:
        raise RuntimeError(f"sparse mode {mode} takes a mask of one of {shapes}, not {list(mask.shape)}")
