"""The copies that a program asks a device for, counted: as the executor makes them together (`lowering.copies`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tokenring.ir.schedule_data import Kind, ScheduleData
from tokenring.lowering.copies import CopyRun, MemoryPlace, as_one, copy_runs
from tokenring.lowering.program import Instruction, Merge, Pack, Program, Result, Span
from tokenring.lowering.records import Field, Record, Records, aligned

Pair = tuple[MemoryPlace, MemoryPlace]


class PassRecords:
    """The common ground of a pass's programs: the records of blocks, and how many rows each rank has of its own."""

    def __init__(self, schedule: ScheduleData, records: Records) -> None:
        size = records.workload
        self.records, self.operator = records, schedule.operator
        self.forward_records = Records(schedule, size, "forward")  # of what forward keeps
        self.own_rows: Mapping[Kind, int] = {
            "q": size.q_length // schedule.world_size, "kv": size.kv_length // schedule.world_size
        }  # fmt: skip


class CopiesOfProgram:
    """Counts copies, of callers' tensors that are contiguous and results as the kernel gives them."""

    def __init__(self, program: Program, of_pass: PassRecords) -> None:
        self.program, self.of_pass, self.records = program, of_pass, of_pass.records
        self.forward, self.batch = program.direction == "forward", of_pass.records.workload.batch
        self.runs: dict[int, CopyRun] = {}  # by the identity of each of its instructions
        for run in copy_runs(program.instructions):
            self.runs.update((id(program.instructions[at]), run) for at in run.positions)
        self._offsets: list[int] = []  # in bytes, of each slot in its memory
        ends = {True: 0, False: 0}
        for number, slot in enumerate(program.slots):
            self._offsets.append(ends[slot.kept])
            if slot.kept or slot.pooled:
                ends[slot.kept] += aligned(self.record(number).nbytes * slot.rows)

    def record(self, slot: int) -> Record:
        """Return the record that the rows of a slot hold."""
        spec = self.program.slots[slot]
        records = self.of_pass.forward_records if spec.kept else self.records
        return records(spec.kind, spec.full_precision, spec.all_heads)

    def together(self, instruction: Pack | Merge) -> list[Instruction]:
        """Return the instructions whose copies are made with this one: itself, others as well, or none: elsewhere."""
        run = self.runs.get(id(instruction))
        if run is None:
            return [instruction]
        if self.program.instructions[run.at] is not instruction:
            return []
        return [self.program.instructions[at] for at in run.positions]

    def of_packs(self, packs: Iterable[Instruction]) -> int:
        """Return the copies of packs."""
        pairs: list[Pair] = []
        for pack in packs:
            assert isinstance(pack, Pack)
            for field in self.record(pack.into.slot).fields:
                pairs.append((self._own(pack, field), self._in_slot(pack.into, field.name)))
        return len(as_one(pairs))

    def of_merges(self, merges: Iterable[Instruction]) -> int:
        """Return the copies of first results."""
        pairs: list[Pair] = []
        for merge in merges:
            assert isinstance(merge, Merge)
            has = {field.name for field in self.record(merge.into.slot).fields}
            for field in (each for each in self.record(merge.source.slot).fields if each.name in has):
                pairs.append((self._in_slot(merge.source, field.name), self._in_slot(merge.into, field.name)))
        return len(as_one(pairs))

    def of_results(self, rows: int, results: Iterable[Result]) -> int:
        """Return the copies of a kernel's results, of so many rows each."""
        pairs: list[Pair] = []
        for result in results:
            for field in self.record(result.into.slot).fields:
                pairs.append((self._made(result, field.name, rows), self._in_slot(result.into, field.name)))
        return len(as_one(pairs))

    # ---------- places

    def _in_slot(self, span: Span, name: str) -> MemoryPlace:
        spec, record = self.program.slots[span.slot], self.record(span.slot)
        field = record.field(name)
        low, high = (0, record.heads)
        if spec.all_heads:
            low, high = self.records.head_range(spec.kind, span.heads)
        wide, size = field.dim or 1, field.dtype.itemsize
        if spec.output:
            offset = span.start * record.heads * wide
            strides = record.heads * wide, spec.rows * record.heads * wide, wide, 1
            home: object = (span.slot, name)
        else:
            offset = (self._offsets[span.slot] + span.start * record.nbytes + field.offset_bytes) // size
            strides = record.nbytes // size, record.heads * wide, wide, 1
            home = "kept" if spec.kept else "pool"
        return self._place(home, field, offset + low * wide, span.rows, high - low, strides)

    def _own(self, pack: Pack, field: Field) -> MemoryPlace:
        low, high = self.records.head_range(pack.kind, pack.source.heads)
        size, total = self.records.workload, self.of_pass.own_rows[pack.kind]
        heads = size.q_heads if pack.kind.startswith("q") else size.kv_heads
        start, dim = pack.source.start, field.dim
        if field.statistic:
            offset, strides = low * total + start, (1, heads * total, total, 1)
        else:
            offset, strides = (start * heads + low) * dim, (heads * dim, total * heads * dim, dim, 1)
        return self._place(field.name, field, offset, pack.source.rows, high - low, strides)

    def _made(self, result: Result, name: str, rows: int) -> MemoryPlace:
        low, high = self.records.head_range(result.kind, result.into.heads)
        heads, field = high - low, self.record(result.into.slot).field(name)
        strides, offset = (heads * field.dim, rows * heads * field.dim, field.dim, 1), result.start * heads * field.dim
        if field.statistic:
            strides, offset = (1, heads * rows, rows, 1), result.start
        return self._place(name, field, offset, result.into.rows, heads, strides)

    def _place(
        self, home: object, field: Field, offset: int, rows: int, heads: int, strides: tuple[int, ...]
    ) -> MemoryPlace:
        shape = (rows, self.batch, heads) if field.statistic else (rows, self.batch, heads, field.dim)
        return MemoryPlace(home, field.dtype, offset, shape, strides[: len(shape)])
