"""One rank of a race of ways to take a step over a KV cache: python -m tokenring.cli.bench.cached_worker CASE."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.cli.bench.cached_ways import (
    WAYS,
    CachedStep,
    StepTensors,
    by_hand,
    context_of,
    wanted_out,
    why_not,
)
from tokenring.cli.bench.candidates import WAIT_SECONDS, RaceSetting
from tokenring.cli.bench.operators_worker import Racer, in_turns
from tokenring.cli.bench.results import MEASURED, OURS, PEER, SKIPPED, CachedCase, CachedReport, Entry
from tokenring.cli.bench.sleeping import SleepingPartial, cached_kernels
from tokenring.cli.bench.worker import machine_of
from tokenring.emulate.ways import heaviest
from tokenring.launch.command import Tell, process_group, quiet, serve
from tokenring.runtime.cached_kernel import cached_partial

BY_HAND = "by hand"


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, CachedCase.of(json.loads(argv[0]))))


def run(case: CachedCase, tell: Tell) -> CachedReport | None:
    """Race on the processes that torchrun has started; return the report at rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        machine = machine_of(ranks)
        entries = raced(case, rank, ranks, tell if rank == 0 else quiet)
    reference = None if case.compute_tflops else "float64"
    return CachedReport(case, machine, entries, reference, []) if rank == 0 else None


def raced(case: CachedCase, rank: int, ranks: int, tell: Tell) -> list[Entry]:
    """Return the entries. Every rank calls it."""
    tensors = StepTensors.of(case, rank, ranks)
    wanted = None if case.compute_tflops else wanted_out(case, tensors)
    kernel: Any = cached_partial
    with torch.inference_mode(), ExitStack() as held:
        if case.compute_tflops:
            kernel = SleepingPartial(case.compute_tflops)
            held.enter_context(cached_kernels(kernel, kernel.flash))
        own = tr.ContextParallel(transport=case.transport, timeout_seconds=WAIT_SECONDS)
        held.callback(own.close)
        step = CachedStep(case, tensors, context_of(case), own.transport or case.transport)
        held.callback(step.close)
        racers = [_way(case, step, name, wanted) for name in case.schedules]
        racers.append(_hand(case, tensors, wanted, kernel))
        return in_turns(RaceSetting(case, rank, ranks), racers, tell)  # type: ignore[arg-type]


def _way(case: CachedCase, step: CachedStep, name: str, wanted: torch.Tensor | None) -> Racer:
    """Return the racer of a way, with what it sends in a step."""
    cp, home = step.cp, WAYS[name][0]
    entry = Entry(name, OURS, f'q_home="{home}"', tr.__version__, MEASURED)
    if (reason := why_not(case, name, cp.world_size)) is not None:
        return Racer(replace(entry, status=SKIPPED, reason=reason))
    taken = step.taken(name)
    what = entry.what if name == taken or taken in name else f"{entry.what}, takes {taken}"
    entry = replace(entry, what=what, **_sent(case, step, name))
    right = {} if wanted is None else {"out": StepTensors.own(wanted, home, cp.rank, cp.world_size)}
    return Racer(entry, lambda: {"out": step.call(name)}, right, lambda: step.begun(name))


def _sent(case: CachedCase, step: CachedStep, name: str) -> dict[str, Any]:
    """Return the bytes of a step on the link that carries most, and on emulated links the heaviest wire's time.

    They are those of the messages of one step, which is taken for it; the agreement of the ranks is not in them.
    """
    transport, ranks = step.cp.transport, step.cp.world_size
    with step.begun(name):
        if transport is not None:
            transport.sent_bytes.clear()
        step.call(name)
        mine = {} if transport is None else dict(transport.sent_bytes)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, mine)
    loads = {(src, dst): count for src, sent in enumerate(every) for dst, count in sent.items()}
    load = None if case.emulate is None else heaviest(case.emulate.fabric, loads)
    wire = {} if load is None else {"wire": load.wire, "wire_s": load.seconds}
    return {"link_bytes": max(loads.values(), default=0), **wire}


def _hand(case: CachedCase, tensors: StepTensors, wanted: torch.Tensor | None, kernel: Any) -> Racer:
    q, *rest = (x.transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v, tensors.cached_k, tensors.cached_v))
    opened, sealed = (rest[0], rest[1]), (rest[2].contiguous(), rest[3].contiguous())
    if case.latents:
        sealed = sealed[0], sealed[0][..., : case.value_dim]
    scale = case.head_dim**-0.5
    visible = None if case.tokens == 1 else torch.ones(case.tokens, case.tokens, dtype=torch.bool).tril()[None, None]

    def call() -> dict[str, torch.Tensor]:
        out, _ = by_hand(q, sealed, opened, scale, visible, kernel)
        return {"out": out.transpose(1, 2)}

    entry = Entry(BY_HAND, PEER, "kernel, all-gather over Gloo, merge", None, MEASURED)
    return Racer(entry, call, {} if wanted is None else {"out": wanted})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
