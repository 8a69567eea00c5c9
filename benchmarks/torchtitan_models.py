"""Debug models of torchtitan under FSDP2 and context parallelism: errors of gradients, and bytes beside its own CP.

    python benchmarks/torchtitan_models.py errors [--models llama3,gpt_oss] [--cp 2 4] [--fsdp 2] [--compiled]
    python benchmarks/torchtitan_models.py bytes [--models llama3] [--cp 2 4] [--schedule auto]

errors: loss and every gradient of a step against one process with torchtitan's own masks, in float32; rows with one
document, and packed rows whose documents differ. The step is that of torchtitan's Trainer. bytes: what all ranks send
for attention in both passes of packed rows, and what torchtitan's own FlexAttention sends there, which gathers K and V
of all ranks. That has no backward pass on a CPU, so plain arithmetic stands in its place. Ends with 1 if anything is
wrong. Needs torchtitan; docs/torchtitan.md names versions.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "tests/support", "tests/fakes")]

import pytest  # noqa: E402
import tiny_torchtitan as tiny  # noqa: E402
import torch  # noqa: E402
from gradient_errors import largest_error  # noqa: E402
from ranks import Here, RankPools  # noqa: E402

CALL_SECONDS = 900.0
EXACT, FEWER = 1e-5, 0.5
LENGTH = 256  # beyond gpt_oss's window of 128
BATCHES = {
    "dense": [[[LENGTH]]],
    "packed": [[[100, 30, 126], [20, 236]], [[10] * 25 + [6], [LENGTH]]],
}
PACK = [173, 64, 301, 22, 140, 90, 211, 23]  # 1024 tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("errors", "bytes"))
    parser.add_argument("--models", default=",".join(tiny.MODELS))
    parser.add_argument("--cp", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--fsdp", type=int, default=2)
    parser.add_argument("--batches", default=",".join(BATCHES))
    parser.add_argument("--backend", default="partial_dtensor", help="spmd_backend of torchtitan")
    parser.add_argument("--attention", default="flex", help="of the model before use_tokenring: flex or varlen")
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--schedule", default="auto")
    parser.add_argument("--layout", default="auto")
    given = parser.parse_args()
    pools = RankPools()
    import torchtitan

    print(f"torchtitan {torchtitan.__version__}, torch {torch.__version__}, float32\n")
    try:
        return (errors if given.what == "errors" else bytes_sent)(given, pools)
    finally:
        pools.close()


def errors(given: argparse.Namespace, pools: RankPools) -> int:
    print("| model | CP x FSDP | rows | compiled | largest relative error | of |\n|---|---|---|---|---|---|")
    worst, wrong = 0.0, 0
    for name, cp, rows in itertools.product(given.models.split(","), given.cp, given.batches.split(",")):
        found = pools(cp * given.fsdp).within(
            CALL_SECONDS, tiny.split, name, LENGTH, BATCHES[rows], cp, len(BATCHES[rows][0]), given.attention,
            given.layers, given.backend, given.compiled, schedule=given.schedule, layout=given.layout,
        )  # fmt: skip
        error, what = max(found)
        compiled = "yes" if given.compiled else "no"
        print(f"| {name} | {cp} x {given.fsdp} | {rows} | {compiled} | {error:.1e} | {what} |", flush=True)
        worst, wrong = max(worst, error), wrong + (not error <= EXACT)
    print(f"\nlargest error {worst:.1e}; wrong or refused: {wrong}")
    return 1 if wrong else 0


def bytes_sent(given: argparse.Namespace, pools: RankPools) -> int:
    print("| model | ranks | schedule | tokenring | FlexAttention's CP | ratio | its error |")
    print("|---|---|---|---|---|---|---|")
    more = 0
    for name, cp in itertools.product(given.models.split(","), given.cp):
        layers = given.layers or 3
        ours = pools(cp).within(CALL_SECONDS, our_bytes, name, layers, given.schedule, given.layout)
        theirs = pools(cp).within(CALL_SECONDS, their_bytes, name, layers)
        sent, their_sent = sum(each[0] for each in ours), sum(each[0] for each in theirs)
        more += not sent <= FEWER * their_sent
        print(
            f"| {name} | {cp} | {ours[0][1]} | {sent:,} | {their_sent:,} | {sent / their_sent:.3f} | "
            f"{theirs[0][1]:.1e} |", flush=True,
        )  # fmt: skip
    print(f"\nmore than {FEWER} of the bytes of FlexAttention's CP: {more}")
    return 1 if more else 0


def our_bytes(here: Here, name: str, layers: int, schedule: str, layout: str) -> tuple[int, str]:
    from tokenring.integrations.torchtitan import use_tokenring
    from tokenring.integrations.torchtitan.inputs import setup_of

    names = set()
    with tiny.on_cpu("partial_dtensor"), pytest.MonkeyPatch.context() as patched:
        config = tiny.make_config(name, sum(PACK), "flex", layers, "partial_dtensor", here.world_size)
        trainer = tiny.on_ranks(use_tokenring(config, schedule=schedule, layout=layout), here.world_size)
        setup = setup_of(config.model_spec.model)
        assert setup is not None
        cp = setup.context(trainer.parallel_dims.get_mesh("cp"))
        plan = type(cp).plan
        patched.setattr(type(cp), "plan", lambda self, request: names.add((found := plan(self, request)).name) or found)
        batch = tiny.make_batch(1, sum(PACK), [PACK])
        found = tiny.step_on_ranks(trainer, batch, 0, 1)
        assert here.rank or error_of(found, name, batch, layers) < EXACT
        return sum(cp.transport.sent_bytes.values()), " ".join(sorted(names)) or schedule


def their_bytes(here: Here, name: str, layers: int) -> tuple[int, float]:
    """Count what this rank sends in torchtitan's own CP, by torch's flex_cp_allgather; return its error, too."""
    with tiny.on_cpu("partial_dtensor"), pytest.MonkeyPatch.context() as patched:
        from torch.distributed.tensor.experimental._context_parallel import _cp_custom_ops as gathers
        from torchtitan.models.common.attention import FlexAttention

        counted = Counted(gathers.funcol, here.world_size)
        patched.setattr(gathers, "funcol", counted)
        patched.setattr(FlexAttention, "forward", lambda self, *args, **more: tiny.plain_attention(*args, **more))
        config = tiny.make_config(name, sum(PACK), "flex", layers, "partial_dtensor", here.world_size)
        trainer = tiny.on_ranks(config, here.world_size)
        batch = tiny.make_batch(1, sum(PACK), [PACK])
        found = tiny.step_on_ranks(trainer, batch, 0, 1)
        if here.rank:
            return counted.sent, 0.0
        return counted.sent, error_of(found, name, batch, layers)


def error_of(found: tiny.Results, name: str, batch: dict[str, torch.Tensor], layers: int) -> float:
    """Compare a step on ranks with one process."""
    return largest_error(found, tiny.in_one_process(name, batch, layers), zeros_may_lack=True)[0]


class Counted:
    """torch's functional collectives, and the bytes that this rank sends in them."""

    def __init__(self, collectives: Any, ranks: int) -> None:
        self.collectives, self.ranks, self.sent = collectives, ranks, 0

    def all_gather_single(self, x: torch.Tensor, *given: Any) -> Any:
        self.sent += x.numel() * x.element_size() * (self.ranks - 1)
        return self.collectives.all_gather_single(x, *given)

    def reduce_scatter_single(self, x: torch.Tensor, *given: Any) -> Any:
        self.sent += x.numel() * x.element_size() * (self.ranks - 1) // self.ranks
        return self.collectives.reduce_scatter_single(x, *given)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.collectives, name)


if __name__ == "__main__":
    sys.exit(main())
