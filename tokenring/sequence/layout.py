"""Layouts: the ranks that own the positions of the sequence.

A layout cuts a sequence into equal chunks and gives each rank some of them. A rank's local
tensor holds its chunks one after another, in ascending order of their first position. Where the
length does not divide, the chunks are those of the next length that does, cut at the end of the
sequence: the last ones are shorter, or empty, and so are the local tensors of their owners.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from tokenring.errors import ConfigurationError

COUNTED_LENGTH = 2**24  # positions that may be counted one by one, for chunks that interleave in no way of ours
AUTO = "auto"  # the layout that follows from a mask; made by the planner
NAME = re.compile("([a-z]+)(?:/([1-9][0-9]{0,8}))?", re.ASCII)

# State of the process: operators of torch.compile take a number for a layout. It holds none alive.
_numbers = itertools.count(1)
_numbered: WeakValueDictionary[int, Layout] = WeakValueDictionary()


class Positions(NamedTuple):
    """The positions range(start, stop, step) of one chunk; none where the sequence ends before it."""

    start: int
    stop: int
    step: int = 1

    def __len__(self) -> int:
        return len(range(self.start, self.stop, self.step))

    @property
    def last(self) -> int:
        """Last of the positions."""
        return self.start + (len(self) - 1) * self.step

    def part(self, index: int, count: int) -> Positions:
        """Return the index-th of `count` equal neighbouring parts."""
        size = len(self) // count
        start = self.start + index * size * self.step
        return Positions(start, start + (size - 1) * self.step + 1, self.step)

    def cut(self, first: int, count: int) -> Positions:
        """Return `count` positions from the `first` on, or as many of them as there are."""
        start = self.start + first * self.step
        size = max(0, min(count, len(self) - first))
        return Positions(start, start + (size - 1) * self.step + 1 if size else start, self.step)

    def join(self, after: Positions) -> Positions | None:
        """Return both as one range, if `after` goes on where this one ends; else None."""
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
    numbered by their first position. A chunk is shorter only where the sequence ends in it or before it:
    Positions(start, start) beyond the end are none. Raises ConfigurationError when they do not partition
    range(length) into such parts, the same number for each rank.
    """

    name: str
    world_size: int
    length: int
    chunks: tuple[Positions, ...]
    owners: tuple[int, ...]

    def __post_init__(self) -> None:
        self._take_number()
        if not isinstance(self.name, str) or not self.name:
            raise ConfigurationError(f"layout {self.name!r}: give it a name, which its texts show")
        for size in ("world_size", "length"):
            object.__setattr__(self, size, _at_least_one(f"layout {self.name!r}", size, getattr(self, size)))
        if not isinstance(self.chunks, tuple) or not isinstance(self.owners, tuple):
            raise ConfigurationError(f"layout {self.name!r}: give its chunks and owners as tuples")
        if len(self.chunks) != len(self.owners) or not self.chunks:
            raise ConfigurationError(f"layout {self.name!r}: {len(self.chunks)} chunks for {len(self.owners)} owners")
        for chunk in self.chunks:
            if not _is_range(chunk, self.length):
                raise ConfigurationError(
                    f"layout {self.name!r}: a chunk is {chunk!r}; write Positions(start, stop, step) of integers "
                    f"with start from 0 on, stop above it and step from 1 on"
                )
        if sum(map(len, self.chunks)) != self.length or not all(map(self._is_whole_or_cut, self.chunks)):
            raise ConfigurationError(f"layout {self.name!r}: its chunks are not equal parts of {self.length} positions")
        if list(self.chunks) != sorted(self.chunks):
            raise ConfigurationError(f"layout {self.name!r}: number the chunks by their first position")
        counts = Counter(self.owners)
        known = {type(owner) for owner in self.owners} == {int} and counts.keys() <= set(range(self.world_size))
        if not known or len(counts) < self.world_size or len(set(counts.values())) != 1:
            raise ConfigurationError(
                f"layout {self.name!r}: give each of the {self.world_size} ranks equally many chunks"
            )
        check_partition(self)
        for rank, owned in enumerate(self._owned if not self.is_even else ()):
            there = [chunk for chunk in owned if len(self.chunks[chunk])]
            if any(len(self.chunks[chunk]) < self.chunk_length for chunk in there[:-1]):
                raise ConfigurationError(
                    f"layout {self.name!r}: rank {rank} has two chunks that the end of the sequence cuts; "
                    f"of each rank's chunks only the last may be shorter"
                )

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of all fields: worked out once, it is that of hundreds of chunks."""
        return hash((self.name, self.world_size, self.length, self.chunks, self.owners))

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled: without the hash, since another process has other hashes of texts."""
        return {name: value for name, value in vars(self).items() if name not in ("_hash", "number")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._take_number()

    def _take_number(self) -> None:
        """Give it a `number` of its own, by which compiled graphs of this process know it: see `layout_numbered`."""
        self.number: int
        object.__setattr__(self, "number", next(_numbers))
        _numbered[self.number] = self

    @cached_property
    def chunk_length(self) -> int:
        """Number of positions in each chunk that the end of the sequence does not cut."""
        return max(map(len, self.chunks))

    def _is_whole_or_cut(self, chunk: Positions) -> bool:
        return len(chunk) == self.chunk_length or chunk.start + (self.chunk_length - 1) * chunk.step >= self.length

    @cached_property
    def is_even(self) -> bool:
        """True if all chunks are equally long."""
        return self.chunk_length * len(self.chunks) == self.length

    def takes_pieces(self, pieces: int) -> bool:
        """Return whether chunks are cut into so many pieces; not every one is as long where the length is not even."""
        return pieces >= 1 and not (self.is_even and self.chunk_length % pieces)

    @property
    def local_length(self) -> int:
        """Positions that each rank holds; where they differ, those of the rank that holds most."""
        return max(self.local_lengths)

    @cached_property
    def local_lengths(self) -> tuple[int, ...]:
        """Positions that each rank holds, by rank."""
        if self.is_even:
            return (self.length // self.world_size,) * self.world_size
        return tuple(sum(len(self.chunks[chunk]) for chunk in owned) for owned in self._owned)

    @cached_property
    def _owned(self) -> tuple[tuple[int, ...], ...]:
        owned: list[list[int]] = [[] for _ in range(self.world_size)]
        for chunk, owner in enumerate(self.owners):
            owned[owner].append(chunk)
        return tuple(map(tuple, owned))

    def owned_by(self, rank: int) -> tuple[int, ...]:
        """Return the rank's chunks, in the order in which its local tensor holds them."""
        return self._owned[rank]

    @cached_property
    def local_start(self) -> tuple[int, ...]:
        """First row of each chunk in its owner's local tensor."""
        start = [0] * len(self.chunks)
        for owned in self._owned:
            for index, chunk in enumerate(owned):
                start[chunk] = index * self.chunk_length
        return tuple(start)

    def positions(self, rank: int) -> list[int]:
        """Return the global position of each token of the rank's local tensor; none where it holds none."""
        return [p for chunk in self.owned_by(rank) for p in range(*self.chunks[chunk])]


def layout_numbered(number: int) -> Layout | None:
    """Return the layout of this process that has this number; None where it is gone."""
    return _numbered.get(number)


def contiguous(world_size: int, length: int, cuts: int = 1) -> Layout:
    """Return the layout in which rank r holds the r-th of `world_size` equal parts, itself cut `cuts` times."""
    world_size, length, cuts = _sizes("contiguous", world_size, length, cuts)
    count = world_size * cuts
    return Layout(
        _name("contiguous", cuts), world_size, length, _cut(length, count), tuple(c // cuts for c in range(count))
    )


def zigzag(world_size: int, length: int, cuts: int = 1) -> Layout:
    """Return the layout in which rank r holds parts r and 2P-1-r of 2P, which balances causal attention."""
    world_size, length, cuts = _sizes("zigzag", world_size, length, cuts)
    count = 2 * world_size * cuts
    owners = tuple(min(c // cuts, 2 * world_size - 1 - c // cuts) for c in range(count))
    return Layout(_name("zigzag", cuts), world_size, length, _cut(length, count), owners)


def striped(world_size: int, length: int, cuts: int = 1) -> Layout:
    """Return the layout with positions r, r+P, r+2P, ... at rank r: Striped Attention (arXiv:2311.09431)."""
    world_size, length, cuts = _sizes("striped", world_size, length, cuts)
    size = -(-length // (world_size * cuts))
    starts = [cut * size * world_size + rank for cut in range(cuts) for rank in range(world_size)]
    chunks = [_chunk(start, size, world_size, length) for start in starts]
    return Layout(_name("striped", cuts), world_size, length, tuple(chunks), tuple(range(world_size)) * cuts)


LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def make_layout(name: str | Layout, world_size: int, length: int) -> Layout:
    """Return the layout called `name` ("zigzag", or finer cut: "zigzag/4") of `length` positions.

    Raises ConfigurationError for an unknown name, or a length that is no integer from 1 on.
    """
    if isinstance(name, Layout):
        if (name.world_size, name.length) != (world_size, length):
            raise ConfigurationError(
                f"layout {name.name!r} is for {name.world_size} ranks and {name.length} positions; "
                f"the group has {world_size} ranks and the tensors {length} positions"
            )
        return name
    base, cuts = read_name(name)
    return LAYOUTS[base](world_size, length, cuts)


def read_name(name: object) -> tuple[str, int]:
    """Return the kind of layout that a name stands for, and how often it is cut. Raises ConfigurationError."""
    known = f"choose one of {', '.join(LAYOUTS)}, or cut one finer, as in 'zigzag/2'"
    if not isinstance(name, str):
        raise ConfigurationError(f"layout is of type {type(name).__name__}; {known}, or give a Layout")
    match = NAME.fullmatch(name)
    if match is None or match[1] not in LAYOUTS:
        from tokenring.nearest import hint

        raise ConfigurationError(f"unknown layout {name!r}; {known}{hint(name.partition('/')[0], LAYOUTS)}")
    return match[1], int(match[2] or 1)


def check_partition(layout: Layout) -> None:
    """Raise ConfigurationError unless the chunks hold every position once."""
    if join_chunks(_interleaved([chunk for chunk in layout.chunks if len(chunk)])) == [Positions(0, layout.length)]:
        return
    if layout.length > COUNTED_LENGTH:
        raise ConfigurationError(
            f"layout {layout.name!r} is not one of tokenring's; its {layout.length} positions are too many to check "
            f"(at most {COUNTED_LENGTH})"
        )
    seen = bytearray(layout.length)
    for chunk in layout.chunks:
        inner = range(layout.length)[chunk.start : chunk.stop : chunk.step]
        seen[chunk.start : chunk.stop : chunk.step] = b"\x01" * len(inner)
    if (missing := seen.find(0)) >= 0:
        raise ConfigurationError(f"layout {layout.name!r}: position {missing} of {layout.length} is in no chunk")


def _interleaved(chunks: Sequence[Positions]) -> list[Positions]:
    """Return chunks with every n of step n that lie between each other, as striped ones do, as one range."""
    made: list[Positions] = []
    at = 0
    while at < len(chunks):
        first = chunks[at]
        group = chunks[at : at + first.step]
        stop = max(chunk.last for chunk in group) + 1
        counts = [len(range(first.start + index, stop, first.step)) for index in range(first.step)]
        beside = [_chunk(first.start + index, count, first.step, stop) for index, count in enumerate(counts) if count]
        if first.step > 1 and list(group[: len(beside)]) == beside and len(group[len(beside) :]) == 0:
            made.append(Positions(first.start, stop))
            at += len(group)
        else:
            made.append(first)
            at += 1
    return made


def split_order(layout: Layout) -> list[int]:
    """Return the global position of each token when all ranks' local tensors are laid end to end."""
    return [p for rank in range(layout.world_size) for p in layout.positions(rank)]


def join_chunks(chunks: Sequence[Positions]) -> list[Positions]:
    """Join neighbouring ranges wherever one goes on where the last ended."""
    joined: list[Positions] = []
    for chunk in chunks:
        both = joined[-1].join(chunk) if joined else None
        if both is None:
            joined.append(chunk)
        else:
            joined[-1] = both
    return joined


def _cut(length: int, count: int) -> tuple[Positions, ...]:
    size = -(-length // count)
    return tuple(_chunk(c * size, size, 1, length) for c in range(count))


def _chunk(start: int, size: int, step: int, length: int) -> Positions:
    """Return so many positions from `start` on, those of a sequence of this length."""
    return Positions(start, start + size * step, step).cut(0, len(range(start, length, step)))


def _name(base: str, cuts: int) -> str:
    return base if cuts == 1 else f"{base}/{cuts}"


def _sizes(base: str, world_size: int, length: int, cuts: int) -> tuple[int, int, int]:
    """Return world size, length and cuts as integers. Raises ConfigurationError unless they are, from 1 on."""
    what = f"layout {base!r}"
    world_size, cuts = _at_least_one(what, "world_size", world_size), _at_least_one(what, "cuts", cuts)
    return world_size, _at_least_one(what, "length", length), cuts


def _at_least_one(what: str, name: str, given: object) -> int:
    value = as_integer(given)
    if value is None or value < 1:
        raise ConfigurationError(f"{what}: {name} is {given!r}; give a positive integer")
    return value


def _is_range(chunk: object, length: int) -> bool:
    if not isinstance(chunk, Positions) or not type(chunk.start) is type(chunk.stop) is type(chunk.step) is int:
        return False
    return (0 <= chunk.start < chunk.stop or length <= chunk.start == chunk.stop) and chunk.step >= 1


def as_integer(value: object) -> int | None:
    """Return the value as an int, None if it is no integer of Python, numpy or torch; booleans are none."""
    try:
        return None if isinstance(value, bool) else operator.index(cast(int, value))
    except TypeError:
        return None
