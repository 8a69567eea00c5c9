"""Race attention by `auto` with an error that a wire format may add against `auto` without, over really shaped links.

    sudo python benchmarks/format_budgets.py --topology full-mesh --ranks 4 --link-gbit 0.02 --errors 0.05 0.3

Causal attention in bf16, forward and backward; `auto` knows the links. Prints what it takes, the time that it predicts,
the median over interleaved rounds of the slowest rank's time in ms, how many times as fast that is as without a format,
and the largest error of a result against float64.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from on_links import is_rank, run_on_links

RUN_SECONDS = 900.0
HEADS, KV_HEADS, DIM = 8, 2, 64
SHAPES = ("full-mesh", "switch", "ring", "two-node")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=SHAPES, default="full-mesh")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link-gbit", type=float, default=0.02)
    parser.add_argument("--tokens", type=int, default=256, help="tokens a rank")
    parser.add_argument("--errors", type=float, nargs="+", default=[0.05, 0.3])
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def run_rank(spec: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from float64_errors import causal_float64, relative_errors

    import tokenring as tr
    from tokenring.cli.bench.candidates import emulated
    from tokenring.emulate import Shape

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, length = dist.get_rank(), spec.tokens * spec.ranks
    net = emulated(Shape(spec.topology, spec.ranks, spec.link_gbit), None)
    random = torch.Generator().manual_seed(1)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    whole = [torch.randn(1, length, each, DIM, generator=random).bfloat16() for each in heads]
    base = tr.ContextParallel()
    runs: dict[float | None, tr.ContextParallel] = {}
    for error in (None, *spec.errors):
        runs[error] = tr.ContextParallel(transport=base.transport, topology=net, max_error=error)
    q, k, v, dout = (tr.shard(each, base, dim=1).detach() for each in whole)
    own = [each.requires_grad_() for each in (q, k, v)]
    right = [tr.shard(each, base, dim=1) for each in causal_float64(whole)]
    times: dict[float | None, list[float]] = {error: [] for error in runs}
    worst: dict[float | None, float] = {}
    for turn in range(spec.rounds + 1):
        for error, cp in runs.items():
            dist.barrier()
            began = time.perf_counter()
            made = tr.attention(q, k, v, cp, is_causal=True)
            grads = torch.autograd.grad(made, own, dout)
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:
                times[error].append(slowest.item() * 1e3)
                continue
            worst[error] = max(relative_errors((made.detach(), *grads), right))
    plain = statistics.median(times[None])
    for error, cp in runs.items() if rank == 0 else ():
        plan, ms = tr.plan(q, k, v, cp, is_causal=True), statistics.median(times[error])
        predicted = plan.candidates[0].predicted_seconds
        print(json.dumps({
            "max_error": error, "takes": plan.name, "wire": next(iter(plan.schedule.formats.values()), "none"),
            "predicted_ms": None if predicted is None else round(predicted * 1e3, 1), "ms": round(ms, 1),
            "spread_ms": [round(min(times[error]), 1), round(max(times[error]), 1)],
            "times_as_fast": round(plain / ms, 2), "error": round(worst[error], 4),
        }), flush=True)  # fmt: skip
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    spec = parse()
    if is_rank():
        run_rank(spec)
    else:
        run_on_links(__file__, spec.topology, spec.ranks, spec.link_gbit, RUN_SECONDS)


if __name__ == "__main__":
    main()
