"""What one rank has to do in a pass, sorted and counted, before any slot is given out."""

from __future__ import annotations

from collections import Counter, defaultdict

from tokenring.schedule.calls import Call, Supports, calls
from tokenring.schedule.coverage import Coverage
from tokenring.schedule.ir import PARTIALS, Block, Move, Pass, Tile
from tokenring.schedule.storage import Group, Slab, Storage

Message = list[Move]


class Agenda:
    """Tiles (with their kernel calls) and messages by step, and how often each slot will be used.

    `adds` are partials that this rank adds to its own on their way home, `homecoming` those for
    units that it owns. `direct_partials` are the slabs of which no row is ever written twice:
    their partials may be written in the wire's dtype at once. Only asked for when `half`.
    """

    def __init__(
        self, storage: Storage, rank: int, direction: Pass, supports: Supports, half: bool, early: bool
    ) -> None:
        self.storage, self.schedule, self.rank = storage, storage.schedule, rank
        self.tiles: dict[int, list[tuple[Tile, list[Call]]]] = defaultdict(list)
        for tile in self.schedule.tiles:
            if tile.rank == rank:
                self.tiles[tile.step].append((tile, calls(storage, tile, supports)))
        self._moves = [move for move in self.schedule.moves_in(direction) if rank in (move.src, move.dst)]
        messages = storage.messages(self._moves)
        self.by_step: dict[int, list[Message]] = defaultdict(list)
        for message in messages:
            self.by_step[self._post_step(message[0], early)].append(message)
        self.uses = self._count_uses(messages)
        received = [m for m in messages if m[0].dst == rank and m[0].channel == PARTIALS]
        self.homecoming = [m for m in received if self.schedule.owner(m[0].block) == rank]
        self._adds = [m for m in received if m[0].add and self.schedule.owner(m[0].block) != rank]
        self.direct_partials = self._written_once() if half else set()

    def _post_step(self, move: Move, early: bool) -> int:
        """When a message is posted. Without slack, incoming partials have slots of their own all along: their
        receives are posted at once, so that no announcement stands behind a send to the same peer.
        """
        incoming = move.channel == PARTIALS and move.dst == self.rank
        return 0 if incoming and early and self.schedule.slack is None else move.step

    def slabs(self, tile: Tile) -> tuple[Slab, Slab]:
        """Where the tile's q and kv blocks lie."""
        return self.storage.slab(self.rank, tile.q[0]), self.storage.slab(self.rank, tile.kv[0])

    def take_adds(self, units: set[Block]) -> list[Message]:
        """The messages that bring partials to be added to any of these units; each is given once."""
        taken = [m for m in self._adds if any(move.block.request() in units for move in m)]
        self._adds = [m for m in self._adds if m not in taken]
        return taken

    def use_key(self, move: Move) -> object:
        """Which slot a message uses at this rank, None if it only fills one."""
        block = move.block
        if block.made_at is None:
            if move.dst == self.rank:
                return None
            slab = self.storage.slab(self.rank, block)
            return ("staged", self.storage.group(block)) if slab.own_only else slab.key
        merged_here = move.add or self.schedule.owner(block) == self.rank
        if move.dst == self.rank and not merged_here:
            return None
        if move.src == self.rank and block.made_at == self.rank:
            return "partial", self.storage.slab(self.rank, block.request()).key
        return self.incoming_key(move)

    def incoming_key(self, move: Move) -> tuple[Group, int, bool]:
        """What shares a slot among partials that come in: one owner, maker and precision."""
        return self.storage.group(move.block), made_at(move.block), self.schedule.in_full_precision(move)

    def _count_uses(self, messages: list[Message]) -> Counter[object]:
        uses = Counter(self.use_key(message[0]) for message in messages)
        for tiles in self.tiles.values():
            for tile, _ in tiles:
                uses.update(slab.key for slab in self.slabs(tile) if not slab.own_only)
        return uses

    def _written_once(self) -> set[Group]:
        written: dict[Group, Coverage] = defaultdict(Coverage)
        twice = {
            self.storage.slab(self.rank, move.block.request()).key
            for move in self._moves
            if move.block.made_at == self.rank and self.schedule.in_full_precision(move)
        }
        for tiles in self.tiles.values():
            for tile, made in tiles:
                q_slab, kv_slab = self.slabs(tile)
                for call in made:
                    for slab, row, rows in (
                        (q_slab, call.q_row, call.patch.rows),
                        (kv_slab, call.kv_row, call.patch.cols),
                    ):
                        if written[slab.key].overlaps(row, row + rows):
                            twice.add(slab.key)
                        written[slab.key].add(row, row + rows)
        return set(written) - twice


def made_at(block: Block) -> int:
    """The rank at which a partial was made."""
    assert block.made_at is not None  # requests never come here
    return block.made_at
