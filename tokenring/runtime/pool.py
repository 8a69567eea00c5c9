"""The buffer pool of one rank: all slots and accumulators of a program in one allocation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Transport, Work
from tokenring.errors import UnsupportedError
from tokenring.ir.schedule_data import ScheduleData
from tokenring.lowering.program import Collective, Program, Span, bundled_bytes, landing_slots
from tokenring.lowering.records import (
    Field,
    Record,
    Records,
    aligned,
    decoded_bytes,
    scratch_bytes,
    slot_bytes,
)
from tokenring.sequence.workload import Workload
from tokenring.weak_method import weakly

if TYPE_CHECKING:
    from tokenring.backends.codecs.choice import Codec
    from tokenring.backends.devices import DeviceRuntime
    from tokenring.runtime.streams import Streams

Allocate = Callable[[int], "torch.Tensor | None"]


class Pool:
    """A buffer pool whose bytes only grow. `high_water_bytes` is the end of the furthest view ever given out.

    allocate: where peers write into the pool, gives memory that they can reach, or None while what
    it gave last is enough for all ranks; a collective call.
    """

    def __init__(self, device: torch.device, allocate: Allocate | None = None) -> None:
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self.high_water_bytes = 0
        self.streams = _streams_of(device_of(device))
        self._allocate = allocate
        self.exchanges: dict[object, object] = {}  # of cached attention, bound to this memory: see `partials`

    @staticmethod
    def of(transport: Transport | None, device: torch.device) -> Pool:
        """Return a new pool; where peers write into it, the transport's only one: growing it is a collective call."""
        if transport is None or not transport.target.one_sided:
            return Pool(device)
        if transport.pool is None:
            transport.pool = Pool(device, weakly(transport.allocate))  # it holds the pool
        return cast(Pool, transport.pool)

    @property
    def one_sided(self) -> bool:
        """True if peers write into the pool."""
        return self._allocate is not None

    def reserve(self, nbytes: int) -> None:
        """Grow the pool to at least so many bytes; views given out before a growth stay on the old memory."""
        if self._allocate is not None:
            grown = self._allocate(nbytes)
            self.data = self.data if grown is None else grown
        elif nbytes > self.data.numel():
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=self.data.device)

    def touch(self, end: int) -> None:
        """Raise `high_water_bytes` to `end`, if it is lower."""
        self.high_water_bytes = max(self.high_water_bytes, end)


class Views:
    """Typed views of the slots of one program on a pool (or on kept tensors)."""

    def __init__(self, schedule: ScheduleData, workload: Workload, program: Program, pool: Pool) -> None:
        self.program, self.pool, self.workload, self.operator = program, pool, workload, schedule.operator
        self.records = Records(schedule, workload, program.direction)
        self.forward_records = Records(schedule, workload, "forward")
        form = self.records.formats.get("q")
        moves = form is not None and any(move.block.kind == "q" for move in schedule.moves)  # in either pass
        self.q_format = form.name if form is not None and moves else None
        self.nbytes = slot_bytes(schedule, workload, program)
        self.offsets, at = [], 0
        for slot, size in zip(program.slots, self.nbytes, strict=True):
            self.offsets.append(at if slot.pooled else -1)
            at += aligned(size) if slot.pooled else 0
        self.kept_offsets: dict[int, int] = {}  # kept slot → where it lies in the memory that forward leaves
        self.kept_bytes = 0
        for number, slot in enumerate(program.slots):
            if slot.kept:
                self.kept_offsets[number] = self.kept_bytes
                self.kept_bytes += aligned(self.nbytes[number])
        self._landings: dict[int, int] = {}  # kept slot → where its messages land
        for kept in landing_slots(program) if pool.one_sided else ():
            self._landings[kept] = at
            at += aligned(self.nbytes[kept])
        self._bundles: dict[Collective, tuple[int, int]] = {}  # where the messages of a bundle lie together
        for bundle, size in bundled_bytes(self.nbytes, program).items():
            self._bundles[bundle] = at, at + size
            at += aligned(size)
        end = at + aligned(scratch_bytes(schedule, workload, program))
        self._decoded: dict[str, int] = {}  # where tensors lie that are decoded, by name
        for name, size in decoded_bytes(schedule, workload, program).items():
            self._decoded[name] = at
            at += aligned(size)
        self._scratch_at = at
        pool.reserve(end)
        self.base = pool.data
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # the pool as values of a dtype

    def record(self, slot: int) -> Record:
        """Return the record that the rows of a slot hold."""
        spec = self.program.slots[slot]
        records = self.forward_records if spec.kept else self.records
        return records(spec.kind, spec.full_precision, spec.all_heads)

    def message(self, span: Span, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bytes of a span, contiguous: uint8, rows · record bytes."""
        size = self.record(span.slot).nbytes
        start, base = self._start(span.slot, kept)
        self._touch(span, kept)
        return base[start + span.start * size : start + span.stop * size]

    def landing(self, span: Span) -> torch.Tensor | None:
        """Return the bytes where a message for a kept slot arrives; None if it arrives in the slot itself.

        Peers that write into the pool cannot reach kept memory, so the message lands in the pool first.
        """
        if span.slot not in self._landings:
            return None
        size, start = self.record(span.slot).nbytes, self._landings[span.slot]
        self.pool.touch(start + aligned(self.nbytes[span.slot]))
        return self.base[start + span.start * size : start + span.stop * size]

    def bundle(self, bundle: Collective) -> torch.Tensor:
        """Return the bytes of a bundle, contiguous."""
        start, stop = self._bundles[bundle]
        self.pool.touch(start + aligned(stop - start))
        return self.base[start:stop]

    def field(self, span: Span, name: str, kept: torch.Tensor | None = None) -> torch.Tensor:
        """Return a field of a span's rows and head group: [rows, B, heads, D], or [rows, B, heads] for a statistic."""
        record = self.record(span.slot)
        start, base = self._start(span.slot, kept)
        self._touch(span, kept)
        spec = self.program.slots[span.slot]
        heads = (0, record.heads) if not spec.all_heads else self.records.head_range(spec.kind, span.heads)
        return self._strided(base, start + span.start * record.nbytes, span.rows, record, record.field(name), heads)

    def whole(self, slot: int, name: str) -> torch.Tensor:
        """Return a field of all rows and heads of a slot."""
        record = self.record(slot)
        rows = self.program.slots[slot].rows
        self._touch(Span(slot, 0, rows), None)
        return self._strided(self.base, self.offsets[slot], rows, record, record.field(name), (0, record.heads))

    def scratch(self, rows: int, heads: int) -> torch.Tensor:
        """Return the memory for merging: [2, rows, B, heads] fp32."""
        count = 2 * rows * self.workload.batch * heads
        self.pool.touch(self._scratch_at + aligned(4 * count))
        flat = self.base[self._scratch_at : self._scratch_at + 4 * count].view(torch.float32)
        return flat.view(2, rows, self.workload.batch, heads)

    def codec(self, slot: int, name: str) -> Codec | None:
        """Return the codec of a field of a slot; None: it is not encoded."""
        if not self._decoded or (form := self.record(slot).field(name).codec) is None:
            return None
        from tokenring.backends.codecs.choice import codec_of

        return codec_of(form)

    def as_read(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows of q or dout [..., D] as other ranks read them, where q travels encoded, else as they are.

        All tiles of a row have one q and one dout then: what rounding adds is common to its scores, and cancels.
        What a collective gathers is the same on all ranks.
        """
        if self.q_format is None:
            return rows
        from tokenring.backends.codecs.choice import codec_of, there_and_back

        return there_and_back(codec_of(self.q_format), rows)[1]

    def decoded(self, span: Span, name: str) -> torch.Tensor:
        """Return the memory into which a field of a span is decoded: [rows, B, heads, D]. Others share it."""
        record, size = self.record(span.slot), self.workload
        shape = (span.rows, size.batch, record.heads, record.field(name).elements)
        nbytes, start = math.prod(shape) * size.dtype.itemsize, self._decoded[name]
        self.pool.touch(start + aligned(nbytes))
        return self.base[start : start + nbytes].view(size.dtype).view(shape)

    def new_kept(self, device: torch.device) -> torch.Tensor | None:
        """Allocate memory for what forward keeps for backward, uint8; None where it keeps nothing."""
        return torch.empty(self.kept_bytes, dtype=torch.uint8, device=device) if self.kept_bytes else None

    def kept_slots_in(self, kept: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """Return the slots that lie in kept memory, by their numbers in this program.

        Numbers differ between the passes, the order and sizes of slots do not.
        Raises UnsupportedError if the memory is not what forward made.
        """
        if not self.kept_bytes:
            return {}
        if kept is None or kept.numel() < self.kept_bytes:
            raise UnsupportedError(
                f"the {self.kept_bytes} bytes that forward kept for backward are gone: under torch.compile tensors "
                f"saved for backward must not be copied, as torch.autograd.graph.save_on_cpu does; use a schedule "
                f"that keeps nothing"
            )
        return {slot: kept[at : at + self.nbytes[slot]] for slot, at in self.kept_offsets.items()}

    def _strided(
        self, base: torch.Tensor, start: int, rows: int, record: Record, field: Field, heads: tuple[int, int]
    ) -> torch.Tensor:
        """Return a field of rows that begin at a byte: one view, since programs are bound to thousands of them."""
        typed = self._values(base, field.dtype)
        size, width, (low, high) = field.dtype.itemsize, 1 if field.statistic else field.dim, heads
        shape: tuple[int, ...] = (rows, self.workload.batch, high - low)
        strides: tuple[int, ...] = (record.nbytes // size, record.heads * width, width)
        if not field.statistic:
            shape, strides = (*shape, width), (*strides, 1)
        at = typed.storage_offset() + (start + field.offset_bytes) // size  # of its storage, which others may share
        return typed.as_strided(shape, strides, at + low * width)

    def _values(self, base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if base is not self.base:
            return _typed(base, dtype)
        if dtype not in self._typed:
            self._typed[dtype] = _typed(base, dtype)
        return self._typed[dtype]

    def _start(self, slot: int, kept: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        return (self.offsets[slot], self.base) if kept is None else (0, kept)

    def _touch(self, span: Span, kept: torch.Tensor | None) -> None:
        if kept is None:
            self.pool.touch(self.offsets[span.slot] + aligned(self.nbytes[span.slot]))


class Landed:
    """A message whose parts (where each lies, where it belongs) are copied when all has arrived."""

    def __init__(self, handle: Work, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._handle, self._parts = handle, parts

    def wait(self) -> None:
        """Wait until the message has arrived, then copy its parts."""
        self._handle.wait()
        for landing, into in self._parts:
            into.copy_(landing)


def _typed(base: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return bytes as values of a dtype."""
    return base[: base.numel() // 4 * 4].view(dtype)


def own_rows(x: torch.Tensor, span: Span, low: int, high: int) -> torch.Tensor:
    """Return a view of own rows and heads as slots have them: [B, T, H, D] → [S, B, heads, D], [B, H, T] likewise."""
    if x.dim() == 3:
        return x[:, low:high, span.start : span.stop].permute(2, 0, 1)
    return x[:, span.start : span.stop, low:high].transpose(0, 1)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """Return a view with heads first: [S, B, H, ...] → [B, H, S, ...]."""
    return x.permute(1, 2, 0, 3) if x.dim() == 4 else x.permute(1, 2, 0)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """Return a view with rows first: [B, H, S, ...] → [S, B, H, ...]."""
    return x.permute(2, 0, 1, 3) if x.dim() == 4 else x.permute(2, 0, 1)


def _streams_of(device: DeviceRuntime) -> Streams | None:
    """Make the streams of a device; None if it has none."""
    if device.current_stream() is None:
        return None
    from tokenring.runtime.streams import Streams

    return Streams(device)
