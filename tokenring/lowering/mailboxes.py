"""Mailboxes: room beside the pool for messages whose puts write to the place at the peer that they read from.

Such a put cannot reach the message's own place. The sender copies the message into a box and puts that, the receiver
copies it out of the box. A box lies at one offset on both ranks, so that at each rank the boxes of all that it sends
and receives must be apart: intervals that colour the edges of a graph whose vertices are ranks. Pure functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenring.lowering.target import Link

BOXES = 2  # of a line: one message waits to be taken out while the next one comes
ALIGNED_BYTES = 256  # copies of whole lines, whatever copies them
Interval = tuple[int, int]  # start and end in bytes


@dataclass(frozen=True)
class Mailboxes:
    """Places of the boxes of each line, which its messages take in turn; nbytes: what they need at every rank."""

    nbytes: int
    places: Mapping[Link, tuple[int, ...]]

    def place(self, link: Link, number: int) -> int:
        """Return the offset of the box of a line's message of this number."""
        boxes = self.places[link]
        return boxes[number % len(boxes)]


def lay(messages: Mapping[Link, Sequence[int]]) -> Mailboxes:
    """Return boxes for these messages, given in bytes by line; the same on all ranks that know the same.

    The largest lines come first, each at the lowest offset that is free at both its ends.
    """
    taken: dict[int, list[Interval]] = defaultdict(list)
    places: dict[Link, tuple[int, ...]] = {}
    for link, size, count in sorted(_needs(messages), key=lambda each: (-each[1] * each[2], each[0])):
        start = _lowest([*taken[link[0]], *taken[link[1]]], size * count)
        for rank in link[:2]:
            taken[rank].append((start, start + size * count))
        places[link] = tuple(start + size * number for number in range(count))
    return Mailboxes(max((end for each in taken.values() for _, end in each), default=0), places)


def _needs(messages: Mapping[Link, Sequence[int]]) -> Iterable[tuple[Link, int, int]]:
    """Yield, of each line, the bytes of a box and how many boxes it needs."""
    for link, sizes in messages.items():
        if sizes:
            yield link, -(-max(sizes) // ALIGNED_BYTES) * ALIGNED_BYTES, min(BOXES, len(sizes))


def _lowest(taken: Sequence[Interval], nbytes: int) -> int:
    """Return the lowest offset from which on so many bytes are free."""
    start = 0
    for low, high in sorted(taken):
        if low - start >= nbytes:
            break
        start = max(start, high)
    return start
