"""One attention call of the model's shape: its schedule, its bytes, its time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.cli.demo.model import ModelConfig
from tokenring.cli.demo.results import DemoMeasured, Pass
from tokenring.cli.trace.bars import bars, messages
from tokenring.cli.trace.record import Stretch
from tokenring.ir.schedule_data import PASSES
from tokenring.runtime.trace import Event, Trace


@dataclass(frozen=True)
class _Observed:
    """One pass at one rank."""

    events: list[Event]
    sent_bytes: dict[int, int]
    split_seconds: dict[str, float]


def measure(config: ModelConfig, length: int, cp: tr.ContextParallel) -> DemoMeasured:
    """Run and observe one call on all ranks together; return the same result on every rank."""
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
    # Ranks share a clock: perf_counter is CLOCK_MONOTONIC, which is one for the whole machine.
    starts = [start] * cp.world_size
    return DemoMeasured(
        plan.name,
        plan.reason,
        passes,
        [_stretch(each.events, start) for rank in observed for each in rank],
        [bar for rank in observed for each in rank for bar in bars(each.events, start)],
        [
            message
            for number in range(len(PASSES))
            for message in messages([rank[number].events for rank in observed], starts)
        ],
    )


def _stretch(events: list[Event], start: float) -> Stretch:
    """Return the time from the first instruction to the last."""
    began, ended = (round(each - start, 9) for each in (events[0].began_seconds, events[-1].ended_seconds))
    return Stretch(events[0].rank, events[0].direction, began, ended)


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
