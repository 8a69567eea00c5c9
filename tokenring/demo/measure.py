"""One attention call of the model's shape: its schedule, its bytes, its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.demo.model import ModelConfig
from tokenring.demo.results import Bar, Measured, Message, Pass
from tokenring.runtime.trace import Event, Trace
from tokenring.schedule.ir import PASSES
from tokenring.schedule.program import Attend, Fill, Instruction, Merge, Pack, Recv, Release, Send, Wait

KIND_OF: dict[type[Instruction], str] = {
    Attend: "compute",
    Wait: "wait",
    Merge: "merge",
    Pack: "pack",
    Fill: "pack",
    Send: "post",
    Recv: "post",
    Release: "post",
}


@dataclass(frozen=True)
class _Observed:
    """One pass at one rank."""

    events: list[Event]
    sent_bytes: dict[int, int]
    split_seconds: dict[str, float]


def measure(config: ModelConfig, length: int, cp: tr.ContextParallel) -> Measured:
    """Run and observe one call on all ranks together; every rank gets the same answer."""
    q, k, v = _inputs(config, length // cp.world_size)
    plan = tr.plan(q, k, v, cp, tr.Causal())
    observed = _all_ranks(_observe(q, k, v, cp), cp)
    start = min(event.began_seconds for rank in observed for each in rank for event in each.events)
    passes = []
    for number, direction in enumerate(PASSES):
        at_ranks = [rank[number] for rank in observed]
        predicted = _matrix(plan.schedule.link_bytes(plan.workload, direction), cp.world_size)
        counted = _matrix(
            {(src, dst): sent for src, rank in enumerate(at_ranks) for dst, sent in rank.sent_bytes.items()},
            cp.world_size,
        )
        passes.append(Pass(direction, predicted, counted, _mean([rank.split_seconds for rank in at_ranks])))
    bars = [_bar(event, start) for rank in observed for each in rank for event in each.events]
    messages = [each for number in range(len(PASSES)) for each in _messages([rank[number] for rank in observed], start)]
    return Measured(plan.name, plan.reason, passes, bars, messages)


def _inputs(config: ModelConfig, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, k, v = (
        torch.randn(1, tokens, heads, config.head_dim, requires_grad=True)
        for heads in (config.q_heads, config.kv_heads, config.kv_heads)
    )
    return q, k, v


def _observe(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: tr.ContextParallel) -> list[_Observed]:
    sent: dict[int, int] = {} if cp.transport is None else cp.transport.sent_bytes
    _together(cp)
    sent.clear()
    with cp.trace() as forward:
        out = tr.attention(q, k, v, cp, mask=tr.Causal())
    in_forward = dict(sent)
    dout = torch.randn_like(out)
    _together(cp)
    sent.clear()
    with cp.trace() as backward:
        out.backward(dout)  # type: ignore[no-untyped-call]
    return [_observed(forward, in_forward), _observed(backward, dict(sent))]


def _observed(trace: Trace, sent_bytes: dict[int, int]) -> _Observed:
    return _Observed(trace.events, sent_bytes, trace.split_seconds())


def _together(cp: tr.ContextParallel) -> None:
    if cp.world_size > 1:
        dist.barrier()


def _all_ranks(mine: list[_Observed], cp: tr.ContextParallel) -> list[list[_Observed]]:
    if cp.world_size == 1:
        return [mine]
    gathered: list[Any] = [None] * cp.world_size
    dist.all_gather_object(gathered, mine)
    return gathered


def _matrix(links: Mapping[tuple[int, int], int], ranks: int) -> list[list[int]]:
    return [[links.get((src, dst), 0) for dst in range(ranks)] for src in range(ranks)]


def _mean(splits: list[dict[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for split in splits:
        for part, seconds in split.items():
            sums[part] += seconds / len(splits)
    return dict(sums)


def _bar(event: Event, start: float) -> Bar:
    """Ranks share a clock: perf_counter is CLOCK_MONOTONIC, which is one for the whole machine."""
    began, ended = event.began_seconds - start, event.ended_seconds - start
    kind = KIND_OF.get(type(event.instruction), "pack")
    label, short = _label(event.instruction), ""
    if isinstance(event.instruction, Attend):
        short = f"{event.instruction.patch.rows} × {event.instruction.patch.cols}"
    return Bar(event.rank, event.direction, kind, label, short, round(began, 6), round(ended, 6))


def _messages(at_ranks: list[_Observed], start: float) -> Iterator[Message]:
    """Messages between two ranks on one channel keep their order: the n-th sent is the n-th received."""
    arrivals = [list(_arrivals(rank.events)) for rank in at_ranks]
    for src, rank in enumerate(at_ranks):
        for event in rank.events:
            send = event.instruction
            if isinstance(send, Send):
                here = next(each for each in arrivals[send.dst] if each[:2] == (src, send.channel))
                arrivals[send.dst].remove(here)
                sent, received = event.began_seconds - start, here[2] - start
                yield Message(src, send.dst, send.label, round(sent, 6), round(received, 6))


def _arrivals(events: list[Event]) -> Iterator[tuple[int, str, float]]:
    """(source, channel, when the wait for it ended) of each message, in the order in which receives were posted."""
    waited = {event.instruction.message: event.ended_seconds for event in events if isinstance(event.instruction, Wait)}
    for event in events:
        if isinstance(event.instruction, Recv):
            yield event.instruction.src, event.instruction.channel, waited[event.instruction.message]


def _label(instruction: Instruction) -> str:
    match instruction:
        case Attend():
            patch = instruction.patch
            shape = "causal" if patch.is_causal else "full" if patch.is_full else "masked"
            return f"attention of {patch.rows} × {patch.cols} tokens, {shape}"
        case Send():
            return f"post the send of {instruction.label} to rank {instruction.dst}"
        case Recv():
            return f"post the receive of {instruction.label} from rank {instruction.src}"
        case Wait():
            return f"wait for message {instruction.message}"
        case Merge():
            return f"merge {instruction.into.rows} rows"
        case Pack():
            return f"pack {instruction.source.rows} rows"
        case Fill():
            return f"clear {instruction.into.rows} rows"
    return "release a buffer"
