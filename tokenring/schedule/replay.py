"""The proof of programs: run those of all ranks together, every message a blocking rendezvous.

A message is done when it stands first in its queue at both ends. Where a transport serialises
both directions of a pair, there is one queue for each pair and channel, else one for each
direction. Slots are watched: nothing is read before it has arrived, nothing written while it is
on its way, nothing overwritten before its slot was released.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence

import torch

from tokenring.errors import ScheduleError
from tokenring.schedule.ir import PASSES, Schedule
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
)  # fmt: skip
from tokenring.workload import Workload


def replay_schedule(schedule: Schedule) -> None:
    """Lower both passes for every rank, for both kinds of transport, and replay them."""
    from tokenring.schedule.lower import lower

    groups = schedule.head_groups
    workload = Workload(1, schedule.q_layout.length, schedule.kv_layout.length, groups, groups, 1, torch.bfloat16)
    for direction in PASSES:
        for early in (True, False):
            ranks = range(schedule.world_size)
            programs = [lower(schedule, rank, direction, workload, early_receives=early) for rank in ranks]
            replay(schedule.name, programs, one_queue_a_pair=not early)


def replay(name: str, programs: Sequence[Program], one_queue_a_pair: bool) -> None:
    """Raises ScheduleError when the programs deadlock, mismatch, or misuse a slot; it names step, rank and block."""
    _Replay(name, programs, one_queue_a_pair).run()


class _Rank:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.at = 0
        self.posted: dict[int, Recv | Send] = {}
        self.done: set[int] = set()
        self.in_flight: dict[int, list[tuple[int, Span, bool]]] = defaultdict(list)  # slot → (message, rows, receiving)
        self.written: dict[int, list[Span]] = defaultdict(list)  # slot → rows that hold something


class _Replay:
    def __init__(self, name: str, programs: Sequence[Program], one_queue: bool) -> None:
        self.name, self.one_queue = name, one_queue
        self.ranks = [_Rank(program) for program in programs]
        self.queues: dict[tuple[int, object], deque[int]] = defaultdict(deque)

    def run(self) -> None:
        ready = deque(range(len(self.ranks)))
        while ready:
            rank = ready.popleft()
            ready.extend(self._advance(rank))
        for rank, state in enumerate(self.ranks):
            if state.at < len(state.program.instructions):
                stuck = state.program.instructions[state.at]
                assert isinstance(stuck, Wait)  # nothing else blocks
                raise self._fail(rank, f"waits for ever for {self._name(rank, stuck.message)}: a deadlock")
            if len(state.done) < len(state.posted):
                left = min(set(state.posted) - state.done)
                raise self._fail(rank, f"ends although {self._name(rank, left)} was never met by its peer")
            if any(state.in_flight.values()):
                left = next(entries[0][0] for entries in state.in_flight.values() if entries)
                raise self._fail(rank, f"ends without waiting for {self._name(rank, left)}")

    def _fail(self, rank: int, text: str) -> ScheduleError:
        state = self.ranks[rank]
        at = min(state.at, len(state.program.steps) - 1)
        step = state.program.steps[at] if state.program.steps else 0
        return ScheduleError(f"{self.name}, {state.program.direction}: step {step}, rank {rank}: {text}")

    def _name(self, rank: int, message: int) -> str:
        post = self.ranks[rank].posted[message]
        peer = post.src if isinstance(post, Recv) else post.dst
        return (
            f"{'receive' if isinstance(post, Recv) else 'send'} {message} ({post.label}, rank {peer}, {post.channel})"
        )

    def _advance(self, rank: int) -> list[int]:
        """Run a rank until it must wait; the ranks that can go on because of it."""
        state, woken = self.ranks[rank], []
        while state.at < len(state.program.instructions):
            instruction = state.program.instructions[state.at]
            if isinstance(instruction, Wait) and instruction.message not in state.done:
                if instruction.message not in state.posted:
                    raise self._fail(rank, f"waits for message {instruction.message}, which it never posted")
                break
            woken += self._execute(rank, instruction)
            state.at += 1
        return woken

    def _execute(self, rank: int, instruction: Instruction) -> list[int]:
        match instruction:
            case Recv() | Send():
                return self._post(rank, instruction)
            case Wait(message):
                self._waited(rank, message)
            case Pack(into=into):
                self._write(rank, into)
            case Attend(q=q, kv=kv, results=results, kept_q=kept_q):
                for span in (q, kv, *(() if kept_q is None else (kept_q,))):
                    self._read(rank, span)
                for result in results:
                    self._write(rank, result.into, accumulates=True)
            case Merge(source=source, into=into):
                self._read(rank, source)
                self._write(rank, into, accumulates=True)
            case Fill(into=into):
                self._write(rank, into, accumulates=True)
            case Release(slot):
                self._release(rank, slot)
        return []

    def _post(self, rank: int, post: Recv | Send) -> list[int]:
        state, receiving = self.ranks[rank], isinstance(post, Recv)
        peer = post.src if isinstance(post, Recv) else post.dst
        if receiving:
            self._write(rank, post.span)
        else:
            self._read(rank, post.span)
        state.posted[post.message] = post
        state.in_flight[post.span.slot].append((post.message, post.span, receiving))
        pair = (min(rank, peer), max(rank, peer))
        direction = (peer, rank) if receiving else (rank, peer)
        key = (pair if self.one_queue else direction, post.channel)
        self.queues[rank, key].append(post.message)
        return self._meet(rank, peer, key)

    def _meet(self, a: int, b: int, key: object) -> list[int]:
        """Complete what stands first at both ends."""
        met: list[int] = []
        here, there = self.queues[a, key], self.queues[b, key]
        while here and there:
            mine, theirs = self.ranks[a].posted[here[0]], self.ranks[b].posted[there[0]]
            if type(mine) is type(theirs):
                return met  # both send, or both receive: this is how orders that cross block each other
            if (mine.label, mine.span.rows) != (theirs.label, theirs.span.rows):
                raise self._fail(a, f"{self._name(a, mine.message)} meets {self._name(b, theirs.message)} of rank {b}")
            self.ranks[a].done.add(here.popleft())
            self.ranks[b].done.add(there.popleft())
            met = [a, b]
        return met

    def _waited(self, rank: int, message: int) -> None:
        for entries in self.ranks[rank].in_flight.values():
            entries[:] = [entry for entry in entries if entry[0] != message]

    def _read(self, rank: int, span: Span) -> None:
        if span.slot == OWN:
            return
        state = self.ranks[rank]
        for message, rows, receiving in state.in_flight[span.slot]:
            if receiving and _overlap(rows, span):
                raise self._fail(rank, f"reads slot {span.slot} before waiting for {self._name(rank, message)}")
        if not state.program.slots[span.slot].kept and not any(
            _overlap(rows, span) for rows in state.written[span.slot]
        ):
            raise self._fail(rank, f"reads rows {span.start} to {span.stop} of slot {span.slot}, which hold nothing")

    def _write(self, rank: int, span: Span, accumulates: bool = False) -> None:
        state = self.ranks[rank]
        for message, rows, _ in state.in_flight[span.slot]:
            if _overlap(rows, span):
                raise self._fail(rank, f"writes slot {span.slot} before waiting for {self._name(rank, message)}")
        if not accumulates and any(_overlap(rows, span) for rows in state.written[span.slot]):
            text = f"overwrites rows {span.start} to {span.stop} of slot {span.slot} before its release"
            raise self._fail(rank, text)
        state.written[span.slot].append(span)

    def _release(self, rank: int, slot: int) -> None:
        state = self.ranks[rank]
        if state.in_flight[slot]:
            raise self._fail(
                rank, f"releases slot {slot} before waiting for {self._name(rank, state.in_flight[slot][0][0])}"
            )
        state.written[slot].clear()


def _overlap(a: Span, b: Span) -> bool:
    return a.start < b.stop and b.start < a.stop
