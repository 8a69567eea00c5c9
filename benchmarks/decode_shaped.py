"""One new token over a cache of N tokens on really shaped links: cached_attention, by hand, and schedules that move KV.

    sudo python benchmarks/decode_shaped.py [--ranks 4] [--link-gbit 0.1] [--cached 16384] [--kv-heads 8] [--tokens 1]

Prints the median of each, of rank 0, in ms. "by hand" is a kernel, an all-gather of partial results over Gloo and a
merge. Schedules take as many query tokens as ranks, the fewest that they share out evenly.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from on_links import is_rank, run_on_links

RUN_SECONDS = 600.0
HEADS, DIM = 8, 64


def read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("ranks", 4), ("cached", 16384), ("kv-heads", HEADS), ("tokens", 1), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--link-gbit", type=float, default=0.1)
    parser.add_argument("--topology", default="full-mesh")
    return parser.parse_args()


def measure(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    import tokenring as tr
    from tokenring.cli.bench.cached_ways import by_hand

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    base = tr.ContextParallel(transport="gloo")
    ranks, tokens, own = base.world_size, options.tokens, options.cached // base.world_size
    torch.manual_seed(0)
    q = torch.randn(1, tokens, HEADS, DIM)
    k, v = (torch.randn(1, own, options.kv_heads, DIM) for _ in range(2))
    cache = tr.KVCache(
        base, layers=1, kv_heads=options.kv_heads, head_dim=DIM, capacity=options.cached + 100 * tokens + 1024, page=256
    )
    # Sealed where they are, as after a prefill; what they attend to does not matter here.
    with cache.step(options.cached, "tokens") as step:
        assert step.layout is not None
        cache.sharded(0, k.transpose(1, 2), v.transpose(1, 2), step.layout)
    fewest = -(-tokens // ranks)
    new = q[:, :, : options.kv_heads]
    calls: dict[str, Callable[[], object]] = {"cached_attention": lambda: tr.cached_attention(q, new, new, cache, 0)}
    if not tokens % (2 * ranks):
        mine, mine_new = (tr.shard(x, base) for x in (q, new))
        calls["cached_attention, q sharded"] = lambda: tr.cached_attention(
            mine, mine_new, mine_new, cache, 0, q_home="tokens"
        )
    rows, *sealed = (x.transpose(1, 2) for x in (q, k, v))
    calls["by hand"] = lambda: by_hand(rows, (sealed[0], sealed[1]), None, 0.1)
    for name in ("direct-q", "direct-kv", "ring"):
        cp = tr.ContextParallel(layout="contiguous", schedule=name, transport=base.transport)
        part = torch.randn(1, fewest, HEADS, DIM)
        calls[name] = lambda cp=cp, part=part: tr.attention(part, k, v, cp)  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for turn in range(options.rounds + 1):
            for name, call in calls.items():
                dist.barrier()
                began = time.perf_counter()
                call()
                if turn:
                    seconds[name].append(time.perf_counter() - began)
    if dist.get_rank() == 0:
        of = {name: statistics.median(each) for name, each in seconds.items()}
        for name, each in of.items():
            low, high = min(seconds[name]) * 1e3, max(seconds[name]) * 1e3
            print(f"{name}: {each * 1e3:.1f} ms ({low:.1f} to {high:.1f}), {each / of['by hand']:.2f} × by hand")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    options = read()
    if is_rank():
        measure(options)
    else:
        run_on_links(__file__, options.topology, options.ranks, options.link_gbit, RUN_SECONDS)


if __name__ == "__main__":
    main()
