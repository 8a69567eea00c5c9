"""One rank of a trace of a step over a KV cache: python -m tokenring.cli.trace.cached_worker CASE."""

from __future__ import annotations

import gc
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.cli.bench.cached_ways import CachedStep, StepTensors
from tokenring.cli.bench.results import CachedCase
from tokenring.cli.bench.worker import machine_of
from tokenring.cli.trace.bars import DIGITS, bars
from tokenring.cli.trace.notes import NotedMessage, Notes, NotingTransport, StepNote, noting
from tokenring.cli.trace.record import Bar, Stretch, Traced, TracedMessage
from tokenring.cli.trace.worker import WAIT_SECONDS, WARM_UP_ROUNDS, clock_name, median_round, slowest, starts_of
from tokenring.gc_pause import no_collection
from tokenring.launch.command import Tell, process_group, quiet, serve
from tokenring.runtime.trace import Event


@dataclass
class _Round:
    """One step at one rank, in perf_counter seconds; zero: when it left the barrier before."""

    zero: float
    began: float
    ended: float
    done: list[StepNote]
    sent: list[NotedMessage]
    received: list[NotedMessage]
    events: list[Event]


@dataclass
class _Rank:
    """The record of one rank as rank 0 gets it."""

    clock: str
    round: _Round


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, CachedCase.of(json.loads(argv[0]))))


def run(case: CachedCase, tell: Tell) -> Traced | None:
    """Run the trace on the processes that torchrun has started; return it at rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        machine = machine_of(dist.get_world_size())
        found = traced_step(case, tell if dist.get_rank() == 0 else quiet)
    return Traced(case, machine, **found) if found is not None else None


# ---------- at every rank


def traced_step(case: CachedCase, tell: Tell) -> dict[str, Any] | None:
    """Trace all rounds; return the fields of Traced that are not about case and machine at rank 0, None elsewhere."""
    rank, ranks, name, notes = dist.get_rank(), dist.get_world_size(), case.schedules[0], Notes()
    with torch.inference_mode(), ExitStack() as held:
        own = tr.ContextParallel(transport=case.transport, timeout_seconds=WAIT_SECONDS)
        held.callback(own.close)
        transport: Any = case.transport if own.transport is None else NotingTransport(own.transport, notes)
        step = CachedStep(case, StepTensors.of(case, rank, ranks), tr.ContextParallel, transport)
        held.callback(step.close)
        taken = step.taken(name)
        rounds, count = [], WARM_UP_ROUNDS + case.rounds
        held.enter_context(noting(notes))
        with no_collection():
            for turn in range(count):
                tell(turn, count, f"round {turn + 1} of {count}")
                gc.collect()
                rounds.append(_round(step, name, notes))
        del rounds[:WARM_UP_ROUNDS]
    times = slowest([each.ended - each.began for each in rounds])
    chosen = median_round(times)
    at_ranks: list[Any] = [None] * ranks
    dist.gather_object(_Rank(clock_name(), rounds[chosen]), at_ranks if rank == 0 else None)
    if rank > 0:
        return None
    schedule = taken if name.startswith("auto") else name
    return {"schedule": schedule, "rounds_s": times, "round": chosen, **_joined(at_ranks)}


def _round(step: CachedStep, name: str, notes: Notes) -> _Round:
    """Take one step, the agreement of the ranks included."""
    contexts = step.cp, *step.cache.movers.values()
    dist.barrier()
    zero = perf_counter()
    notes.clear()
    with ExitStack() as held:
        traces = [held.enter_context(cp.trace()) for cp in contexts]
        began = perf_counter()
        with step.begun(name):
            step.call(name)
            ended = perf_counter()
            found = [*notes.done], [*notes.sent], [*notes.received]
    events = sorted((event for trace in traces for event in trace.events), key=lambda event: event.began_seconds)
    return _Round(zero, began, ended, *found, [event for event in events if event.ended_seconds <= ended])


# ---------- at rank 0


def _joined(at_ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Put all ranks on one clock: their own, if they share one, or clocks set by the barrier."""
    rounds = [each.round for each in at_ranks]
    one_clock, starts = starts_of(
        [each.clock for each in at_ranks], [each.zero for each in rounds], [each.began for each in rounds]
    )
    stretches, made = [], []
    for rank, (each, start) in enumerate(zip(rounds, starts, strict=True)):
        began, ended = (round(time - start, DIGITS) for time in (each.began, each.ended))
        stretches.append(Stretch(rank, "forward", began, ended))
        made += bars_of(rank, each.done, each.events, start)
    return {"one_clock": one_clock, "stretches": stretches, "bars": made, "messages": _messages(rounds, starts)}


def bars_of(rank: int, notes: Sequence[StepNote], events: Sequence[Event], start: float) -> list[Bar]:
    """Return the bars of a step at a rank, in order. A step of it ends with the waits of a round of messages.

    What a schedule's executor did is in its events, in which the notes of its messages lie.
    """
    begins = [event.began_seconds for event in events]

    def is_inside(note: StepNote) -> bool:
        at = bisect_right(begins, note.began) - 1
        return at >= 0 and note.ended <= events[at].ended_seconds

    outside = [note for note in notes if not is_inside(note)]
    found = [
        Bar(rank, "forward", each.kind, each.label, each.short, round(each.began - start, DIGITS),
            round(each.ended - start, DIGITS), 0, each.name, each.details)
        for each in outside
    ]  # fmt: skip
    found += bars(events, start)
    found.sort(key=lambda bar: (bar.began, bar.ended))
    return _in_rounds(found)


def _in_rounds(found: Sequence[Bar]) -> list[Bar]:
    """Return the bars with the numbers of their steps, each of which ends with waits."""
    made, step, waited = [], 0, False
    for bar in found:
        step += waited and bar.kind != "wait"
        waited = bar.kind == "wait"
        made.append(Bar(**{**vars(bar), "step": step}))
    return made


def _messages(rounds: Sequence[_Round], starts: Sequence[float]) -> list[TracedMessage]:
    """Return the messages: the n-th that one rank sent to another on a channel is the n-th that this one received."""
    arrivals: dict[tuple[int, int, str], list[NotedMessage]] = defaultdict(list)
    for dst, each in enumerate(rounds):
        for message in each.received:
            arrivals[message.peer, dst, message.channel].append(message)
    found = []
    for src, each in enumerate(rounds):
        for message in each.sent:
            dst = message.peer
            waited = arrivals[src, dst, message.channel].pop(0).waited
            assert waited is not None
            began, ended = (round(time - starts[dst], DIGITS) for time in waited)
            sent = round(message.posted - starts[src], DIGITS)
            found.append(TracedMessage(src, dst, message.label, sent, ended, began, "forward", message.details))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
