"""One rank of a trace: python -m tokenring.cli.trace.worker CASE, as torchrun starts it for the command.

Its standard output carries lines for the process that shows them, its standard error a log.
"""

from __future__ import annotations

import gc
import json
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import make_request
from tokenring.backends.control.process_info import this_process
from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import AttentionKernel, Tiles
from tokenring.cli.bench.race import make_inputs
from tokenring.cli.bench.results import RaceCase
from tokenring.cli.bench.worker import machine_of
from tokenring.cli.trace.bars import Known, bars, messages
from tokenring.cli.trace.record import Stretch, Traced
from tokenring.cli.trace.simulated import simulated
from tokenring.gc_pause import no_collection
from tokenring.ir.schedule_data import Pass
from tokenring.launch.command import Tell, process_group, quiet, serve
from tokenring.lowering.program import Attend, Span
from tokenring.planner.layouts.balanced import layout_of
from tokenring.runtime.bound_kernel import held
from tokenring.runtime.executor import Executor
from tokenring.runtime.labels import tiles as tiles_of
from tokenring.runtime.trace import Event
from tokenring.sequence.layout import AUTO, Layout
from tokenring.sequence.mask import Mask, parse_mask
from tokenring.sequence.workload import Request

WAIT_SECONDS = 600.0  # for other ranks
WARM_UP_ROUNDS = 2


@dataclass
class _Observed:
    """One pass at one rank, in perf_counter seconds of its process. made: when each kernel call was done."""

    direction: Pass
    began: float
    ended: float
    events: list[Event]
    made: list[float]


@dataclass
class _Round:
    """One call at one rank; `zero` is when it left the barrier before."""

    zero: float
    passes: list[_Observed]

    @property
    def seconds(self) -> float:
        return self.passes[-1].ended - self.passes[0].began


@dataclass
class _Rank:
    """One rank's record as rank 0 gets it: its clock, its round, and for each pass what the events do not hold."""

    clock: str
    round: _Round
    tiles: list[list[str]]
    span_bytes: list[dict[Span, int]]
    merges: list[list[bool]]


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, RaceCase(**json.loads(argv[0]))))


def run(case: RaceCase, tell: Tell) -> Traced | None:
    """Run the trace on the processes that torchrun has started; return it at rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        machine = machine_of(dist.get_world_size())
        traced = _traced(case, tell if dist.get_rank() == 0 else quiet)
    return Traced(case, machine, **traced) if traced is not None else None


def _traced(case: RaceCase, tell: Tell) -> dict[str, Any] | None:
    layout: str | Layout = case.layout
    if layout == AUTO:
        layout = layout_of(layout, dist.get_world_size(), case.seq_len, parse_mask(case.mask))
    options = {"layout": layout, "schedule": case.schedules[0], "pieces": case.pieces}
    cp = Clocked(**options, transport=case.transport, timeout_seconds=WAIT_SECONDS)
    with cp:
        return trace(case, cp, tell)


class Clocked(ContextParallel):
    """A context that notes when each kernel call was done: what follows in the same instruction is the executor's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.made: list[float] = []

    def kernel(self, device: torch.device) -> AttentionKernel:
        """Return the kernel for tensors on this device, which notes when each of its calls was done."""
        return _ClockedKernel(super().kernel(device), self.made)


@dataclass
class _ClockedKernel:
    kernel: AttentionKernel
    made: list[float] = field(repr=False)

    def __post_init__(self) -> None:
        self.name = self.kernel.name
        self.supports, self.supports_patch = self.kernel.supports, self.kernel.supports_patch

    def holding(self, tiles: Tiles) -> _ClockedKernel:
        return _ClockedKernel(held(self.kernel, tiles), self.made)

    def forward(self, *tensors: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor]:
        result = self.kernel.forward(*tensors, **how)
        self.made.append(device_of(result[0]).stream_clock())
        return result

    def backward(self, *tensors: Any, **how: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        result = self.kernel.backward(*tensors, **how)
        self.made.append(device_of(result[0]).stream_clock())
        return result


# ---------- at every rank


def trace(case: RaceCase, cp: Clocked, tell: Tell) -> dict[str, Any] | None:
    """Trace all rounds; return the fields of Traced that are not about case and machine at rank 0, None elsewhere."""
    mask = parse_mask(case.mask)
    inputs = _inputs(case, cp)
    rounds = []
    with no_collection(), torch.set_grad_enabled(case.backward):
        for turn in range(WARM_UP_ROUNDS + case.rounds):
            tell(turn, WARM_UP_ROUNDS + case.rounds, f"round {turn + 1} of {WARM_UP_ROUNDS + case.rounds}")
            gc.collect()
            rounds.append(_round(inputs, cp, mask, case.backward))
        del rounds[:WARM_UP_ROUNDS]
        q, k, v = inputs[:3]
        request = make_request(q, k, v, cp, mask, None, wants_lse=False)  # as the calls that were traced
    times = slowest([each.seconds for each in rounds])
    chosen = median_round(times)
    expected = simulated(cp, request)
    at_ranks: list[Any] = [None] * cp.world_size
    dist.gather_object(_rank(rounds[chosen], cp, request), at_ranks if cp.rank == 0 else None)
    if cp.rank > 0:
        return None
    found = {"schedule": cp.plan(request).name, "rounds_s": times, "round": chosen, "simulated": expected}
    return found | _joined(at_ranks)


def _inputs(case: RaceCase, cp: Clocked) -> list[torch.Tensor]:
    """Return q, k, v and dout of this rank."""
    positions = tr.positions(cp, case.seq_len)
    inputs = [x.index_select(1, positions) for x in make_inputs(case)]
    for x in inputs[:3]:
        x.requires_grad_(case.backward)
    return inputs


def _round(inputs: Sequence[torch.Tensor], cp: Clocked, mask: Mask, backward: bool) -> _Round:
    q, k, v, dout = inputs
    clock = device_of(q).clock
    dist.barrier()
    zero = clock()
    cp.made.clear()
    with cp.trace() as seen:
        began = clock()
        out = tr.attention(q, k, v, cp, mask=mask)
        middle = ended = clock()
        if backward:
            torch.autograd.grad(out, (q, k, v), dout)
            ended = clock()
    forward, rest = ([e for e in seen.events if (e.direction == "forward") is first] for first in (True, False))
    kernels = sum(isinstance(event.instruction, Attend) for event in forward)
    passes = [_Observed("forward", began, middle, forward, cp.made[:kernels])]
    if backward:
        passes.append(_Observed("backward", middle, ended, rest, cp.made[kernels:]))
    return _Round(zero, passes)


def slowest(seconds: list[float]) -> list[float]:
    """Return the slowest rank's time in each round."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    return [round(each, 9) for each in times.tolist()]


def median_round(times: Sequence[float]) -> int:
    """Return which round has the median time."""
    return sorted(range(len(times)), key=times.__getitem__)[(len(times) - 1) // 2]


def clock_name() -> str:
    """Return a name of the clock of this process, which processes of one machine share."""
    return this_process().boot_id or socket.gethostname()


def _rank(chosen: _Round, cp: Clocked, request: Request) -> _Rank:
    directions = [each.direction for each in chosen.passes]
    executors = [cp.executor(request, direction) for direction in directions]
    schedule = cp.plan(request).schedule
    tiles = tiles_of(schedule, cp.rank, cp.kernel(request.device).supports_patch)
    sizes = [_span_bytes(executor) for executor in executors]
    merges = [_merges(executor) for executor in executors]
    return _Rank(clock_name(), chosen, [tiles for _ in directions], sizes, merges)


def _span_bytes(executor: Executor) -> dict[Span, int]:
    """Return the bytes of the spans that are packed, sent and received."""
    spans = (
        getattr(instruction, name)
        for instruction in executor.program.instructions
        for name in ("span", "into")
        if hasattr(instruction, name)
    )
    return {span: span.rows * executor.views.record(span.slot).nbytes for span in spans}


def _merges(executor: Executor) -> list[bool]:
    """Tell for each kernel call, in order, if its results are then written or merged, and not adopted as they are."""
    return [
        any(not result.first or result.into.slot not in executor.adopted for result in instruction.results)
        for instruction in executor.program.instructions
        if isinstance(instruction, Attend)
    ]


# ---------- at rank 0


def _joined(at_ranks: Sequence[_Rank]) -> dict[str, Any]:
    """Put all ranks on one clock: their own, if they share one, or clocks set by the barrier."""
    rounds = [each.round for each in at_ranks]
    one_clock, starts = starts_of(
        [each.clock for each in at_ranks], [each.zero for each in rounds], [each.passes[0].began for each in rounds]
    )
    found: dict[str, Any] = {"one_clock": one_clock, "stretches": [], "bars": [], "messages": []}
    for number in range(len(at_ranks[0].round.passes)):
        seen = [each.round.passes[number] for each in at_ranks]
        known = [_known(each, number) for each in at_ranks]
        for rank, each in enumerate(seen):
            began, ended = (round(time - starts[rank], 9) for time in (each.began, each.ended))
            found["stretches"].append(Stretch(rank, each.direction, began, ended))
            found["bars"] += bars(each.events, starts[rank], known[rank])
        found["messages"] += messages([each.events for each in seen], starts, known)
    return found


def starts_of(clocks: Sequence[str], zeros: Sequence[float], begins: Sequence[float]) -> tuple[bool, list[float]]:
    """Return whether all ranks have one clock, and when by each one's the first of them began.

    zeros: when each left the barrier before, by which clocks are set that are not one.
    """
    one_clock = len(set(clocks)) == 1
    zeros = [0.0 if one_clock else each for each in zeros]
    first = min(begin - zero for begin, zero in zip(begins, zeros, strict=True))
    return one_clock, [zero + first for zero in zeros]


def _known(rank: _Rank, number: int) -> Known:
    made = rank.round.passes[number].made
    cuts = {call: made[call] for call, merges in enumerate(rank.merges[number]) if merges}
    return Known(rank.span_bytes[number].__getitem__, rank.tiles[number], cuts)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
