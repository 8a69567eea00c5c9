"""Records, of which blocks are made: one record for each token, with every tensor of the block in it.

Records of neighbouring tokens are neighbours in memory, so any run of tokens, of chunks or of
pieces is one contiguous message whatever it carries, and kernels read it in place, strided.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import PASSES, Kind, Pass, ScheduleData
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.ir.wire_formats import WireFormat
    from tokenring.lowering.program import Program
    from tokenring.lowering.storage import Message

STATISTIC_BYTES = 4  # lse and delta are fp32 everywhere


class Field(NamedTuple):
    """One tensor of a record: [batch, heads, dim] in `dtype`, or an fp32 statistic [batch, heads].

    Encoded it is uint8, and dim its bytes. codec: the wire format; elements: its last axis decoded; decoded_bytes: all
    of it decoded.
    """

    name: str
    dtype: torch.dtype
    offset_bytes: int
    statistic: bool = False
    dim: int = 0  # the last axis: head_dim, or value_dim of v, out and their gradients; 0 for a statistic, or no v
    codec: str | None = None
    elements: int = 0
    decoded_bytes: int = 0


class Record(NamedTuple):
    """The layout of one token's bytes. Statistics come first, so that they stay aligned."""

    fields: tuple[Field, ...]
    heads: int
    nbytes: int

    def field(self, name: str) -> Field:
        """Return the field of this name."""
        return next(field for field in self.fields if field.name == name)


AS_WIDE_AS_VALUES = frozenset({"v", "out", "dout", "dv"})  # the others are as wide as q and k


def check_workload(schedule: ScheduleData, workload: Workload, direction: Pass) -> None:
    """Raise ConfigurationError unless the schedule has such a pass, and is for such a workload."""
    if not isinstance(workload, Workload):
        raise ConfigurationError(
            f"workload is of type {type(workload).__name__}; "
            f"give a Workload(batch, q_length, kv_length, q_heads, kv_heads, head_dim)"
        )
    if direction not in PASSES:
        raise ConfigurationError(f"there is no pass {direction!r}; use {' or '.join(PASSES)}")
    lengths = schedule.q_layout.length, schedule.kv_layout.length
    if (workload.q_length, workload.kv_length) != lengths:
        raise ConfigurationError(
            f"the schedule is for {lengths[0]} q and {lengths[1]} kv positions, the workload has "
            f"{workload.q_length} and {workload.kv_length}: make the schedule with this length"
        )


class Records:
    """The records of one schedule, workload and pass."""

    def __init__(self, schedule: ScheduleData, workload: Workload, direction: Pass) -> None:
        check_workload(schedule, workload, direction)
        self.workload, self.direction = workload, direction
        self.groups, self.keep, self.carries = schedule.head_groups, schedule.keep, schedule.operator.carries
        self.left_out = schedule.operator.left_out if direction == "forward" else ()
        self.formats = formats_of(schedule, workload) if schedule.codecs else {}
        self._made: dict[tuple[Kind, bool, bool], Record] = {}

    def __call__(self, kind: Kind, full_precision: bool = False, all_heads: bool = False) -> Record:
        """Return the record of a block on the wire; partials in fp32 where they are added to; one head group or all."""
        key = (kind, full_precision, all_heads)
        if key not in self._made:
            self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, kind: Kind, full_precision: bool, all_heads: bool) -> Record:
        statistics, tensors = self.carries[kind, self.direction]
        if self.left_out and not full_precision:
            statistics = tuple(name for name in statistics if name not in self.left_out)
        if self.direction == "backward" and kind == "q" and "q" in self.keep:
            tensors = ("dout",)
        size = self.workload
        total = size.q_heads if kind.startswith("q") else size.kv_heads
        low, high = self.head_range(kind, 0)
        heads = total if all_heads else high - low
        dtype = torch.float32 if full_precision else size.dtype
        form = None if full_precision else self.formats.get(kind)
        fields, at = [], 0
        for name in statistics:
            fields.append(Field(name, torch.float32, at, statistic=True))
            at += STATISTIC_BYTES * size.batch * heads
        for name in tensors:
            dim = size.value_dim if name in AS_WIDE_AS_VALUES else size.head_dim
            if size.latent_dim is not None and kind.startswith("kv"):  # which stands in the place of k; v has no width
                dim = 0 if name in AS_WIDE_AS_VALUES else size.latent_dim
            if form is None:
                fields.append(Field(name, dtype, at, dim=dim))
                at += dtype.itemsize * size.batch * heads * dim
                continue
            nbytes, rows = form.row_bytes(dim), size.batch * heads
            decoded = rows * dim * dtype.itemsize
            fields.append(Field(name, torch.uint8, at, False, nbytes, form.name, elements=dim, decoded_bytes=decoded))
            at += rows * nbytes
        return Record(tuple(fields), heads, -(-at // 4) * 4)

    def head_range(self, kind: Kind, group: int) -> tuple[int, int]:
        """Return the heads [low, high) of a head group, in tensors of this kind."""
        of = self.workload.q_head_range if kind.startswith("q") else self.workload.kv_head_range
        return of(group, self.groups)


def formats_of(schedule: ScheduleData, workload: Workload) -> dict[str, WireFormat]:
    """Return the wire formats of the kinds that are encoded: not into the dtype that they have.

    Raises ConfigurationError where blocks of a format do not divide a width, UnsupportedError for latents.
    """
    from tokenring.ir.wire_formats import SHORT, check_width, wire_format

    found: dict[str, WireFormat] = {}
    for kind, name in schedule.formats.items():
        if name == SHORT.get(str(workload.dtype)):
            continue
        if workload.latent_dim is not None:
            raise UnsupportedError(f"latents in a wire format are not supported, and {kind} is in {name}: leave it out")
        found[kind] = wire_format(name)
        for width in (workload.head_dim, workload.value_dim):
            check_width(name, width)
    return found


def decoded_bytes(schedule: ScheduleData, workload: Workload, program: Program) -> dict[str, int]:
    """Return the bytes in which encoded tensors of a program are decoded, by name: of the slot with most rows."""
    if not schedule.codecs:
        return {}
    records, forward = (Records(schedule, workload, each) for each in (program.direction, PASSES[0]))
    found: dict[str, int] = {}
    for slot in program.slots:
        record = (forward if slot.kept else records)(slot.kind, slot.full_precision, slot.all_heads)
        for field in record.fields:
            if field.codec is not None:
                found[field.name] = max(found.get(field.name, 0), slot.rows * field.decoded_bytes)
    return found


def nbytes(messages: Iterable[Message], records: Records) -> int:
    """Return the bytes of these messages together."""
    return sum(records(each.kind, each.full_precision).nbytes * each.rows for each in messages)


def slot_bytes(schedule: ScheduleData, workload: Workload, program: Program) -> list[int]:
    """Return the bytes of each slot of a program."""
    records = Records(schedule, workload, program.direction)
    forward = Records(schedule, workload, "forward")
    return [
        (forward if slot.kept else records)(slot.kind, slot.full_precision, slot.all_heads).nbytes * slot.rows
        for slot in program.slots
    ]


def scratch_bytes(schedule: ScheduleData, workload: Workload, program: Program) -> int:
    """Return the bytes of two statistics for each row of the largest merge, and of what is decoded."""
    heads = workload.q_heads // schedule.head_groups
    decoded = sum(map(aligned, decoded_bytes(schedule, workload, program).values()))
    return decoded + 2 * program.scratch_rows * workload.batch * heads * STATISTIC_BYTES


def aligned(nbytes: int) -> int:
    """Return the bytes rounded up to a multiple of a cache line (64 bytes), at which slots begin."""
    return -(-nbytes // 64) * 64
