"""One rank of a race of linear layers or collectives: python -m tokenring.cli.bench.operators_worker CASE.

T tokens of all ranks, N features, D width, P ranks.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.distributed as dist

import tokenring as tr
from tokenring.backends.interfaces import Transport
from tokenring.cli.bench.candidates import WAIT_SECONDS, RaceSetting, emulated
from tokenring.cli.bench.operators import TORCH, OperatorCase, OperatorReport
from tokenring.cli.bench.race import SEED, WARM_UP_ROUNDS, begin_together, order
from tokenring.cli.bench.results import ERROR_LIMITS, FAILED, MEASURED, OURS, PEER, WRONG, Entry
from tokenring.cli.bench.torch_layers import Layer, by_collectives, gathered, layer_of, scattered
from tokenring.cli.bench.worker import machine_of
from tokenring.cli.operator_names import COLLECTIVES
from tokenring.gc_pause import no_collection
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.launch.command import Tell, process_group, quiet, serve
from tokenring.launch.follow import short

Results = dict[str, torch.Tensor]


@dataclass
class Racer:
    """One who takes part in a race of results by name.

    wanted: its right results at this rank, float64; empty: they are not compared. around: holds what a turn needs, of
    which its time does not count.
    """

    entry: Entry
    call: Callable[[], Results] = dict
    wanted: Results = field(default_factory=dict)
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Given:
    """The tensors of this rank, and the right results in float64."""

    x: torch.Tensor  # of column [1, T/P, D], of row [1, T, N/P]; of a collective what it takes
    weight: torch.Tensor | None
    dout: torch.Tensor | None
    wanted: Results


def main(argv: list[str]) -> int:
    """Run this rank; return the exit code."""
    return serve(partial(run, OperatorCase.of(json.loads(argv[0]))))


def run(case: OperatorCase, tell: Tell) -> OperatorReport | None:
    """Race on the processes that torchrun has started; return the report at rank 0, None elsewhere."""
    torch.set_num_threads(1)
    with process_group(WAIT_SECONDS):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        machine = machine_of(ranks)
        entries = raced(case, rank, ranks, tell if rank == 0 else quiet)
    return OperatorReport(case, machine, entries) if rank == 0 else None


def raced(case: OperatorCase, rank: int, ranks: int, tell: Tell) -> list[Entry]:
    """Return the entries. Every rank calls it."""
    with tr.ContextParallel(transport=case.transport, timeout_seconds=WAIT_SECONDS) as cp:
        racers = _racers(case, rank, ranks, cp.transport)
        return in_turns(RaceSetting(case, rank, ranks), racers, tell)  # type: ignore[arg-type]


def _racers(case: OperatorCase, rank: int, ranks: int, transport: Transport | None) -> list[Racer]:
    """Return who races, of our schedules over this transport."""
    given = given_of(case, rank, ranks)
    topology = None if case.emulate is None else emulated(case.emulate, None)
    what = "collectives, then products" if case.is_layer else "its collective"
    torch_entry = Entry(TORCH, PEER, what, None, MEASURED)
    racers = [Racer(torch_entry, lambda: torch_call(case, given, ranks), given.wanted)]
    for name in case.schedules:
        tp = tr.TensorParallel(
            None, name, transport or case.transport, topology=topology, timeout_seconds=WAIT_SECONDS
        )
        entry = Entry(name, OURS, "schedule", tr.__version__, MEASURED)
        try:
            what, link_bytes = _said(case, tp, name)
            entry = replace(entry, what=what, link_bytes=link_bytes)
            racers.append(Racer(entry, partial(our_call, case, given, tp), given.wanted))
        except (tr.TokenRingError, ValueError) as error:  # of sizes and ranks, so on all ranks alike
            racers.append(Racer(replace(entry, status=FAILED, reason=str(error))))
    return racers


def in_turns(setting: RaceSetting, racers: Sequence[Racer], tell: Tell) -> list[Entry]:
    """Let everyone who has not failed or been left out have a turn in each round; return the entries."""
    rounds = WARM_UP_ROUNDS + setting.case.rounds
    with no_collection():
        for turn in range(rounds):
            running = [each for each in racers if each.entry.status in (MEASURED, WRONG)]
            for at in order(len(running), turn) if running else []:
                tell(turn, rounds, f"round {turn + 1} of {rounds}: {running[at].entry.name}")
                running[at].entry = _turn(setting, running[at], turn)
    return [each.entry for each in racers]


def _said(case: OperatorCase, tp: tr.TensorParallel, name: str) -> tuple[str, int]:
    """Return what a schedule is, and the bytes of all passes on the link that carries most."""
    dtype = getattr(torch, case.dtype)
    if case.is_layer:
        schedule = tp.plan(case.operator, case.tokens, case.features, case.width, dtype)
        like = torch.empty(0, dtype=dtype)
        size = tp.request(case.operator, (case.tokens, case.features, case.width), like).workload
        passes: tuple[Pass, ...] = PASSES if case.backward else PASSES[:1]
    else:
        request = tp.collective(case.nbytes // dtype.itemsize, torch.empty(0, dtype=dtype))
        schedule, size, passes = tp.schedule_of(request), request.workload, COLLECTIVES[case.operator]
    loads: Counter[tuple[int, int]] = Counter()
    for each in passes:
        loads.update(schedule.link_bytes(size, each))
    return f"schedule, takes {schedule.name}" if name == "auto" else "schedule", max(loads.values(), default=0)


def _turn(setting: RaceSetting, racer: Racer, turn: int) -> Entry:
    """Make one call on all ranks; the first is compared, and those behind the warm-up are timed."""
    found: Results = {}
    entry, took, forward, problem = racer.entry, 0.0, 0.0, ""
    try:
        with racer.around():
            moment = begin_together(setting)
            began = time.perf_counter() if moment is None else moment
            found = racer.call()
            took = time.perf_counter() - began
        forward = float(found.pop("forward ended", torch.tensor(began + took, dtype=torch.float64))) - began
    except Exception as error:
        problem = f"{type(error).__name__}: {short(error)}"
    slowest = torch.tensor([forward, took, float(bool(problem))], dtype=torch.float64)
    if setting.ranks > 1:
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if slowest[2]:
        return replace(entry, status=FAILED, reason=problem or "failed on another rank", forward_s=[], call_s=[])
    if turn == 0 and racer.wanted:
        return _compared(setting, entry, found, racer.wanted)
    if turn >= WARM_UP_ROUNDS:
        entry.forward_s.append(round(slowest[0].item(), 7))
        entry.call_s.append(round(slowest[1].item(), 7))
    return entry


def _compared(setting: RaceSetting, entry: Entry, found: Results, wanted: Results) -> Entry:
    """Return the entry with the errors of its results, over all ranks."""
    off = {}
    for name, want in wanted.items():
        sums = torch.stack([(found[name].double() - want).square().sum(), want.square().sum()])
        if setting.ranks > 1:
            dist.all_reduce(sums)
        off[name] = float((sums[0] / sums[1]).sqrt())
    entry = replace(entry, errors=off)
    limit = ERROR_LIMITS[setting.case.dtype]
    if not entry.worst_error <= limit:
        entry = replace(entry, status=WRONG, reason=f"errors are {off}; the limit is {limit:.0e}")
    return entry


def given_of(case: OperatorCase, rank: int, ranks: int) -> Given:
    """Make this rank's tensors and the right results, from one seed on all ranks."""
    random = torch.Generator().manual_seed(SEED)
    dtype = getattr(torch, case.dtype)

    def made(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random).to(dtype)

    def own(x: torch.Tensor, dim: int) -> torch.Tensor:
        return x.chunk(ranks, dim)[rank].contiguous()

    if not case.is_layer:
        elements = max(ranks, case.nbytes // dtype.itemsize // ranks * ranks)
        if case.operator == "all-gather":
            whole = made(elements)
            return Given(own(whole, 0), None, None, {"out": whole.double()})
        every = [made(elements) for _ in range(ranks)]
        total = torch.stack(every).double().sum(0)
        return Given(every[rank], None, None, {"out": total if case.operator == "all-reduce" else own(total, 0)})
    x, w = made(case.tokens, case.width), made(case.features, case.width)
    if case.operator == "column":
        dc = made(case.tokens, case.features)
        out, dx, dw = (each.double() for each in (x.double() @ w.double().t(), dc.double() @ w.double(),
                                                  dc.double().t() @ x.double()))  # fmt: skip
        wanted = {"out": own(out, 1), "dx": own(dx, 0), "dw": own(dw, 0)}
        mine, weight, dout = own(x, 0), own(w, 0), own(dc, 1)
    else:
        h, dy = made(case.tokens, case.features), made(case.tokens, case.width)
        out, dh, dw = h.double() @ w.double(), dy.double() @ w.double().t(), dy.double().t() @ h.double()
        wanted = {"out": own(out, 0), "dx": own(dh, 1), "dw": own(dw, 1)}
        mine, weight, dout = own(h, 1), own(w, 0).t().contiguous(), own(dy, 0)
    wanted = wanted if case.backward else {"out": wanted["out"]}
    return Given(mine[None], weight, dout[None], wanted)


def our_call(case: OperatorCase, given: Given, tp: tr.TensorParallel) -> Results:
    """Compute the operator by a schedule."""
    if not case.is_layer:
        made = {"all-reduce": tr.all_reduce, "reduce-scatter": tr.reduce_scatter, "all-gather": tr.all_gather}
        return {"out": made[case.operator](given.x, tp)}
    layer = tr.column_linear if case.operator == "column" else tr.row_linear
    return layer_call(case, given, lambda x, w: layer(x, w, tp))


def torch_call(case: OperatorCase, given: Given, ranks: int) -> Results:
    """Compute the operator by torch.distributed's collectives and products, one after another."""
    if case.is_layer:
        return layer_call(case, given, layer_of(case.operator, by_collectives()))
    if case.operator == "all-reduce":
        total = given.x.clone()
        dist.all_reduce(total)
        return {"out": total}
    return {"out": scattered(given.x) if case.operator == "reduce-scatter" else gathered(given.x)}


def layer_call(case: OperatorCase, given: Given, call: Layer) -> Results:
    """Compute a layer: out, dx and dw of this rank, and when forward had ended by time.perf_counter."""
    assert given.weight is not None and given.dout is not None
    x, w = (each.detach().requires_grad_(case.backward) for each in (given.x, given.weight))
    out = call(x, w)
    found = {"out": out.detach()[0], "forward ended": torch.tensor(time.perf_counter(), dtype=torch.float64)}
    if case.backward:
        dx, dw = torch.autograd.grad(out, (x, w), given.dout)
        found |= {"dx": dx[0], "dw": dw}
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
