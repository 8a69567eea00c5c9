"""Ten kinds of masks, each with its definition written down anew, pair by pair."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

import torch

import tokenring as tr

KINDS = (
    "prefix", "prefix of each document", "images in a text", "block-causal", "chunks", "prefix tree",
    "window of each document", "cross-attention", "later start", "slices",
)  # fmt: skip
Sees = Callable[[int, int], bool]


class Kind(NamedTuple):
    """A mask for these lengths, and its definition: does q position i see kv position j."""

    mask: tr.Mask
    q_length: int
    kv_length: int
    sees: Sees

    def dense(self) -> torch.Tensor:
        """All pairs: booleans [q_length, kv_length]."""
        return torch.tensor([[self.sees(i, j) for j in range(self.kv_length)] for i in range(self.q_length)])


def kind(name: str, length: int, seed: int = 0, kv_length: int | None = None) -> Kind:
    """A mask of a kind for so many positions; kv_length: where the kind lets kv be longer or shorter."""
    random = Random(f"{name} {length} {seed}")
    longer = {"cross-attention": 2 * length, "later start": 2 * length}.get(name, length)
    kv = longer if kv_length is None else kv_length
    return Kind(*MAKE[name](random, length, kv))


def cuts(random: Random, length: int, most: int = 5) -> list[int]:
    """Ends of documents, with padding after the last one."""
    ends = sorted(random.sample(range(1, length), min(most, length - 1)))
    return [0, *ends]


def document(ends: list[int], at: int) -> int | None:
    """The number of the document in which a position lies; None: padding."""
    number = bisect_right(ends, at) - 1
    return number if number < len(ends) - 1 else None


def _prefix(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    prefix = random.randrange(1, n)
    return tr.PrefixLM(prefix), n, kv, lambda i, j: j <= i or (j < prefix and i < prefix)


def _prefixes(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    ends = cuts(random, n)
    lengths = [random.randrange(n // 2) for _ in ends[1:]]

    def sees(i: int, j: int) -> bool:
        of = document(ends, i)
        if of is None or of != document(ends, j):
            return False
        return j <= i or max(i, j) < ends[of] + lengths[of]

    return tr.PrefixLM(lengths, ends), n, kv, sees


def _images(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    ends = cuts(random, n, 6)[1:]
    spans = [(a, b) for a, b in zip(ends[::2], ends[1::2], strict=False)]
    mask = tr.Causal() | tr.Bidirectional(spans)
    return mask, n, kv, lambda i, j: j <= i or any(a <= i < b and a <= j < b for a, b in spans)


def _blocks(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    block = random.randrange(1, max(2, n // 3))
    return tr.BlockCausal(block), n, kv, lambda i, j: j // block <= i // block


def _chunks(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    size = random.randrange(2, max(3, n // 2))  # of 1 all gradients of q and k are 0
    return tr.Causal() & tr.Chunks(size), n, kv, lambda i, j: j <= i and i // size == j // size


def _tree(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    ends = cuts(random, n, 7)
    lengths = [b - a for a, b in pairwise(ends)]
    parents = [None if at == 0 or random.random() < 0.2 else random.randrange(at) for at in range(len(lengths))]

    def sees(i: int, j: int) -> bool:
        node, wanted = document(ends, i), document(ends, j)
        if node is None or wanted is None:
            return False
        if node == wanted:
            return j <= i
        while node is not None and node != wanted:
            node = parents[node]
        return node is not None

    return tr.PrefixTree(lengths, parents), n, kv, sees


def _windows(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    ends = cuts(random, n, 4)
    sizes = [(random.randrange(-1, n), random.randrange(-1, 5)) for _ in ends[1:]]

    def sees(i: int, j: int) -> bool:
        of = document(ends, i)
        if of is None or of != document(ends, j):
            return False
        left, right = sizes[of]
        return (left < 0 or i - j <= left) and (right < 0 or j - i <= right)

    return tr.Documents(ends, windows=sizes), n, kv, sees


def _cross(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    count = min(4, n - 1, kv - 1)
    q_ends, kv_ends = cuts(random, n, count), cuts(random, kv, count)
    q_ends[2:3] = q_ends[1:2] * len(q_ends[2:3])  # a sample without any q

    def sees(i: int, j: int) -> bool:
        return document(q_ends, i) is not None and document(q_ends, i) == document(kv_ends, j)

    return tr.Documents(q_ends, kv_ends), n, kv, sees


def _later(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    start, left, ends = max(0, kv - n), random.randrange(1, kv), cuts(random, kv, 3)
    of_both = tr.SlidingWindow(left, q_start=start) & tr.Documents(ends, q_start=start)

    def sees(i: int, j: int) -> bool:
        of = document(ends, i + start)
        return 0 <= i + start - j <= left and of is not None and of == document(ends, j)

    if random.random() < 0.5:
        return tr.Causal(q_start=start), n, kv, lambda i, j: j <= i + start
    return of_both, n, kv, sees


def _slices(random: Random, n: int, kv: int) -> tuple[tr.Mask, int, int, Sees]:
    """A grid of rectangles, some left out, each with one of MagiAttention's four kinds, or with any window."""
    rows = []
    q_ends, kv_ends = [*cuts(random, n, 3), n], [*cuts(random, kv, 2), kv]
    for q0, q1 in pairwise(q_ends):
        for kv0, kv1 in pairwise(kv_ends):
            low, high = kv0 - q0, kv1 - q1
            any_window = (
                sorted(random.sample(range(kv0 - q1 + 1, kv1 - q0), 2)) if kv1 - q0 - kv0 + q1 > 2 else [None] * 2
            )
            window = random.choice([(None, None), (None, high), (low, None), (low, max(low, high)), any_window])
            if random.random() < 0.8:
                rows.append((q0, q1, kv0, kv1, *window))

    def sees(i: int, j: int) -> bool:
        return any(
            a <= i < b and c <= j < d and (low is None or j - i >= low) and (high is None or j - i <= high)
            for a, b, c, d, low, high in rows
        )

    rows = rows or [(0, n, 0, kv, None, None)]
    return tr.Slices(rows), n, kv, sees


MAKE = dict(
    zip(
        KINDS,
        (_prefix, _prefixes, _images, _blocks, _chunks, _tree, _windows, _cross, _later, _slices),
        strict=True,
    )
)
