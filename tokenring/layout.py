"""Which rank owns which positions of the sequence.

A layout cuts a sequence into equal chunks and gives each rank some of them. A rank's local
tensor holds its chunks one after another, in ascending order of their first position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from tokenring.errors import ConfigurationError


class Positions(NamedTuple):
    """The positions range(start, stop, step) of one chunk; never empty in a valid layout."""

    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    @property
    def last(self) -> int:
        return self.start + (len(self) - 1) * self.step

    def part(self, index: int, count: int) -> Positions:
        """The index-th of `count` equal neighbouring parts."""
        size = len(self) // count
        start = self.start + index * size * self.step
        return Positions(start, start + (size - 1) * self.step + 1, self.step)

    def join(self, after: Positions) -> Positions | None:
        """Both as one range, if `after` goes on where this one ends; else None."""
        steps = {self.step} if len(self) > 1 else set()
        steps |= {after.step} if len(after) > 1 else set()
        steps |= {after.start - self.last}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            return Positions(self.start, after.last + 1, step)
        return None


@dataclass(frozen=True)
class Layout:
    """Equal chunks of `length` positions, each owned by one rank.

    chunks[c] are the positions of chunk c, owners[c] the rank that holds them. Chunks are
    numbered by their first position. Raises ConfigurationError when they do not partition
    range(length) into equal parts, the same number for each rank.
    """

    name: str
    world_size: int
    length: int
    chunks: tuple[Positions, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.chunks) != len(self.owners) or not self.chunks:
            raise ConfigurationError(f"layout {self.name!r}: {len(self.chunks)} chunks for {len(self.owners)} owners")
        if len({len(chunk) for chunk in self.chunks}) != 1 or self.chunk_length * len(self.chunks) != self.length:
            raise ConfigurationError(f"layout {self.name!r}: its chunks are not equal parts of {self.length} positions")
        if list(self.chunks) != sorted(self.chunks):
            raise ConfigurationError(f"layout {self.name!r}: number the chunks by their first position")
        counts = {self.owners.count(rank) for rank in range(self.world_size)}
        if len(counts) != 1 or not set(self.owners) <= set(range(self.world_size)):
            raise ConfigurationError(
                f"layout {self.name!r}: give each of the {self.world_size} ranks equally many chunks"
            )

    @property
    def chunk_length(self) -> int:
        return len(self.chunks[0])

    @property
    def local_length(self) -> int:
        """Positions that each rank holds."""
        return self.length // self.world_size

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(c for c, owner in enumerate(self.owners) if owner == rank) for rank in range(self.world_size)
        )

    def owned_by(self, rank: int) -> tuple[int, ...]:
        """The rank's chunks, in the order in which its local tensor holds them."""
        return self._owned[rank]

    @cached_property
    def local_start(self) -> tuple[int, ...]:
        """Where each chunk begins in its owner's local tensor."""
        start = [0] * len(self.chunks)
        for owned in self._owned:
            for index, chunk in enumerate(owned):
                start[chunk] = index * self.chunk_length
        return tuple(start)

    def positions(self, rank: int) -> list[int]:
        """The global position of each token of the rank's local tensor."""
        return [p for chunk in self.owned_by(rank) for p in range(*self.chunks[chunk])]


def contiguous(world_size: int, length: int, cuts: int = 1) -> Layout:
    """Rank r holds the r-th of `world_size` equal parts, itself cut `cuts` times."""
    count = world_size * cuts
    _check_divides("contiguous", world_size, length, count, cuts)
    return Layout(
        _name("contiguous", cuts), world_size, length, _cut(length, count), tuple(c // cuts for c in range(count))
    )


def zigzag(world_size: int, length: int, cuts: int = 1) -> Layout:
    """Rank r holds parts r and 2P-1-r of 2P, which balances causal attention."""
    count = 2 * world_size * cuts
    _check_divides("zigzag", world_size, length, count, cuts)
    owners = tuple(min(c // cuts, 2 * world_size - 1 - c // cuts) for c in range(count))
    return Layout(_name("zigzag", cuts), world_size, length, _cut(length, count), owners)


def striped(world_size: int, length: int, cuts: int = 1) -> Layout:
    """Rank r holds positions r, r+P, r+2P, ...: Striped Attention (arXiv:2311.09431)."""
    _check_divides("striped", world_size, length, world_size * cuts, cuts)
    span = length // cuts
    chunks = [
        Positions(cut * span + rank, (cut + 1) * span - world_size + rank + 1, world_size)
        for cut in range(cuts)
        for rank in range(world_size)
    ]
    return Layout(_name("striped", cuts), world_size, length, tuple(chunks), tuple(range(world_size)) * cuts)


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def make_layout(name: str | Layout, world_size: int, length: int) -> Layout:
    """The layout called `name` ("zigzag", or finer cut: "zigzag/4") of `length` positions.

    Raises ConfigurationError for an unknown name, a length that does not divide, or an empty shard.
    """
    if isinstance(name, Layout):
        if (name.world_size, name.length) != (world_size, length):
            raise ConfigurationError(
                f"layout {name.name!r} is for {name.world_size} ranks and {name.length} positions; "
                f"the group has {world_size} ranks and the tensors {length} positions"
            )
        check_partition(name)
        return name
    base, _, cuts = name.partition("/")
    if base not in LAYOUTS or (cuts and not (cuts.isdigit() and int(cuts))):
        known = ", ".join(LAYOUTS)
        raise ConfigurationError(f"unknown layout {name!r}; choose one of {known}, or cut one finer, as in 'zigzag/2'")
    return LAYOUTS[base](world_size, length, int(cuts or 1))


def check_partition(layout: Layout) -> None:
    """Raises ConfigurationError unless the chunks hold every position once; for layouts from outside."""
    if join_chunks(layout.chunks) == [Positions(0, layout.length)]:
        return
    seen = set().union(*(range(*chunk) for chunk in layout.chunks))
    if seen != set(range(layout.length)):
        missing = min(set(range(layout.length)) - seen, default=None)
        raise ConfigurationError(f"layout {layout.name!r}: position {missing} of {layout.length} is in no chunk")


def split_order(layout: Layout) -> list[int]:
    """The global position of each token when all ranks' local tensors are laid end to end."""
    return [p for rank in range(layout.world_size) for p in layout.positions(rank)]


def join_chunks(chunks: Sequence[Positions]) -> list[Positions]:
    """Neighbouring ranges joined wherever one goes on where the last ended."""
    joined: list[Positions] = []
    for chunk in chunks:
        both = joined[-1].join(chunk) if joined else None
        if both is None:
            joined.append(chunk)
        else:
            joined[-1] = both
    return joined


def _cut(length: int, count: int) -> tuple[Positions, ...]:
    size = length // count
    return tuple(Positions(c * size, (c + 1) * size) for c in range(count))


def _name(base: str, cuts: int) -> str:
    return base if cuts == 1 else f"{base}/{cuts}"


def _check_divides(base: str, world_size: int, length: int, count: int, cuts: int) -> None:
    if length < count or length % count:
        padded = max(count, -(-length // count) * count)
        found = "is empty for some ranks" if length < count else "does not divide"
        raise ConfigurationError(
            f"layout {_name(base, cuts)!r} over {world_size} ranks cuts a sequence into {count} chunks; "
            f"a length of {length} {found}: pad to {padded}, or choose another layout"
        )
