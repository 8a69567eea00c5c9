"""Times of the executor: tiles and merges of eight virtual ranks, a step's Python, a graph of it."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from math import inf
from pathlib import Path
from typing import Any

import torch
from gpu_clock import Tensors, one_call_seconds, seconds
from gpu_own_puts import OwnMemory, OwnPuts, words_of
from gpu_report import Report, guarded
from virtual_ranks import Bound, bind

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from executor_overhead import Idle, Nothing

from tokenring.api.autograd import run_backward, run_forward
from tokenring.backends.devices import device_of
from tokenring.backends.interfaces import AttentionKernel
from tokenring.backends.registry import make_kernel
from tokenring.backends.transports import symmetric
from tokenring.cli.rates.command import candidates
from tokenring.errors import one_line
from tokenring.runtime.call import ActiveCall
from tokenring.schedule.names import named_schedule
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Positions, make_layout
from tokenring.sequence.mask import Causal
from tokenring.sequence.workload import Workload

RANKS, LENGTH, HEADS, DIM = 8, 65536, 32, 128
SCHEDULES = ("ring", "tokenring", "direct-q", "ulysses")
FORWARD_LIMIT, BOTH_LIMIT = 1.05, 1.08
STEP_LIMIT_US, GRAPH_LIMIT_US = 40.0, 5.0
STEP_RANKS, STEP_TOKENS, STEP_DIM = 4, 256, 64
ROUNDS = 5
SECONDS = 120.0  # for all lines


def run(report: Report, seconds: float = SECONDS) -> None:
    device, deadline = torch.device("cuda"), time.monotonic() + seconds
    host_times(report, steps(device), device, deadline)
    sum_of_ranks(report, device, LENGTH, deadline)  # takes longest, with every kernel that is installed


# ---------- tiles and merges of all ranks, and one call


def sum_of_ranks(report: Report, device: torch.device, length: int, deadline: float = inf) -> None:
    """Each rank's programs one after another, with messages that take no time, beside one call over the sequence.

    deadline: by the monotonic clock; what would begin later says so.
    """
    workload = Workload(1, length, length, HEADS, HEADS, DIM, torch.bfloat16)
    kernel = make_kernel("auto", device)
    q, k, v, dout = (torch.randn(1, length, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(4))
    whole = Positions(0, length, 1)
    (patch,) = Causal().region(whole, whole)
    one: dict[bool, float] = {}

    def one_of_each() -> tuple[str, None]:
        """Of every kernel that is installed; the fastest of each way is what all ranks are compared with."""
        kernels = candidates(kernel, DIM, torch.bfloat16) or [kernel]
        times, failed = dict[str, tuple[float, float]](), list[str]()
        for each in kernels:
            if times and time.monotonic() > deadline:
                failed.append(f"no time for {each.name}")
                continue
            try:
                times[each.name] = one_call_seconds(each, (q, k, v, dout), patch, DIM**-0.5, ROUNDS)
            except Exception as error:
                failed.append(f"{each.name} fails: {one_line(error, 80)}")
        best = fastest(times)
        one.update({backward: of[1] for backward, of in best.items()})
        forward, both = (f"{1e3 * seconds:.2f} ms by {name}" for name, seconds in best.values())
        return "; ".join([f"{forward} forward, {both} both; of {', '.join(times)}", *failed]), None

    size = f"{length >> 10}k, {HEADS} heads of {DIM}, bf16, causal"
    guarded(report, f"one call of the fastest kernel here, {size}", "", one_of_each, deadline - time.monotonic())
    layout = make_layout("zigzag", RANKS, length)
    given: Tensors = tuple(x[:, : length // RANKS].contiguous() for x in (q, k, v, dout))
    for name in SCHEDULES:
        what = f"tiles and merges of {RANKS} virtual ranks, {name}, {length >> 10}k"

        def line(name: str = name) -> tuple[str, bool]:
            schedule = named_schedule(name, workload, layout, layout, Causal(), None)
            ratios = [sum(of_ranks(schedule, workload, kernel, given, way)) / one[way] for way in (False, True)]
            return f"{ratios[0]:.3f} ×, {ratios[1]:.3f} ×", ratios[0] <= FORWARD_LIMIT and ratios[1] <= BOTH_LIMIT

        limit = f"{FORWARD_LIMIT} × forward, {BOTH_LIMIT} × both"
        guarded(report, what, limit, line, deadline - time.monotonic())


def fastest(times: Mapping[str, tuple[float, float]]) -> dict[bool, tuple[str, float]]:
    """Of forward (False) and of both passes (True): the kernel that takes least, and its seconds.

    times: the two of each kernel. Raises RuntimeError where there is none.
    """
    if not times:
        raise RuntimeError("no kernel has computed the call")
    best = [min(times, key=lambda name: times[name][way]) for way in range(2)]
    return {bool(way): (name, times[name][way]) for way, name in enumerate(best)}


def of_ranks(schedule: Schedule, workload: Workload, kernel: Any, given: Tensors, backward: bool) -> list[float]:
    """Seconds of each rank's own work."""
    device, found = given[0].device, []
    for rank in range(schedule.world_size):
        bound = bind(schedule, workload, rank, kernel, Nothing(schedule.world_size), device)
        for executor in bound.values():
            _fill(executor.views.base)
        found.append(seconds(partial(_passes, bound, given, backward), device, ROUNDS))
    return found


def _fill(pool: torch.Tensor) -> None:
    """With numbers as they come from other ranks: products of what nobody wrote, zeros or NaN, take less power."""
    pool[: pool.numel() // 2 * 2].view(torch.bfloat16).normal_()


def _passes(bound: Bound, given: Tensors, backward: bool) -> None:
    q, k, v, dout = given
    out, lse, kept = run_forward(bound["forward"], None, q, k, v)
    if backward:
        run_backward(bound["backward"], None, dout, q, k, v, out, lse, kept)


# ---------- the host's share of a step


@dataclass
class Passes:
    """Both passes of one rank, bound, and the tensors of a call, so small that only the host's time counts."""

    bound: Bound
    call: ActiveCall


@dataclass
class Step:
    """What is in a step, and whether that is all that the limit is about.

    It is made in the first line that measures it: what fails then is told there, and takes no other line with it.
    """

    what: str
    limited: bool
    make: Callable[[], Passes]

    @cached_property
    def passes(self) -> Passes:
        return self.make()


def steps(device: torch.device) -> list[Step]:
    """A whole step: the kernel and merges taken here, puts as symm queues them; and one without tile and move."""
    reason = without_puts(device)

    def whole() -> Passes:
        return first_rank(make_kernel("auto", device), puts(device) if reason is None else Nothing(STEP_RANKS), device)

    what = "executor, move, tile, merge" if reason is None else f"executor, tile, merge; no move: {reason}"
    merges = partial(first_rank, IdleOn(device), Nothing(STEP_RANKS), device)
    return [Step(what, reason is None, whole), Step("executor, merge", False, merges)]


def without_puts(device: torch.device) -> str | None:
    """Why a step has no puts here; None: it has."""
    return symmetric.unavailable() if device.type == "cuda" else "no CUDA device"


def puts(device: torch.device) -> OwnPuts:
    return OwnPuts(OwnMemory(device, words_of(STEP_RANKS).count), device_of(device), STEP_RANKS)


def first_rank(kernel: AttentionKernel, moved: Any, device: torch.device) -> Passes:
    """Of tokenring, in bf16."""
    dtype = torch.bfloat16
    size = Workload(1, STEP_TOKENS * STEP_RANKS, STEP_TOKENS * STEP_RANKS, 1, 1, STEP_DIM, dtype)
    layout = make_layout("zigzag", STEP_RANKS, size.q_length)
    schedule = named_schedule("tokenring", size, layout, layout, Causal(), None)
    names = ("q", "k", "v", "out", "dout")
    own = {name: torch.zeros(1, STEP_TOKENS, 1, STEP_DIM, device=device, dtype=dtype) for name in names}
    own |= {name: torch.zeros(1, 1, STEP_TOKENS, device=device) for name in ("lse", "delta")}
    return Passes(bind(schedule, size, 0, kernel, moved, device), ActiveCall(own))


class IdleOn(Idle):
    """Idle, with results on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def _result(self, key: torch.Size, shapes: tuple[torch.Size, ...]) -> tuple[torch.Tensor, ...]:
        if (key,) not in self.made:
            self.made[key,] = tuple(torch.zeros(shape, device=self.device) for shape in shapes)
        return self.made[key,]


def host_times(report: Report, made: Sequence[Step], device: torch.device, deadline: float = inf) -> None:
    """Of each, eager and as the launch of a graph, shared out over its steps."""
    for how, limit_us, measure in (
        ("eager", STEP_LIMIT_US, eager_step),
        ("in a captured graph", GRAPH_LIMIT_US, captured_step),
    ):
        for each in made:

            def line(each: Step = each, limit_us: float = limit_us, measure: Any = measure) -> tuple[str, bool | None]:
                found = measure(each.passes, device)
                text = f"{found[0]:.1f} µs forward, {found[1]:.1f} µs backward"
                return text, max(found) <= limit_us if each.limited else None

            limit = f"{limit_us:g} µs" if each.limited else ""
            name = f"host time of a step ({each.what}), {how}"
            guarded(report, name, limit, line, deadline - time.monotonic())


def eager_step(step: Passes, device: torch.device, rounds: int = 200) -> list[float]:
    """Medians of forward and backward, in µs a step."""
    found = []
    for executor in step.bound.values():
        times = []
        for _ in range(rounds):
            device_of(device).synchronize()
            began = time.perf_counter()
            executor.run(step.call)
            times.append(time.perf_counter() - began)
        found.append(1e6 * statistics.median(times) / len(set(executor.program.steps)))
    return found


def captured_step(step: Passes, device: torch.device, rounds: int = 200) -> list[float]:
    """The launch of a graph that holds a pass, in µs a step."""
    found = []
    for executor in step.bound.values():
        side: Any = device_of(device).new_stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                executor.run(step.call)
        torch.cuda.synchronize()
        if executor.streams is not None:
            executor.streams.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executor.run(step.call)
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            times.append(time.perf_counter() - began)
        if executor.streams is not None:
            executor.streams.forget()
        found.append(1e6 * statistics.median(times) / len(set(executor.program.steps)))
    return found
