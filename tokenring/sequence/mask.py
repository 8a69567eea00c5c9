"""Masks: the functions that make them, and the text that says one.

What a mask is, and how it is computed with, is in mask_data.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, pairwise
from typing import TYPE_CHECKING, NamedTuple, cast

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import as_integer
from tokenring.sequence.mask_data import NOTHING, Mask, documents_of, ends_of
from tokenring.sequence.region import LIMIT, shown

if TYPE_CHECKING:
    from tokenring.sequence.slices import Slice

__all__ = [
    "DEEPEST", "LIMIT", "WORDS", "Bidirectional", "BlockCausal", "Causal", "Chunks", "Documents", "Full", "Mask", 
    "PrefixLM", "PrefixTree", "Slices", "SlidingWindow", "of_numbers", "parse_mask",
]  # fmt: skip

PART = re.compile(r"\s*([a-z]+)\s*(?:\(([^()]*)\)\s*)?")
NUMBER = re.compile(r"\s*(-?[0-9]{1,16})?\s*", re.ASCII)
DEEPEST = 16  # parentheses in each other


def Full() -> Mask:  # masks read as types, and may become types
    """Return the mask in which every q position sees every kv position; their numbers may differ."""
    return Mask()


def Causal(*, q_start: int | None = None) -> Mask:
    """Return the mask in which a position sees itself and those before it.

    q_start: the position of the first of q among those of kv, as behind a cache of so many; then kv may be longer.
    """
    return Mask(high=0, q_start=q_start)


def SlidingWindow(left: int, right: int = 0, *, q_start: int | None = None) -> Mask:
    """Return the mask in which a position sees `left` positions before it and `right` after it, inclusive.

    -1 is unbounded. q_start: as of Causal. Raises ConfigurationError for sizes that are no integers, below -1 or too
    large.
    """
    return Mask(*_window("SlidingWindow", left, right), q_start=q_start)


def Documents(
    cu_seqlens: Sequence[int],
    cu_seqlens_kv: Sequence[int] | None = None,
    *,
    windows: Sequence[tuple[int, int]] | None = None,
    q_start: int | None = None,
) -> Mask:
    """Return the mask of packed documents: positions cu_seqlens[i] to cu_seqlens[i+1] see each other only.

    `cu_seqlens` starts with 0 and does not decrease (a list, or a tensor of integers, which is
    copied to the host). Positions from its last entry on are padding: out 0, lse -inf, no gradient.

    cu_seqlens_kv: where kv is cut otherwise than q, as in cross-attention: part i of q sees part i of kv. Their lengths
    may differ. windows: (left, right) of each document, as of SlidingWindow. q_start: as of Causal.
    """
    if cu_seqlens_kv is None and windows is None:
        return Mask(cu_seqlens=documents_of(cu_seqlens), q_start=q_start)
    from tokenring.sequence.slices import table_of

    bounds = ends_of(cu_seqlens)
    if cu_seqlens_kv is None:
        kv_bounds = bounds
    elif windows is not None or q_start is not None:
        raise ConfigurationError("Documents of q and of kv apart take no windows and no q_start: say these by Slices")
    else:
        kv_bounds, q_start = ends_of(cu_seqlens_kv), 0
    if len(bounds) != len(kv_bounds):
        raise ConfigurationError(
            f"Documents: {len(bounds) - 1} parts of q, but {len(kv_bounds) - 1} of kv; cut both into as many"
        )
    of_each = [(-1, -1)] * (len(bounds) - 1) if windows is None else _pairs("windows are", windows)
    if len(of_each) != len(bounds) - 1:
        raise ConfigurationError(f"Documents: {len(of_each)} windows for {len(bounds) - 1} documents; give each one")
    cuts = zip(pairwise(bounds), pairwise(kv_bounds), of_each, strict=True)
    slices = [
        (*q, *kv, *_window("a document's window", *size)) for q, kv, size in cuts if q[0] < q[1] and kv[0] < kv[1]
    ]
    return Mask(slices=table_of(slices), q_start=q_start)


def Chunks(size: int) -> Mask:
    """Return the mask in which positions see those of their chunk, of `size` positions each: Llama 4's, & Causal()."""
    return Mask(chunks=(size,))


def Bidirectional(spans: Sequence[tuple[int, int]]) -> Mask:
    """Return the mask in which positions of each span (start, stop) see each other, and others nothing.

    `Causal() | Bidirectional(spans)` are images in a text (Gemma 3). Raises ConfigurationError for spans that overlap.
    """
    from tokenring.sequence.slices import table_of

    return Mask(slices=table_of((start, stop, start, stop) for start, stop in _pairs("spans are", spans)))


def BlockCausal(block_length: int) -> Mask:
    """Return the mask in which positions see all of their own block and of those before, as the frames of a video."""
    return Causal() | Chunks(block_length)


def PrefixLM(prefix_length: int | Sequence[int], cu_seqlens: Sequence[int] | None = None) -> Mask:
    """Return the causal mask whose first `prefix_length` positions also see each other in both directions.

    cu_seqlens: of packed documents, each with a prefix of its own: prefix_length is that of each, or a list.
    """
    bounds = None if cu_seqlens is None else ends_of(cu_seqlens)
    documents = 1 if bounds is None else len(bounds) - 1
    given = [prefix_length] * documents if as_integer(prefix_length) is not None else _list(prefix_length)
    lengths = [length for length in map(as_integer, given) if length is not None and 0 <= length <= LIMIT]
    if len(lengths) < max(1, len(given)):
        raise ConfigurationError(f"PrefixLM({shown(prefix_length)}): a prefix has 0 positions or more, an integer")
    if len(lengths) != documents:
        raise ConfigurationError(f"PrefixLM: {len(lengths)} prefixes, but {documents} documents; give one for each")
    whole = [(0, LIMIT)] if bounds is None else list(pairwise(bounds))
    ends = [(start, min(stop, start + n)) for (start, stop), n in zip(whole, lengths, strict=True)]
    prefixes = [(start, stop) for start, stop in ends if start < stop]
    mask = Causal() | Bidirectional(prefixes) if prefixes else Causal()
    return mask if bounds is None else mask & Documents(bounds)


def PrefixTree(lengths: Sequence[int], parents: Sequence[int | None]) -> Mask:
    """Return the mask of a tree of segments, packed one after another: each sees its ancestors, and itself causally.

    lengths: of each segment. parents: number of the segment that each goes on from, an earlier one; None: of none.
    Positions beyond the last segment are padding.
    """
    from tokenring.sequence.slices import disjoint

    sizes, above = [as_integer(each) for each in _list(lengths)], _list(parents)
    if not sizes or len(sizes) != len(above) or any(size is None or not 0 < size <= LIMIT for size in sizes):
        raise ConfigurationError(
            f"PrefixTree({shown(lengths)}, {shown(parents)}): give each segment its length, from 1 on, and its parent"
        )
    known: list[int | None] = []
    for number, given in enumerate(above):
        parent = as_integer(given)
        if given is not None and (parent is None or not 0 <= parent < number):
            raise ConfigurationError(f"PrefixTree: parent {given!r} of segment {number}: give an earlier one, or None")
        known.append(parent)
    return Mask(slices=disjoint(_of_tree(cast("list[int]", sizes), known)))


def _of_tree(lengths: Sequence[int], parents: Sequence[int | None]) -> Iterator[Slice]:
    """Yield the slices of a tree; a segment right behind its parent goes on from that, in one slice."""
    from tokenring.sequence.slices import Slice

    chains: list[_Chain] = []
    start = 0
    for size, parent in zip(lengths, parents, strict=True):
        stop, above = start + size, None if parent is None else chains[parent]
        first = start
        if above is not None and above.stop == start:
            first, above = above.first, above.above
        chains.append(_Chain(first, stop, above))
        yield Slice(start, stop, first, stop, None, 0)
        while above is not None:
            yield Slice(start, stop, above.first, above.stop)
            above = above.above
        start = stop


class _Chain(NamedTuple):
    """Positions of segments that follow each other, down to one of a tree, and those above."""

    first: int
    stop: int
    above: _Chain | None


def Slices(slices: Iterable[Sequence[int | None]], *, q_start: int | None = 0) -> Mask:
    """Return the mask of slices that do not overlap: rows (q0, q1, kv0, kv1) or (q0, q1, kv0, kv1, low, high).

    A pair is seen if q0 <= q < q1, kv0 <= kv < kv1 and low <= kv - q <= high, for one of them. None as an end or a
    bound is none. Lengths of q and kv may differ, unless q_start is None. Raises ConfigurationError for slices that
    overlap, are empty, reversed, or more than 65,536.
    """
    from tokenring.sequence.slices import table_of

    made = table_of(slices)
    if not made:
        raise ConfigurationError("Slices([]): give one slice at least")
    return Mask(slices=made, q_start=q_start)


def _window(what: str, left: object, right: object) -> tuple[int | None, int | None]:
    """Return the bounds of kv - q. Raises ConfigurationError."""
    sizes = [as_integer(left), as_integer(right)]
    if any(size is None or not -1 <= size <= LIMIT for size in sizes):
        raise ConfigurationError(
            f"{what}({left!r}, {right!r}): use integers, 0 or more (at most {LIMIT}), or -1 for unbounded"
        )
    before, after = cast("list[int]", sizes)
    return None if before == -1 else -before, None if after == -1 else after


def _pairs(what: str, given: object) -> list[tuple[object, object]]:
    """Return pairs of anything. Raises ConfigurationError."""
    pairs = [tuple(_list(each)) for each in _list(given)]
    if not pairs or any(len(each) != 2 for each in pairs):
        raise ConfigurationError(f"{what} a list of pairs, one at least; got {shown(given)}")
    return cast("list[tuple[object, object]]", pairs)


def _list(given: object) -> list[object]:
    values = given.tolist() if hasattr(given, "tolist") else given
    return list(values) if isinstance(values, Iterable) else []


# ---------- as numbers


def of_numbers(numbers: Iterable[int]) -> Mask:
    """Return the mask that has these `numbers`."""
    from tokenring.sequence.slices import Slice

    given = iter(numbers)

    def one() -> int | None:
        return None if (number := next(given)) == NOTHING else number

    def some(count: int) -> tuple[int, ...]:
        return tuple(islice(given, count))

    low, high = one(), one()
    documents, chunks = some(next(given)) or None, some(next(given))
    count = one()
    slices = None if count is None else tuple(Slice._make((*some(4), one(), one())) for _ in range(count))
    either = tuple(tuple(of_numbers(given) for _ in range(next(given))) for _ in range(next(given)))
    return Mask(low, high, documents, chunks, slices, either, one())


# ---------- as text


Numbers = list[int | None]
MASKS: dict[str, Callable[..., Mask]] = {
    "full": Full,
    "causal": Causal,
    "window": SlidingWindow,
    "band": lambda low, high: Mask(low, high),
    "documents": lambda *bounds: Documents(bounds),
    "chunks": Chunks,
    "blockcausal": BlockCausal,
    "prefix": PrefixLM,
}  # by the word that a mask's text begins with
TABLES: dict[str, Callable[[list[Numbers]], Mask]] = {
    "bidirectional": lambda rows: Bidirectional(cast("list[tuple[int, int]]", rows)),
    "slices": lambda rows: Slices(rows, q_start=None),
    "tree": lambda rows: PrefixTree(*cast("tuple[list[int], Numbers]", rows)),
}  # of rows of numbers with ; between them
WORDS = (
    "full, causal, window(left,right), band(low,high), documents(0,end,...), chunks(size), blockcausal(length), "
    "prefix(length), bidirectional(start,stop;...), slices(q0,q1,kv0,kv1,low,high;...), tree(length,...;parent,...), "
    "joined by & or |, with &start(q_start) at the end"
)


def parse_mask(text: str) -> Mask:
    """Return the mask that str(mask) printed: parts joined by "&" and "|". Raises ConfigurationError.

    "full", "causal", "window(128,0)" for SlidingWindow(128, 0), "documents(0,7,9)", and "band(1,5)" for
    Mask(low=1, high=5), where "band(1,)" has no upper bound. "&" binds more than "|"; (parentheses) bind most.
    docs/masks.md has the others.
    """
    return _either(text, 0)


def _either(text: str, depth: int) -> Mask:
    if depth > DEEPEST:
        raise ConfigurationError(f"unknown mask {shown(text)}: more than {DEEPEST} parentheses stand in each other")
    first, *others = [_all_of(part, depth) for part in _split(text, "|")]
    for other in others:
        first |= other
    return first


def _all_of(text: str, depth: int) -> Mask:
    mask = Full()
    starts: list[int | None] = []
    for part in _split(text, "&"):
        inner, word = part.strip(), ""
        if inner.startswith("(") and inner.endswith(")"):
            mask &= _either(inner[1:-1], depth + 1)
            continue
        try:
            word, rows = _part(part)
            if word == "start" and not starts:
                ((start,),) = rows
                starts.append(start)
            else:
                mask &= TABLES[word](rows) if word in TABLES else MASKS[word](*[n for row in rows for n in row])
        except (KeyError, ValueError, TypeError) as error:
            if isinstance(error, ConfigurationError) and word in TABLES:
                raise  # which says more
            from tokenring.nearest import hint

            known = [*MASKS, *TABLES]
            raise ConfigurationError(
                f"unknown mask {shown(part)}; write {WORDS}{hint(part.partition('(')[0].strip(), known)}"
            ) from None
    return mask.with_q_start(starts[0]) if starts else mask


def _split(text: str, sign: str) -> list[str]:
    """Return the parts between signs that stand in no parentheses."""
    parts, depth = [""], 0
    for piece in re.split(r"([()&|])", text):
        depth += (piece == "(") - (piece == ")")
        if piece == sign and depth == 0:
            parts.append("")
        else:
            parts[-1] += piece
    return parts


def _part(text: str) -> tuple[str, list[Numbers]]:
    """Return the word and the numbers of one part of a mask's text. Raises ValueError."""
    match = PART.fullmatch(text)
    if match is None:
        raise ValueError(text)
    inner = match[2] or ""
    rows = [[_number(each) for each in row.split(",")] for row in inner.split(";")] if inner.strip() else []
    if len(rows) > 1 and match[1] not in TABLES:
        raise ValueError(text)
    return match[1], rows


def _number(text: str) -> int | None:
    """Return a number, None for nothing, which only some take. Raises ValueError for any other text."""
    match = NUMBER.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return None if match[1] is None else int(match[1])
