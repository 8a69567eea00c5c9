"""Times of the executor: tiles and merges of eight virtual ranks, a step's Python, a graph of it, a copy beside it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_exact import Tensors, one_call
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
MOVE_BYTES, SLOWER_LIMIT = 64 << 20, 0.02
ROUNDS = 5


def run(report: Report) -> None:
    device = torch.device("cuda")
    sum_of_ranks(report, device, LENGTH)
    guarded(report, "host time of a step, eager", f"{STEP_LIMIT_US:g} µs", lambda: eager_step(device))
    guarded(report, "host time of a step in a captured graph", f"{GRAPH_LIMIT_US:g} µs", lambda: captured_step(device))
    moves(report, device)


# ---------- tiles and merges of all ranks, and one call


def sum_of_ranks(report: Report, device: torch.device, length: int) -> None:
    """Each rank's programs one after another, with messages that take no time, beside one call over the sequence."""
    workload = Workload(1, length, length, HEADS, HEADS, DIM, torch.bfloat16)
    kernel = make_kernel("auto", device)
    q, k, v, dout = (torch.randn(1, length, HEADS, DIM, device=device, dtype=torch.bfloat16) for _ in range(4))
    whole = Positions(0, length, 1)
    (patch,) = Causal().region(whole, whole)
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    one: dict[bool, float] = {}

    def one_of_each() -> tuple[str, None]:
        one[False] = seconds(lambda: kernel.forward(*heads_first, patch=patch, scale=DIM**-0.5), device)
        one[True] = seconds(lambda: one_call(kernel, (q, k, v, dout), patch, DIM**-0.5), device)
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
        found.append(seconds(partial(_passes, bound, given, backward), device))
    return found


def _passes(bound: Bound, given: Tensors, backward: bool) -> None:
    q, k, v, dout = given
    out, lse, kept = run_forward(bound["forward"], None, q, k, v)
    if backward:
        run_backward(bound["backward"], None, dout, q, k, v, out, lse, kept)


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """The median over some rounds, after two to warm up; the device's own work, which the host runs ahead of."""
    clock = device_of(device).clock
    times = []
    for turn in range(ROUNDS + 2):
        began = clock()
        call()
        times.append(clock() - began if turn >= 2 else 0.0)
    return statistics.median(times[2:])


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


# ---------- a move while attention runs


def moves(report: Report, device: torch.device) -> None:
    """Attention alone, beside copies of the driver's (to another buffer, and to the host), and beside a copy kernel."""
    kernel = make_kernel("auto", device)
    heads, length = 32, 16384
    q, k, v = (torch.randn(1, heads, length, DIM, device=device, dtype=torch.bfloat16) for _ in range(3))
    whole = Positions(0, length, 1)
    (patch,) = Causal().region(whole, whole)
    source, target = (torch.zeros(MOVE_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
    host = torch.zeros(MOVE_BYTES, dtype=torch.uint8, pin_memory=True)
    side: Any = device_of(device).new_stream(high_priority=True)
    wide, into = source.view(torch.int32), target.view(torch.int32)
    copies: dict[str, Callable[[], object]] = {
        "nothing": lambda: None,
        "cudaMemcpyAsync on the device": lambda: target.copy_(source, non_blocking=True),
        "a copy engine, to the host": lambda: host.copy_(source, non_blocking=True),
        "a copy kernel (as NCCL's, on SMs)": lambda: torch.add(wide, 0, out=into),
    }
    times: dict[str, float] = {}

    def beside(copy: Callable[[], object]) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy()
        kernel.forward(q, k, v, patch=patch, scale=DIM**-0.5)

    for name, copy in copies.items():

        def line(name: str = name, copy: Callable[[], object] = copy) -> tuple[str, bool | None]:
            times[name] = _attention_seconds(lambda: beside(copy), device)
            if name == "nothing":
                return f"{1e3 * times[name]:.3f} ms", None
            slower = times[name] / times["nothing"] - 1
            return f"{slower:+.1%}", slower <= SLOWER_LIMIT if "kernel" not in name else None

        limit = f"+{SLOWER_LIMIT:.0%}" if "engine" in name or "Async" in name else ""
        guarded(report, f"attention beside a move of 64 MB: {name}", limit, line)


def _attention_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Of what stands in the current stream, by events; the median over many rounds."""
    times = []
    for turn in range(23):
        torch.cuda.synchronize()
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record()
        call()
        ended.record()
        torch.cuda.synchronize()
        if turn >= 3:
            times.append(1e-3 * float(began.elapsed_time(ended)))
    return float(statistics.median(times))

