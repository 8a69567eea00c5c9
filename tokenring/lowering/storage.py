"""Storage: the slots in which blocks lie at each rank, and their order in them.

Units that a tile reads together lie together, in sequence order, so that one kernel call can
take them; all units of one owner, head group and piece lie together too, in the owner's order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from tokenring.ir.schedule_data import REQUEST_OF, Block, Joined, Kind, Move, Pass, ScheduleData, Tile

Group = tuple[Kind, int, int, int]  # kind (q or kv), owner, head group, piece


class MovePart(NamedTuple):
    """Rows [start, stop) of a move's unit."""

    move: Move
    start: int
    stop: int


class Message:
    """Parts of moves of one step, source, destination and channel whose rows are neighbours at both ends.

    first: the first row of the first unit that goes; whole: all its units go whole, and are equally long.
    """

    def __init__(self, storage: Storage, parts: list[MovePart]) -> None:
        (first, self.first, stop), schedule = parts[0], storage.schedule
        self.parts = tuple(parts)
        self.step, self.block, self.src, self.dst, self.channel, self.add, _ = first
        self.kind, _, _, _, self.made_at = self.block
        length = schedule.unit_length(self.kind)
        if len(parts) == 1:
            self.blocks: tuple[Block, ...] = (self.block,)
            self.rows = stop - self.first
            self.whole = self.rows == length
        else:
            self.blocks = tuple(part.move.block for part in parts)
            self.rows = sum(stop - start for _, start, stop in parts)
            self.whole = all(stop - start == length for _, start, stop in parts)
        self.units = self.blocks if self.made_at is None else tuple(block.request() for block in self.blocks)
        self.unit = self.units[0]
        self.group = storage.group(self.unit)
        self.owner = self.group[1]
        self.full_precision = schedule.in_full_precision(first)
        self.label = f"step {self.step}, {','.join(map(_name, parts))}"

    @property
    def places(self) -> Iterator[tuple[Block, int, int]]:
        """The rows [start, stop) of each unit that go."""
        return ((unit, start, stop) for unit, (_, start, stop) in zip(self.units, self.parts, strict=True))


def _name(part: MovePart) -> str:
    return str(part.move.block) + ("" if part.move.rows is None else f"[{part.start}:{part.stop}]")


_alike = itemgetter(0, 2, 3, 4, 5)  # of moves of one message: step, source, destination, channel, and whether it adds


class _Stretch:
    """Moves alike that follow each other in the total order: in it, moves of one step, pair and piece stand together.

    Their messages are made when one of their ranks is first asked for its own.
    """

    def __init__(self, moves: tuple[Move, ...]) -> None:
        self.moves = moves
        self._made: dict[None, list[Message]] = {}  # one entry, which the first of several threads makes

    def messages(self, storage: Storage, rank: int) -> list[Message]:
        """Return the messages in which they go, the same objects at both ends; rank: of the end that asks."""
        if None not in self._made:
            self._made.setdefault(None, [Message(storage, parts) for parts in self._joined(storage, rank)])
        return self._made[None]

    def _joined(self, storage: Storage, rank: int) -> Iterator[list[MovePart]]:
        """Yield what goes in one message: rows that are neighbours at both ends."""
        runs, moves = storage.schedule.runs, self.moves
        if len(moves) == 1 or storage.has_lone_chunks:  # runs of one move are apart
            yield from ([MovePart(move, *run)] for move in moves for run in runs(move))
            return
        joined: list[MovePart] = []
        for move in moves:
            for number, run in enumerate(runs(move)):
                part = MovePart(move, *run)
                if joined and (number or not storage.follows(joined[-1], part, rank)):
                    yield joined
                    joined = []
                joined.append(part)
        yield joined


class Slab(NamedTuple):
    """Request blocks that share a slot at one rank, in the order in which they lie there."""

    key: Group
    blocks: tuple[Block, ...]
    own_only: bool


class _JoinedGroups(NamedTuple):
    """Groups that lie together at one rank: for each the one that stands for all, and the members of that."""

    key_of: Mapping[Group, Group]
    members: Mapping[Group, list[Group]]


@lru_cache(maxsize=64)
def storage_of(schedule: ScheduleData) -> Storage:
    """Return the schedule's storage, worked out once."""
    return Storage(schedule)


class Storage:
    """The slabs of every rank of a schedule. Ranks agree on it without talking.

    Threads of one process may ask the same one: what is worked out once is seen by others only when it is whole, and
    all have the messages of the thread that came first (`setdefault`), since these are known by their identity.
    """

    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule = schedule
        self._groups: dict[Block, Group] = {}
        self._joined: dict[int, _JoinedGroups] = {}  # of the ranks that were asked for
        self._slabs: dict[tuple[int, Group], Slab] = {}
        ranks = range(schedule.world_size)
        self._slab_of: list[dict[Block, Slab]] = [{} for _ in ranks]
        self._row_of: list[dict[Block, int]] = [{} for _ in ranks]
        self._messages: dict[tuple[int, Pass], list[Message]] = {}
        self._stretches: dict[Pass, list[list[_Stretch]]] = {}
        self._of_a_pass: dict[int, _Stretch] = {}  # by the identity of their first move, which the schedule keeps

    def group(self, block: Block) -> Group:
        """Return the group of a block: its kind as a request, its owner, head group and piece."""
        group = self._groups.get(block)
        if group is None:
            kind = REQUEST_OF.get(block.kind, block.kind)
            group = self._groups[block] = (kind, self.schedule.owner(block), block.heads, block.piece)
        return group

    def slab(self, rank: int, block: Block) -> Slab:
        """Return the slab of a request block at a rank (partials of a unit lie as their requests do)."""
        slab = self._slab_of[rank].get(block)
        if slab is None:
            group = self.group(block)
            key = self._joined_at(rank).key_of.get(group, group)
            if (rank, key) not in self._slabs:
                self._slabs[rank, key] = self._make(rank, key)
            slab = self._slab_of[rank][block] = self._slabs[rank, key]
        return slab

    def row(self, rank: int, block: Block) -> int:
        """Return the first row of a request block in its slab; in the own tensors if the slab is the rank's own."""
        row = self._row_of[rank].get(block)
        if row is None:
            slab = self.slab(rank, block)
            if slab.own_only:
                return self.own_row(block)
            length = self.schedule.unit_length(slab.key[0])
            self._row_of[rank].update({each: index * length for index, each in enumerate(slab.blocks)})
            row = self._row_of[rank][block]
        return row

    def own_row(self, block: Block) -> int:
        """Return the first row of a unit in its owner's tensors."""
        layout = self.schedule.layout_of(block.kind)
        return layout.local_start[block.chunk] + block.piece * self.schedule.unit_length(block.kind)

    def group_row(self, block: Block) -> int:
        """Return the first row of a unit among its owner's units of the same head group and piece."""
        layout = self.schedule.layout_of(block.kind)
        return layout.local_start[block.chunk] // layout.chunk_length * self.schedule.unit_length(block.kind)

    def group_blocks(self, group: Group) -> tuple[Block, ...]:
        """Return the blocks of a group, in the order of its owner's chunks."""
        kind, owner, heads, piece = group
        return tuple(Block(kind, chunk, heads, piece) for chunk in self.schedule.layout_of(kind).owned_by(owner))

    def destinations(
        self, rank: int, slab: Slab, blocks: tuple[Block, ...], start: int, stop: int
    ) -> Iterator[tuple[int, int, bool, int]]:
        """Yield where rows [start, stop) of a result go, counted from start: (first, stop, whether home, row there)."""
        owners = {self.schedule.owner(block) == rank for block in blocks}
        if slab.own_only or owners == {False}:
            yield 0, stop - start, slab.own_only, start
            return
        length = self.schedule.unit_length(blocks[0].kind)
        for block in blocks:
            at = self.row(rank, block)
            low, high = max(at, start), min(at + length, stop)
            if low < high:
                home = self.schedule.owner(block) == rank
                yield low - start, high - start, home, self.own_row(block) + low - at if home else low

    def tiles(self, rank: int) -> list[Tile]:
        """Return the tiles of a rank, in order."""
        return self.schedule.tiles_at(rank)

    def messages(self, rank: int, direction: Pass) -> list[Message]:
        """Return the messages that a rank sends and receives in a pass, in the order that both ends share."""
        known = self._messages.get((rank, direction))
        if known is None:
            stretches = self._stretches_of(direction)[rank]
            made = [each for some in stretches for each in some.messages(self, rank)]
            known = self._messages.setdefault((rank, direction), made)
        return known

    def _stretches_of(self, direction: Pass) -> list[list[_Stretch]]:
        """Return the stretches of a pass that each rank sends or receives, in order."""
        if direction not in self._stretches:
            found: list[list[_Stretch]] = [[] for _ in range(self.schedule.world_size)]
            for (_, src, dst, *_), some in groupby(self.schedule.moves_in(direction), _alike):
                moves = tuple(some)
                stretch = self._of_a_pass.get(id(moves[0]))  # most moves are those of both passes
                if stretch is None or stretch.moves != moves:
                    stretch = self._of_a_pass[id(moves[0])] = _Stretch(moves)
                found[src].append(stretch)
                found[dst].append(stretch)
            self._stretches.setdefault(direction, found)
        return self._stretches[direction]

    @cached_property
    def has_lone_chunks(self) -> bool:
        """True if no rank owns two chunks: then no two blocks are neighbours at both ends of a move."""
        owners = [self.schedule.layout_of(kind).owners for kind in ("q", "kv")]
        return all(len(set(each)) == len(each) for each in owners)

    def follows(self, part: MovePart, then: MovePart, rank: int) -> bool:
        """Return whether rows of two moves alike are neighbours at both ends; that of `rank` is asked first."""
        one, other, in_full = part.move, then.move, self.schedule.in_full_precision
        if self.group(one.block) != self.group(other.block) or one.block.made_at != other.block.made_at:
            return False
        if in_full(one) != in_full(other):
            return False
        there = one.dst if rank == one.src else one.src
        return all(self._follows_at(end, part, then) for end in (rank, there))

    def _follows_at(self, rank: int, part: MovePart, then: MovePart) -> bool:
        (one, _, stop), (other, start, _) = part, then
        joined = self.schedule.joined_at(rank, one.block) if one.block.made_at in (None, rank) else None
        if joined is None or all(owner == rank for owner, _, _ in joined):
            return self._wire_row(rank, one.block) + stop == self._wire_row(rank, other.block) + start
        whole = start == 0 and stop == self.schedule.unit_length(one.block.kind)
        return whole and not self._lies_between(joined, one.block, other.block)

    def _lies_between(self, joined: Iterable[Joined], one: Block, other: Block) -> bool:
        """Return whether units of those that lie together lie between two of them, or these the other way round."""
        schedule, kind = self.schedule, one.kind
        owned, pieces = schedule.layout_of(kind).owned_by, schedule.pieces_of(kind)
        first, last, units = schedule.positions(one), schedule.positions(other), schedule.unit_positions[kind[0]]
        if first > last:
            return True
        return any(
            first < units[chunk * pieces + piece] < last for owner, _, piece in joined for chunk in owned(owner)
        )

    def _wire_row(self, rank: int, block: Block) -> int:
        """Return the row from or into which a rank sends or receives the block."""
        request = block.request() if block.made_at is not None else block
        if block.made_at not in (None, rank) or self.slab(rank, request).own_only:
            return self.group_row(request)
        return self.row(rank, request)

    def _make(self, rank: int, key: Group) -> Slab:
        members = self._joined_at(rank).members.get(key, [key])
        blocks = [block for group in members for block in self.group_blocks(group)]
        blocks.sort(key=self.schedule.positions)
        own = all(group[1] == rank for group in members)
        return Slab(key, tuple(blocks), own)

    def _joined_at(self, rank: int) -> _JoinedGroups:
        """Return the groups that some tile of a rank reads together with another."""
        if rank not in self._joined:
            key_of, members = self._join_fused(self.tiles(rank)), defaultdict[Group, list[Group]](list)
            for group, key in key_of.items():
                members[key].append(group)
            self._joined[rank] = _JoinedGroups(key_of, members)
        return self._joined[rank]

    def _join_fused(self, tiles: Iterable[Tile]) -> dict[Group, Group]:
        parent: dict[Group, Group] = {}

        def find(group: Group) -> Group:
            while (up := parent.get(group, group)) != group:
                group = up
            return group

        for tile in tiles:
            for blocks in (tile.q, tile.kv):
                groups = sorted({self.group(block) for block in blocks})
                for group in groups:
                    if len(groups) > 1:
                        parent.setdefault(group, group)
                        low, high = sorted((find(groups[0]), find(group)))
                        parent[high] = low
        return {group: find(group) for group in parent}
