"""From a schedule to the program of one rank.

Steps are worked off in order: receives are posted first (transports that match messages by pair
order get both ends' posts in the one total order instead), then requests are sent on, tiles
computed, partials sent, and partials merged that have had `slack` steps to arrive. Every wait is
for one message, and stands where its content is needed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import lru_cache

import torch

from tokenring.schedule.agenda import Agenda, made_at
from tokenring.schedule.calls import Call, Supports, anything
from tokenring.schedule.coverage import Coverage
from tokenring.schedule.ir import PARTIALS, REQUESTS, Block, Kind, Move, Pass, Schedule, Tile
from tokenring.schedule.payload import Records
from tokenring.schedule.program import (
    OWN, Attend, Fill, Instruction, Merge, Pack, Program, Recv, Result, Send, Slot, Span, Wait,
)  # fmt: skip
from tokenring.schedule.slots import Slots
from tokenring.schedule.storage import Group, Slab, Storage
from tokenring.workload import Workload


@lru_cache(maxsize=64)
def storage_of(schedule: Schedule) -> Storage:
    return Storage(schedule)


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


class _Lowering:
    def __init__(
        self, schedule: Schedule, rank: int, direction: Pass, workload: Workload, supports: Supports, early: bool
    ) -> None:
        self.schedule, self.rank, self.direction, self.supports, self.early = schedule, rank, direction, supports, early
        self.storage = storage_of(schedule)
        self.records = Records(schedule, workload, direction)
        self.half = workload.dtype != torch.float32
        self.step = 0
        self.instructions: list[Instruction] = []
        self.steps: list[int] = []
        self.slots = Slots(self.emit)
        self.patience = None if schedule.slack is None else max(1, schedule.slack)
        self.kinds: tuple[Kind, ...] = ("q_partial",) if direction == "forward" else ("q_partial", "kv_partial")
        self.arriving: dict[Block, int] = {}  # what has not been waited for yet, and in which message it comes
        self.messages = 0
        self.request_slots: dict[Group, int] = {}
        self.staged: dict[Group, int] = {}
        self.packed: set[Block] = set()
        self.partial_slots: dict[Group, int] = {}
        self.incoming_slots: dict[tuple[Group, int], int] = {}
        self.wire_slots: dict[Group, int] = {}
        self.coverage: dict[object, Coverage] = defaultdict(Coverage)
        self.scratch_rows = 0
        self.agenda = Agenda(self.storage, rank, direction, supports, self.half)

    def run(self) -> Program:
        self.home = {
            kind: self.slots.take(Slot(kind, self._local_rows(kind), True, True), 0, None) for kind in self.kinds
        }
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

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.steps.append(self.step)

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

    def _used(self, key: object, *slots: int) -> None:
        self.agenda.uses[key] -= 1
        if self.agenda.uses[key] == 0:
            for slot in sorted(set(slots)):
                self.slots.drop(slot)

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
        slot = self.incoming_slots[self.storage.group(block), made_at(block)]
        return self._span(slot, self.storage.group_row(block.request()), rows, block), [slot]

    @staticmethod
    def _span(slot: int, row: int, rows: int, block: Block) -> Span:
        return Span(slot, row, row + rows, block.heads)

    def _await(self, message_blocks: Iterable[Block]) -> None:
        """Wait for what of these has not been waited for yet."""
        numbers = {self.arriving[block] for block in message_blocks if block in self.arriving}
        if numbers:
            self.arriving = {block: number for block, number in self.arriving.items() if number not in numbers}
        for number in sorted(numbers):
            self.emit(Wait(number))

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
        slabs = {slab.key: slab for tiles in self.agenda.tiles.values() for tile, _ in tiles for slab in self.agenda.slabs(tile)}
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

    def _results(self, kind: Kind, slab: Slab, blocks: tuple[Block, ...], span: Span) -> Iterator[Result]:
        """Where the rows of a kernel's result go: home, or to the partial for their owner."""
        for start, stop, at_home, row in self._destinations(slab, blocks, span):
            if at_home:
                into, covered = self.home[kind], self._home_coverage(kind, span.heads)
            else:
                into, covered = self._partial_slot(kind, slab), self.coverage[kind, slab.key]
            for low, high, again in list(covered.runs(row, row + stop - start)):
                target = Span(into, low, high, span.heads)
                self._note_merge(kind, again, target)
                yield Result(kind, start + low - row, target, not again)
            covered.add(row, row + stop - start)

    def _destinations(
        self, slab: Slab, blocks: tuple[Block, ...], span: Span
    ) -> Iterator[tuple[int, int, bool, int]]:
        """(first row, last row, whether home, row there) of each part of a result."""
        owners = {self.schedule.owner(block) == self.rank for block in blocks}
        if slab.own_only or owners == {False}:
            yield 0, span.rows, slab.own_only, span.start
            return
        length = self.schedule.unit_length(blocks[0].kind)
        for block in blocks:
            at = self.storage.row(self.rank, block)
            low, high = max(at, span.start), min(at + length, span.stop)
            if low < high:
                home = self.schedule.owner(block) == self.rank
                row = self.storage.own_row(block) + low - at if home else low
                yield low - span.start, high - span.start, home, row

    def _note_merge(self, kind: Kind, again: bool, into: Span) -> None:
        if again and self.direction == "forward" and kind == "q_partial":
            self.scratch_rows = max(self.scratch_rows, into.rows)

    def _home_coverage(self, kind: Kind, heads: int) -> Coverage:
        return self.coverage["home", kind, self.records.head_range(kind, heads)]

    # ---------- partials

    def _partial_slot(self, kind: Kind, slab: Slab) -> int:
        """The accumulator of what this rank makes for the owners of a slab's units."""
        if slab.key not in self.partial_slots:
            rows = len(slab.blocks) * self.schedule.unit_length(kind)
            full = slab.key not in self.agenda.direct_partials
            self.partial_slots[slab.key] = self.slots.take(Slot(kind, rows, full), self.step, self.patience)
        return self.partial_slots[slab.key]

    def _incoming_slot(self, move: Move) -> int:
        group = self.storage.group(move.block)
        key = (group, made_at(move.block))
        if key not in self.incoming_slots:
            rows = len(self.storage.group_blocks(group)) * self.schedule.unit_length(move.block.kind)
            spec = Slot(move.block.kind, rows, self._full(move))
            self.incoming_slots[key] = self.slots.take(spec, self.step, self.patience)
        return self.incoming_slots[key]

    def _full(self, move: Move) -> bool:
        return not self.half or self.schedule.in_full_precision(move)

    def _finish_partial(self, message: list[Move]) -> None:
        """Before a partial is sent: add what came for it on the way, fill what nothing reached, convert."""
        if message[0].block.made_at != self.rank:
            self._await([move.block for move in message])
            return
        for incoming in self.agenda.take_adds({move.block.request() for move in message}):
            self._merge_incoming(incoming)
        kind, slab = message[0].block.kind, self.storage.slab(self.rank, message[0].block.request())
        slot, covered = self._partial_slot(kind, slab), self.coverage[kind, slab.key]
        rows = len(message) * self.schedule.unit_length(kind)
        span = self._span(slot, self.storage.row(self.rank, message[0].block.request()), rows, message[0].block)
        self._fill(kind, span, covered)
        if self.slots.specs[slot].full_precision and not self._full(message[0]):
            wire = self._wire_slot(message[0])
            self.emit(Merge(kind, span, span._replace(slot=wire), True))

    def _wire_slot(self, move: Move) -> int:
        """The slot that a partial is sent from: its accumulator, or a copy in the wire's dtype."""
        slab = self.storage.slab(self.rank, move.block.request())
        slot = self._partial_slot(move.block.kind, slab)
        if not self.slots.specs[slot].full_precision or self._full(move):
            return slot
        if slab.key not in self.wire_slots:
            spec = self.slots.specs[slot]._replace(full_precision=False)
            self.wire_slots[slab.key] = self.slots.take(spec, self.step, self.patience)
        return self.wire_slots[slab.key]

    def _merge_home(self, until: int | None) -> None:
        """Merge partials that have come home, those posted up to step `until`."""
        waiting = []
        for message in self.agenda.homecoming:
            if until is None or message[0].step <= until:
                self._merge_incoming(message)
            else:
                waiting.append(message)
        self.agenda.homecoming = waiting

    def _merge_incoming(self, message: list[Move]) -> None:
        """Wait for a received partial and merge it into the accumulator for its units, here or at home."""
        first = message[0]
        kind = first.block.kind
        self._await([move.block for move in message])
        source = self.incoming_slots[self.storage.group(first.block), made_at(first.block)]
        length = self.schedule.unit_length(kind)
        for move in message:
            unit = move.block.request()
            at_home = self.schedule.owner(unit) == self.rank
            slab = self.storage.slab(self.rank, unit)
            into = self.home[kind] if at_home else self._partial_slot(kind, slab)
            covered = self._home_coverage(kind, unit.heads) if at_home else self.coverage[kind, slab.key]
            row = self.storage.own_row(unit) if at_home else self.storage.row(self.rank, unit)
            start = self.storage.group_row(unit)
            for low, high, again in list(covered.runs(row, row + length)):
                target = Span(into, low, high, unit.heads)
                self._note_merge(kind, again, target)
                part = Span(source, start + low - row, start + high - row, unit.heads)
                self.emit(Merge(kind, part, target, not again))
            covered.add(row, row + length)
        self._used(self.agenda.use_key(first), source)

    def _fill(self, kind: Kind, span: Span, covered: Coverage) -> None:
        for low, high, done in list(covered.runs(span.start, span.stop)):
            if not done:
                self.emit(Fill(kind, Span(span.slot, low, high, span.heads)))
        covered.add(span.start, span.stop)

    def _fill_home(self) -> None:
        for kind in self.kinds:
            ranges = {self.records.head_range(kind, group): group for group in range(self.schedule.head_groups)}
            for heads in ranges.values():
                span = Span(self.home[kind], 0, self._local_rows(kind), heads)
                self._fill(kind, span, self._home_coverage(kind, heads))

    def _local_rows(self, kind: Kind) -> int:
        return self.schedule.layout_of(kind).local_length
