"""Slices of packed documents that are cut zigzag, each by itself, over the ranks that hold them.

Positions are the tokens of rank 0, then those of rank 1, and so on. Document i gives rank r of P two chunks of equal
length, numbers r and 2P-1-r of its 2P, which lie next to each other there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

from tokenring.sequence.mask import Causal, Full, Mask
from tokenring.sequence.slices import MOST_SLICES, Slice, known_disjoint

Row = tuple[int, int, int, int, int | None, int | None]  # of a table of slices


class DocumentChunk(NamedTuple):
    """Tokens of a document: where they lie in the order of the ranks, from where on in the document, and how many."""

    at: int
    first: int
    size: int


def mask_of_rows(rows: Iterable[Row]) -> Mask | None:
    """Return the mask of disjoint slices; None: there are none, or more than a mask may have."""
    found = [Slice(*row) for row in islice(rows, MOST_SLICES + 1)]
    return Mask(slices=known_disjoint(found), q_start=None) if 0 < len(found) <= MOST_SLICES else None


def slices_of(padded: Sequence[int], real: Sequence[int], ranks: int, tokens: int, mask: Mask) -> Iterator[Row]:
    """Yield the disjoint slices of all documents, each under `mask`: a window, as Causal() is.

    padded, real: lengths of each document with and without the padding at its end, which is seen by nothing.
    tokens: that each rank holds, of all documents and behind them.
    """
    start = 0
    for length, held in zip(padded, real, strict=True):
        if held:
            chunks = [_chunks(length, held, start + rank * tokens, rank, ranks) for rank in range(ranks)]
            is_whole = length == held and ranks > 1
            if is_whole and mask in (Causal(), Full()):
                yield from _of_ranks(length // ranks, start, ranks, tokens, mask == Causal())
            else:
                yield from slices_of_chunks([chunk for each in chunks for chunk in each], mask)
        start += length // ranks


def _chunks(length: int, held: int, at: int, rank: int, ranks: int) -> list[DocumentChunk]:
    """Return a rank's chunks of a document without its padding; of one rank alone, the document."""
    size = length // (2 * ranks) if ranks > 1 else length
    numbers = (rank, 2 * ranks - 1 - rank) if ranks > 1 else (0,)
    found = [DocumentChunk(at + index * size, number * size, size) for index, number in enumerate(numbers)]
    cut = [each._replace(size=min(size, held - each.first)) for each in found]
    return [each for each in cut if each.size > 0]


def _of_ranks(size: int, start: int, ranks: int, tokens: int, is_causal: bool) -> Iterator[Row]:
    """Yield the slices of a document without padding, one for each pair of ranks, which hold `size` tokens each.

    Under a causal mask the second chunk of a rank sees all of later ranks, and a rank the first chunk of earlier ones.
    """
    half = size // 2
    for q_rank, kv_rank in product(range(ranks), repeat=2):
        q, kv = start + q_rank * tokens, start + kv_rank * tokens
        if not is_causal:
            yield (q, q + size, kv, kv + size, None, None)
        elif q_rank == kv_rank:
            yield (q, q + size, kv, kv + size, None, 0)
        elif q_rank > kv_rank:
            yield (q, q + size, kv, kv + half, None, None)
        else:
            yield (q + half, q + size, kv, kv + size, None, None)


def slices_of_chunks(chunks: Sequence[DocumentChunk], mask: Mask) -> Iterator[Row]:
    """Yield the slices of any two chunks that see something of each other."""
    for q, kv in product(chunks, repeat=2):
        shift = (q.first - q.at) - (kv.first - kv.at)  # of kv - q, between the document and the order of the ranks
        low, high = (None if bound is None else bound + shift for bound in (mask.low, mask.high))
        least, most = kv.at - (q.at + q.size - 1), kv.at + kv.size - 1 - q.at
        if (high is None or high >= least) and (low is None or low <= most):
            yield (q.at, q.at + q.size, kv.at, kv.at + kv.size, low, high)
