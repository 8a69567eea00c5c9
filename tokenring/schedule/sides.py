"""Units of one rank's part by their owners: all of q, or of kv, their routes, and which of them see which."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from tokenring.ir.schedule_data import Block, Joined, Kind
from tokenring.schedule.routes import Hop, Makers, Origin

if TYPE_CHECKING:
    from tokenring.schedule.schedule import Schedule
    from tokenring.schedule.scheme import Scheme

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


V = TypeVar("V")


class ByKey(dict[Key, V]):
    """Values by key, each found when it is first asked for."""

    def __init__(self, find: Callable[[Key], V]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: Key) -> V:
        found = self[key] = self._find(key)
        return found


class Side:
    """All units of q, or of kv, and their routes: what is known of each is found when it is first asked for."""

    def __init__(self, empty: Schedule, kind: Kind, scheme: Scheme) -> None:
        self.kind, self.straight = kind, kind in scheme.straight
        if kind == "q":
            self.gather, self.back, self._may_reach = scheme.gather_q, scheme.return_q, None
        else:
            self.gather, self.back, self._may_reach = scheme.gather_kv, scheme.return_kv, scheme.may_reach_kv
        layout = empty.layout_of(kind)
        self._world, self._groups, self._pieces = empty.world_size, empty.head_groups, empty.pieces_of(kind)
        self._owners, self._owned = layout.owners, layout.owned_by
        self.keys = [key for owner in range(self._world) for key in self.owned(owner)]
        self.by_heads: dict[int, list[Key]] = defaultdict(list)
        self.by_heads_and_piece: dict[tuple[int, int], list[Key]] = defaultdict(list)
        for key in self.keys:
            self.by_heads[key[1]].append(key)
            self.by_heads_and_piece[key[1:]].append(key)
        self.blocks = ByKey(self._blocks)
        self.units = ByKey(self._units)  # their numbers, as of `ScheduleData.unit_index`
        self.bits = ByKey(lambda key: sum(1 << unit for unit in self.units[key]))
        self._hops: dict[Key, tuple[Hop, ...]] = {}
        self._due: dict[Key, dict[int, int]] = {}

    def owned(self, rank: int) -> list[Key]:
        """Return the keys of a rank's own units."""
        return [(rank, heads, piece) for heads in range(self._groups) for piece in range(self._pieces)]

    def key(self, unit: int, heads: int) -> Key:
        """Return the key of a unit of a head group."""
        return self._owners[unit // self._pieces], heads, unit % self._pieces

    def _blocks(self, key: Key) -> tuple[Block, ...]:
        owner, heads, piece = key
        return tuple(Block(self.kind, chunk, heads, piece) for chunk in self._owned(owner))

    def _units(self, key: Key) -> tuple[int, ...]:
        owner, _, piece = key
        return tuple(chunk * self._pieces + piece for chunk in self._owned(owner))

    @cached_property
    def bits_of_piece(self) -> list[int]:
        """The units of each piece, of one head group or another, as bits."""
        every = sum(1 << unit for unit in range(0, len(self._owners) * self._pieces, self._pieces))
        return [every << piece for piece in range(self._pieces)]

    @cached_property
    def blocks_by_heads(self) -> dict[tuple[int, int], list[tuple[Block, ...]]]:
        """Units of one owner, by head group and piece."""
        return {each: [self.blocks[key] for key in keys] for each, keys in self.by_heads_and_piece.items()}

    def _origin(self, key: Key) -> Origin:
        owner, heads, piece = key
        return Origin(owner, self._world, self._owned(owner)[0], heads, piece, self._pieces)

    def hops(self, key: Key) -> tuple[Hop, ...]:
        """Return the hops by which a unit reaches all ranks that it ever reaches."""
        if key in self._hops:
            return self._hops[key]
        found = self.gather(self._origin(key))
        if not self.straight:  # else each is asked for once, and together they are large
            self._hops[key] = found
        return found

    def reaches(self, key: Key, rank: int) -> bool:
        """Return whether a unit is ever at a rank."""
        if key[0] == rank:
            return True
        if self._may_reach is not None and not self._may_reach(self._origin(key), rank):
            return False
        return rank in self.due(key)

    def due(self, key: Key) -> dict[int, int]:
        """Return in which step a unit is due at each rank that it reaches."""
        if key not in self._due:
            self._due[key] = {dst: due or step + 1 for step, _, dst, due, _ in self.hops(key)} | {key[0]: 0}
        return self._due[key]

    def hops_back(self, key: Key, made: Makers) -> tuple[Hop, ...]:
        """Return the hops by which partials for a unit come home."""
        return self.back(self._origin(key), made)
