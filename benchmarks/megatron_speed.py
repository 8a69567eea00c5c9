"""Steps of a Megatron-core GPT on CPU ranks: with our attention, and with ring-flash-attn's zigzag ring.

    pip install --no-deps --target DIR megatron-core==0.16.1 ring-flash-attn==0.1.8
    OMP_NUM_THREADS=1 PYTHONPATH=DIR torchrun --standalone --nproc-per-node 4 benchmarks/megatron_speed.py

Two models of the same weights take turns, forward and backward, in one order and then the other; a step's time is that
of its slowest rank. Gradients are compared first. ring-flash-attn computes with the CPU kernel that ours takes, through
the stand-in of tokenring.cli.bench. Prints medians in ms, their quotient, and the quotients' spread over rounds.
"""

from __future__ import annotations

import argparse
import gc
import logging
import math
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from tokenring.cli.bench.peers import ring_flash_function
from tokenring.gc_pause import no_collection
from tokenring.integrations.megatron import use_tokenring

VOCABULARY = 256
AGREE = 1e-4  # largest relative difference of a gradient


class ZigzagRing(torch.nn.Module):
    """core_attention by ring-flash-attn, for causal self-attention under context parallelism."""

    def __init__(self, config: Any, **rest: Any) -> None:
        super().__init__()
        from megatron.core import parallel_state

        self.scale = 1 / math.sqrt(config.kv_channels)
        self.group = parallel_state.get_context_parallel_group()
        self.call, self.notes = ring_flash_function("zigzag_ring_flash_attn")

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **more: Any) -> torch.Tensor:
        q, k, v = (x.transpose(0, 1).contiguous() for x in (q, k, v))
        out: torch.Tensor = self.call(q, k, v, softmax_scale=self.scale, causal=True, group=self.group)
        return out.transpose(0, 1).flatten(2)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--schedule", default="auto")
    return parser.parse_args()


def make_model(args: argparse.Namespace, spec: Any) -> Any:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=args.layers,
        hidden_size=args.heads * args.head_dim,
        num_attention_heads=args.heads,
        num_query_groups=args.kv_heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=dist.get_world_size(),
        use_cpu_initialization=True,
    )
    torch.manual_seed(0)
    return GPTModel(config, spec, VOCABULARY, args.seq)  # with learned positions


def step(model: Any, tokens: torch.Tensor, positions: torch.Tensor) -> float:
    """Seconds that the slowest rank takes for forward and backward."""
    model.zero_grad()
    dist.barrier()
    began = time.perf_counter()
    model(tokens, positions, None, labels=tokens).mean().backward()
    seconds = torch.tensor(time.perf_counter() - began)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def furthest_apart(model: Any, other: Any) -> float:
    """The largest relative difference of a parameter's gradient between two models, on this rank."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a.grad - b.grad).norm() / b.grad.norm()) for a, b in pairs)


def main() -> None:
    from megatron.core import __version__, parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    args = arguments()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("tokenring").setLevel(logging.INFO)  # which schedule it is
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    theirs = get_gpt_layer_local_spec()
    theirs.submodules.self_attention.submodules.core_attention = ZigzagRing
    models = {
        "tokenring": make_model(args, use_tokenring(get_gpt_layer_local_spec(), args.schedule)),
        "ring-flash-attn": make_model(args, theirs),
    }
    chunks = torch.arange(args.seq).chunk(2 * ranks)
    positions = torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]])[None]
    tokens = positions * 7919 % VOCABULARY
    for model in models.values():  # warm up, twice: the first plans and connects
        step(model, tokens, positions), step(model, tokens, positions)
    apart = furthest_apart(*models.values())
    assert apart <= AGREE, f"gradients differ by {apart:.1e}"

    taken: dict[str, list[float]] = {name: [] for name in models}
    with no_collection():
        for number in range(args.rounds):
            for name in list(models)[:: 1 if number % 2 else -1]:
                taken[name].append(step(models[name], tokens, positions))
            gc.collect()
    if rank == 0:
        ours, others = taken.values()
        shares = statistics.quantiles([a / b for a, b in zip(ours, others, strict=True)], n=4)
        print(f"Megatron-core {__version__}, torch {torch.__version__}, {ranks} ranks, {args.layers} layers, "
              f"{args.heads}/{args.kv_heads} heads of {args.head_dim}, {args.seq} tokens, {args.rounds} rounds")
        for note in models["ring-flash-attn"].decoder.layers[0].self_attention.core_attention.notes:
            print(f"ring-flash-attn: {note.text}")
        for name, seconds in taken.items():
            print(f"{name:16} {1e3 * statistics.median(seconds):8.1f} ms")
        print(f"quotient of the medians {statistics.median(ours) / statistics.median(others):.3f}, "
              f"of each round {shares[0]:.3f} to {shares[2]:.3f} (quartiles)")
        print(f"gradients agree within {apart:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
