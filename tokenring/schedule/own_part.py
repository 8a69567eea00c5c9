"""One rank's part of what a scheme makes: its tiles, and the moves that it sends or receives, without those of others.

The same tiles and moves as in what `scheme.build` makes, found from the rank's side. Of other ranks only what the
program of this one depends on is asked: which blocks they use, when they are done, and which of them lie together.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from functools import cached_property, reduce
from operator import itemgetter, or_
from typing import TYPE_CHECKING

from tokenring.gc_pause import no_collection
from tokenring.ir.passes import keep_for_last, move_order, order, tile_order
from tokenring.ir.schedule_data import PARTIAL_OF, PARTIALS, REQUEST_OF, REQUESTS, Block, Kind, Move, ScheduleData, Tile
from tokenring.schedule.placed import Placed
from tokenring.schedule.routes import Hop, return_direct
from tokenring.schedule.scheme import (
    Groups,
    Rows,
    Scheme,
    build,
    joined,
    joined_rows,
    nothing_moves_yet,
)
from tokenring.schedule.sides import Key, Side, seen_units, units_in

if TYPE_CHECKING:
    from tokenring.schedule.schedule import Schedule
    from tokenring.sequence.layout import Layout
    from tokenring.sequence.mask import Mask

Used = dict[Kind, dict[int, int]]  # by kind and head group: units, as bits
_step_of = itemgetter(0)  # of a hop


def halves_in_pieces(scheme: Scheme) -> bool:
    """Return whether halves of a local tile may lie elsewhere than the tile, for which parts are not known."""
    return scheme.late and (scheme.q_pieces > 1 or scheme.kv_pieces > 1)


class OwnPart(ScheduleData):
    """The part of one rank: a schedule with its tiles and moves alone, which says where others keep blocks."""

    def tiles_at(self, rank: int) -> list[Tile]:
        """Return the tiles of any rank; those of others may come whole where they keep some for last."""
        own: int = vars(self)["rank"]
        return list(self.tiles) if rank == own else vars(self)["parts"].tiles(rank)

    def joined_at(self, rank: int, block: Block) -> Collection[Key] | None:
        """Return whose units lie with a block's at another rank, without making the tiles there."""
        own: int = vars(self)["rank"]
        return None if rank == own else vars(self)["parts"].joined_at(rank, block)

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class OwnParts:
    """The parts of all ranks of a schedule in which whole units move, each made when it is asked for.

    Routes must be the same for all units of an owner, head group and piece: those of all families are. Not where
    `halves_in_pieces`.
    """

    def __init__(self, scheme: Scheme, q_layout: Layout, kv_layout: Layout, mask: Mask) -> None:
        self.scheme = scheme
        self.empty = nothing_moves_yet(scheme, q_layout, kv_layout, mask)
        self._used_known: dict[int, Used] = {}
        self._joined_known: dict[int, dict[Kind, list[Sequence[Key]]]] = {}
        self._made: tuple[int, OwnPart] | None = None  # the part that was last asked for: that of both passes

    @cached_property
    def _q(self) -> Side:
        return Side(self.empty, "q", self.scheme)

    @cached_property
    def _kv(self) -> Side:
        return Side(self.empty, "kv", self.scheme)

    @cached_property
    def _sees(self) -> list[int]:
        return seen_units(self.empty)

    @cached_property
    def _placed(self) -> Placed:
        return Placed(self.scheme, self.empty, self._q, self._kv)

    def whole(self) -> Schedule:
        """Return the schedule, with what all ranks do."""
        return build(self.scheme, self.empty.q_layout, self.empty.kv_layout, self.empty.mask)

    def part(self, rank: int) -> OwnPart:
        """Return the part of a rank."""
        made = self._made
        if made is None or made[0] != rank:
            with no_collection():
                made = self._made = rank, self._make(rank)
        return made[1]

    def _make(self, rank: int) -> OwnPart:
        tiles, wide = self.tiles(rank), set[Block]()
        moves = [
            *self._requests(self._q, rank), *self._requests(self._kv, rank),
            *self._partials(self._q, rank, wide), *self._partials(self._kv, rank, wide),
        ]  # fmt: skip
        moves.sort(key=move_order)
        known = {each.name: getattr(self.empty, each.name) for each in fields(ScheduleData)}
        made = OwnPart(**known | {"tiles": tuple(tiles), "moves": tuple(moves)})
        if self.scheme.late:
            made = order(keep_for_last(made))
        vars(made).update(_wide_partials=frozenset(wide), rank=rank, parts=self)
        return made

    # ---------- tiles

    def tiles(self, rank: int) -> list[Tile]:
        """Return the tiles of a rank, in order; none is kept for last."""
        parts = (self._visible(tile) for tile in self._all_tiles(rank))
        return sorted((tile for tile in parts if tile.q), key=tile_order)

    def _visible(self, tile: Tile) -> Tile:
        """Return the tile without blocks that see or show nothing, as `passes.prune` leaves it."""
        number, here, shown = self.empty.unit_index, 0, 0
        units = [number(block) for block in tile.kv]
        for unit in units:
            here |= 1 << unit
        seen = [self._sees[number(block)] & here for block in tile.q]
        for some in seen:
            shown |= some
        if shown == here and all(seen):
            return tile
        seeing = tuple(block for block, some in zip(tile.q, seen, strict=True) if some)
        return tile._replace(q=seeing, kv=tuple(b for b, unit in zip(tile.kv, units, strict=True) if shown >> unit & 1))

    def _all_tiles(self, rank: int) -> list[Tile]:
        """Return the tiles of a rank as if everything were visible."""
        if self._placed.by_rows:
            rows: Rows = defaultdict(list)
            for q, kv_piece in self._placed.rows_at[rank]:
                rows[self._placed.row_step(q, kv_piece), rank, q[1]].append((self._q.blocks[q], kv_piece))
            return joined_rows(self.empty, rows, self._kv.blocks_by_heads)
        groups: Groups = defaultdict(list)
        for q, kv, step in self._placed.work(rank):
            groups[step, rank, q[1]].append((self._q.blocks[q], self._kv.blocks[kv]))
        return joined(self.empty, groups)

    # ---------- what lies together at others

    def joined_at(self, rank: int, block: Block) -> Collection[Key] | None:
        """Return whose units lie in one slot with a block's at a rank; None where the end of the sequence cuts some."""
        kind = REQUEST_OF.get(block.kind, block.kind)
        if not self.empty.layout_of(kind).is_even:
            return None
        if rank not in self._joined_known:
            self._joined_known[rank] = self._joined(rank)
        found = {(self.empty.owner(block), block.heads, block.piece)}
        left, more = self._joined_known[rank][kind], True
        while more:
            apart = []
            for some in left:
                if found.isdisjoint(some):
                    apart.append(some)
                else:
                    found.update(some)
            left, more = apart, len(apart) < len(left)
        return found

    def _joined(self, rank: int) -> dict[Kind, list[Sequence[Key]]]:
        """Return the units that a tile of a rank reads together, of each of its tiles that reads several owners'."""
        found: dict[Kind, list[Sequence[Key]]] = {"q": [], "kv": []}
        for queries, keys, here in self._products(rank):
            shown, seeing = 0, []
            for q in queries:
                if seen := self._seen_by(q) & here:
                    seeing.append(q)
                    shown |= seen
            found["q"].append(seeing)
            found["kv"].append(keys if shown == here else [kv for kv in keys if self._kv.bits[kv] & shown])
        return found

    def _seen_by(self, q: Key) -> int:
        """Return the units of kv of which any unit of an owner's sees anything, as bits."""
        return reduce(or_, (self._sees[unit] for unit in self._q.units[q]))

    def _products(self, rank: int) -> Iterator[tuple[Sequence[Key], Sequence[Key], int]]:
        """Yield q and kv, and kv's units as bits, of each tile of a rank that `joined` makes of several."""
        bits, by_piece = self._kv.bits, self._kv.bits_of_piece
        if self._placed.by_rows:
            rows: dict[tuple[int, int], list[tuple[Key, int]]] = defaultdict(list)
            for q, kv_piece in self._placed.rows_at[rank]:
                rows[self._placed.row_step(q, kv_piece), q[1]].append((q, kv_piece))
            for (_, heads), each in rows.items():
                queries, pieces = dict.fromkeys(q for q, _ in each), dict.fromkeys(piece for _, piece in each)
                if self.empty.world_size > 1 and len(each) == len(queries) * len(pieces):
                    keys = [kv for piece in pieces for kv in self._kv.by_heads_and_piece[heads, piece]]
                    yield list(queries), keys, reduce(or_, (by_piece[piece] for piece in pieces))
            return
        pairs: dict[tuple[int, int], list[tuple[Key, Key]]] = defaultdict(list)
        for q, kv, step in self._placed.work(rank):
            pairs[step, q[1]].append((q, kv))
        for some in pairs.values():
            queries, keys = dict.fromkeys(q for q, _ in some), list(dict.fromkeys(kv for _, kv in some))
            if 1 < len(some) == len(queries) * len(keys):
                yield list(queries), keys, reduce(or_, (bits[kv] for kv in keys))

    # ---------- what tiles read and make

    def _used(self, rank: int) -> Used:
        """Return the units of q, and of kv, that tiles of a rank read, of which the mask shows something."""
        if rank not in self._used_known:
            self._used_known[rank] = self._used_at(rank)
        return self._used_known[rank]

    def _used_at(self, rank: int) -> Used:
        here: dict[Key, int] = defaultdict(int)  # kv units that a q unit meets
        if self._placed.by_q:
            for q, kv_piece in self._placed.rows_at[rank]:
                here[q] |= self._kv.bits_of_piece[kv_piece]
        else:
            for q, keys in self._placed.pairs_at[rank].items():
                here[q] = reduce(or_, map(self._kv.bits.__getitem__, keys))
        used: dict[int, int] = defaultdict(int)
        shown: dict[int, int] = defaultdict(int)
        for q, units in here.items():
            for unit in self._q.units[q]:
                if seen := self._sees[unit] & units:
                    used[q[1]] |= 1 << unit
                    shown[q[1]] |= seen
        return {"q": used, "kv": shown}

    # ---------- moves

    def _requests(self, side: Side, rank: int) -> Iterator[Move]:
        """Yield the requests that a rank sends and receives."""
        for key in self._reaching(side, rank):
            hops: Sequence[Hop] = side.hops(key)
            touching = [hop for hop in hops if rank in (hop.src, hop.dst)]
            if any(hop.src == rank for hop in touching):
                first = min(map(_step_of, touching))
                hops = [hop for hop in hops if hop.step >= first]  # only on later ones does it depend who needs them
            else:  # nobody waits for what it does with them
                hops = touching
            for block, (step, src, dst, _, _) in self._needed(side, key, hops):
                if rank in (src, dst):
                    yield Move(step, block, src, dst, REQUESTS)

    def _reaching(self, side: Side, rank: int) -> Iterable[Key]:
        """Return the units that a rank sends or receives; where nobody passes them on, those that it owns or uses."""
        if not side.straight:
            return [key for key in side.keys if side.reaches(key, rank)]
        used = {side.key(unit, heads) for heads, bits in self._used(rank)[side.kind].items() for unit in units_in(bits)}
        return used | set(side.owned(rank))

    def _needed(self, side: Side, key: Key, hops: Iterable[Hop]) -> Iterator[tuple[Block, Hop]]:
        """Yield the hops of each block that are needed: whose end uses it or passes it on."""
        last_first = sorted(hops, key=_step_of, reverse=True)
        used = [self._used(hop[2])[side.kind].get(key[1], 0) for hop in last_first]
        for block, unit in zip(side.blocks[key], side.units[key], strict=True):
            needed = set[int]()
            for hop, used_there in zip(last_first, used, strict=True):
                if used_there >> unit & 1 or hop[2] in needed:
                    needed.add(hop[1])
                    yield block, hop

    def _partials(self, side: Side, rank: int, wide: set[Block]) -> Iterator[Move]:
        """Yield the partials that a rank sends and receives; fill `wide` with those that relays add."""
        straight = side.back is return_direct
        own = self._placed.own_last(side, rank) if straight else {}
        for key in [*own, *side.owned(rank)] if straight else side.keys:
            made = {rank: own[key]} if key in own else self._placed.makers(side, key)
            hops = side.hops_back(key, made) if made else ()
            if not any(rank in (hop.src, hop.dst) for hop in hops):
                continue
            for block, (step, src, dst, _, add) in self._fed(side, key, hops):
                partial = block.partial(src)
                if add:
                    wide.update((partial, partial._replace(made_at=dst)))
                if rank in (src, dst):
                    yield Move(step, partial, src, dst, PARTIALS, add)

    def _fed(self, side: Side, key: Key, hops: Iterable[Hop]) -> Iterator[tuple[Block, Hop]]:
        """Yield the hops of partials for each block that carry any: whose source made or received some."""
        first_first = sorted(hops, key=_step_of)
        made = [self._used(hop[1])[side.kind].get(key[1], 0) for hop in first_first]
        for block, unit in zip(side.blocks[key], side.units[key], strict=True):
            received = set[int]()
            for hop, made_there in zip(first_first, made, strict=True):
                if hop.src in received or made_there >> unit & 1:
                    if hop.add:
                        received.add(hop.dst)
                    yield block, hop

    def requested_tokens(self, every: int = 1) -> int:
        """Return tokens times hops of all requests: what tells two directions of one ring apart.

        every: only the units of so many-th owners count, which is cheaper.
        """
        rows = self.empty.rows
        return sum(
            rows(block)
            for side in (self._q, self._kv)
            for owner in range(0, self.empty.world_size, every)
            for key in side.owned(owner)
            for block, _ in self._needed(side, key, side.hops(key))
        )

    def moves_by_pair(self) -> Counter[tuple[int, int, Kind]]:
        """Return the number of moves of all ranks, as `ScheduleData.moves_by_pair`."""
        found = Counter[tuple[int, int, Kind]]()
        for side in (self._q, self._kv):
            partial = PARTIAL_OF[side.kind]
            for key in side.keys:
                found.update((hop.src, hop.dst, side.kind) for _, hop in self._needed(side, key, side.hops(key)))
                if side.back is not return_direct:
                    makers = self._placed.makers(side, key)
                    hops = side.hops_back(key, makers) if makers else ()
                    found.update((hop.src, hop.dst, partial) for _, hop in self._fed(side, key, hops))
            for rank in range(self.empty.world_size) if side.back is return_direct else ():
                made = (unit for bits in self._used(rank)[side.kind].values() for unit in units_in(bits))
                owners = (side.key(unit, 0)[0] for unit in made)
                found.update((rank, owner, partial) for owner in owners if owner != rank)
        return found
