"""Density of a mask: the share of all (query, key) pairs that it leaves, and whether it is even over pairs of ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tokenring.sequence.layout import Layout, Positions, join_chunks
from tokenring.sequence.mask import Mask
from tokenring.sequence.region import Patch

UNEVEN = 0.1  # a share that differs by more from that of the whole is another one
MOST_CHUNK_PAIRS = 1 << 14  # that are looked at one by one: 64 ranks of two chunks
SOME = 3  # owners of queries that are looked at, and one more of keys


def visible_pairs(mask: Mask, q_length: int, kv_length: int) -> int:
    """Return the number of (query, key) pairs that a mask leaves, of one head."""
    region: Iterable[Patch] = mask.region(Positions(0, q_length), Positions(0, kv_length))
    return sum(patch.pairs() for patch in region)


def visible_share(mask: Mask, q_length: int, kv_length: int) -> float:
    """Return the share of all pairs that a mask leaves."""
    return visible_pairs(mask, q_length, kv_length) / (q_length * kv_length)


def own_pairs(mask: Mask, q_layout: Layout, kv_layout: Layout, groups: Sequence[Sequence[int]]) -> int:
    """Return how many (query, key) pairs that a mask leaves have both in the same group of ranks; at most.

    These are pairs of one head. Where there are many chunks, or all is visible: all pairs that the groups have.
    """
    if mask.is_full or len(q_layout.chunks) * len(kv_layout.chunks) > MOST_CHUNK_PAIRS:
        return sum(len(group) ** 2 for group in groups) * q_layout.local_length * kv_layout.local_length
    return sum(_seen(mask, q_layout, kv_layout, group, group) for group in groups)


def is_even(mask: Mask, q_layout: Layout, kv_layout: Layout) -> bool:
    """Return whether a mask leaves about the same share of every two ranks' pairs, judged by some of them.

    So do full masks, and causal ones in layouts that balance them. Where it does not, as a window in a contiguous
    layout, ranks compute unequally much, and blocks that nobody sees need not move. Nor where ranks hold parts of
    unequal length.
    """
    if not (_has_equal_parts(q_layout) and _has_equal_parts(kv_layout)):
        return False
    if mask.is_full:
        return True
    whole = visible_share(mask, q_layout.length, kv_layout.length)
    return all(
        abs(_share_of(mask, q_layout, kv_layout, q_owner, kv_owner) - whole) <= UNEVEN * whole
        for q_owner in _some(q_layout.world_size, SOME)
        for kv_owner in _some(kv_layout.world_size, SOME + 1)
    )


def _has_equal_parts(layout: Layout) -> bool:
    """Return whether all ranks hold about as many positions."""
    return layout.is_even or layout.local_length - min(layout.local_lengths) <= UNEVEN * layout.local_length


def most_of_own_rows(mask: Mask, q_layout: Layout, kv_length: int) -> float:
    """Return the most pairs that one rank's own queries see, as a multiple of the average over ranks.

    By the ranks at the ends and some between them.
    """
    average = visible_pairs(mask, q_layout.length, kv_length) / q_layout.world_size
    everything = Positions(0, kv_length)
    seen = [
        sum(patch.pairs() for q in _owned(q_layout, [rank]) for patch in mask.region(q, everything))
        for rank in _some(q_layout.world_size, SOME)
    ]
    return max(seen) / average if average else 1.0


def _some(count: int, wanted: int) -> list[int]:
    """Return the first, the last, and others between them; all where there are few."""
    return sorted({each * (count - 1) // (wanted - 1) for each in range(wanted)})


def _share_of(mask: Mask, q_layout: Layout, kv_layout: Layout, q_owner: int, kv_owner: int) -> float:
    seen = _seen(mask, q_layout, kv_layout, (q_owner,), (kv_owner,))
    return seen / (q_layout.local_lengths[q_owner] * kv_layout.local_lengths[kv_owner])


def _seen(mask: Mask, q_layout: Layout, kv_layout: Layout, q_owners: Iterable[int], kv_owners: Iterable[int]) -> int:
    """Return the number of visible pairs of queries of some ranks and keys of some."""
    queries, keys = _owned(q_layout, q_owners), _owned(kv_layout, kv_owners)
    return sum(patch.pairs() for q in queries for kv in keys for patch in mask.region(q, kv))


def _owned(layout: Layout, owners: Iterable[int]) -> list[Positions]:
    """Return the positions that these ranks own, neighbouring chunks together."""
    chunks = (layout.chunks[chunk] for rank in owners for chunk in layout.owned_by(rank))
    return join_chunks(sorted(chunk for chunk in chunks if len(chunk)))
