"""What the library costs where there is nothing to split: one rank against plain scaled_dot_product_attention.

    benchmarks/single_rank_overhead.py [--tokens 8192] [--pairs 9] [--threads 2]

Forward and backward of one causal call, interleaved pairs; prints both medians and the median of
the pairs' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch

import tokenring as tr


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--threads", type=int, default=2)
    spec = parser.parse_args(arguments)
    torch.set_num_threads(spec.threads)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, spec.tokens, spec.heads, spec.dim, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    cp = tr.ContextParallel(layout="contiguous")

    def ours() -> torch.Tensor:
        return tr.attention(q, k, v, cp, mask=tr.Causal())

    def plain() -> torch.Tensor:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]
        return torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    seconds: dict[str, list[float]] = {"tokenring": [], "plain": []}
    for pair in range(spec.pairs + 1):
        order: list[tuple[str, Callable[[], torch.Tensor]]] = [("tokenring", ours), ("plain", plain)]
        for name, call in order if pair % 2 else reversed(order):
            began = time.perf_counter()
            call().backward(dout)
            if pair:  # the first warms up
                seconds[name].append(time.perf_counter() - began)
            q.grad = k.grad = v.grad = None
    ratios = [a / b for a, b in zip(seconds["tokenring"], seconds["plain"], strict=True)]
    print(f"1 rank, {spec.threads} threads, {spec.tokens} tokens, {spec.heads} heads x {spec.dim}, fp32, causal, "
          f"forward + backward, {spec.pairs} interleaved pairs")  # fmt: skip
    for name, times in seconds.items():
        median, low, high = (1e3 * each for each in (statistics.median(times), min(times), max(times)))
        print(f"{name:10} median {median:8.1f} ms  ({low:.1f} to {high:.1f})")
    print(f"ratio      median {statistics.median(ratios):.4f}  ({min(ratios):.4f} to {max(ratios):.4f})")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
