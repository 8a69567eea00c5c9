"""Accumulators of one rank's program: which rows hold what already, and what is merged, filled and converted when."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from tokenring.ir.schedule_data import Block, Kind
from tokenring.lowering.agenda import Agenda, incoming_key
from tokenring.lowering.program import Fill, Instruction, Merge, Result, Slot, Span, Wait
from tokenring.lowering.records import Records
from tokenring.lowering.slots import Coverage, Slots
from tokenring.lowering.storage import Group, Message, Slab
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.lowering.bundles import Bundle
    from tokenring.lowering.exchanges import Exchange


class Listing:
    """The instructions so far. It stands apart from what lists them, so that nothing refers to itself in a circle."""

    def __init__(self) -> None:
        self.step = 0
        self.instructions: list[Instruction] = []
        self.steps: list[int] = []

    def emit(self, instruction: Instruction) -> None:
        """Append an instruction to the program, in the step that is being lowered."""
        self.instructions.append(instruction)
        self.steps.append(self.step)


class Accumulators:
    """The state of lowering, and the part of it that deals with results: at home and on their way there."""

    def __init__(
        self, agenda: Agenda, workload: Workload, early: bool, together: Sequence[Exchange | Bundle] = ()
    ) -> None:
        self.agenda, self.early, self.exchanges = agenda, early, together
        # Messages of an exchange lie apart in the total order; those of a bundle follow each other in their queue.
        together = () if early else together
        self.turns = {message: turn for turn, each in enumerate(together) for message in each.messages}
        self.schedule, self.storage, self.half = agenda.schedule, agenda.storage, agenda.half
        self.rank, self.direction = agenda.rank, agenda.direction
        schedule = self.schedule
        self.records = Records(schedule, workload, self.direction)
        self.listing = Listing()
        self.emit = self.listing.emit
        self.slots = Slots(self.emit)
        self.patience = None if schedule.slack is None else max(1, schedule.slack)
        self.kinds: tuple[Kind, ...] = schedule.operator.home[self.direction]
        self.arriving: dict[Block, list[int]] = {}  # what has not been waited for yet, and in which messages it comes
        self.posted: list[Message] = []
        self.uses = Counter(agenda.uses)  # that are still to come
        self.homecoming, self.adds = list(agenda.homecoming), list(agenda.adds)
        self.request_slots: dict[Group, int] = {}
        self.staged: dict[Group, int] = {}
        self.packed: set[Block] = set()
        self.partial_slots: dict[Group, int] = {}
        self.incoming_slots: dict[tuple[Group, int | None, bool], int] = {}
        self.wire_slots: dict[Group, int] = {}
        self.coverage: dict[object, Coverage] = defaultdict(Coverage)
        self.scratch_rows = 0
        self.home: dict[Kind, int] = {kind: self._home_slot(kind) for kind in self.kinds}

    def _home_slot(self, kind: Kind) -> int:
        spec = Slot(kind, self._local_rows(kind), full_precision=True, all_heads=True, output=not self.half)
        return self.slots.take(spec, 0, None)

    def _used(self, key: object, *slots: int) -> None:
        self.uses[key] -= 1
        if self.uses[key] == 0:
            for slot in sorted(set(slots)):
                self.slots.drop(slot)

    @staticmethod
    def _span(slot: int, row: int, rows: int, block: Block) -> Span:
        return Span(slot, row, row + rows, block.heads)

    def _await(self, blocks: Iterable[Block]) -> None:
        """Wait for what of these has not been waited for yet."""
        arriving = self.arriving
        numbers = {number for block in blocks for number in arriving.get(block, ())}
        for number in sorted(numbers):
            for block in self.posted[number].blocks:
                arriving[block].remove(number)
            self.emit(Wait(number))

    def _local_rows(self, kind: Kind) -> int:
        return self.schedule.layout_of(kind).local_lengths[self.rank]

    def _results(self, kind: Kind, slab: Slab, blocks: tuple[Block, ...], span: Span) -> Iterator[Result]:
        """Yield where the rows of a kernel's result go: home, or to the partial for their owner."""
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
        if again and self.direction == "forward" and self.schedule.operator.merge == "log-sum-exp":
            self.scratch_rows = max(self.scratch_rows, into.rows)

    def _home_coverage(self, kind: Kind, heads: int) -> Coverage:
        return self.coverage["home", kind, self.records.head_range(kind, heads)]

    def _partial_slot(self, kind: Kind, slab: Slab) -> int:
        """Return the accumulator of what this rank makes for the owners of a slab's units."""
        if slab.key not in self.partial_slots:
            rows = len(slab.blocks) * self.schedule.unit_length(kind)
            full = slab.key not in self.agenda.direct_partials or not self.agenda.narrow(kind)
            self.partial_slots[slab.key] = self.slots.take(Slot(kind, rows, full), self.listing.step, self.patience)
        return self.partial_slots[slab.key]

    def _incoming_slot(self, message: Message) -> int:
        key = incoming_key(message)
        if key not in self.incoming_slots:
            rows = len(self.storage.group_blocks(message.group)) * self.schedule.unit_length(message.kind)
            spec = Slot(message.kind, rows, self._full(message))
            self.incoming_slots[key] = self.slots.take(spec, self.listing.step, self.patience)
        return self.incoming_slots[key]

    def _full(self, message: Message) -> bool:
        return message.full_precision or not self.agenda.narrow(message.kind)

    def _finish_partial(self, message: Message) -> None:
        """Make a partial ready to send: add what came for it on the way, fill what nothing reached, convert it."""
        if message.made_at != self.rank:
            self._await(message.blocks)
            return
        for incoming in self._take_adds(message):
            self._merge_incoming(incoming)
        kind, slab = message.kind, self.storage.slab(self.rank, message.unit)
        slot, covered = self._partial_slot(kind, slab), self.coverage[kind, slab.key]
        span = self._span(slot, self.storage.row(self.rank, message.unit) + message.first, message.rows, message.unit)
        self._fill(kind, span, covered)
        if self.slots.specs[slot].full_precision and not self._full(message):
            wire = self._wire_slot(message, slab)
            self.emit(Merge(kind, span, span._replace(slot=wire), True))

    def _take_adds(self, message: Message) -> list[Message]:
        """Return the messages that bring partials to be added to those of this message; each is returned once."""
        if not self.adds:
            return []
        units = set(message.units)
        taken = [each for each in self.adds if not units.isdisjoint(each.units)]
        self.adds = [each for each in self.adds if each not in taken]
        return taken

    def _wire_slot(self, message: Message, slab: Slab) -> int:
        """Return the slot that a partial is sent from: its accumulator, or a copy in the wire's dtype."""
        slot = self._partial_slot(message.kind, slab)
        if not self.slots.specs[slot].full_precision or self._full(message):
            return slot
        if slab.key not in self.wire_slots:
            spec = self.slots.specs[slot]._replace(full_precision=False)
            self.wire_slots[slab.key] = self.slots.take(spec, self.listing.step, self.patience)
        return self.wire_slots[slab.key]

    def _merge_home(self, until: int | None) -> None:
        """Merge partials that have come home, those posted up to step `until`."""
        waiting = []
        for message in self.homecoming:
            if until is None or message.step <= until:
                self._merge_incoming(message)
            else:
                waiting.append(message)
        self.homecoming = waiting

    def _merge_incoming(self, message: Message) -> None:
        """Wait for a received partial and merge it into the accumulator for its units, here or at home."""
        kind, at_home = message.kind, message.owner == self.rank
        self._await(message.blocks)
        source = self.incoming_slots[incoming_key(message)]
        if at_home:
            into, covered = self.home[kind], self._home_coverage(kind, message.unit.heads)
        else:
            slab = self.storage.slab(self.rank, message.unit)
            into, covered = self._partial_slot(kind, slab), self.coverage[kind, slab.key]
        for start, row, rows in self._neighbours(message, at_home):
            for low, high, again in list(covered.runs(row, row + rows)):
                target = Span(into, low, high, message.unit.heads)
                self._note_merge(kind, again, target)
                part = Span(source, start + low - row, start + high - row, message.unit.heads)
                self.emit(Merge(kind, part, target, not again))
            covered.add(row, row + rows)
        self._used(self.agenda.use_key(message), source)

    def _neighbours(self, message: Message, at_home: bool) -> Iterator[tuple[int, int, int]]:
        """Yield (row in the incoming slot, row there, rows) of runs that lie together where they are merged, too."""
        storage = self.storage
        run: tuple[int, int, int] | None = None
        for unit, start, stop in message.places:
            row = start + (storage.own_row(unit) if at_home else storage.row(self.rank, unit))
            if run is not None and row == run[1] + run[2]:
                run = run[0], run[1], run[2] + stop - start
                continue
            if run is not None:
                yield run
            run = storage.group_row(unit) + start, row, stop - start
        if run is not None:
            yield run

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
