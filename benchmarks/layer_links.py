"""Race linear layers and all-reduce over really shaped links against Gloo's collectives, on one machine; needs root.

    python benchmarks/layer_links.py column row --topology full-mesh --ranks 4 --shard-ms 105
    python benchmarks/layer_links.py all-reduce --topology full-mesh --ranks 8 --link-gbit 0.02 --bytes 65536 524288
    python benchmarks/layer_links.py column row all-gather all-reduce --link-gbit 0.02 --wire mxfp8 --bytes 1048576

A layer's compute sleeps --compute-ms in all, spread over its products by their share, so that links alone are raced; a
rank's tokens take --shard-ms on a link. Prints the median over interleaved rounds of the slowest rank's time in ms,
and for layers what is exposed beside the compute, and its part of what Gloo's collectives then a matmul expose.

With --wire each schedule runs in bf16 without a format and with each of these, and products are computed: prints how
many times as fast the same schedule is with the format, and what the busiest link needs for the bytes alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from on_links import is_rank, run_on_links

RUN_SECONDS = 900.0
WIDTH = 256
SHAPES = {"full-mesh": "full-mesh", "switch": "switch", "ring": "ring"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("races", nargs="+", choices=("column", "row", "all-gather", "all-reduce"))
    parser.add_argument("--topology", choices=SHAPES, default="full-mesh")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--link-gbit", type=float, default=0.05)
    parser.add_argument("--shard-ms", type=float, default=105.0)
    parser.add_argument("--compute-ms", type=float, default=120.0)
    parser.add_argument("--bytes", type=int, nargs="+", default=[65536])
    parser.add_argument("--schedules", nargs="+", default=["tokenring", "direct-q", "direct-q/pieces4"])
    parser.add_argument("--wire", nargs="+", help="formats of docs/layer.md, to race against none")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def sleeping(seconds_a_pair: float) -> None:
    """Let products sleep instead of computing: their results are zeros."""
    import torch

    from tokenring.runtime import products

    def rest(rows: int, columns: int) -> None:
        time.sleep(rows * columns * seconds_a_pair)

    def column(into: torch.Tensor, of: Any) -> None:
        rest(*into.shape)

    def row(of: Any, wide: bool) -> torch.Tensor:
        rest(*of["c"].shape)
        return torch.zeros(of["c"].shape[0], of["w"].shape[1])

    products.WRITES["column", "forward"] = ("c", column)  # type: ignore[index]
    products.RESULTS["row", "forward"] = {"q_partial": row}  # type: ignore[index]


def run_rank(spec: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for race in spec.races:
        if spec.wire:
            for nbytes in spec.bytes if race.startswith("all-") else [shard_bytes(spec)]:
                race_formats(spec, race, nbytes)
        elif race == "all-reduce":
            for nbytes in spec.bytes:
                report(race, nbytes, timed(spec, all_reducers(nbytes)), None)
        else:
            report(race, 0, timed(spec, layers(spec, race)), spec.compute_ms)
    dist.destroy_process_group()


def all_reducers(nbytes: int) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist

    import tokenring as tr

    t, tp = torch.ones(nbytes // 4), tr.TensorParallel()
    assert tr.all_reduce(t, tp).eq(dist.get_world_size()).all()
    return {"gloo": lambda: dist.all_reduce(t.clone()), "two-step": lambda: tr.all_reduce(t, tp)}


def layers(spec: argparse.Namespace, race: str) -> dict[str, Callable[[], object]]:
    """One forward pass of a layer: by Gloo's collective and a matmul apart, by direct messages apart, by schedules."""
    import torch
    import torch.distributed as dist

    import tokenring as tr

    ranks, features = dist.get_world_size(), 256
    tokens = max(4, round(shard_bytes(spec) / 4 / WIDTH / 4) * 4)
    seconds = spec.compute_ms / 1e3
    sleeping(seconds / (tokens * ranks * features))
    x, w = torch.randn(1, tokens, WIDTH), torch.randn(features, WIDTH)
    h, w2 = torch.randn(1, tokens * ranks, features), torch.randn(WIDTH, features)
    base = tr.TensorParallel()
    parallels = {name: tr.TensorParallel(schedule=name) for name in spec.schedules}
    whole = torch.empty(tokens * ranks, WIDTH)
    part = torch.empty(tokens, WIDTH)

    def unfused_column() -> None:
        dist.all_gather_into_tensor(whole, x[0])
        time.sleep(seconds)

    def unfused_row() -> None:
        time.sleep(seconds)
        dist.reduce_scatter_tensor(part, whole)

    def direct_column() -> None:
        tr.all_gather(x[0], base)
        time.sleep(seconds)

    def direct_row() -> None:
        time.sleep(seconds)
        tr.reduce_scatter(whole, base)

    calls: dict[str, Callable[[], object]] = {}
    if race == "column":
        calls = {"gloo, then matmul": unfused_column, "direct, then matmul": direct_column}
    else:
        calls = {"matmul, then gloo": unfused_row, "matmul, then direct": direct_row}
    for name, tp in parallels.items():
        calls[name] = partial(tr.column_linear, x, w, tp) if race == "column" else partial(tr.row_linear, h, w2, tp)
    return calls


def shard_bytes(spec: argparse.Namespace) -> int:
    """Return the bytes of a rank's tokens."""
    return round(spec.shard_ms / 1e3 * spec.link_gbit / 8e-9)


def race_formats(spec: argparse.Namespace, race: str, nbytes: int) -> None:
    """Race every schedule without a format and with each, in bf16.

    nbytes: of a rank's tokens for a layer, of the whole tensor for a collective.
    """
    for name in spec.schedules:
        runs = {wire: formatted(race, nbytes, name, wire) for wire in (None, *spec.wire)}
        found = timed(spec, {str(wire): call for wire, (call, _) in runs.items()})
        plain = statistics.median(found["None"])
        for wire, (_, busiest) in runs.items():
            times = found[str(wire)]
            ms = statistics.median(times)
            line: dict[str, Any] = {"race": race, "bytes": nbytes, "by": name, "wire": wire or "none"}
            line |= {"ms": round(ms, 1), "spread_ms": [round(min(times), 1), round(max(times), 1)]}
            line |= {"link_ms": round(busiest * 8e-6 / spec.link_gbit, 1), "times_as_fast": round(plain / ms, 2)}
            say(line)


def formatted(race: str, nbytes: int, name: str, wire: str | None) -> tuple[Callable[[], object], int]:
    """Return a call in a format, and its bytes on the link that carries most."""
    import torch
    import torch.distributed as dist

    import tokenring as tr
    from tokenring.cli.operator_names import COLLECTIVES

    tp, ranks = tr.TensorParallel(schedule=name, wire=wire), dist.get_world_size()
    random = torch.Generator().manual_seed(dist.get_rank())
    if race in COLLECTIVES:
        t = torch.randn(nbytes // 2 // (ranks if race == "all-gather" else 1), generator=random).bfloat16()
        request, passes = tp.collective(nbytes // 2, t), COLLECTIVES[race]
        call = partial(tr.all_gather if race == "all-gather" else tr.all_reduce, t, tp)
    else:
        tokens = max(4, round(nbytes / 2 / WIDTH / 4) * 4)
        x = torch.randn(1, tokens if race == "column" else tokens * ranks, WIDTH, generator=random).bfloat16()
        w = torch.randn(WIDTH, WIDTH, generator=random).bfloat16()
        request, passes = tp.request(race, (tokens * ranks, WIDTH * ranks, WIDTH), x), ("forward",)
        call = partial(tr.column_linear if race == "column" else tr.row_linear, x, w, tp)
    loads: Counter[tuple[int, int]] = Counter()
    for each in passes:
        loads.update(tp.schedule_of(request).link_bytes(request.workload, each))
    return call, max(loads.values())


def timed(spec: argparse.Namespace, calls: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """The slowest rank's ms of each call, round by round."""
    import torch
    import torch.distributed as dist

    found: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(spec.rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            with torch.no_grad():
                call()
            took = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_:
                found[name].append(took.item() * 1e3)
    return found


def report(race: str, nbytes: int, found: dict[str, list[float]], compute_ms: float | None) -> None:
    medians = {name: statistics.median(times) for name, times in found.items()}
    first = next(iter(medians))
    for name, ms in medians.items():
        line: dict[str, Any] = {"race": race, "bytes": nbytes or None, "by": name, "ms": round(ms, 1)}
        line["spread_ms"] = [round(min(found[name]), 1), round(max(found[name]), 1)]
        if compute_ms is None:
            line["times_as_fast"] = round(medians[first] / ms, 2)
        else:
            exposed = ms - compute_ms
            line |= {"exposed_ms": round(exposed, 1), "of_gloos": round(exposed / (medians[first] - compute_ms), 3)}
        say(line)


def say(line: dict[str, Any]) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 0:
        print(json.dumps({key: value for key, value in line.items() if value is not None}), flush=True)


def main() -> None:
    spec = parse()
    if is_rank():
        run_rank(spec)
    else:
        run_on_links(__file__, spec.topology, spec.ranks, spec.link_gbit, RUN_SECONDS)


if __name__ == "__main__":
    main()
