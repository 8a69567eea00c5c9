"""The work of one rank in a pass, sorted and counted, before any slot is given out."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import cached_property

from tokenring.ir.schedule_data import PARTIAL_OF, PARTIALS, REQUESTS, Block, Kind, Pass, Tile
from tokenring.lowering.calls import KernelCall, Supports, calls_of_rank
from tokenring.lowering.slots import Coverage
from tokenring.lowering.storage import Group, Message, Slab, Storage


class Agenda:
    """Tiles (with their kernel calls) and messages, and how often each slot will be used.

    `adds` are partials that this rank adds to its own on their way home, `homecoming` those for
    units that it owns. `direct_partials` are the slabs of which no row is ever written twice:
    their partials may be written as they are on the wire at once. Only asked for where that is `narrow`.
    It is the same whenever receives are posted, and does not change.
    """

    def __init__(self, storage: Storage, rank: int, direction: Pass, supports: Supports, half: bool) -> None:
        self.storage, self.schedule, self.rank, self.direction, self.half = (
            storage, storage.schedule, rank, direction, half,
        )  # fmt: skip
        self.tiles: dict[int, list[tuple[Tile, list[KernelCall]]]] = defaultdict(list)
        for tile, made in calls_of_rank(storage, rank, supports):
            self.tiles[tile.step].append((tile, made))
        self.messages = storage.messages(rank, direction)
        self.uses = self._count_uses()
        received = self.incoming(PARTIALS)
        self.homecoming = [m for m in received if m.owner == rank]
        self.adds = [m for m in received if m.add and m.owner != rank]
        self.direct_partials = self._written_once() if any(self.narrow(kind) for kind in PARTIAL_OF.values()) else set()

    def narrow(self, kind: Kind) -> bool:
        """Return whether partials of a kind are narrower on the wire than in accumulators, in fp32 and whole."""
        leaves_out = bool(self.schedule.operator.left_out) and self.direction == "forward"
        return self.half or leaves_out or kind in self.schedule.formats

    def by_step(self, early: bool, small: bool) -> dict[int, list[Message]]:
        """Return the messages by the step in which they are posted, some receives at once (in step 0).

        So no announcement stands behind what this rank sends. Without slack these receives are incoming partials, which
        have slots of their own all along; where requests are small, these too, which then have (nothing is received
        twice).
        """
        at_once = {PARTIALS: early and self.schedule.slack is None, REQUESTS: early and small}
        posted: dict[int, list[Message]] = defaultdict(list)
        for message in self.messages:
            posted[0 if message.dst == self.rank and at_once[message.channel] else message.step].append(message)
        return posted

    def incoming(self, channel: str) -> list[Message]:
        """Return the messages that this rank receives on a channel."""
        return [message for message in self.messages if message.dst == self.rank and message.channel == channel]

    def leaving_rows(self, block: Block) -> list[tuple[int, int]]:
        """Return the rows of an own block that this rank sends to anybody."""
        runs = self._leaving[block].runs(0, self.schedule.unit_length(block.kind))
        return [(start, stop) for start, stop, sent in runs if sent]

    @cached_property
    def _leaving(self) -> dict[Block, Coverage]:
        leaving: dict[Block, Coverage] = defaultdict(Coverage)
        for message in self.messages:
            if message.src == self.rank and message.channel == REQUESTS:
                for unit, start, stop in message.places:
                    leaving[unit].add(start, stop)
        return leaving

    def slabs(self, tile: Tile) -> tuple[Slab, Slab]:
        """Return the slabs in which the tile's q and kv blocks lie."""
        return self.storage.slab(self.rank, tile.q[0]), self.storage.slab(self.rank, tile.kv[0])

    def use_key(self, message: Message) -> object:
        """Return the key of the slot that a message uses at this rank, None if it only fills one."""
        incoming = message.dst == self.rank
        if message.made_at is None:
            if incoming:
                return None
            slab = self.storage.slab(self.rank, message.unit)
            return ("staged", message.group) if slab.own_only else slab.key
        if incoming and not (message.add or message.owner == self.rank):
            return None
        if not incoming and message.made_at == self.rank:
            return "partial", self.storage.slab(self.rank, message.unit).key
        return incoming_key(message)

    def _count_uses(self) -> Counter[object]:
        uses = Counter(map(self.use_key, self.messages))
        for tiles in self.tiles.values():
            for tile, _ in tiles:
                uses.update(slab.key for slab in self.slabs(tile) if not slab.own_only)
        return uses

    def _written_once(self) -> set[Group]:
        written: dict[Group, Coverage] = defaultdict(Coverage)
        twice = {
            self.storage.slab(self.rank, message.unit).key
            for message in self.messages
            if message.made_at == self.rank and message.full_precision
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


def incoming_key(message: Message) -> tuple[Group, int | None, bool]:
    """Return the key by which incoming partials share a slot: one owner, maker and precision."""
    return message.group, message.made_at, message.full_precision
