"""Masks: which kv positions a q position may see.

Every mask is a window of position differences and a cut of the sequence into documents, and
so is every conjunction of masks. Schedules, the executor and the transports know nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

from tokenring.errors import ConfigurationError
from tokenring.layout import Positions
from tokenring.region import Patch, Region, inside, tidy, window_region


@dataclass(frozen=True)
class Mask:
    """kv - q in [low, high] (None: unbounded), both in one document; `cu_seqlens` None: one document.

    Positions from cu_seqlens[-1] on are padding: they see nothing and nothing sees them.
    """

    low: int | None = None
    high: int | None = None
    cu_seqlens: tuple[int, ...] | None = None

    def __and__(self, other: Mask) -> Mask:
        lows = [bound for bound in (self.low, other.low) if bound is not None]
        highs = [bound for bound in (self.high, other.high) if bound is not None]
        return Mask(max(lows, default=None), min(highs, default=None), _both(self.cu_seqlens, other.cu_seqlens))

    @cached_property
    def needs_equal_lengths(self) -> bool:
        """Whether q and kv positions must number the same sequence."""
        return (self.low, self.high, self.cu_seqlens) != (None, None, None)

    def region(self, q: Positions, kv: Positions) -> Region:
        """What the q chunk sees of the kv chunk, as disjoint patches in their indices."""
        return _region(self, q, kv)

    def visible(self, q: Positions, kv: Positions) -> bool:
        """Whether the q chunk sees anything of the kv chunk."""
        return bool(_region(self, q, kv))

    def allows(self, q: int, kv: int) -> bool:
        """The definition, for one pair of positions."""
        in_window = (self.low is None or kv - q >= self.low) and (self.high is None or kv - q <= self.high)
        if self.cu_seqlens is None or not in_window:
            return in_window
        return any(a <= q < b and a <= kv < b for a, b in pairwise(self.cu_seqlens))

    def check_length(self, length: int) -> None:
        """Raises ConfigurationError when the documents end beyond a sequence of this length."""
        if self.cu_seqlens is not None and self.cu_seqlens[-1] > length:
            raise ConfigurationError(
                f"Documents end at {self.cu_seqlens[-1]}, but the sequence has {length} positions: "
                f"cu_seqlens counts positions of the whole sequence, over all ranks"
            )

    def __str__(self) -> str:
        parts = []
        if (self.low, self.high) == (None, 0):
            parts.append("causal")
        elif (self.low, self.high) != (None, None):
            parts.append(f"window({_left(self.low)},{_right(self.high)})")
        if self.cu_seqlens is not None:
            parts.append(f"documents({','.join(map(str, self.cu_seqlens))})")
        return "&".join(parts) or "full"


@lru_cache(maxsize=65536)
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


def Full() -> Mask:  # noqa: N802: masks read as types, and may become types
    """Every q position sees every kv position; their numbers may differ."""
    return Mask()


def Causal() -> Mask:
    """A position sees itself and those before it."""
    return Mask(high=0)


def SlidingWindow(left: int, right: int = 0) -> Mask:
    """A position sees `left` positions before it and `right` after it, inclusive; -1 is unbounded."""
    if left < -1 or right < -1:
        raise ConfigurationError(f"SlidingWindow({left}, {right}): use 0 or more, or -1 for unbounded")
    return Mask(None if left == -1 else -left, None if right == -1 else right)


def Documents(cu_seqlens: Sequence[int]) -> Mask:
    """Packed documents: positions cu_seqlens[i] to cu_seqlens[i+1] see each other only.

    `cu_seqlens` starts with 0 and does not decrease (a list, or a tensor of integers, which is
    copied to the host). Positions from its last entry on are padding: out 0, lse -inf, no gradient.
    """
    values = cu_seqlens.tolist() if hasattr(cu_seqlens, "tolist") else cu_seqlens
    bounds = tuple(int(value) for value in values)
    if len(bounds) < 2 or bounds[0] != 0 or any(a > b for a, b in pairwise(bounds)):
        raise ConfigurationError(f"Documents wants [0, end of the first, ..., end of the last]; got {_short(bounds)}")
    return Mask(cu_seqlens=_distinct(bounds))


def parse_mask(text: str) -> Mask:
    """The mask that str(mask) printed: "full", "causal", "window(128,0)", "documents(0,7,9)", joined by "&"."""
    mask = Full()
    for part in text.replace(" ", "").split("&"):
        name, _, rest = part.partition("(")
        numbers = rest.removesuffix(")")
        try:
            values = [int(value) for value in numbers.split(",")] if numbers else []
            made = {"full": Full, "causal": Causal, "window": SlidingWindow, "documents": lambda *v: Documents(v)}[name]
            mask &= made(*values)  # type: ignore[operator]
        except (KeyError, ValueError, TypeError):
            raise ConfigurationError(
                f"unknown mask {part!r}; write full, causal, window(left,right), documents(0,end,...), joined by &"
            ) from None
    return mask


def _both(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if a is None or b is None:
        return a if b is None else b
    end = min(a[-1], b[-1])
    return _distinct(tuple(sorted({bound for bound in (*a, *b) if bound <= end})))


def _distinct(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Without empty documents; at least one interval, empty if there is nothing but padding."""
    kept = tuple(sorted(set(bounds)))
    return kept if len(kept) > 1 else (0, 0)


def _left(low: int | None) -> int:
    return -1 if low is None else -low


def _right(high: int | None) -> int:
    return -1 if high is None else high


def _short(values: tuple[int, ...]) -> str:
    return str(list(values)) if len(values) <= 8 else f"[{', '.join(map(str, values[:8]))}, ...]"
