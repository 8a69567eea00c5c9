"""What the executor itself costs: programs run with a kernel that computes nothing and messages that take no time.

    python benchmarks/executor_overhead.py [--ranks 4] [--tokens 8192] [--rounds 200]

What is left of a step is its Python: the loop, the calls, posting and waiting. Once with tensors of the asked size,
where merging and packing move real memory, and once with tensors so small that nothing does. Medians in µs a step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.lower import lower
from tokenring.lowering.target import IDEAL
from tokenring.runtime.call import ActiveCall
from tokenring.runtime.executor import Executor
from tokenring.runtime.pool import Pool
from tokenring.schedule.names import SCHEMES, named_schedule
from tokenring.sequence.layout import make_layout
from tokenring.sequence.mask import Causal
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload

CPU = torch.device("cpu")
Results = tuple[torch.Tensor, ...]


class Nothing:
    """A transport and its handles: every message is there at once."""

    def __init__(self, world_size: int) -> None:
        self.world_size, self.target = world_size, IDEAL

    def send(self, data: torch.Tensor, dst: int, channel: str, label: str) -> Nothing:
        return self

    def recv(self, data: torch.Tensor, src: int, channel: str, label: str) -> Nothing:
        return self

    def wait(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        raise error


class Idle(CpuFlash):
    """Results of the right shapes, made once."""

    def __init__(self) -> None:
        self.made: dict[tuple[torch.Size, ...], Results] = {}

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, patch: Patch, scale: float) -> Any:
        return self._result(q.shape, (q.shape, q.shape[:3]))

    def backward(self, dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, *others: Any, **how: Any) -> Any:
        return self._result(k.shape + q.shape, (q.shape, k.shape, k.shape))

    def _result(self, key: torch.Size, shapes: tuple[torch.Size, ...]) -> Results:
        if (key,) not in self.made:
            self.made[key,] = tuple(torch.zeros(shape) for shape in shapes)
        return self.made[key,]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = ((options.tokens, 8, 64), (256 * options.ranks, 1, 8))  # tokens, heads, head dim
    what = f"the median over {options.rounds} rounds, of the rank that takes longest"
    print(f"{options.ranks} ranks, causal zigzag, fp32; µs a step, {what}")
    heads = "".join(f"{f'{tokens} x {heads} x {dim}':>16}" for tokens, heads, dim in sizes)
    print(f"{'schedule':14} {'pass':9} steps{heads}")
    for name in SCHEMES:
        found = [steps(name, options.ranks, size, options.rounds) for size in sizes]
        for direction in PASSES:
            times = "".join(f"{each[direction][1]:16.1f}" for each in found)
            print(f"{name:14} {direction:9} {found[0][direction][0]:5}{times}", flush=True)


def steps(name: str, ranks: int, size: tuple[int, int, int], rounds: int) -> dict[str, tuple[int, float]]:
    """Of each pass: how many steps it has at the rank that has most, and µs a step there."""
    tokens, heads, dim = size
    workload = Workload(1, tokens, tokens, heads, heads, dim, torch.float32)
    layout = make_layout("zigzag", ranks, tokens)
    schedule = named_schedule(name, workload, layout, layout, Causal(), None)
    kernel, own = Idle(), tensors(tokens // ranks, heads, dim)
    found: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for rank in range(ranks):
        pool = Pool(CPU)
        programs = {each: lower(schedule, rank, each, workload, supports=kernel.supports_patch) for each in PASSES}
        for program in programs.values():  # the pool is as large as the larger needs before anything is bound for good
            Executor(schedule, workload, program, pool, Nothing(ranks), kernel, 0.125)  # type: ignore[arg-type]
        for each, program in programs.items():
            executor = Executor(schedule, workload, program, pool, Nothing(ranks), kernel, 0.125)  # type: ignore[arg-type]
            kept = executor.views.kept_slots_in(executor.views.new_kept(CPU))
            times = []
            for _ in range(rounds):
                call = ActiveCall(own, dict(kept))
                began = time.perf_counter()
                executor.run(call)
                times.append(time.perf_counter() - began)
            count = len(set(program.steps))
            found[each].append((1e6 * statistics.median(times) / count, count))
    return {each: (max(some)[1], max(some)[0]) for each, some in found.items()}


def tensors(tokens: int, heads: int, dim: int) -> dict[str, torch.Tensor]:
    own = {name: torch.zeros(1, tokens, heads, dim) for name in ("q", "k", "v", "out", "dout")}
    return own | {name: torch.zeros(1, heads, tokens) for name in ("lse", "delta")}


if __name__ == "__main__":
    main()
