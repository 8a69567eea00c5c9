"""From a schedule to the program of one rank.

Steps are worked off in order: receives are posted first (transports that match messages by pair
order get both ends' posts in the one total order instead), then requests are sent on, tiles
computed, partials sent, and partials merged that have had `slack` steps to arrive. Every wait is
for one message, and stands where its content is needed.
"""

from __future__ import annotations

from collections.abc import Iterator

from tokenring.schedule.accumulators import Accumulators
from tokenring.schedule.calls import Call, Supports, anything
from tokenring.schedule.ir import PARTIALS, REQUESTS, Block, Move, Pass, Schedule, Tile
from tokenring.schedule.program import (
    OWN,
    Attend,
    Pack,
    Program,
    Recv,
    Send,
    Slot,
    Span,
)  # fmt: skip
from tokenring.schedule.storage import Group, Slab
from tokenring.workload import Workload


def lower(
    schedule: Schedule,
    rank: int,
    direction: Pass,
    workload: Workload,
    supports: Supports = anything,
    early_receives: bool = True,
) -> Program:
    """The program of one rank in one pass.

    supports: says why the kernel refuses a patch; such patches are cut until it does not.
    early_receives: whether the transport matches the two directions of a pair apart, so that
    receives may be posted before sends; else posts follow the total order of `passes.order`.
    """
    return _Lowering(schedule, rank, direction, workload, supports, early_receives).run()


class _Lowering(Accumulators):
    """Steps, messages, requests and tiles."""

    def run(self) -> Program:
        self._keep_slots()
        for step in sorted({*self.agenda.tiles, *self.agenda.by_step}):
            self.step = step
            self._one_step(self.agenda.by_step[step], self.agenda.tiles[step])
        self._merge_home(None)
        self.slots.settle_all()
        self._fill_home()
        return Program(
            self.rank, self.direction, tuple(self.slots.specs), tuple(self.instructions),
            tuple(self.home.items()), self.scratch_rows, tuple(self.steps),
        )  # fmt: skip

    def _one_step(self, messages: list[list[Move]], tiles: list[tuple[Tile, list[Call]]]) -> None:
        def of(channel: str, receiving: bool | None) -> Iterator[list[Move]]:
            for message in messages:
                if message[0].channel == channel and receiving in (None, message[0].dst == self.rank):
                    yield message

        if self.early:
            for message in [*of(REQUESTS, True), *of(PARTIALS, True)]:
                self._post(message)
        for message in of(REQUESTS, False):
            self._have_request(message)
        for message in of(REQUESTS, False if self.early else None):
            self._post(message)
        for tile, made in tiles:
            self._tile(tile, made)
        for message in of(PARTIALS, False):
            self._finish_partial(message)
        for message in of(PARTIALS, False if self.early else None):
            self._post(message)
        if self.schedule.slack is not None:
            self._merge_home(self.step - self.schedule.slack)

    # ---------- messages

    def _post(self, message: list[Move]) -> None:
        """Post the send or the receive of neighbouring blocks."""
        first = message[0]
        number = self.messages
        self.messages += 1
        label = f"step {first.step}, {','.join(str(move.block) for move in message)}"
        if first.dst == self.rank:
            span = self._receive_span(message)
            for move in message:
                self.arriving[move.block] = number
            self.emit(Recv(number, span, first.src, first.channel, label))
            return
        span, sources = self._send_span(message)
        self.emit(Send(number, span, first.dst, first.channel, label))
        self.slots.sent(span.slot, number, self.step)
        self._used(self.agenda.use_key(first), *sources)

    def _receive_span(self, message: list[Move]) -> Span:
        first = message[0]
        rows = len(message) * self.schedule.unit_length(first.block.kind)
        if first.channel == REQUESTS:
            slot = self._request_slot(self.storage.slab(self.rank, first.block))
            return self._span(slot, self.storage.row(self.rank, first.block), rows, first.block)
        slot = self._incoming_slot(first)
        return self._span(slot, self.storage.group_row(first.block.request()), rows, first.block)

    def _send_span(self, message: list[Move]) -> tuple[Span, list[int]]:
        """What is sent, and the slots that are done with when this was the last send from them."""
        first = message[0]
        block = first.block
        rows = len(message) * self.schedule.unit_length(block.kind)
        if first.channel == REQUESTS:
            slab, group = self.storage.slab(self.rank, block), self.storage.group(block)
            slot = self.staged[group] if slab.own_only else self._request_slot(slab)
            row = self.storage.group_row(block) if slab.own_only else self.storage.row(self.rank, block)
            return self._span(slot, row, rows, block), [slot]
        if block.made_at == self.rank:
            slab = self.storage.slab(self.rank, block.request())
            row = self.storage.row(self.rank, block.request())
            span = self._span(self._wire_slot(first), row, rows, block)
            wire = self.wire_slots.get(slab.key)
            return span, [self._partial_slot(block.kind, slab), *([] if wire is None else [wire])]
        slot = self.incoming_slots[self.agenda.incoming_key(first)]
        return self._span(slot, self.storage.group_row(block.request()), rows, block), [slot]

    # ---------- requests

    def _have_request(self, message: list[Move]) -> None:
        """Before a send: what is passed on has arrived, what is the rank's own is packed."""
        blocks = [move.block for move in message]
        self._await(blocks)
        own = [block for block in blocks if self.schedule.owner(block) == self.rank]
        if own:
            self._pack(own)

    def _pack(self, blocks: list[Block]) -> None:
        for block in blocks:
            if block in self.packed:
                continue
            self.packed.add(block)
            slab, group = self.storage.slab(self.rank, block), self.storage.group(block)
            length, source = self.schedule.unit_length(block.kind), self.storage.own_row(block)
            if slab.own_only:
                if group not in self.staged:
                    rows = len(self.storage.group_blocks(group)) * length
                    self.staged[group] = self.slots.take(Slot(block.kind, rows), self.step, 0)
                slot, row = self.staged[group], self.storage.group_row(block)
            else:
                slot, row = self._request_slot(slab), self.storage.row(self.rank, block)
            self.emit(Pack(block.kind, self._span(OWN, source, length, block), self._span(slot, row, length, block)))

    def _request_slot(self, slab: Slab) -> int:
        if slab.key not in self.request_slots:
            kind = slab.key[0]
            spec = Slot(kind, len(slab.blocks) * self.schedule.unit_length(kind))
            self.request_slots[slab.key] = self.slots.take(spec, self.step, 0)
        return self.request_slots[slab.key]

    def _keep_slots(self) -> None:
        """Slots that outlive the pass come first, in an order on which both passes agree."""
        slabs = {
            slab.key: slab
            for tiles in self.agenda.tiles.values()
            for tile, _ in tiles
            for slab in self.agenda.slabs(tile)
        }
        self.kept: dict[Group, int] = {}
        for key in sorted(slabs):
            slab = slabs[key]
            if key[0] in self.schedule.keep and not slab.own_only:
                rows = len(slab.blocks) * self.schedule.unit_length(key[0])
                self.kept[key] = self.slots.take(Slot(key[0], rows, kept=True), 0, None)
                if self.direction == "forward" or key[0] == "kv":
                    self.request_slots[key] = self.kept[key]

    # ---------- tiles

    def _tile(self, tile: Tile, made: list[Call]) -> None:
        q_slab, kv_slab = self.agenda.slabs(tile)
        for blocks, slab in ((tile.q, q_slab), (tile.kv, kv_slab)):
            self._await(blocks)
            packs = not slab.own_only and self.request_slots.get(slab.key) not in self._kept_before()
            if packs:
                self._pack([block for block in blocks if self.schedule.owner(block) == self.rank])
        q_slot = OWN if q_slab.own_only else self._request_slot(q_slab)
        kv_slot = OWN if kv_slab.own_only else self._request_slot(kv_slab)
        for call in made:
            q = Span(q_slot, call.q_row, call.q_row + call.patch.rows, tile.heads)
            kv = Span(kv_slot, call.kv_row, call.kv_row + call.patch.cols, tile.heads)
            results = [*self._results("q_partial", q_slab, tile.q, q)]
            if "kv_partial" in self.kinds:
                results += self._results("kv_partial", kv_slab, tile.kv, kv)
            kept_q = None
            if self.direction == "backward" and q_slab.key in self.kept:
                kept_q = q._replace(slot=self.kept[q_slab.key])
            self.emit(Attend(tile.step, q, kv, call.patch, tuple(results), kept_q))
        for slab, slot in ((q_slab, q_slot), (kv_slab, kv_slot)):
            if not slab.own_only:
                self._used(slab.key, slot)

    def _kept_before(self) -> set[int]:
        """Slots that forward has filled already."""
        if self.direction == "forward":
            return set()
        return {slot for key, slot in self.kept.items() if key[0] == "kv"}
