"""Slices: q range × kv range × window of differences. Every mask is a set of disjoint ones.

What a mask says is computed from the slices that it is within a rectangle: regions, counts and proofs alike. So a mask
never lists all of its slices, and a pair of chunks costs what lies in it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Positions, as_integer
from tokenring.sequence.region import LIMIT, Patch, Region, inside, shown, tidy, window_bound

END = LIMIT  # of a range that has none
MOST_SLICES = 2**16  # of one table: comparing them all takes seconds
COMPARISONS = 128  # that each slice of a table may cost on average, to find that all are disjoint
Box = tuple[int, int, int, int, int, int]  # least and most of q, kv and kv - q; the upper ends are not inside


class Slice(NamedTuple):
    """Pairs with q0 <= q < q1, kv0 <= kv < kv1 and low <= kv - q <= high; None is unbounded, END has no end."""

    q0: int
    q1: int
    kv0: int
    kv1: int
    low: int | None = None
    high: int | None = None

    def __str__(self) -> str:
        """Return its ranges, and its window where it has one."""
        low, high = "" if self.low is None else f"{self.low} <= ", "" if self.high is None else f" <= {self.high}"
        q1, kv1 = ("" if end == END else end for end in (self.q1, self.kv1))
        return f"(q {self.q0}:{q1}, kv {self.kv0}:{kv1}{f', {low}kv - q{high}' if low or high else ''})"

    def has(self, q: int, kv: int) -> bool:
        """Return whether it has this pair: its definition."""
        in_window = (self.low is None or kv - q >= self.low) and (self.high is None or kv - q <= self.high)
        return in_window and self.q0 <= q < self.q1 and self.kv0 <= kv < self.kv1

    @property
    def box(self) -> Box:
        """Least and most of q, kv and kv - q, of which the pairs are some."""
        least, most = self.kv0 - self.q1 + 1, self.kv1 - self.q0
        low = least if self.low is None else max(least, self.low)
        return *self[:4], low, most if self.high is None else min(most, self.high + 1)


def tight(given: Slice) -> Slice | None:
    """Return the slice without empty rows, empty columns and needless bounds; None if it has no pairs."""
    q0, q1, kv0, kv1, low, high = given
    low, high = None if low is None or low <= -END else low, None if high is None or high >= END else high
    if low is not None:
        kv0 = max(kv0, q0 + low)
        q1 = q1 if kv1 >= END else min(q1, kv1 - low)
    if high is not None:
        q0 = max(q0, kv0 - high)
        kv1 = kv1 if q1 >= END else min(kv1, q1 + high)
    if q0 >= q1 or kv0 >= kv1 or (low is not None and high is not None and low > high):
        return None
    if low is not None and q1 < END and low <= kv0 - q1 + 1:
        low = None
    if high is not None and kv1 < END and high >= kv1 - 1 - q0:
        high = None
    return Slice(q0, q1, kv0, kv1, low, high)


def meet(a: Slice, b: Slice) -> Slice | None:
    """Return the pairs that are in both slices, None if there are none."""
    q0, q1, kv0, kv1 = max(a.q0, b.q0), min(a.q1, b.q1), max(a.kv0, b.kv0), min(a.kv1, b.kv1)
    if q0 >= q1 or kv0 >= kv1:
        return None
    lows = [bound for bound in (a.low, b.low) if bound is not None]
    highs = [bound for bound in (a.high, b.high) if bound is not None]
    return tight(Slice(q0, q1, kv0, kv1, max(lows, default=None), min(highs, default=None)))


def without(a: Slice, b: Slice) -> list[Slice]:
    """Return the pairs of `a` that are not in `b`, as disjoint slices: rows above, sides, other differences, below."""
    both = meet(a, b)
    if both is None:
        return [a]
    rows = a._replace(q0=both.q0, q1=both.q1)
    inside = rows._replace(kv0=both.kv0, kv1=both.kv1)
    parts = [
        a._replace(q1=both.q0),
        rows._replace(kv1=both.kv0),
        *([] if both.low is None else [inside._replace(high=_least(a.high, both.low - 1))]),
        *([] if both.high is None else [inside._replace(low=_most(a.low, both.high + 1))]),
        rows._replace(kv0=both.kv1),
        a._replace(q0=both.q1),
    ]
    return [kept for part in parts if (kept := tight(part)) is not None]


def together(sets: Iterable[Iterable[Slice]]) -> list[Slice]:
    """Return the pairs that are in any of these sets of disjoint slices, as disjoint slices in their order."""
    found: list[Slice] = []
    for each in sets:
        taken = SliceTable(found)
        rest = [part for one in each for part in _beyond(one, [found[at] for at in taken.near(one.box)])]
        found = sorted([*found, *rest], key=_place)
    return _joined(found)


def _beyond(one: Slice, taken: Iterable[Slice]) -> Iterator[Slice]:
    """Yield the slice without what is taken, which is in order of q0."""
    parts = [one]
    for other in taken:
        yield from (part for part in parts if part.q1 <= other.q0)
        parts = [kept for part in parts if part.q1 > other.q0 for kept in without(part, other)]
    yield from parts


def _joined(slices: Sequence[Slice]) -> list[Slice]:
    """Return slices with neighbours of the same rows as one, where one slice says what both do."""
    joined: list[Slice] = []
    for each in slices:
        both = _as_one(joined[-1], each) if joined else None
        if both is None:
            joined.append(each)
        else:
            joined[-1] = both
    return joined


def _as_one(a: Slice, b: Slice) -> Slice | None:
    """Return the slice that is `a` and, right of it, `b`; None if there is none."""
    if (a.q0, a.q1, a.kv1) != (b.q0, b.q1, b.kv0) or a.high is not None or b.low is not None:
        return None
    if b.high is not None and b.high < a.kv1 - 1 - a.q0:
        return None
    if a.low is not None and (a.q1 >= END or a.low > b.kv0 - b.q1 + 1):
        return None
    return Slice(a.q0, a.q1, a.kv0, b.kv1, a.low, b.high)


def squares(within: Slice, first: int, bound: Callable[[int], int], count: int) -> Iterator[Slice]:
    """Yield what a slice has of squares on the diagonal, of positions bound(i) to bound(i + 1), from the first on."""
    end = min(within.q1, within.kv1)
    for at in range(first, count):
        start = bound(at)
        if start >= end:
            return
        stop = bound(at + 1)
        part = meet(within, Slice(start, stop, start, stop))
        if part is not None:
            yield part


def of_documents(cu_seqlens: Sequence[int], within: Slice) -> Iterator[Slice]:
    """Yield what a slice has of documents."""
    first = bisect_right(cu_seqlens, max(within.q0, within.kv0)) - 1
    return squares(within, first, cu_seqlens.__getitem__, len(cu_seqlens) - 1)


def of_chunks(size: int, within: Slice) -> Iterator[Slice]:
    """Yield what a slice has of chunks of so many positions each."""
    return squares(within, max(within.q0, within.kv0) // size, lambda at: at * size, END)


class SliceTable:
    """A table of slices in which those that meet another are found without looking at all."""

    def __init__(self, slices: Sequence[Slice]) -> None:
        count = len(slices)
        self.slices, self.visits = slices, 0
        self._boxes: list[Box] = [(0, 0, 0, 0, 0, 0)] * count + [each.box for each in slices]  # of node n: 2n, 2n + 1
        for node in range(count - 1, 0, -1):
            self._boxes[node] = _hull(self._boxes[2 * node], self._boxes[2 * node + 1])

    def within(self, other: Slice) -> Iterator[Slice]:
        """Yield what a slice has of these, in their order."""
        for at in self.near(other.box):
            part = meet(self.slices[at], other)
            if part is not None:
                yield part

    def near(self, box: Box) -> list[int]:
        """Return the numbers of slices whose boxes meet a box, ascending."""
        boxes, count = self._boxes, len(self.slices)
        q0, q1, kv0, kv1, low, high = box
        found, open_nodes = [], [1] if count else []
        while open_nodes:
            node = open_nodes.pop()
            self.visits += 1
            a0, a1, b0, b1, c0, c1 = boxes[node]
            if a0 < q1 and q0 < a1 and b0 < kv1 and kv0 < b1 and c0 < high and low < c1:
                if node >= count:
                    found.append(node - count)
                else:
                    open_nodes += (2 * node, 2 * node + 1)
        return sorted(found)


class Disjoint(tuple[Slice, ...]):
    """Disjoint slices in their order, tight: compared already."""

    __slots__ = ()


def disjoint(slices: Iterable[Slice]) -> Disjoint:
    """Return slices in order, tight and without empty ones. Raises ConfigurationError for overlaps and too many."""
    found = list(islice(slices, MOST_SLICES + 1))
    if len(found) > MOST_SLICES:
        raise ConfigurationError(
            f"a mask of more than {MOST_SLICES} slices is not supported: say it by fewer, or by Documents and Chunks, "
            f"which may be as many as they like"
        )
    made = known_disjoint(found)
    if any(a.q1 > b.q0 for a, b in pairwise(made)):
        _check_disjoint(made)
    return made


def known_disjoint(slices: Iterable[Slice]) -> Disjoint:
    """Return slices in order, tight and without empty ones, of which it is known that no two overlap."""
    return Disjoint(sorted((kept for each in slices if (kept := tight(each)) is not None), key=_place))


def _check_disjoint(slices: Sequence[Slice]) -> None:
    table = SliceTable(slices)
    for at, each in enumerate(slices):
        for other in table.near(each.box):
            if other < at and meet(slices[other], each) is not None:
                raise ConfigurationError(
                    f"slices {slices[other]} and {each} overlap: a pair may be in one only; "
                    f"cut one of them, or join masks with |, which counts pairs once"
                )
        if table.visits > COMPARISONS * (len(slices) + 1024):
            raise ConfigurationError(
                f"{len(slices)} slices lie too much across each other to be compared: give fewer, or cut the rows "
                f"alike, so that slices have either the same rows or none in common"
            )


def _hull(a: Box, b: Box) -> Box:
    low = (min(a[0], b[0]), min(a[2], b[2]), min(a[4], b[4]))
    high = (max(a[1], b[1]), max(a[3], b[3]), max(a[5], b[5]))
    return low[0], high[0], low[1], high[1], low[2], high[2]


def _place(of: Slice) -> tuple[int, ...]:
    return *of[:4], -END if of.low is None else of.low, END if of.high is None else of.high


def _least(a: int | None, b: int) -> int:
    return b if a is None else min(a, b)


def _most(a: int | None, b: int) -> int:
    return b if a is None else max(a, b)


def patches_of(slices: Iterable[Slice], q: Positions, kv: Positions) -> Region:
    """Return what slices within two chunks are in the indices of these."""
    patches: list[Patch] = []
    for q0, q1, kv0, kv1, low, high in slices:
        (row0, row1), (col0, col1) = inside(q, q0, q1), inside(kv, kv0, kv1)
        offset = (q.start + row0 * q.step) - (kv.start + col0 * kv.step)
        low, high = None if low is None else low + offset, None if high is None else high + offset
        patch = tidy(Patch(row0, row1, col0, col1, low, high, q.step, kv.step))
        if patch is not None:
            patches.append(patch)
    return tuple(patches)


# ---------- as users give them, and as text


def tiled(slices: Sequence[Slice]) -> tuple[int, ...] | None:
    """Return the documents of slices that are squares, end to end, with one window; None if they are not."""
    window = slices[0][4:]
    if slices[0].q0 or slices[-1].q1 == END or any(a.q1 != b.q0 for a, b in pairwise(slices)):
        return None
    if any(each[:2] != each[2:4] or each[4:] != window for each in slices):
        return None
    return (0, *(each.q1 for each in slices))


def start_of(given: object) -> int | None:
    """Return the position of the first of q. Raises ConfigurationError if it is none."""
    start = as_integer(given)
    if given is not None and (start is None or not 0 <= start <= LIMIT):
        raise ConfigurationError(
            f"q_start={shown(given)}: the position of the first of q among those of kv is an integer, 0 or more"
        )
    return start


def size_of(given: object) -> int:
    """Return the number of positions of a chunk. Raises ConfigurationError if it is none."""
    size = as_integer(given)
    if size is None or not 1 <= size <= LIMIT:
        raise ConfigurationError(f"Chunks({shown(given)}): give the positions of a chunk, a positive integer")
    return size


def slice_of(given: object) -> Slice:
    """Return a slice of rows as users give them: (q0, q1, kv0, kv1), or with low and high; None: no end, no bound."""
    values = list(given) if isinstance(given, Iterable) else []
    if len(values) not in (4, 6):
        raise ConfigurationError(f"a slice is (q0, q1, kv0, kv1), or (q0, q1, kv0, kv1, low, high); got {shown(given)}")
    numbers = [as_integer(value) for value in values]
    q0, q1, kv0, kv1 = (END if number is None and at in (1, 3) else number for at, number in enumerate(numbers[:4]))
    wrong = any(number is None and value is not None for number, value in zip(numbers, values, strict=True))
    if wrong or q0 is None or kv0 is None or q1 is None or kv1 is None:
        raise ConfigurationError(f"slice {shown(given)}: give integers; only ends and bounds may be None")
    if not (0 <= q0 < q1 <= END and 0 <= kv0 < kv1 <= END):
        raise ConfigurationError(f"slice {shown(given)}: ranges begin at 0 or later, and end after they begin")
    low, high = numbers[4:] or (None, None)
    made = Slice(q0, q1, kv0, kv1, window_bound("low", low), window_bound("high", high))
    if tight(made) is None:
        raise ConfigurationError(f"slice {made} is empty: no pair of its ranges is in its window")
    return made


def table_of(given: object) -> Disjoint:
    """Return the disjoint slices of rows: lists of numbers, or a tensor. Raises ConfigurationError."""
    rows = given
    if hasattr(given, "tolist"):
        rows = given[: MOST_SLICES + 1].tolist() if getattr(given, "ndim", 0) else None  # type: ignore[index]
    if not isinstance(rows, Iterable):
        raise ConfigurationError(f"slices are a list of (q0, q1, kv0, kv1, low, high); got {shown(given)}")
    return disjoint(map(slice_of, rows))


def check_ends(slices: Iterable[Slice], q_end: int, kv_end: int) -> None:
    """Raise ConfigurationError for a slice that ends beyond these positions."""
    for each in slices:
        for name, end, most in (("q", each.q1, q_end), ("kv", each.kv1, kv_end)):
            if most < end < END:
                raise ConfigurationError(
                    f"slice {each} ends beyond the positions of {name}, which end at {most}: "
                    f"slices count positions of the whole sequence, over all ranks"
                )


def more_texts(
    chunks: Iterable[int], slices: Sequence[Slice] | None, groups: Sequence[str], q_start: int | None, alone: bool
) -> Iterator[str]:
    """Yield the text of what a mask says beyond its window and documents. alone: it says nothing of these."""
    first = [f"chunks({size})" for size in chunks]
    if slices is not None and all(each[:2] == each[2:4] and each[4:] == (None, None) for each in slices):
        first.append(f"bidirectional({_rows(each[:2] for each in slices)})")
    elif slices is not None:
        first.append(f"slices({_rows(slices)})")
    yield from first
    bare = alone and not first and len(groups) == 1 and q_start is None
    yield from groups if bare else (f"({group})" for group in groups)
    if q_start is not None:
        yield f"start({q_start})"


def slice_row(of: Slice) -> list[int | None]:
    """Return a slice as users give it: None for an end or a bound that there is none of."""
    return [None if number == END else number for number in of]


def _rows(rows: Iterable[Iterable[int | None]]) -> str:
    return ";".join(",".join("" if number in (None, END) else str(number) for number in row) for row in rows)
