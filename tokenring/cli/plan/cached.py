"""`tokenring plan --cached N`: how new tokens attend to a KV cache, the time of each way, and where they cross."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from tokenring.cli.call_options import heads_of_latents
from tokenring.cli.plan.options import DTYPES, first_ranks, several_hosts, where
from tokenring.cli.spelling import check_counts, heads_text, new_tokens_text
from tokenring.display.units import time_text
from tokenring.errors import ConfigurationError
from tokenring.planner.choosing.cached_calls import (
    CachedCall,
    CachedWay,
    cached_ways,
    crossovers,
    least_cached_seconds,
)
from tokenring.planner.interconnects.rank_order import context_parallel_group, heads_of_group
from tokenring.sequence.sizes import read_size
from tokenring.sequence.workload import Workload

OF_ONE_PLAN = (
    "sweep", "svg", "explain", "timeline", "mask_svg", "save", "layout", "schedules", "memory_limit", "max_error",
)  # fmt: skip
UNUSED = {  # options with a default, and why one that was given does not count
    "seq": "its lengths are those of --cached N and --tokens N",
    "mask": "new tokens see all that is cached; with a sliding window of w give --cached w",
    "passes": "it is forward alone",
    "transport": "its ways are not lowered for a transport",
    "all": "it always shows all its ways",
}
FORMAT, VERSION = "tokenring-cached-plan", 1
ONE_TOKEN = "1"
UNITS = ("B", "kB", "MB", "GB", "TB")


def check_tokens(options: argparse.Namespace) -> None:
    """Raise ConfigurationError for --tokens or --decode without --cached N, or for --decode of several tokens."""
    if options.cached is None and options.decode:
        raise ConfigurationError(
            "--decode is one new token over a KV cache: say how many tokens are cached, as in --cached 128k"
        )
    if options.cached is None and options.tokens != ONE_TOKEN:
        raise ConfigurationError(
            f"--tokens {options.tokens} are new tokens over a cache: say how many are cached with --cached N; for a "
            f"whole sequence say --seq {options.tokens}"
        )
    if options.decode and options.tokens != ONE_TOKEN:
        raise ConfigurationError(
            f"--decode is one new token, and --tokens {options.tokens} asks for others: leave one of them out"
        )


def cached_call(options: argparse.Namespace, given: argparse.Namespace) -> CachedCall:
    """Return the options as a call. Raises ConfigurationError for those that do not go with --cached.

    given: the options without the defaults of those in UNUSED.
    """
    for name in OF_ONE_PLAN:
        if getattr(options, name) not in (None, False):
            spelled = name.replace("_", "-")
            raise ConfigurationError(f"--{spelled} is for a plan of a whole sequence, and not for --cached")
    for name, why in UNUSED.items():
        if (value := getattr(given, name)) not in (None, False, "forward"):
            said = ("pass" if name == "passes" else name) + ("" if value is True else f" {value}")
            raise ConfigurationError(f"--{said} does not go with --cached: {why}")
    check_counts(options)
    dtype = DTYPES[options.dtype]
    name, _ = several_hosts(options.topology, options.ranks)
    net, machine = where(name, dtype, options)
    net = context_parallel_group(first_ranks(net, options.ranks), options.tp)
    tokens, cached = read_size("--tokens", options.tokens), read_size("--cached", options.cached)
    kv_heads = options.heads if options.kv_heads is None else options.kv_heads
    latent_dim = None
    if options.latents:
        kv_heads, latent_dim = heads_of_latents(options), options.dim
    whole = Workload(
        options.batch, tokens, cached, options.heads, kv_heads, options.dim, dtype, options.value_dim, latent_dim
    )
    return CachedCall(heads_of_group(whole, options.tp), net, machine)


def cached_json(call: CachedCall) -> str:
    """Return the ways as JSON, the fastest first, with the bound and the crossovers."""
    size, crossed = call.workload, crossovers(call)
    data = {
        "format": FORMAT, "version": VERSION, "interconnect": call.interconnect.name, "ranks": call.ranks,
        "batch": size.batch, "tokens": size.q_length, "cached": size.kv_length, "heads": size.q_heads,
        "kv_heads": size.kv_heads, "dim": size.head_dim, "value_dim": size.value_dim,
        "latents": size.latent_dim is not None,
        "dtype": str(size.dtype).removeprefix("torch."),
        "ways": [asdict(way) for way in cached_ways(call)], "bound_seconds": least_cached_seconds(call),
        "cache_moves_from_tokens": crossed.cache_moves, "ranks_are_faster_from_cached": crossed.several,
        "two_step_from_tokens": crossed.two_step,
    }  # fmt: skip
    return json.dumps(data, indent=1) + "\n"


def cached_report(call: CachedCall) -> str:
    """Return the ways as a table, the fastest first, with the bound and the crossovers."""
    size, ways = call.workload, cached_ways(call)
    heads = " ".join(f"{text:>9}" for text in ("time", "bound", "kernels", "exchange"))
    dims = heads_text(size.head_dim, size.value_dim)
    lines = [
        f"attention of one layer, forward: batch {size.batch}, {new_tokens_text(size.q_length)} over "
        f"{size.kv_length:,} cached{'' if size.latent_dim is None else ' latents'}, "
        f"{size.q_heads}:{size.kv_heads} heads × {dims}, {str(size.dtype).removeprefix('torch.')}",
        f"on {call.interconnect.name}: {call.ranks} ranks; {call.machine.source}",
        f"{ways[0].name}: {_why(ways)}",
        "",
        f"{'':11} {heads} {'sent a rank':>12} {'rounds':>7}  what moves",
        *map(_row, ways),
        "",
        f"bound {time_text(least_cached_seconds(call))} over {call.ranks} ranks with the cache in place; all times are "
        f"worked out, none is measured",
        *_crossed(call),
    ]
    return "\n".join(lines)


def _why(ways: Sequence[CachedWay]) -> str:
    best, second, last = ways[0].seconds, ways[1], ways[-1]
    return f"{second.seconds / best:.2f} × as fast as {second.name}, {last.seconds / best:.0f} × as {last.name}"


def _row(way: CachedWay) -> str:
    found = way.seconds, way.bound_seconds, way.kernel_seconds, way.exchange_seconds
    times = (time_text(each) for each in found)
    cells = " ".join(f"{text:>9}" for text in times)
    return f"{way.name:11} {cells} {_bytes(way.sent_bytes):>12} {way.rounds:>7}  {way.moves}"


def _crossed(call: CachedCall) -> list[str]:
    cached, tokens = call.workload.kv_length, call.workload.q_length
    moves, several, two_step = crossovers(call)
    q = "q moves, whatever the number of new tokens" if moves is None else f"q moves below {new_tokens_text(moves)}"
    if several is None:
        ranks = "one rank is faster, whatever is cached"
    else:
        count = f"{several:,} cached token{'s' if several > 1 else ''}"
        ranks = f"{call.ranks} ranks that all have the new tokens are faster than one from {count} on"
    more = "" if moves is None else ", the cache from there on"
    steps = "in one round, whatever their number"
    if two_step is not None:
        steps = f"in two rounds from {new_tokens_text(two_step)} on"
    return [
        f"over {cached:,} cached tokens {q}{more}",
        f"with {new_tokens_text(tokens)} {ranks}",
        f"of tokens that every rank has partial results are merged {steps}",
    ]


def _bytes(count: float) -> str:
    value, unit = count, 0
    while value >= 1000 and unit < len(UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.3g} {UNITS[unit]}"
