"""Units of one rank's part by their owners: all of q, or of kv, their routes, and which of them see which."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from tokenring.ir.schedule_data import Block, Joined, Kind
from tokenring.schedule.routes import Gather, Hop, Makers, Origin, Return

if TYPE_CHECKING:
    from tokenring.schedule.schedule import Schedule

Key = Joined  # owner, head group and piece: their units go the same ways, at the same time


def seen_units(schedule: Schedule) -> list[int]:
    """Return the kv units of which each q unit sees anything, as bits: bit u stands for unit u.

    For masks under which whole units go: full ones, and causal ones, which show what begins up to a unit's last row.
    """
    rows, units = schedule.unit_positions["q"], schedule.unit_positions["k"]
    in_order = sorted((each.start, unit) for unit, each in enumerate(units) if len(each))
    first, starts = [0], [start for start, _ in in_order]
    for _, unit in in_order:
        first.append(first[-1] | 1 << unit)
    if schedule.mask.is_full:
        return [first[-1] if len(each) else 0 for each in rows]
    return [first[bisect_right(starts, each.last)] if len(each) else 0 for each in rows]


def units_in(bits: int) -> Iterator[int]:
    """Yield the units of which the bits are set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


class Side:
    """All units of q, or of kv, and their routes."""

    def __init__(self, empty: Schedule, kind: Kind, gather: Gather, back: Return) -> None:
        self.kind, self.gather, self.back = kind, gather, back
        self._world, self._pieces = empty.world_size, empty.pieces_of(kind)
        self.blocks: dict[Key, tuple[Block, ...]] = {}
        self.units: dict[Key, tuple[int, ...]] = {}  # their numbers, as of `ScheduleData.unit_index`
        self.owners = [owner for owner in empty.layout_of(kind).owners for _ in range(self._pieces)]  # of units
        self.by_heads: dict[int, list[Key]] = defaultdict(list)
        self.by_heads_and_piece: dict[tuple[int, int], list[Key]] = defaultdict(list)
        for owner in range(empty.world_size):
            chunks = empty.layout_of(kind).owned_by(owner)
            for heads in range(empty.head_groups):
                for piece in range(self._pieces):
                    key = owner, heads, piece
                    self.blocks[key] = tuple(Block(kind, chunk, heads, piece) for chunk in chunks)
                    self.units[key] = tuple(chunk * self._pieces + piece for chunk in chunks)
                    self.by_heads[heads].append(key)
                    self.by_heads_and_piece[heads, piece].append(key)
        self._hops: dict[Key, tuple[Hop, ...]] = {}
        self._due: dict[Key, dict[int, int]] = {}

    @cached_property
    def bits(self) -> dict[Key, int]:
        """Units of one owner, as bits."""
        return {key: sum(1 << unit for unit in units) for key, units in self.units.items()}

    @cached_property
    def bits_of_piece(self) -> list[int]:
        """The units of each piece, of one head group or another, as bits."""
        every = sum(1 << unit for unit in range(0, len(self.owners), self._pieces))
        return [every << piece for piece in range(self._pieces)]

    @cached_property
    def blocks_by_heads(self) -> dict[tuple[int, int], list[tuple[Block, ...]]]:
        """Units of one owner, by head group and piece."""
        return {each: [self.blocks[key] for key in keys] for each, keys in self.by_heads_and_piece.items()}

    def _origin(self, key: Key) -> Origin:
        owner, heads, piece = key
        return Origin(owner, self._world, self.blocks[key][0].chunk, heads, piece, self._pieces)

    def hops(self, key: Key) -> tuple[Hop, ...]:
        """Return the hops by which a unit reaches all ranks that it ever reaches."""
        if key not in self._hops:
            self._hops[key] = self.gather(self._origin(key))
        return self._hops[key]

    def due(self, key: Key) -> dict[int, int]:
        """Return in which step a unit is due at each rank that it reaches."""
        if key not in self._due:
            self._due[key] = {dst: due or step + 1 for step, _, dst, due, _ in self.hops(key)} | {key[0]: 0}
        return self._due[key]

    def hops_back(self, key: Key, made: Makers) -> tuple[Hop, ...]:
        """Return the hops by which partials for a unit come home."""
        return self.back(self._origin(key), made)
