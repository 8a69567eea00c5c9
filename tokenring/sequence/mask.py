"""Masks: which kv positions a q position may see.

Every mask is a window of position differences and a cut of the sequence into documents, and
so is every conjunction of masks. Schedules, the executor and the transports know nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import cast

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Positions, as_integer
from tokenring.sequence.region import Patch, Region, inside, tidy, window_region

LIMIT = 2**53 - 1  # of bounds: beyond it JSON readers of other languages lose digits
PART = re.compile(r"\s*([a-z]+)\s*(?:\(([^()]*)\)\s*)?")
NUMBER = re.compile(r"\s*(-?[0-9]{1,16})?\s*", re.ASCII)


@dataclass(frozen=True)
class Mask:
    """kv - q in [low, high] (None: unbounded), both in one document; `cu_seqlens` None: one document.

    Positions from cu_seqlens[-1] on are padding: they see nothing and nothing sees them. Empty documents
    are left out, so that masks which say the same are equal. Raises ConfigurationError.
    """

    low: int | None = None
    high: int | None = None
    cu_seqlens: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, _bound(name, getattr(self, name)))
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", _documents(self.cu_seqlens))

    def __and__(self, other: Mask) -> Mask:
        """Return the mask that shows what both show. Raises ConfigurationError if `other` is no mask.

        Of documents with different ends, what lies beyond the nearer end is padding.
        """
        if not isinstance(other, Mask):
            called = getattr(other, "__name__", None)
            found = f"{called} without ()" if called else f"one of type {type(other).__name__}"
            raise ConfigurationError(f"& joins a mask and a mask, as in Causal() & Documents(...); found {found}")
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Mask(max(lows, default=None), min(highs, default=None), _both(self.cu_seqlens, other.cu_seqlens))

    __rand__ = __and__  # reached only by what is no mask: to say so

    @cached_property
    def needs_equal_lengths(self) -> bool:
        """True if q and kv positions must number the same sequence."""
        return (self.low, self.high, self.cu_seqlens) != (None, None, None)

    def region(self, q: Positions, kv: Positions) -> Region:
        """Return what the q chunk sees of the kv chunk, as disjoint patches in their indices."""
        return _region(self, q, kv)

    def visible(self, q: Positions, kv: Positions) -> bool:
        """Return whether the q chunk sees anything of the kv chunk."""
        if self.cu_seqlens is not None or q.step != kv.step:
            return bool(_region(self, q, kv))
        if self.low is None and self.high is None:
            return True
        # Differences kv - q are `nearest` + step · n, for n from 1 - len(q) to len(kv) - 1.
        nearest, step = kv.start - q.start, q.step
        least, most = 1 - len(q), len(kv) - 1
        if self.low is not None:
            least = max(least, -((nearest - self.low) // step))
        if self.high is not None:
            most = min(most, (self.high - nearest) // step)
        return least <= most

    def allows(self, q: int, kv: int) -> bool:
        """Return whether a q position sees a kv position: the definition of the mask, for one pair."""
        in_window = (self.low is None or kv - q >= self.low) and (self.high is None or kv - q <= self.high)
        if self.cu_seqlens is None or not in_window:
            return in_window
        return any(a <= q < b and a <= kv < b for a, b in pairwise(self.cu_seqlens))

    def check_length(self, length: int) -> None:
        """Raise ConfigurationError when the documents end beyond a sequence of this length."""
        if self.cu_seqlens is not None and self.cu_seqlens[-1] > length:
            raise ConfigurationError(
                f"Documents end at {self.cu_seqlens[-1]}, but the sequence has {length} positions: "
                f"cu_seqlens counts positions of the whole sequence, over all ranks"
            )

    def __str__(self) -> str:
        """Return the text that parse_mask reads back, for every mask."""
        low, high = self.low, self.high
        parts = []
        if (low, high) == (None, 0):
            parts.append("causal")
        elif (low or 0) > 0 or (high or 0) < 0:
            parts.append(f"band({_or(low, '')},{_or(high, '')})")
        elif (low, high) != (None, None):
            parts.append(f"window({-1 if low is None else -low},{_or(high, -1)})")
        if self.cu_seqlens is not None:
            parts.append(f"documents({','.join(map(str, self.cu_seqlens))})")
        return "&".join(parts) or "full"


@lru_cache(maxsize=16384)
def _region(mask: Mask, q: Positions, kv: Positions) -> Region:
    if mask.cu_seqlens is None:
        return window_region(q, kv, mask.low, mask.high)
    patches: list[Patch] = []
    for start, stop in pairwise(mask.cu_seqlens):
        if stop <= q.start or stop <= kv.start or start > q.last or start > kv.last:
            continue
        (row0, row1), (col0, col1) = inside(q, start, stop), inside(kv, start, stop)
        offset = (q.start + row0 * q.step) - (kv.start + col0 * kv.step)
        low = None if mask.low is None else mask.low + offset
        high = None if mask.high is None else mask.high + offset
        patch = tidy(Patch(row0, row1, col0, col1, low, high, q.step, kv.step))
        if patch is not None:
            patches.append(patch)
    return tuple(patches)


def Full() -> Mask:  # masks read as types, and may become types
    """Return the mask in which every q position sees every kv position; their numbers may differ."""
    return Mask()


def Causal() -> Mask:
    """Return the mask in which a position sees itself and those before it."""
    return Mask(high=0)


def SlidingWindow(left: int, right: int = 0) -> Mask:
    """Return the mask in which a position sees `left` positions before it and `right` after it, inclusive.

    -1 is unbounded. Raises ConfigurationError for sizes that are no integers, below -1 or too large.
    """
    sizes = [as_integer(left), as_integer(right)]
    if any(size is None or not -1 <= size <= LIMIT for size in sizes):
        raise ConfigurationError(
            f"SlidingWindow({left!r}, {right!r}): use integers, 0 or more (at most {LIMIT}), or -1 for unbounded"
        )
    before, after = cast("list[int]", sizes)
    return Mask(None if before == -1 else -before, None if after == -1 else after)


def Documents(cu_seqlens: Sequence[int]) -> Mask:
    """Return the mask of packed documents: positions cu_seqlens[i] to cu_seqlens[i+1] see each other only.

    `cu_seqlens` starts with 0 and does not decrease (a list, or a tensor of integers, which is
    copied to the host). Positions from its last entry on are padding: out 0, lse -inf, no gradient.
    """
    return Mask(cu_seqlens=_documents(cu_seqlens))


MASKS: dict[str, Callable[..., Mask]] = {
    "full": Full,
    "causal": Causal,
    "window": SlidingWindow,
    "band": lambda low, high: Mask(low, high),
    "documents": lambda *bounds: Documents(bounds),
}  # by the word that a mask's text begins with


def parse_mask(text: str) -> Mask:
    """Return the mask that str(mask) printed: parts joined by "&". Raises ConfigurationError.

    "full", "causal", "window(128,0)" for SlidingWindow(128, 0), "documents(0,7,9)", and "band(1,5)" for
    Mask(low=1, high=5), where "band(1,)" has no upper bound.
    """
    mask = Full()
    for part in text.split("&"):
        try:
            mask &= _part(part)
        except (KeyError, ValueError, TypeError):
            from tokenring.nearest import hint

            raise ConfigurationError(
                f"unknown mask {_short(part)}; write full, causal, window(left,right), band(low,high), "
                f"documents(0,end,...), joined by &{hint(part.partition('(')[0].strip(), MASKS)}"
            ) from None
    return mask


def _part(text: str) -> Mask:
    """Return the mask of one part of a mask's text. Raises KeyError, ValueError or TypeError."""
    match = PART.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return MASKS[match[1]](*map(_number, match[2].split(",") if (match[2] or "").strip() else ()))


def _number(text: str) -> int | None:
    """Return a number, None for nothing, which only a band takes. Raises ValueError for any other text."""
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return None if match[1] is None else int(match[1])


def _bound(name: str, given: object) -> int | None:
    bound = as_integer(given)
    if given is not None and (bound is None or abs(bound) > LIMIT):
        raise ConfigurationError(
            f"Mask({name}={given!r}): bounds of kv - q are integers from -{LIMIT} to {LIMIT}, or None for unbounded"
        )
    return bound


def _documents(given: object) -> tuple[int, ...]:
    values = given.tolist() if hasattr(given, "tolist") else given
    found = [as_integer(value) for value in values] if isinstance(values, Iterable) else []
    bounds = tuple(bound for bound in found if bound is not None)
    rises = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < max(2, len(found)) or bounds[0] != 0 or not rises or bounds[-1] > LIMIT:
        raise ConfigurationError(
            f"Documents wants [0, end of the first, ..., end of the last], integers that do not decrease; "
            f"got {_short(values)}"
        )
    return _distinct(bounds)


def _both(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if a is None or b is None:
        return a if b is None else b
    end = min(a[-1], b[-1])
    return _distinct(tuple(sorted({bound for bound in (*a, *b) if bound <= end})))


def _distinct(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bounds without empty documents; at least one interval, empty if there is nothing but padding."""
    kept = tuple(sorted(set(bounds)))
    return kept if len(kept) > 1 else (0, 0)


def _or(bound: int | None, otherwise: object) -> object:
    return otherwise if bound is None else bound


def _short(value: object) -> str:
    """Return what was found, at most a line of it."""
    if isinstance(value, (list, tuple, range)):
        more = ", ..." if len(value) > 8 else ""
        text = f"[{', '.join(map(repr, value[:8]))}{more}]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
