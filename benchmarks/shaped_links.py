"""Race the schedules over really shaped links: one network namespace a rank, on one machine.

    benchmarks/shaped_links.py path/to/testbed.py [--ranks 8] [--link-gbit 0.05] [--rounds 7]

Prints, for each schedule, the median over interleaved rounds of the slowest rank's time, the time
its most loaded link needs for its bytes alone, and their ratio. Needs root and the test bed script.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

SCHEDULES = ("ring", "tokenring", "bidirectional", "direct-kv", "direct-q")
TOKENS, HEADS, DIM = 128, 8, 64


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("testbed", nargs="?", help="the test bed script; not given on the ranks themselves")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--link-gbit", type=float, default=0.05)
    parser.add_argument("--topology", default="full-mesh")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kv-heads", type=int, default=HEADS)
    parser.add_argument("--mask", default="full")
    parser.add_argument("--layout", default="contiguous", help="what suits a mask that hides nothing")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens a rank")
    parser.add_argument("--pieces", type=int, help="for the direct schedules; default: what the library takes")
    parser.add_argument("--backward", action="store_true", help="time forward and backward")
    return parser.parse_args(arguments)


def launch(spec: argparse.Namespace, arguments: list[str]) -> int:
    own = [each for each in arguments if each != spec.testbed]
    command = [sys.executable, spec.testbed, "run", "--topology", spec.topology, "--ranks", str(spec.ranks)]
    command += ["--link-gbit", str(spec.link_gbit), "--", sys.executable, os.path.abspath(__file__), *own]
    return subprocess.run(command, env={**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}).returncode


def run_rank(spec: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import tokenring as tr
    from tokenring.ir.schedule_data import PASSES

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    base = tr.ContextParallel()
    torch.manual_seed(rank)
    grad = spec.backward
    q = torch.randn(1, spec.tokens, HEADS, DIM, requires_grad=grad)
    k, v = (torch.randn(1, spec.tokens, spec.kv_heads, DIM, requires_grad=grad) for _ in range(2))
    mask = tr.Causal() if spec.mask == "causal" else tr.Full()
    runs: dict[str, tuple[tr.ContextParallel, float]] = {}
    for name in SCHEDULES:
        pieces = spec.pieces if name.startswith("direct") else None
        cp = tr.ContextParallel(layout=spec.layout, schedule=name, transport=base.transport, pieces=pieces)
        plan = tr.plan(q, k, v, cp, mask)
        passes = PASSES if grad else PASSES[:1]
        loads: dict[tuple[int, int], int] = {}
        for direction in passes:
            for link, size in plan.schedule.link_bytes(plan.workload, direction).items():
                loads[link] = loads.get(link, 0) + size
        runs[name] = cp, max(loads.values()) * 8 / (spec.link_gbit * 1e9)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(spec.rounds + 1):
        for name, (cp, _) in runs.items():
            dist.barrier()
            began = time.perf_counter()
            out = tr.attention(q, k, v, cp, mask=mask)
            if grad:
                out.backward(out.detach())
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:  # the first builds plans and connections
                times[name].append(slowest.item())
    if rank == 0:
        print(f"{ranks} ranks, {spec.topology}, {spec.link_gbit} Gbit/s a link, {spec.tokens} tokens a rank,")
        print(f"{HEADS}:{spec.kv_heads} heads x {DIM}, fp32, {mask}, {'forward + backward' if grad else 'forward'},")
        print(f"medians of {spec.rounds} interleaved rounds")
        print(f"{'schedule':15} {'median ms':>10} {'min':>8} {'max':>8} {'link ms':>9} {'ratio':>6}")
        for name, (_, link_seconds) in runs.items():
            median = statistics.median(times[name])
            low, high = min(times[name]), max(times[name])
            ratio = median / link_seconds
            figures = [1e3 * seconds for seconds in (median, low, high, link_seconds)]
            print("{:15} {:10.1f} {:8.1f} {:8.1f} {:9.1f} {:6.2f}".format(name, *figures, ratio))
        best = min(statistics.median(times[name]) for name in runs if name.startswith("direct"))
        print(f"ring / direct {statistics.median(times['ring']) / best:.2f}")
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: list[str]) -> int:
    spec = parse(arguments)
    if spec.testbed:
        return launch(spec, arguments)
    run_rank(spec)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
