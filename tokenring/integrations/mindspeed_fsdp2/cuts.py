"""The cuts of these trainers: zigzag over the ranks of a ring, then in equal parts over those of Ulysses.

MindSpeed-LLM has one of the two, MindSpeed-MM both. Of P ranks with a ring of R rank p has place p % R in its ring and
place p // R among the U = P / R that share one part of it. Where a length does not divide by U, the first have a token
more. Vision encoders under a ring cut each document by itself instead, in R parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron.packs import DocumentChunk, mask_of_rows, slices_of_chunks
from tokenring.integrations.mindspeed_cuts.layouts import hybrid_layout
from tokenring.sequence.layout import Layout, contiguous, zigzag
from tokenring.sequence.mask import Documents, Full, Mask
from tokenring.sequence.slices import MOST_SLICES

KEPT = 64  # cuts, of as many lengths and packs
Ends = tuple[int, ...]  # of documents, from 0 on


class TrainerCut(NamedTuple):
    """Hold the ranks in a ring, and those that share each part of it by Ulysses; both 1: a sequence is whole."""

    ring: int
    ulysses: int

    @property
    def ranks(self) -> int:
        """Return the number of ranks that hold a sequence together."""
        return self.ring * self.ulysses


class CutCall(NamedTuple):
    """Hold how a call is to be made: its mask, and the layout of its tensors; None: that of the context.

    tokens: that each rank holds, where they are to be padded to one number; None: the layout says them.
    """

    mask: Mask
    layout: Layout | None
    tokens: tuple[int, ...] | None = None


class Run(NamedTuple):
    """Hold tokens of a document that follow each other on a rank: from where on in the document, and how many."""

    document: int
    first: int
    size: int


def cut_call(cut: TrainerCut, tokens: int, length: int | None, ends: Ends | None, mask: Mask) -> CutCall:
    """Return how a call of one sequence is made, of which this rank holds `tokens` tokens.

    length: of the sequence, where it is known. ends: of its documents, from 0 on; None: it is one. mask: of a document.
    Raises ConfigurationError for ends or tokens that are not those of such a sequence.
    """
    if ends is not None and len(ends) == 2:
        length, ends = length or ends[1], None
    if ends is None and mask == Full():
        return CutCall(mask, None)
    length = length or (ends[-1] if ends else tokens * cut.ranks)
    if ends is not None and ends[-1] != length:
        raise ConfigurationError(
            f"packed documents end at {_shown(ends)}, and the sequence of {cut.ranks} ranks has {length} tokens: give "
            f"the ends in the whole sequence, before it is cut"
        )
    return _cut_call(cut, length, ends, mask)


@lru_cache(maxsize=KEPT)
def _cut_call(cut: TrainerCut, length: int, ends: Ends | None, mask: Mask) -> CutCall:
    whole = mask if ends is None else mask & Documents(ends)
    if cut.ring > 1:
        return CutCall(whole, _ring_layout(cut, length))
    layout = contiguous(cut.ranks, length)
    if layout.local_lengths == tuple(split_sizes(length, cut.ranks)):
        return CutCall(whole, layout)
    return uneven_call(_runs_of_equal_parts(length, ends or (0, length), cut.ranks), mask)


def cut_of_documents(cut: TrainerCut, parts: Sequence[Sequence[int]], mask: Mask) -> CutCall:
    """Return how a call is made of documents that are each cut by itself over the ring.

    parts: tokens of each document on each place in the ring, [R][documents].
    """
    return _cut_of_documents(cut, tuple(map(tuple, parts)), mask)


@lru_cache(maxsize=KEPT)
def _cut_of_documents(cut: TrainerCut, parts: tuple[tuple[int, ...], ...], mask: Mask) -> CutCall:
    if len(parts) != cut.ring:
        raise ConfigurationError(f"seq_split_lens have {len(parts)} rows, and the ring {cut.ring} ranks: give one each")
    begins = [[0, *accumulate(each)] for each in zip(*parts, strict=True)]  # of each document, by place in the ring
    runs: list[list[Run]] = []
    for rank in range(cut.ranks):
        place = rank % cut.ring
        rows = [Run(number, begins[number][place], size) for number, size in enumerate(parts[place])]
        start, size = _part(sum(parts[place]), cut.ulysses, rank // cut.ring)
        runs.append(list(_between(rows, start, start + size)))
    return uneven_call(runs, mask)


def uneven_call(runs: Sequence[Sequence[Run]], mask: Mask) -> CutCall:
    """Return how a call is made of any tokens on each rank: padded to one number, and a mask that sees no padding.

    Raises UnsupportedError where that mask would have more slices than a mask may.
    """
    tokens = tuple(sum(run.size for run in own) for own in runs)
    held = max(tokens)
    documents: dict[int, list[DocumentChunk]] = {}
    for rank, own in enumerate(runs):
        at = rank * held
        for run in own:
            if run.size:
                documents.setdefault(run.document, []).append(DocumentChunk(at, run.first, run.size))
            at += run.size
    made = mask_of_rows(row for chunks in documents.values() for row in slices_of_chunks(chunks, mask))
    if made is None:
        raise UnsupportedError(
            f"{len(documents)} documents on {len(runs)} ranks have more slices than a mask may ({MOST_SLICES}): pack "
            f"fewer, or make lengths multiples of the number of ranks"
        )
    return CutCall(made, contiguous(len(runs), len(runs) * held), tokens)


def split_sizes(length: int, ranks: int) -> list[int]:
    """Return the tokens of each rank in equal parts, as cal_split_sizes of MindSpeed-MM does."""
    return [_part(length, ranks, rank)[1] for rank in range(ranks)]


def _part(length: int, ranks: int, rank: int) -> tuple[int, int]:
    """Return where a rank's part of a length begins, and how many tokens it has."""
    size, rest = divmod(length, ranks)
    return rank * size + min(rank, rest), size + (rank < rest)


def _runs_of_equal_parts(length: int, ends: Ends, ranks: int) -> list[list[Run]]:
    whole = [Run(number, 0, stop - start) for number, (start, stop) in enumerate(pairwise(ends))]
    parts = [_part(length, ranks, rank) for rank in range(ranks)]
    return [list(_between(whole, start, start + size)) for start, size in parts]


def _between(rows: Sequence[Run], start: int, stop: int) -> Iterator[Run]:
    """Yield what rows [start, stop) hold of runs that follow each other."""
    at = 0
    for run in rows:
        first, last = max(start, at), min(stop, at + run.size)
        if first < last:
            yield Run(run.document, run.first + first - at, last - first)
        at += run.size


def _ring_layout(cut: TrainerCut, length: int) -> Layout:
    if length % (2 * cut.ring) or length % cut.ranks or (cut.ulysses % 2 and length % (2 * cut.ranks)):
        raise ConfigurationError(
            f"{length} tokens on a ring of {cut.ring} ranks with {cut.ulysses} of Ulysses: pad sequences to a multiple "
            f"of {2 * cut.ranks}"
        )
    if cut.ulysses == 1:
        return zigzag(cut.ring, length)
    neighbours = hybrid_layout(cut.ranks, length, cut.ulysses)
    owners = tuple(owner % cut.ulysses * cut.ring + owner // cut.ulysses for owner in neighbours.owners)
    return Layout(f"ring of {cut.ring}", cut.ranks, length, neighbours.chunks, owners)


def _shown(ends: Ends) -> str:
    return ", ".join(map(str, ends[1:] if len(ends) < 10 else (*ends[1:8], "...", ends[-1])))
