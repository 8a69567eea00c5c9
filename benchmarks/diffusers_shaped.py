"""A tiny Flux, Wan or QwenImage on really shaped links: ours beside diffusers' own `ulysses_anything`, in turn.

    sudo python benchmarks/diffusers_shaped.py [--ranks 8] [--heads 30] [--link-gbit 0.02] [--topology full-mesh]
                                               [--model flux] [--what attention model] [--rounds 9]

Prints medians over interleaved rounds of the slowest rank's time, and ours over theirs. attention: one call of
diffusers' own dispatch of attention on tokens that are cut already. model: a whole call, with the gathering of its
output. Lengths divide by the ranks, as diffusers gathers by Gloo only then. The links are measured before, for "auto".
Needs root, and diffusers; docs/diffusers.md names versions.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from on_links import is_rank, run_on_links

TESTS = Path(__file__).resolve().parent.parent / "tests"
FOLDERS = TESTS / "support", TESTS / "fakes"


def read() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (
        ("ranks", 8), ("heads", 30), ("head-dim", 16), ("text", 64), ("image", 960), ("rounds", 9)
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--link-gbit", type=float, default=0.02)
    parser.add_argument("--topology", default="full-mesh")
    parser.add_argument("--model", default="flux")
    parser.add_argument("--schedules", nargs="+", default=["auto"])
    parser.add_argument("--what", nargs="+", choices=("attention", "model"), default=["attention", "model"])
    parser.add_argument("--seconds", type=float, default=540.0, help="after which all ends")
    return parser.parse_args()


def measure(given: argparse.Namespace) -> None:
    import warnings

    import torch
    import torch.distributed as dist
    from diffusers import ContextParallelConfig
    from tiny_diffusers import make_inputs, make_model

    import tokenring as tr
    from tokenring.integrations.diffusers import use_tokenring

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    sizes: dict[str, Any] = {"attention_head_dim": given.head_dim}
    if given.model != "wan":
        sizes["axes_dims_rope"] = given.head_dim // 4, *[3 * given.head_dim // 8] * 2
    inputs = make_inputs(given.model, given.text, given.image)
    calls: dict[str, Callable[[], torch.Tensor]] = {}
    base = tr.ContextParallel()
    topology = tr.Topology.measure()
    names: dict[str, set[str]] = {}
    for schedule in given.schedules:
        cp = tr.ContextParallel(schedule=schedule, topology=topology, transport=base.transport)
        model = use_tokenring(make_model(given.model, given.heads, **sizes), cp)
        noted(cp, names.setdefault(schedule, set()))
        for what in given.what:
            calls[f"{what}, tokenring {schedule}"] = call_of(what, model, inputs, given)
    theirs = make_model(given.model, given.heads, **sizes)
    torch.accelerator.device_count = lambda: 1  # type: ignore[method-assign]  # enable_parallelism asks for one
    theirs.enable_parallelism(config=ContextParallelConfig(ulysses_degree=given.ranks, ulysses_anything=True))
    for what in given.what:
        calls[f"{what}, ulysses_anything"] = call_of(what, theirs, inputs, given)
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(given.rounds + 1):
        for name, call in calls.items():
            dist.barrier()
            began = time.perf_counter()
            with torch.no_grad():  # theirs has no backward pass
                call()
            slowest = torch.tensor(time.perf_counter() - began)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if turn:  # the first makes plans and connections
                seconds[name].append(slowest.item())
    if dist.get_rank() == 0:
        said(given, seconds, names)
    dist.barrier()
    dist.destroy_process_group()


def noted(cp: Any, names: set[str]) -> None:
    """Note the names of the schedules that cp takes."""
    plan = type(cp).plan

    def planned(request: Any) -> Any:
        found = plan(cp, request)
        names.add(found.name)
        return found

    cp.plan = planned


def call_of(what: str, model: Any, inputs: dict[str, Any], given: argparse.Namespace) -> Callable[[], Any]:
    """Return a call of the model, or of its attention on this rank's tokens of all."""
    import torch
    from diffusers.models.attention_dispatch import dispatch_attention_fn

    def whole() -> Any:
        return model(**inputs, return_dict=False)[0]

    if what == "model":
        return whole
    with torch.no_grad():
        whole()  # it learns the lengths
    processor = model.blocks[0].attn1.processor if given.model == "wan" else model.transformer_blocks[0].attn.processor
    tokens = (given.image + (0 if given.model == "wan" else given.text)) // given.ranks
    sizes = 1, tokens, given.heads, given.head_dim
    q, k, v = (torch.randn(sizes) for _ in range(3))
    return lambda: dispatch_attention_fn(q, k, v, parallel_config=processor._parallel_config)


def said(given: argparse.Namespace, seconds: dict[str, list[float]], names: dict[str, set[str]]) -> None:
    length = f"{given.text} + {given.image} tokens"
    print(f"{given.model}, {given.ranks} ranks, {given.topology}, {given.link_gbit} Gbit/s, {given.heads} heads x "
          f"{given.head_dim}, {length}, fp32, forward; medians of {given.rounds} rounds")  # fmt: skip
    for name, each in seconds.items():
        peer = seconds[f"{name.split(',')[0]}, ulysses_anything"]
        low, middle, high = (1e3 * figure for figure in (min(each), statistics.median(each), max(each)))
        took = ", ".join(sorted(names.get(name.split()[-1], ())))
        ratio = statistics.median(each) / statistics.median(peer)
        print(f"{name:32} {middle:8.1f} ms ({low:.1f} to {high:.1f}), {ratio:.2f} x {took}")


def main() -> None:
    given = read()
    if is_rank():
        measure(given)
    else:
        run_on_links(__file__, given.topology, given.ranks, given.link_gbit, given.seconds, *FOLDERS)


if __name__ == "__main__":
    main()
