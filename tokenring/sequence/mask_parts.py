"""What the parts of masks may be, and the one form of each: documents, windows, slices as users give them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import as_integer
from tokenring.sequence.slices import END, LIMIT, MOST_SLICES, Disjoint, Slice, disjoint, tight

T = TypeVar("T")
Window = tuple[int | None, int | None]


def bound_of(name: str, given: object) -> int | None:
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


def documents_of(given: object) -> tuple[int, ...]:
    """Return the bounds of documents, without empty ones. Raises ConfigurationError if these are none."""
    return _distinct(ends_of(given))


def ends_of(given: object) -> tuple[int, ...]:
    """Return the bounds of documents, with empty ones. Raises ConfigurationError if these are none."""
    values = given.tolist() if hasattr(given, "tolist") else given
    found = [as_integer(value) for value in values] if isinstance(values, Iterable) else []
    bounds = tuple(bound for bound in found if bound is not None)
    rises = all(a <= b for a, b in pairwise(bounds))
    if len(bounds) < max(2, len(found)) or bounds[0] != 0 or not rises or bounds[-1] > LIMIT:
        raise ConfigurationError(
            f"Documents wants [0, end of the first, ..., end of the last], integers that do not decrease; "
            f"got {shown(values)}"
        )
    return bounds


def documents_in_both(a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """Return the documents that two cuts leave together; beyond the nearer end is padding."""
    if a is None or b is None:
        return a if b is None else b
    end = min(a[-1], b[-1])
    return _distinct(tuple(sorted({bound for bound in (*a, *b) if bound <= end})))


def _distinct(bounds: tuple[int, ...]) -> tuple[int, ...]:
    """Return the bounds without empty documents; at least one interval, empty if there is nothing but padding."""
    kept = tuple(sorted(set(bounds)))
    return kept if len(kept) > 1 else (0, 0)


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
            f"q_start={shown(given)}: the position of the first of q among those of kv is an integer from 0 on"
        )
    return start


def size_of(given: object) -> int:
    """Return the number of positions of a chunk. Raises ConfigurationError if it is none."""
    size = as_integer(given)
    if size is None or not 1 <= size <= LIMIT:
        raise ConfigurationError(f"Chunks({shown(given)}): give the positions of a chunk, an integer from 1 on")
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
    made = Slice(q0, q1, kv0, kv1, bound_of("low", low), bound_of("high", high))
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


def value_or(value: int | None, otherwise: T) -> int | T:
    """Return the value, or something else for None."""
    return otherwise if value is None else value


def shown(value: object) -> str:
    """Return what was found, at most a line of it."""
    if isinstance(value, (list, tuple, range)):
        more = ", ..." if len(value) > 8 else ""
        text = f"[{', '.join(map(repr, value[:8]))}{more}]"
    else:
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
