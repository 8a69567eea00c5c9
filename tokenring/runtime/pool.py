"""The buffer pool of one rank: all slots and accumulators of a program in one allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch

from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import Transport, Work
from tokenring.errors import UnsupportedError
from tokenring.ir.schedule_data import ScheduleData
from tokenring.lowering.footprint import aligned, bundled_bytes, landing_slots, scratch_bytes, slot_bytes
from tokenring.lowering.program import Collective, Program, Span
from tokenring.lowering.records import Field, Record, Records
from tokenring.runtime.streams import Streams
from tokenring.sequence.workload import Workload
from tokenring.weak_method import weakly

Allocate = Callable[[int], "torch.Tensor | None"]


class Pool:
    """Bytes that only grow. `high_water_bytes` is the end of the furthest view ever given out.

    allocate: where peers write into the pool, gives memory that they can reach, or None while what
    it gave last is enough for all ranks; a collective call.
    """

    def __init__(self, device: torch.device, allocate: Allocate | None = None) -> None:
        self.data = torch.empty(0, dtype=torch.uint8, device=device)
        self.high_water_bytes = 0
        self.streams = Streams.of(device_of(device))
        self._allocate = allocate

    @staticmethod
    def of(transport: Transport | None, device: torch.device) -> Pool:
        """A pool of its own; where peers write into it, the transport's one, since growing it is a collective call."""
        if transport is None or not transport.target.one_sided:
            return Pool(device)
        if transport.pool is None:
            transport.pool = Pool(device, weakly(transport.allocate))  # it holds the pool
        return cast(Pool, transport.pool)

    @property
    def one_sided(self) -> bool:
        return self._allocate is not None

    def reserve(self, nbytes: int) -> None:
        """At least so many bytes; views given out before a growth stay on the old memory."""
        if self._allocate is not None:
            grown = self._allocate(nbytes)
            self.data = self.data if grown is None else grown
        elif nbytes > self.data.numel():
            self.data = torch.empty(nbytes, dtype=torch.uint8, device=self.data.device)

    def touch(self, end: int) -> None:
        self.high_water_bytes = max(self.high_water_bytes, end)


class Views:
    """Typed views of the slots of one program on a pool (or on kept tensors)."""

    def __init__(self, schedule: ScheduleData, workload: Workload, program: Program, pool: Pool) -> None:
        self.program, self.pool, self.workload = program, pool, workload
        self.records = Records(schedule, workload, program.direction)
        self.forward_records = Records(schedule, workload, "forward")
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
        self._scratch_at = at
        pool.reserve(at + aligned(scratch_bytes(schedule, workload, program)))
        self.base = pool.data

    def record(self, slot: int) -> Record:
        spec = self.program.slots[slot]
        records = self.forward_records if spec.kept else self.records
        return records(spec.kind, spec.full_precision, spec.all_heads)

    def message(self, span: Span, kept: torch.Tensor | None = None) -> torch.Tensor:
        """The bytes of a span, contiguous."""
        size = self.record(span.slot).nbytes
        start, base = self._start(span.slot, kept)
        self._touch(span, kept)
        return base[start + span.start * size : start + span.stop * size]

    def landing(self, span: Span) -> torch.Tensor | None:
        """Where a message for a kept slot lands, if peers cannot write into kept memory themselves."""
        if span.slot not in self._landings:
            return None
        size, start = self.record(span.slot).nbytes, self._landings[span.slot]
        self.pool.touch(start + aligned(self.nbytes[span.slot]))
        return self.base[start + span.start * size : start + span.stop * size]

    def bundle(self, bundle: Collective) -> torch.Tensor:
        """The bytes of a bundle, contiguous."""
        start, stop = self._bundles[bundle]
        self.pool.touch(start + aligned(stop - start))
        return self.base[start:stop]

    def field(self, span: Span, name: str, kept: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, B, heads, D], or [rows, B, heads] for a statistic: the span's rows and head group."""
        record = self.record(span.slot)
        field = record.field(name)
        start, base = self._start(span.slot, kept)
        self._touch(span, kept)
        whole = _strided(base, start + span.start * record.nbytes, span.rows, record, field, self.workload)
        spec = self.program.slots[span.slot]
        if not spec.all_heads:
            return whole
        low, high = self.records.head_range(spec.kind, span.heads)
        return whole[:, :, low:high]

    def whole(self, slot: int, name: str) -> torch.Tensor:
        """All rows and heads of a slot."""
        record = self.record(slot)
        rows = self.program.slots[slot].rows
        self._touch(Span(slot, 0, rows), None)
        return _strided(self.base, self.offsets[slot], rows, record, record.field(name), self.workload)

    def scratch(self, rows: int, heads: int) -> torch.Tensor:
        """[2, rows, B, heads] fp32 for merging."""
        count = 2 * rows * self.workload.batch * heads
        self.pool.touch(self._scratch_at + aligned(4 * count))
        flat = self.base[self._scratch_at : self._scratch_at + 4 * count].view(torch.float32)
        return flat.view(2, rows, self.workload.batch, heads)

    def new_kept(self, device: torch.device) -> torch.Tensor | None:
        """Memory for what forward keeps for backward, uint8; None where that is nothing."""
        return torch.empty(self.kept_bytes, dtype=torch.uint8, device=device) if self.kept_bytes else None

    def kept_slots_in(self, kept: torch.Tensor | None) -> dict[int, torch.Tensor]:
        """The slots that lie in it. Their numbers differ between the passes, their order and sizes do not.

        Raises UnsupportedError where it is not what forward made.
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

    def _start(self, slot: int, kept: torch.Tensor | None) -> tuple[int, torch.Tensor]:
        return (self.offsets[slot], self.base) if kept is None else (0, kept)

    def _touch(self, span: Span, kept: torch.Tensor | None) -> None:
        if kept is None:
            self.pool.touch(self.offsets[span.slot] + aligned(self.nbytes[span.slot]))


class Landed:
    """A message of which each part (where it lies, where it belongs) is copied when all has arrived."""

    def __init__(self, handle: Work, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._handle, self._parts = handle, parts

    def wait(self) -> None:
        self._handle.wait()
        for landing, into in self._parts:
            into.copy_(landing)


def _strided(
    base: torch.Tensor, start: int, rows: int, record: Record, field: Field, workload: Workload
) -> torch.Tensor:
    typed = base[: base.numel() // 4 * 4].view(field.dtype)
    size = field.dtype.itemsize
    shape: tuple[int, ...] = (rows, workload.batch, record.heads)
    strides: tuple[int, ...] = (record.nbytes // size, record.heads, 1)
    if not field.statistic:
        shape = (*shape, workload.head_dim)
        strides = (strides[0], record.heads * workload.head_dim, workload.head_dim, 1)
    at = typed.storage_offset() + (start + field.offset_bytes) // size  # of its storage, which others may share
    return typed.as_strided(shape, strides, at)


def heads_first(x: torch.Tensor) -> torch.Tensor:
    """[S, B, H, ...] → [B, H, S, ...]"""
    return x.permute(1, 2, 0, 3) if x.dim() == 4 else x.permute(1, 2, 0)


def rows_first(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, ...] → [S, B, H, ...]"""
    return x.permute(2, 0, 1, 3) if x.dim() == 4 else x.permute(2, 0, 1)
