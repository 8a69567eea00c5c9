"""Accumulators of one rank's program: which rows hold what already, and what is merged, filled and converted when."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch

from tokenring.schedule.agenda import Agenda
from tokenring.schedule.calls import Supports
from tokenring.schedule.coverage import Coverage
from tokenring.schedule.ir import Block, Kind, Move, Pass, Schedule
from tokenring.schedule.payload import Records
from tokenring.schedule.program import Fill, Instruction, Merge, Result, Slot, Span, Wait
from tokenring.schedule.slots import Slots
from tokenring.schedule.storage import Group, Slab, storage_of
from tokenring.workload import Workload


class Accumulators:
    """The state of lowering, and the part of it that deals with results: at home and on their way there."""

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
        self.incoming_slots: dict[tuple[Group, int, bool], int] = {}
        self.wire_slots: dict[Group, int] = {}
        self.coverage: dict[object, Coverage] = defaultdict(Coverage)
        self.scratch_rows = 0
        self.home: dict[Kind, int] = {kind: self._home_slot(kind) for kind in self.kinds}
        self.agenda = Agenda(self.storage, rank, direction, supports, self.half, early)

    def _home_slot(self, kind: Kind) -> int:
        spec = Slot(kind, self._local_rows(kind), full_precision=True, all_heads=True, output=not self.half)
        return self.slots.take(spec, 0, None)

    def emit(self, instruction: Instruction) -> None:
        self.instructions.append(instruction)
        self.steps.append(self.step)

    def _used(self, key: object, *slots: int) -> None:
        self.agenda.uses[key] -= 1
        if self.agenda.uses[key] == 0:
            for slot in sorted(set(slots)):
                self.slots.drop(slot)

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

    def _local_rows(self, kind: Kind) -> int:
        return self.schedule.layout_of(kind).local_length

    def _results(self, kind: Kind, slab: Slab, blocks: tuple[Block, ...], span: Span) -> Iterator[Result]:
        """Where the rows of a kernel's result go: home, or to the partial for their owner."""
        for start, stop, at_home, row in self.storage.destinations(self.rank, slab, blocks, span.start, span.stop):
            if at_home:
                into, covered = self.home[kind], self._home_coverage(kind, span.heads)
            else:
                into, covered = self._partial_slot(kind, slab), self.coverage[kind, slab.key]
            for low, high, again in list(covered.runs(row, row + stop - start)):
                target = Span(into, low, high, span.heads)
                self._note_merge(kind, again, target)
                yield Result(kind, start + low - row, target, not again)
            covered.add(row, row + stop - start)

    def _note_merge(self, kind: Kind, again: bool, into: Span) -> None:
        if again and self.direction == "forward" and kind == "q_partial":
            self.scratch_rows = max(self.scratch_rows, into.rows)

    def _home_coverage(self, kind: Kind, heads: int) -> Coverage:
        return self.coverage["home", kind, self.records.head_range(kind, heads)]

    def _partial_slot(self, kind: Kind, slab: Slab) -> int:
        """The accumulator of what this rank makes for the owners of a slab's units."""
        if slab.key not in self.partial_slots:
            rows = len(slab.blocks) * self.schedule.unit_length(kind)
            full = slab.key not in self.agenda.direct_partials
            self.partial_slots[slab.key] = self.slots.take(Slot(kind, rows, full), self.step, self.patience)
        return self.partial_slots[slab.key]

    def _incoming_slot(self, move: Move) -> int:
        key = self.agenda.incoming_key(move)
        if key not in self.incoming_slots:
            rows = len(self.storage.group_blocks(key[0])) * self.schedule.unit_length(move.block.kind)
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
        source = self.incoming_slots[self.agenda.incoming_key(first)]
        for start, unit, rows in self._neighbours(message):
            at_home = self.schedule.owner(unit) == self.rank
            slab = self.storage.slab(self.rank, unit)
            into = self.home[kind] if at_home else self._partial_slot(kind, slab)
            covered = self._home_coverage(kind, unit.heads) if at_home else self.coverage[kind, slab.key]
            row = self.storage.own_row(unit) if at_home else self.storage.row(self.rank, unit)
            for low, high, again in list(covered.runs(row, row + rows)):
                target = Span(into, low, high, unit.heads)
                self._note_merge(kind, again, target)
                part = Span(source, start + low - row, start + high - row, unit.heads)
                self.emit(Merge(kind, part, target, not again))
            covered.add(row, row + rows)
        self._used(self.agenda.use_key(first), source)

    def _neighbours(self, message: list[Move]) -> Iterator[tuple[int, Block, int]]:
        """(row in the incoming slot, first unit, rows) of runs that lie together where they are merged, too."""
        length = self.schedule.unit_length(message[0].block.kind)
        units = [move.block.request() for move in message]
        at_home = self.schedule.owner(units[0]) == self.rank
        row_of = self.storage.own_row if at_home else lambda unit: self.storage.row(self.rank, unit)
        first = 0
        for index in range(1, len(units) + 1):
            if index == len(units) or row_of(units[index]) != row_of(units[index - 1]) + length:
                yield self.storage.group_row(units[first]), units[first], (index - first) * length
                first = index

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
