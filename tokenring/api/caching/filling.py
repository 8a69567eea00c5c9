"""The tokens that a layer of a cache holds, and where they lie: the same on all ranks, without any tensor.

Sealed tokens lie at one rank each, open ones, the newest, at all ranks. Appending makes a new `Filled`, with the copies
that lead to it; layers in the same state share both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import NamedTuple

import torch

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, Positions, join_chunks

Runs = tuple[Positions, ...]


class CacheSight(NamedTuple):
    """The rules that hide keys from rows, beside their order. window: a row sees so many keys, its own included.

    starts: the first token of each row of the batch, int64 [B]; before it is padding. latest: the last of them.
    """

    window: int | None = None
    starts: torch.Tensor | None = None
    latest: int = 0

    @property
    def hides_nothing(self) -> bool:
        """True if rows see all that comes before them."""
        return self.window is None and self.starts is None


class Room(NamedTuple):
    """The sizes of a cache: ranks, tokens of a page, of all, and how many sealed ones a rank has memory for."""

    ranks: int
    page: int
    capacity: int
    sealed: int

    @property
    def open(self) -> int:
        """Tokens that the open part has memory for: one page for each rank."""
        return self.ranks * self.page


class Deal(NamedTuple):
    """A page that becomes sealed: from `start` of the open part on, at `rank` from `into` on."""

    start: int
    rank: int
    into: int


class Filled:
    """The tokens of one layer: their number, and the positions of those that lie sealed at each rank, and open.

    trail: a digest of what led to it, by which ranks compare it in a time that does not depend on its length.
    """

    __slots__ = ("_after", "counts", "length", "open", "open_runs", "sealed", "trail")

    def __init__(
        self, length: int, sealed: tuple[Runs, ...], counts: tuple[int, ...], open_runs: Runs, open_count: int,
        trail: str = "",
    ) -> None:  # fmt: skip
        self.length, self.sealed, self.counts = length, sealed, counts
        self.open_runs, self.open, self.trail = open_runs, open_count, trail
        self._after: dict[object, Appended] = {}

    @staticmethod
    def empty(ranks: int) -> Filled:
        """Return what a new layer holds."""
        return Filled(0, ((),) * ranks, (0,) * ranks, (), 0)

    def after(self, tokens: int, room: Room) -> Appended:
        """Return what it holds, and what is copied, once all ranks have appended so many tokens to the open part."""
        if tokens not in self._after:
            self._after = {tokens: _appended(self, tokens, room)}
        return self._after[tokens]

    def after_sharded(self, layout: Layout, room: Room) -> Filled:
        """Return what it holds once each rank has sealed its part of new tokens. Raises ConfigurationError."""
        key = layout.name, layout.length
        if key not in self._after:
            self._after = {key: Appended(_sharded(self, layout, room), (), 0)}
        return self._after[key].filled

    def cropped(self, length: int) -> Filled:
        """Return what is left of it with the first `length` tokens only."""
        sealed = tuple(below(runs, length) for runs in self.sealed)
        open_runs = below(self.open_runs, length)
        trail = self.then(f"keep {length}")
        return Filled(length, sealed, tuple(map(_count, sealed)), open_runs, _count(open_runs), trail)

    def then(self, what: str) -> str:
        """Return the trail that goes on from here with an operation."""
        return hashlib.sha256(f"{self.trail} {what}".encode()).hexdigest()[:16]


class Appended(NamedTuple):
    """The tokens of a layer after an append, the pages that were sealed by it, and how many open tokens stay."""

    filled: Filled
    deals: tuple[Deal, ...]
    sealed_tokens: int


def _appended(before: Filled, tokens: int, room: Room) -> Appended:
    """Seal whole rounds of pages, one for each rank, the oldest tokens first; each goes where fewest are sealed."""
    counts, deals, at, left = list(before.counts), [], 0, before.open + tokens
    while left >= room.open:
        for _ in range(room.ranks):
            rank = min(range(room.ranks), key=lambda each: (counts[each], each))
            if counts[rank] + room.page > room.sealed:  # near the end of a cache that was cropped: they stay open
                break
            deals.append(Deal(at, rank, counts[rank]))
            counts[rank] += room.page
            at, left = at + room.page, left - room.page
        else:
            continue
        break
    runs = (*before.open_runs, Positions(before.length, before.length + tokens))
    sealed = [list(each) for each in before.sealed]
    for deal in deals:
        sealed[deal.rank] += cut(runs, deal.start, room.page)
    found = tuple(tuple(join_chunks(each)) for each in sealed) if deals else before.sealed
    opened = tuple(join_chunks(cut(runs, at, left)))
    after = Filled(before.length + tokens, found, tuple(counts), opened, left, before.then(f"append {tokens}"))
    return Appended(after, tuple(deals), at)


def _sharded(before: Filled, layout: Layout, room: Room) -> Filled:
    counts = tuple(a + b for a, b in zip(before.counts, layout.local_lengths, strict=True))
    if max(counts) > room.sealed:
        raise ConfigurationError(
            f"the cache has room for {room.sealed} sealed tokens at each rank, and {layout.length} sharded ones would "
            f"make it {max(counts)}: make it with a larger capacity, or give the last tokens with q_home='all'"
        )
    sealed = []
    for rank, runs in enumerate(before.sealed):
        sealed.append(tuple(join_chunks([*runs, *runs_of(layout, rank, before.length)])))
    trail = before.then(f"shard {layout.name} {layout.length}")
    return Filled(before.length + layout.length, tuple(sealed), counts, before.open_runs, before.open, trail)


# ---------- runs of positions


def runs_of(layout: Layout, rank: int, start: int) -> Runs:
    """Return the positions of a rank's part of a sequence that begins at `start`."""
    chunks = (layout.chunks[chunk] for chunk in layout.owned_by(rank))
    return tuple(Positions(a + start, b + start, step) for a, b, step in chunks)


def cut(runs: Iterable[Positions], first: int, count: int) -> Runs:
    """Return `count` positions from the `first` on, in the order of the runs."""
    found = []
    for run in runs:
        part = run.cut(min(first, len(run)), count)
        first, count = max(0, first - len(run)), count - len(part)
        if len(part):
            found.append(part)
    return tuple(found)


def below(runs: Iterable[Positions], length: int) -> Runs:
    """Return what of the runs lies below a position; runs ascend, so that is where each of them begins."""
    kept = (Positions(a, min(b, length), step) for a, b, step in runs if a < length)
    return tuple(kept)


def places(runs: Iterable[Positions], device: torch.device) -> torch.Tensor:
    """Return the positions of runs: int64 [n]."""
    made = [torch.arange(*run, dtype=torch.int64, device=device) for run in runs]
    return torch.cat(made) if made else torch.empty(0, dtype=torch.int64, device=device)


def _count(runs: Iterable[Positions]) -> int:
    return sum(map(len, runs))
