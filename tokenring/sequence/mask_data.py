"""Masks: which kv positions a q position may see.

Every mask is a set of disjoint slices (tokenring/sequence/slices.py), kept in the few numbers that they follow from: a
window of position differences, a cut into documents, and so on. Schedules, the executor and the transports know
regions, nothing else. Masks are made by the functions of mask.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, lru_cache, partial
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Positions, as_integer
from tokenring.sequence.region import (
    LIMIT,
    Region,
    neighbours_of,
    seen_in_window,
    shown,
    window_bound,
    window_region,
    windows_in_any,
    windows_in_both,
    with_columns,
)

if TYPE_CHECKING:
    from tokenring.sequence.slices import Slice, SliceTable

    Cut = Callable[[Slice], Iterable[Slice]]  # from a slice to the disjoint slices that a part of a mask leaves of it

T = TypeVar("T")
NOTHING = -(2**62)  # stands for None among a mask's numbers


@dataclass(frozen=True)
class Mask:
    """The pairs of q and kv positions that satisfy all that is said; what is not said hides nothing.

    low, high: kv - q in [low, high]. cu_seqlens: both in one document, [cu_seqlens[i], cu_seqlens[i+1]). chunks: for
    each of these sizes, both in one chunk of so many positions. slices: in one of these disjoint slices. either: for
    each of these groups, seen by at least one of its masks. q_start: the position of the first of q among those of
    kv, whose number may then differ from that of q; None: both number one sequence.

    Positions from cu_seqlens[-1] on are padding: they see nothing and nothing sees them. What says nothing, such as
    an empty document, is left out, so that masks which say the same are equal where that is cheap. Raises
    ConfigurationError.
    """

    low: int | None = None
    high: int | None = None
    cu_seqlens: tuple[int, ...] | None = None
    chunks: tuple[int, ...] = ()
    slices: tuple[Slice, ...] | None = None
    either: tuple[tuple[Mask, ...], ...] = ()
    q_start: int | None = None
    numbers: tuple[int, ...] | None = field(init=False, repr=False, compare=False, default=None)
    """All that a mask consists of, for torch.compile; None where low, high and cu_seqlens are all."""

    def __post_init__(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, window_bound(name, getattr(self, name)))
        if self.cu_seqlens is not None:
            object.__setattr__(self, "cu_seqlens", documents_of(self.cu_seqlens))
        if self.chunks or self.either or self.slices is not None or self.q_start is not None:
            for name, value in _settled(self).items():
                object.__setattr__(self, name, value)
            more = self.chunks or self.either or self.slices is not None or self.q_start is not None
            object.__setattr__(self, "numbers", tuple(_numbers_of(self)) if more else None)

    def __and__(self, other: Mask) -> Mask:
        """Return the mask that shows what both show. Raises ConfigurationError if `other` is no mask.

        Of documents with different ends, what lies beyond the nearer end is padding.
        """
        _check_joins("&", other)
        window = windows_in_both((self.low, self.high), (other.low, other.high))
        documents = documents_in_both(self.cu_seqlens, other.cu_seqlens)
        if self.numbers is None and other.numbers is None:
            return Mask(*window, documents)
        slices = self.slices if other.slices is None else other.slices
        if self.slices is not None and other.slices is not None:
            slices = _in_both(self._table, other.slices)
        either = (*self.either, *other.either)
        return Mask(*window, documents, (*self.chunks, *other.chunks), slices, either, _one_start(self, other))

    __rand__ = __and__  # reached only by what is no mask: to say so

    def __or__(self, other: Mask) -> Mask:
        """Return the mask that shows what any of two shows. Raises ConfigurationError if `other` is no mask."""
        _check_joins("|", other)
        start, masks = _one_start(self, other), _members((self, other))
        return masks[0].with_q_start(start) if len(masks) == 1 else Mask(either=(masks,), q_start=start)

    __ror__ = __or__

    def with_q_start(self, q_start: int | None) -> Mask:
        """Return the mask with the first of q at this position of kv; None: q and kv number one sequence."""
        return Mask(self.low, self.high, self.cu_seqlens, self.chunks, self.slices, self.either, q_start)

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: what was computed from them is computed again, hashes by another process."""
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def _hash(self) -> int:
        return hash((self.low, self.high, self.cu_seqlens, self.chunks, self.slices, self.either, self.q_start))

    @property
    def is_full(self) -> bool:
        """True if every position sees every other one."""
        return self.is_window and self.low is self.high is None

    @property
    def is_window(self) -> bool:
        """True if only the difference of positions counts."""
        return self.cu_seqlens is None and self.slices is None and not self.chunks and not self.either

    @cached_property
    def needs_equal_lengths(self) -> bool:
        """True if q and kv positions must number the same sequence."""
        return self.q_start is None and not self.is_full

    @property
    def looks_back(self) -> bool:
        """True if it is plain that no position sees one that comes later."""
        # A branch, since what a compiler makes of a comparison is no bool.
        if self.high is not None and self.high <= 0:
            return True
        return self.numbers is not None and self._looks_back

    @cached_property
    def _looks_back(self) -> bool:
        before = all((each.high is not None and each.high <= 0) or each.kv1 <= each.q0 for each in self.slices or ())
        members = any(all(mask.looks_back for mask in masks) for masks in self.either)
        return (self.slices is not None and before) or members

    def region(self, q: Positions, kv: Positions) -> Region:
        """Return what the q chunk sees of the kv chunk, as disjoint patches in their indices."""
        q = self._placed(q)
        return window_region(q, kv, self.low, self.high) if self.is_window else _region(self, q, kv)

    def within(self, rectangle: Slice) -> list[Slice]:
        """Return the disjoint slices that the mask is, in a rectangle of positions that has ends."""
        from tokenring.sequence.slices import END, Slice, meet

        window = meet(Slice(0, END, 0, END, self.low, self.high), rectangle)
        found = [] if window is None else [window]
        for cut in self._cuts:
            found = [part for each in found for part in cut(each)]
        return found

    @cached_property
    def _cuts(self) -> tuple[Cut, ...]:
        from tokenring.sequence.slices import of_chunks, of_documents

        cuts: list[Cut] = [] if self.cu_seqlens is None else [partial(of_documents, self.cu_seqlens)]
        cuts += [partial(of_chunks, size) for size in self.chunks]
        cuts += [] if self.slices is None else [self._table.within]
        return (*cuts, *(partial(_any_of, masks) for masks in self.either))

    @cached_property
    def _table(self) -> SliceTable:
        from tokenring.sequence.slices import SliceTable

        return SliceTable(self.slices or ())

    def visible(self, q: Positions, kv: Positions) -> bool:
        """Return whether the q chunk sees anything of the kv chunk."""
        return bool(self.seen(q, (kv,)))

    def seen(self, q: Positions, chunks: Sequence[Positions]) -> frozenset[int]:
        """Return the numbers of the chunks of kv of which the q chunk sees anything."""
        if self.is_full:
            return frozenset(range(len(chunks)))
        if q.step == 1 and (len(chunks[-1]) or not self.is_window) and (near := neighbours_of(tuple(chunks))):
            return with_columns(self.region(q, near.whole), near)  # an empty last one may be beyond what a window sees
        if self.is_window:
            return seen_in_window(self._placed(q), chunks, (self.low, self.high))
        return frozenset(number for number, kv in enumerate(chunks) if self.region(q, kv))

    def one_piece(self, q: Iterable[int]) -> bool:
        """Return whether the mask leaves these positions of q in one piece, as one document or chunk is.

        Only of a piece may rows share a kernel call: in it what is hidden has weight 0, and 0 · NaN is NaN.
        """
        if self.is_window:
            return True
        if self.slices is not None or not all(any(mask.is_window for mask in masks) for masks in self.either):
            return False
        bounds, start = self.cu_seqlens or (), self.q_start or 0
        return len({(bisect_right(bounds, at + start), *((at + start) // c for c in self.chunks)) for at in q}) <= 1

    def allows(self, q: int, kv: int) -> bool:
        """Return whether a q position sees a kv position: the definition of the mask, for one pair."""
        q += self.q_start or 0
        return (
            (self.low is None or kv - q >= self.low)
            and (self.high is None or kv - q <= self.high)
            and (self.cu_seqlens is None or any(a <= q < b and a <= kv < b for a, b in pairwise(self.cu_seqlens)))
            and all(q // size == kv // size for size in self.chunks)
            and (self.slices is None or any(each.has(q, kv) for each in self.slices))
            and all(any(mask.allows(q, kv) for mask in masks) for masks in self.either)
        )

    def check_length(self, length: int) -> None:
        """Raise ConfigurationError when the mask speaks of positions beyond a sequence of this length."""
        self.check_lengths(length, length)

    def check_lengths(self, q_length: int, kv_length: int) -> None:
        """Raise ConfigurationError when the mask speaks of positions beyond those of q or of kv."""
        if self.cu_seqlens is not None and self.cu_seqlens[-1] > kv_length:
            raise ConfigurationError(
                f"Documents end at {self.cu_seqlens[-1]}, but the sequence has {kv_length} positions: "
                f"cu_seqlens counts positions of the whole sequence, over all ranks"
            )
        start = self.q_start or 0
        if self.slices is not None:
            from tokenring.sequence.slices import check_ends

            check_ends(self.slices, start + q_length, kv_length)
        for mask in (mask for masks in self.either for mask in masks):
            mask.check_lengths(start + q_length, kv_length)

    def _placed(self, q: Positions) -> Positions:
        """Return positions of q as they lie among those of kv."""
        return Positions(q.start + self.q_start, q.stop + self.q_start, q.step) if self.q_start else q

    def __str__(self) -> str:
        """Return the text that parse_mask reads back, for every mask."""
        low, high = self.low, self.high
        parts = []
        if (low, high) == (None, 0):
            parts.append("causal")
        elif (low or 0) > 0 or (high or 0) < 0:
            parts.append(f"band({value_or(low, '')},{value_or(high, '')})")
        elif (low, high) != (None, None):
            parts.append(f"window({-1 if low is None else -low},{value_or(high, -1)})")
        if self.cu_seqlens is not None:
            parts.append(f"documents({','.join(map(str, self.cu_seqlens))})")
        if self.numbers is not None:
            from tokenring.sequence.slices import more_texts

            groups = ["|".join(map(str, masks)) for masks in self.either]
            parts += more_texts(self.chunks, self.slices, groups, self.q_start, not parts)
        return "&".join(parts) or "full"


@lru_cache(maxsize=16384)
def _region(mask: Mask, q: Positions, kv: Positions) -> Region:
    from tokenring.sequence.slices import Slice, patches_of

    return patches_of(mask.within(Slice(q.start, q.last + 1, kv.start, kv.last + 1)), q, kv)


def _any_of(masks: Sequence[Mask], within: Slice) -> list[Slice]:
    """Return what a slice has of any of these masks."""
    from tokenring.sequence.slices import together

    return together(mask.within(within) for mask in masks)


# ---------- one form for what says the same


def _settled(mask: Mask) -> dict[str, object]:
    """Return the fields of a mask in the form in which masks that say the same are equal. Raises ConfigurationError."""
    from tokenring.sequence.slices import Disjoint, size_of, start_of, table_of, tiled

    low, high, documents = mask.low, mask.high, mask.cu_seqlens
    chunks = tuple(map(size_of, mask.chunks))
    slices = mask.slices
    if slices is not None and not isinstance(slices, Disjoint):
        slices = table_of(slices)
    if 1 in chunks:
        chunks, (low, high) = (), windows_in_both((low, high), (0, 0))
    if slices and documents is None and (found := tiled(slices)) is not None:
        documents, (low, high), slices = found, windows_in_both((low, high), slices[0][4:]), None
    if slices == ():
        return _fields(None, None, (0, 0), (), None, (), start_of(mask.q_start))
    chunks = tuple(sorted(size for size in set(chunks) if not any(size % other == 0 for other in {*chunks} - {size})))
    groups = {masks for masks in map(_members, mask.either) if not any(each.is_full for each in masks)}
    either = tuple(sorted(groups, key=lambda masks: [_key(each) for each in masks]))
    says = documents is not None or slices is not None or chunks or either or low is not None or high is not None
    return _fields(low, high, documents, chunks, slices, either, start_of(mask.q_start) if says else None)


def _fields(*values: object) -> dict[str, object]:
    names = ("low", "high", "cu_seqlens", "chunks", "slices", "either", "q_start")
    return dict(zip(names, values, strict=True))


def _members(given: Iterable[Mask]) -> tuple[Mask, ...]:
    """Return masks of which one at least must show a pair: windows as few as can be, and last, each once."""
    found: set[Mask] = set()
    for mask in given:
        _check_joins("|", mask)
        plain = mask if mask.q_start is None else mask.with_q_start(None)
        only_either = len(plain.either) == 1 and replace(plain, either=()).is_full
        found |= set(plain.either[0]) if only_either else {plain}
    if any(mask.is_full for mask in found):
        return (Mask(),)
    windows = [Mask(*window) for window in windows_in_any((mask.low, mask.high) for mask in found if mask.is_window)]
    return (*sorted((mask for mask in found if not mask.is_window), key=_key), *windows) or (Mask(slices=()),)


def _one_start(a: Mask, b: Mask) -> int | None:
    """Return the position of the first of q that both masks name. Raises ConfigurationError if there is none."""
    starts = {mask.q_start for mask in (a, b) if not mask.is_full}
    if len(starts) < 2:
        return starts.pop() if starts else None
    if starts == {None, 0}:
        return None
    named = [f"{shown(str(mask))} from {value_or(mask.q_start, 'that of one sequence')}" for mask in (a, b)]
    raise ConfigurationError(f"two masks number q differently, {named[0]} and {named[1]}: give both the same q_start")


def _in_both(table: SliceTable, others: Iterable[Slice]) -> tuple[Slice, ...]:
    from tokenring.sequence.slices import disjoint

    return disjoint(part for each in others for part in table.within(each))


# ---------- as numbers


def _numbers_of(mask: Mask) -> Iterator[int]:
    """Yield all that a mask consists of, for `of_numbers`."""
    yield from (value_or(mask.low, NOTHING), value_or(mask.high, NOTHING))
    for some in (mask.cu_seqlens or (), mask.chunks):
        yield from (len(some), *some)
    yield NOTHING if mask.slices is None else len(mask.slices)
    yield from (value_or(number, NOTHING) for each in mask.slices or () for number in each)
    yield len(mask.either)
    for masks in mask.either:
        yield len(masks)
        for each in masks:
            yield from _numbers_of(each)
    yield value_or(mask.q_start, NOTHING)


def _key(mask: Mask) -> list[int]:
    return list(_numbers_of(mask))


# ---------- what is refused


def _check_joins(sign: str, other: object) -> None:
    if not isinstance(other, Mask):
        called = getattr(other, "__name__", None)
        found = f"{called} without ()" if called else f"one of type {type(other).__name__}"
        example = "Causal() & Documents(...)" if sign == "&" else "Causal() | Bidirectional(...)"
        raise ConfigurationError(f"{sign} joins a mask and a mask, as in {example}; found {found}")


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


def value_or(value: int | None, otherwise: T) -> int | T:
    """Return the value, or something else for None."""
    return otherwise if value is None else value
