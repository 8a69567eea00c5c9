"""Times of the executor: tiles and merges of eight virtual ranks, a step's Python, a graph of it."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

import torch
from gpu_clock import Tensors, one_call_seconds, seconds
from gpu_report import Report, guarded
from own_time import Idle, Nothing
from virtual_ranks import Bound, bind

from tokenring.backends.devices import device_of
from tokenring.backends.registry import make_kernel
from tokenring.layout import Positions, make_layout
from tokenring.mask import Causal
from tokenring.planner.pieces import named_schedule
from tokenring.runtime.autograd import run_backward, run_forward
from tokenring.runtime.executor import Call
from tokenring.schedule.ir import Schedule
from tokenring.workload import Workload

RANKS, LENGTH, HEADS, DIM = 8, 65536, 32, 128
SCHEDULES = ("ring", "tokenring", "direct-q", "ulysses")
FORWARD_LIMIT, BOTH_LIMIT = 1.05, 1.08
STEP_LIMIT_US, GRAPH_LIMIT_US = 40.0, 5.0
ROUNDS = 5


def run(report: Report) -> None:
    device = torch.device("cuda")
    sum_of_ranks(report, device, LENGTH)
    guarded(report, "host time of a step, eager", f"{STEP_LIMIT_US:g} µs", lambda: eager_step(device))
    guarded(report, "host time of a step in a captured graph", f"{GRAPH_LIMIT_US:g} µs", lambda: captured_step(device))


# ---------- tiles and merges of all ranks, and one call


def sum_of_ranks(report: Report, device: torch.device, length: int) -> None:
    """Each rank's programs one after another, with messages that take no time, beside one call over the sequence."""
    workload = Workload(1, length, length, HEADS, HEADS, DIM, torch.bfloat16)
    kernel = make_kernel("auto", device)
    q, k, v, dout = (torch.randn(1, length, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(4))
    whole = Positions(0, length, 1)
    (patch,) = Causal().region(whole, whole)
    one: dict[bool, float] = {}

    def one_of_each() -> tuple[str, None]:
        one[False], one[True] = one_call_seconds(kernel, (q, k, v, dout), patch, DIM**-0.5, ROUNDS)
        return f"{1e3 * one[False]:.2f} ms forward, {1e3 * one[True]:.2f} ms both", None

    size = f"{length >> 10}k, {HEADS} heads of {DIM}, bf16, causal"
    guarded(report, f"one call of {kernel.name}, {size}", "", one_of_each)
    layout = make_layout("zigzag", RANKS, length)
    given: Tensors = tuple(x[:, : length // RANKS].contiguous() for x in (q, k, v, dout))
    for name in SCHEDULES:
        what = f"tiles and merges of {RANKS} virtual ranks, {name}, {length >> 10}k"

        def line(name: str = name) -> tuple[str, bool]:
            schedule = named_schedule(name, workload, layout, layout, Causal(), None)
            ratios = [sum(of_ranks(schedule, workload, kernel, given, way)) / one[way] for way in (False, True)]
            return f"{ratios[0]:.3f} ×, {ratios[1]:.3f} ×", ratios[0] <= FORWARD_LIMIT and ratios[1] <= BOTH_LIMIT

        guarded(report, what, f"{FORWARD_LIMIT} × forward, {BOTH_LIMIT} × both", line)


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


class IdleOn(Idle):
    """Idle, with results on a device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def _result(self, key: torch.Size, shapes: tuple[torch.Size, ...]) -> tuple[torch.Tensor, ...]:
        if (key,) not in self.made:
            self.made[key,] = tuple(torch.zeros(shape, device=self.device) for shape in shapes)
        return self.made[key,]


def _small(device: torch.device) -> tuple[Bound, dict[str, torch.Tensor]]:
    """Both passes of a ring's first rank, with tensors so small that only Python takes time."""
    ranks, tokens = 4, 256
    workload = Workload(1, tokens * ranks, tokens * ranks, 1, 1, 8, torch.float32)
    layout = make_layout("zigzag", ranks, workload.q_length)
    schedule = named_schedule("tokenring", workload, layout, layout, Causal(), None)
    bound = bind(schedule, workload, 0, IdleOn(device), Nothing(ranks), device)
    own = {name: torch.zeros(1, tokens, 1, 8, device=device) for name in ("q", "k", "v", "out", "dout")}
    own |= {name: torch.zeros(1, 1, tokens, device=device) for name in ("lse", "delta")}
    return bound, own


def eager_step(device: torch.device, rounds: int = 200) -> tuple[str, bool]:
    """Medians of forward and backward."""
    executors, own = _small(device)
    found = []
    for executor in executors.values():
        times = []
        for _ in range(rounds):
            device_of(device).synchronize()
            began = time.perf_counter()
            executor.run(Call(own))
            times.append(time.perf_counter() - began)
        found.append(1e6 * statistics.median(times) / len(set(executor.program.steps)))
    return f"{found[0]:.1f} µs forward, {found[1]:.1f} µs backward", max(found) <= STEP_LIMIT_US


def captured_step(device: torch.device, rounds: int = 200) -> tuple[str, bool]:
    """The launch of a graph that holds a pass, shared out over its steps."""
    executors, own = _small(device)
    found = []
    for executor in executors.values():
        side: Any = device_of(device).new_stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                executor.run(Call(own))
        torch.cuda.synchronize()
        if executor.streams is not None:
            executor.streams.forget()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            executor.run(Call(own))
        times = []
        for _ in range(rounds):
            torch.cuda.synchronize()
            began = time.perf_counter()
            graph.replay()
            times.append(time.perf_counter() - began)
        if executor.streams is not None:
            executor.streams.forget()
        found.append(1e6 * statistics.median(times) / len(set(executor.program.steps)))
    return f"{found[0]:.2f} µs forward, {found[1]:.2f} µs backward", max(found) <= GRAPH_LIMIT_US
