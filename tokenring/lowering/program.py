"""The program of one rank in one pass: a flat list of instructions over numbered buffer slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tokenring.ir.schedule_data import Kind, Pass
from tokenring.sequence.region import Patch

OWN = -1  # "slot" of the rank's own tensors
NOTHING = -2  # "slot" of a side of a tile that carries nothing in a pass
ALL_TO_ALL, ALL_GATHER, BUNDLE = "all-to-all", "all-gather", "bundle"


class Slot(NamedTuple):
    """A buffer of so many token records. Accumulators of a rank's own result hold all heads.

    In fp32 they are the very tensors that the caller gets; else they are pooled, and converted at the end.
    """

    kind: Kind
    rows: int
    full_precision: bool = False
    all_heads: bool = False
    kept: bool = False  # outside the pool: forward leaves it to backward
    output: bool = False  # outside the pool: what the caller gets, accumulated in place

    @property
    def pooled(self) -> bool:
        """True if the slot lies in the buffer pool: it is neither kept nor an output."""
        return not (self.kept or self.output)


class Span(NamedTuple):
    """Rows [start, stop) of a slot, or of the own tensors; heads is the head group."""

    slot: int
    start: int
    stop: int
    heads: int = 0

    @property
    def rows(self) -> int:
        """Number of rows in the span."""
        return self.stop - self.start


class Pack(NamedTuple):
    """Write the records of own tokens (`source`) into a slot."""

    kind: Kind
    source: Span
    into: Span


class Recv(NamedTuple):
    """Post the receive of rows of a slot. `message` numbers it among this rank's messages."""

    message: int
    span: Span
    src: int
    channel: str
    label: str


class Send(NamedTuple):
    """Post the send of rows of a slot."""

    message: int
    span: Span
    dst: int
    channel: str
    label: str


class Wait(NamedTuple):
    """Wait until a message has arrived, or may be overwritten."""

    message: int


class Result(NamedTuple):
    """Rows of a kernel's result that go into a slot; `first`: overwrite, else merge or add."""

    kind: Kind
    start: int
    into: Span
    first: bool


class Attend(NamedTuple):
    """One kernel call. `kept_q` is where q itself lies when the q slot carries only what is new."""

    step: int
    q: Span
    kv: Span
    patch: Patch
    results: tuple[Result, ...]
    kept_q: Span | None = None


class Multiply(NamedTuple):
    """One product of rows and columns; `corner` is where its own lie in the rank's tensors of pairs (`pair_box`).

    A side that is carried but NOTHING here leaves out the other side's result, which it is a factor of: see `made_by`.
    """

    step: int
    q: Span
    kv: Span
    patch: Patch
    results: tuple[Result, ...]
    corner: tuple[int, int]


def made_by(call: Multiply, home: tuple[Kind, ...]) -> tuple[Kind, ...]:
    """Return the kinds of results that a product makes, of those of its pass.

    Where a pass has both, a result of one side is the pairs times the other: without that, the first alone is made.
    """
    if len(home) < 2 or (call.q.slot == NOTHING) == (call.kv.slot == NOTHING):
        return home
    return ("q_partial",) if call.q.slot == NOTHING else ("kv_partial",)


class Merge(NamedTuple):
    """Merge (out with lse) or add (gradients) rows of one slot into another; `first`: copy."""

    kind: Kind
    source: Span
    into: Span
    first: bool


class Fill(NamedTuple):
    """Rows that nothing reached: out 0, lse -inf, gradients 0."""

    kind: Kind
    into: Span


Instruction = Pack | Recv | Send | Wait | Attend | Multiply | Merge | Fill


class Collective(NamedTuple):
    """Messages that a transport moves as one operation of these ranks, in `parts` one after another.

    Their posts stand together in the program of every rank, and it begins with the last of them. `messages` are this
    rank's; part k is the k-th of equal parts of what it gives each other rank, and takes from it. A bundle is one
    message instead of several, from the first of two ranks to the second.
    """

    kind: str
    ranks: tuple[int, ...]
    messages: tuple[int, ...]
    parts: int
    label: str


@dataclass(frozen=True)
class Program:
    """The instructions of one rank. The result is in slots `home` (by kind) when they have run."""

    rank: int
    direction: Pass
    slots: tuple[Slot, ...]
    instructions: tuple[Instruction, ...]
    home: tuple[tuple[Kind, int], ...]
    scratch_rows: int
    steps: tuple[int, ...]  # the step of each instruction, for messages and traces
    collectives: tuple[Collective, ...] = ()  # where the transport has any


def landing_slots(program: Program) -> list[int]:
    """Return kept slots that receive messages: one-sided transports need pool memory for these to land in."""
    received = {each.span.slot for each in program.instructions if isinstance(each, Recv)}
    return sorted(slot for slot in received if program.slots[slot].kept)


def bundled_bytes(sizes: Sequence[int], program: Program) -> dict[Collective, int]:
    """Return, of each bundle, the bytes of its messages, which lie together in the pool beside their slots.

    sizes: bytes of the program's slots.
    """
    found = [each for each in program.collectives if each.kind == BUNDLE]
    given = message_bytes(sizes, program) if found else {}
    return {each: sum(given[message] for message in each.messages) for each in found}


def message_bytes(sizes: Sequence[int], program: Program) -> dict[int, int]:
    """Return the bytes of each message, by its number; sizes: bytes of the slots."""
    return {
        each.message: sizes[each.span.slot] // program.slots[each.span.slot].rows * each.span.rows
        for each in program.instructions
        if isinstance(each, Send | Recv)
    }
