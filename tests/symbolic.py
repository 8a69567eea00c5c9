"""Programs run on sets of positions instead of tensors: the oracle of what they compute.

A row of a slot holds a token (a q or kv record) or a result: a token, and the set of tokens of the
other kind that its result takes in. All ranks run together; a message carries its rows as they are
when it is sent, and they are there from the receiver's Wait on. `replay` proves order and progress;
this proves that the right rows come together, each visible pair once.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from typing import NamedTuple

from tokenring.schedule.calls import Supports, anything
from tokenring.schedule.ir import Pass, Schedule
from tokenring.schedule.lower import lower
from tokenring.schedule.program import (
    OWN,
    Attend,
    Fill,
    Instruction,
    Merge,
    Pack,
    Program,
    Recv,
    Release,
    Send,
    Span,
    Wait,
)
from tokenring.workload import Workload


class Token(NamedTuple):
    kind: str  # q or kv
    position: int
    heads: int


class Sum(NamedTuple):
    """The result for one token over the tokens of the other kind in `seen` (bits); None: of any token, nothing."""

    token: Token | None
    seen: int

    def plus(self, other: Sum) -> Sum:
        assert self.token is None or other.token in (None, self.token), f"{self} takes in {other}"
        assert not self.seen & other.seen, f"{self} and {other}: some pair is counted twice"
        return Sum(self.token or other.token, self.seen | other.seen)


Row = Token | Sum
Kept = list[list[dict[tuple[int, int], Row]]]  # by rank: what each kept slot holds


def lower_all(
    schedule: Schedule,
    workload: Workload,
    direction: Pass = "forward",
    supports: Supports = anything,
    early_receives: bool = True,
) -> list[Program]:
    ranks = range(schedule.world_size)
    return [lower(schedule, rank, direction, workload, supports, early_receives) for rank in ranks]


def check_both_passes(
    schedule: Schedule, workload: Workload, supports: Supports = anything, early_receives: bool = True
) -> None:
    """Lower both passes and run them, backward on what forward kept."""
    forward = Machine(schedule, lower_all(schedule, workload, "forward", supports, early_receives))
    forward.run()
    Machine(schedule, lower_all(schedule, workload, "backward", supports, early_receives), forward.kept()).run()


class Machine:
    """The ranks' slots, and the messages between them."""

    def __init__(self, schedule: Schedule, programs: Sequence[Program], kept: Kept | None = None) -> None:
        self.schedule, self.programs = schedule, programs
        self.own = {
            kind: [schedule.layout_of(kind).positions(rank) for rank in range(schedule.world_size)]
            for kind in ("q", "kv")
        }
        # rank → slot → (row, head group) → content
        self.slots = [[dict[tuple[int, int], Row]() for _ in program.slots] for program in programs]
        for rank, program in enumerate(programs):
            for index, slot in enumerate(self._kept_slots(program)):
                self.slots[rank][slot] = {} if kept is None else dict(kept[rank][index])
        self.sent: dict[tuple[int, int, str], deque[list[Row]]] = defaultdict(deque)
        self.due: dict[tuple[int, int, str], deque[int]] = defaultdict(deque)  # receives in the order of their posts
        self.arrived: dict[tuple[int, int], list[Row]] = {}
        self.posted: list[dict[int, Recv | Send]] = [{} for _ in programs]
        self.computed: dict[tuple[int, int], int] = defaultdict(int)  # (q position, head group) → kv positions
        self.calls = 0

    def run(self) -> None:
        at = [0] * len(self.programs)
        moved = True
        while moved:
            moved = False
            for rank, program in enumerate(self.programs):
                while at[rank] < len(program.instructions) and self._step(rank, program.instructions[at[rank]]):
                    at[rank] += 1
                    moved = True
        assert at == [len(program.instructions) for program in self.programs], "the programs deadlock"
        self._check()

    def kept(self) -> Kept:
        return [
            [self.slots[rank][slot] for slot in self._kept_slots(program)] for rank, program in enumerate(self.programs)
        ]

    @staticmethod
    def _kept_slots(program: Program) -> list[int]:
        return [index for index, slot in enumerate(program.slots) if slot.kept]

    def _step(self, rank: int, instruction: Instruction) -> bool:
        """Execute one instruction; False if it must wait."""
        match instruction:
            case Pack(kind, source, into):
                self._write(rank, into, self._read(rank, source, kind))
            case Send(message, span, dst, channel):
                self.posted[rank][message] = instruction
                self.sent[rank, dst, channel].append(self._read(rank, span))
            case Recv(message, span, src, channel):
                self.posted[rank][message] = instruction
                self.due[src, rank, channel].append(message)
            case Wait(message):
                return self._wait(rank, message)
            case Attend():
                self._attend(rank, instruction)
            case Merge(_, source, into, first):
                for row, value in zip(self._rows(into), self._read(rank, source), strict=True):
                    assert isinstance(value, Sum)
                    self._add(rank, into.slot, row, value, first)
            case Fill(_, into):
                self._write(rank, into, [Sum(None, 0)] * into.rows)
            case Release(slot):
                self.slots[rank][slot].clear()
        return True

    def _wait(self, rank: int, message: int) -> bool:
        post = self.posted[rank][message]
        if isinstance(post, Send):
            return True
        key = post.src, rank, post.channel
        while self.sent[key] and self.due[key]:
            self.arrived[rank, self.due[key].popleft()] = self.sent[key].popleft()
        if (rank, message) not in self.arrived:
            return False
        self._write(rank, post.span, self.arrived.pop((rank, message)))
        return True

    @staticmethod
    def _rows(span: Span) -> list[tuple[int, int]]:
        return [(row, span.heads) for row in range(span.start, span.stop)]

    def _read(self, rank: int, span: Span, kind: str = "") -> list[Row]:
        if span.slot == OWN:
            return [Token(kind, self.own[kind][rank][row], span.heads) for row, _ in self._rows(span)]
        return [self.slots[rank][span.slot][row] for row in self._rows(span)]

    def _write(self, rank: int, span: Span, rows: Sequence[Row]) -> None:
        held = self.slots[rank][span.slot]
        for at, value in zip(self._rows(span), rows, strict=True):
            assert at not in held, f"rank {rank} overwrites {held[at]} with {value} in slot {span.slot}"
            held[at] = value

    def _add(self, rank: int, slot: int, at: tuple[int, int], value: Sum, first: bool) -> None:
        held = self.slots[rank][slot]
        before = held.get(at)
        assert (before is None) == first, f"rank {rank}, slot {slot}, row {at}: holds {before}, but first is {first}"
        if isinstance(before, Sum):
            value = before.plus(value)
        held[at] = value

    def _tokens(self, rank: int, span: Span, kind: str) -> list[Token]:
        tokens = []
        for row in self._read(rank, span, kind):
            assert isinstance(row, Token) and (row.kind, row.heads) == (kind, span.heads), f"{row} is no {kind}"
            tokens.append(row)
        return tokens

    def _attend(self, rank: int, call: Attend) -> None:
        self.calls += 1
        q, kv = self._tokens(rank, call.q, "q"), self._tokens(rank, call.kv, "kv")
        assert call.kept_q is None or self._tokens(rank, call.kept_q, "q") == q
        of_q, of_kv = [0] * len(q), [0] * len(kv)
        assert (call.patch.row0, call.patch.col0, call.patch.rows, call.patch.cols) == (0, 0, len(q), len(kv))
        for i in range(len(q)):
            for j in call.patch.columns_of(i):
                of_q[i] |= 1 << kv[j].position
                of_kv[j] |= 1 << q[i].position
            key = q[i].position, call.q.heads
            assert not self.computed[key] & of_q[i], f"rank {rank} computes row {i} of {call} a second time"
            self.computed[key] |= of_q[i]
        sums = {
            "q_partial": [Sum(token, seen) for token, seen in zip(q, of_q, strict=True)],
            "kv_partial": [Sum(token, seen) for token, seen in zip(kv, of_kv, strict=True)],
        }
        for result in call.results:
            values = sums[result.kind][result.start : result.start + result.into.rows]
            for at, value in zip(self._rows(result.into), values, strict=True):
                self._add(rank, result.into.slot, at, value, result.first)

    def _check(self) -> None:
        """Every own row has come home with all that the mask shows it."""
        assert not any(self.sent.values()) and not any(self.due.values()) and not self.arrived, "messages are left"
        lengths = {"q": self.schedule.q_layout.length, "kv": self.schedule.kv_layout.length}
        allows = self.schedule.mask.allows
        goal = {
            "q": [sum(1 << j for j in range(lengths["kv"]) if allows(i, j)) for i in range(lengths["q"])],
            "kv": [sum(1 << i for i in range(lengths["q"]) if allows(i, j)) for j in range(lengths["kv"])],
        }
        for rank, program in enumerate(self.programs):
            for partial, slot in program.home:
                kind = partial.removesuffix("_partial")
                for row, position in enumerate(self.own[kind][rank]):
                    for heads in range(self.schedule.head_groups):
                        found = self.slots[rank][slot][row, heads]
                        assert isinstance(found, Sum)
                        assert found.token in (None, Token(kind, position, heads)), f"rank {rank}, row {row}: {found}"
                        assert found.seen == goal[kind][position], f"rank {rank}, row {row}: {found}"
