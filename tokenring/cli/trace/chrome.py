"""A traced call in the Trace Event Format, which chrome://tracing and Perfetto open: a process for each rank."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenring.cli.bench.table import case_text, machine_text
from tokenring.cli.trace.picture import Timeline, simulation_of, timeline_of
from tokenring.cli.trace.record import Bar, Traced, TracedMessage
from tokenring.cli.trace.table import spans

LANES = {"compute": "compute", "post": "moves", "pack": "moves", "wait": "waits", "merge": "merges"}
NUMBERS = {name: number for number, name in enumerate(("steps", "compute", "moves", "waits", "merges"))}

Entry = dict[str, Any]


def to_chrome(traced: Traced) -> str:
    """Return the JSON document of a traced call."""
    about = {
        "schedule": traced.schedule,
        "call": f"{case_text(traced.case)}, layout {traced.case.layout}",
        "machine": machine_text(traced.machine),
        "clock": "shared by all ranks" if traced.one_clock else "of each machine, set by the barrier before the call",
    }
    if traced.simulated is not None:
        about["simulated"] = traced.simulated.source
    return chrome(timeline_of(traced), about, simulation_of(traced))


def chrome(timeline: Timeline, about: Mapping[str, str], beside: Timeline | None = None) -> str:
    """Return the JSON document of a timeline, with facts about it. Times are in microseconds, as the format has it.

    beside: a simulation of the same; its ranks are processes of their own, below the others.
    """
    entries = list(_entries(timeline))
    if beside is not None:
        for entry in _entries(beside, ", simulated"):
            entry["pid"] += timeline.ranks
            if "id" in entry:
                entry["id"] += len(timeline.messages)
            if entry["name"] == "process_sort_index":
                entry["args"]["sort_index"] += timeline.ranks
            entries.append(entry)
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    return f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(about)}, "traceEvents": [\n{lines}\n]}}\n'


def _entries(timeline: Timeline, what: str = "") -> Iterator[Entry]:
    yield from _names(timeline, what)
    yield from _steps(timeline)
    yield from map(_bar, timeline.bars)
    for number, each in enumerate(timeline.messages):
        yield from _message(number, each)


def _names(timeline: Timeline, what: str) -> Iterator[Entry]:
    for rank in range(timeline.ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}{what}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
        for name, number in NUMBERS.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": number, "args": {"sort_index": number}}


def _steps(timeline: Timeline) -> Iterator[Entry]:
    """Yield the passes, and inside them their steps."""
    for stretch in timeline.stretches:
        yield _span(stretch.direction, "pass", stretch.rank, "steps", stretch.began, stretch.ended)
    for span in spans(timeline.stretches, timeline.bars):
        name = f"{span.direction} step {span.step}"
        yield _span(name, "step", span.rank, "steps", span.began, span.ended)


def _bar(bar: Bar) -> Entry:
    about = {"pass": bar.direction, "step": bar.step, "what": bar.label, **bar.details}
    name = f"{bar.name} step {bar.step}"
    return _span(name, bar.kind, bar.rank, LANES[bar.kind], bar.began, bar.ended) | {"args": about}


def _span(name: str, category: str, rank: int, lane: str, began: float, ended: float) -> Entry:
    where = {"pid": rank, "tid": NUMBERS[lane]}
    # The difference of what is written, so that neighbours meet exactly.
    return {
        "ph": "X", "name": name, "cat": category, **where,
        "ts": _us(began), "dur": round(_us(ended) - _us(began), 3),
    }  # fmt: skip


def _message(number: int, message: TracedMessage) -> Iterator[Entry]:
    """Yield a message as a span of its own, and as an arrow from the post of the send to the wait at the receiver."""
    sent, received = _us(message.sent), _us(message.received)
    name = f"{message.label}: {message.src} to {message.dst}"
    flight = {"name": name, "cat": "message", "id": number, "pid": message.src, "tid": NUMBERS["moves"]}
    about = {"pass": message.direction, "from": message.src, "to": message.dst, **message.details}
    about.pop("peer", None)
    yield {"ph": "b", "ts": sent, **flight, "args": about}
    yield {"ph": "e", "ts": max(sent, received), **flight}
    arrow = {"name": "message", "cat": "arrow", "id": number}
    yield {"ph": "s", "ts": sent, "pid": message.src, "tid": NUMBERS["moves"], **arrow}
    inside = max(sent, _us(message.waited))
    yield {"ph": "f", "bp": "e", "ts": inside, "pid": message.dst, "tid": NUMBERS["waits"], **arrow}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
