"""Time a decode step over a cache that is dealt over ranks, on this machine's shared memory.

    python benchmarks/decode.py --ranks 2 --cached 128 --layers 8
    python benchmarks/decode.py --kernel --cached 8192 --heads 8 --kv-heads 2        # the CPU kernel alone

Processor time of one rank's thread, and wall time: a call of `cached_attention` for one token, what its kernels take of
it, the agreement of a step; and beside it ten lines by hand: kernel, all-gather of partial results over Gloo, merge.
`tokenring bench --cached N` races whole calls, checked and in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tokenring as tr
from tokenring.api.caching import one_token
from tokenring.cli.bench.cached_ways import by_hand
from tokenring.runtime.cached_kernel import cached_partial


def timed(call: Callable[[], object], times: int) -> tuple[float, float, float]:
    """Smallest and middle processor time of this thread, and smallest wall time, in µs."""
    cpu, wall = [], []
    for _ in range(times):
        began, wall_began = time.thread_time_ns(), time.perf_counter_ns()
        call()
        wall.append(time.perf_counter_ns() - wall_began)
        cpu.append(time.thread_time_ns() - began)
    return min(cpu) / 1e3, statistics.median(cpu) / 1e3, min(wall) / 1e3


def tensors(options: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(  # type: ignore[return-value]
        torch.randn(1, 1, heads, options.dim) for heads in (options.heads, options.kv_heads, options.kv_heads)
    )


def filled(cp: tr.ContextParallel, options: Any) -> tr.KVCache:
    cache = tr.KVCache(
        cp, layers=options.layers, kv_heads=options.kv_heads, head_dim=options.dim, page=options.page,
        capacity=options.cached + 4 * options.times + 64,
    )  # fmt: skip
    heads = options.heads, options.kv_heads, options.kv_heads
    whole = [torch.randn(1, options.cached, each, options.dim) for each in heads]
    with cache.step(options.cached):
        for layer in range(options.layers):
            tr.cached_attention(whole[0], whole[1], whole[2], cache, layer)
    return cache


def run(rank: int, options: Any, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=options.ranks)
    torch.manual_seed(0)
    with torch.inference_mode():
        report = measure(rank, options)
    if rank == 0:
        print(report)
    dist.barrier()
    dist.destroy_process_group()


def measure(rank: int, options: Any) -> str:
    cp = tr.ContextParallel(transport=options.transport)
    cache, (q, k, v) = filled(cp, options), tensors(options)
    calls: list[tuple[float, float, float]] = []
    agreements = []
    for _ in range(options.times):
        began = time.thread_time_ns()
        step = cache.step(1)
        step.__enter__()
        agreements.append((time.thread_time_ns() - began) / 1e3)
        for layer in range(options.layers):
            one = timed(lambda layer=layer: tr.cached_attention(q, k, v, cache, layer), 1)  # type: ignore[misc]
            calls.append(one)
        step.__exit__(None, None, None)
    without = host_time(cache, (q, k, v), options)
    sealed, last = cache.sealed(0), cache.filled[0].open
    opened = cache.open_keys[0][:, :, :last], cache.open_values[0][:, :, :last]
    query = q.transpose(1, 2)
    kernels = timed(lambda: [cached_partial(query, *each, None, 0.1) for each in (sealed, opened)], 200)
    hand = timed(lambda: by_hand(query, sealed, opened, 0.1), options.times * 4)
    spent, wall = [each for each, _, _ in calls], min(each for *_, each in calls)
    least, middle = min(spent), statistics.median(spent)
    return (
        f"P {options.ranks}, {options.cached} cached, {options.heads}/{options.kv_heads} heads × {options.dim}, "
        f"{cp.transport.__class__.__name__}\n"
        f"call: CPU {least:.0f} (median {middle:.0f}) µs, wall {wall:.0f} µs; kernels of it {kernels[0]:.0f} µs; "
        f"beside them {least - kernels[0]:.0f} (median {middle - kernels[1]:.0f}) µs\n"
        f"call whose kernels do nothing: CPU {without[0]:.0f} (median {without[1]:.0f}) µs, wall {without[2]:.0f} µs\n"
        f"agreement of a step: {min(agreements):.0f} (median {statistics.median(agreements):.0f}) µs\n"
        f"by hand over Gloo: CPU {hand[0]:.0f} (median {hand[1]:.0f}) µs, wall {hand[2]:.0f} µs"
    )


def host_time(cache: tr.KVCache, qkv: Any, options: Any) -> tuple[float, float, float]:
    """The same calls with kernels that give a result that was made before."""
    heads = options.kv_heads, options.heads // options.kv_heads
    made = torch.zeros(1, *heads, options.dim), torch.zeros(1, *heads)
    real, one_token.FLASH = one_token.FLASH, lambda *_, **__: made
    found = []
    for _ in range(options.times):
        with cache.step(1):
            for layer in range(options.layers):
                found.append(timed(lambda layer=layer: tr.cached_attention(*qkv, cache, layer), 1))  # type: ignore[misc]
    one_token.FLASH = real
    return min(c for c, _, _ in found), statistics.median(c for c, _, _ in found), min(w for *_, w in found)


def kernel(options: Any) -> None:
    torch.set_num_threads(1)
    q = torch.randn(1, options.heads, 1, options.dim)
    k, v = (torch.randn(1, options.kv_heads, options.cached, options.dim) for _ in range(2))
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    calls: dict[str, Callable[[], object]] = {
        "rows of query heads": lambda: flash(q, k, v, 0.0, False, scale=0.1),
        "query heads of a kv head as its rows": lambda: cached_partial(q, k, v, None, 0.1),
        "two batched products and a softmax": lambda: batched(q, k, v, 0.1),
        "keys and values read once, for their sums": lambda: (k.sum(), v.sum()),
    }
    found = {name: [timed(call, 1)[0] for _ in range(10)] for name, call in calls.items()}
    for _ in range(options.times):
        for name, call in calls.items():
            found[name].append(timed(call, 1)[0])
    for name, each in found.items():
        print(f"{name}: {min(each):.0f} µs")


def batched(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """The same attention by matrix products; its query heads are rows of their kv head."""
    rows = q.reshape(k.shape[1], -1, q.shape[-1]) * scale
    return torch.bmm(torch.bmm(rows, k[0].transpose(1, 2)).softmax(-1), v[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 2), ("cached", 128), ("heads", 8), ("kv-heads", 8), ("dim", 64), ("layers", 8),
                        ("page", 16), ("times", 100)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--kernel", action="store_true", help="time the kernel alone")
    options = parser.parse_args()
    if options.kernel:
        return kernel(options)
    mp.spawn(run, (options, 20000 + os.getpid() % 20000), nprocs=options.ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
