"""Train a small model whose ranks exchange in a wire format, beside bf16 as it is: losses, and bytes.

    torchrun --nproc-per-node 2 benchmarks/wire_training.py --wire mxfp8 mxfp4 --steps 200 --seeds 0 1

The model is the demo's transformer, in bf16 with weights in fp32, on the text of Python's help. Split "tensor": all
linear layers of each block are column and row layers, so that x, dx, y and dy travel in the format in both passes.
Split "context": attention over parts of the sequence, of which k and v travel (and dk, dv as they are). All have the
same batches and weights. "bf16 again" has its sums in another order: how far losses are apart without any format.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import tokenring as tr
from tokenring.backends.interfaces import Transport
from tokenring.cli.demo.data import VOCABULARY, Text, TextBatch, text_tokens
from tokenring.cli.demo.model import Attention, ModelConfig, Transformer, whole_attention
from tokenring.cli.demo.train import LARGEST_NORM, split_attention, sum_over_ranks

SPLITS = ("tensor", "context")
AGAIN = "bf16 again"
LAST = 20  # steps, over which the loss at the end is averaged
WARM_UP, LEAST_RATE = 20, 0.1  # steps of a linear rise; what is left of the rate at the end of a cosine
DIMS = {"query": 0, "key": 0, "value": 0, "gate": 0, "up": 0, "output": 1, "down": 1}  # of a weight, that is split


@dataclass(frozen=True)
class Size:
    """Say how much is trained: windows of so many tokens, several at once."""

    tokens: int = 256
    batch: int = 8
    steps: int = 200
    held_out: int = 8  # batches behind the last step
    rate: float = 2e-3
    seed: int = 0

    def rate_at(self, step: int) -> float:
        """Return the learning rate of a step, which counts from 0."""
        cosine = 0.5 + 0.5 * math.cos(math.pi * step / self.steps)
        return self.rate * min(1.0, (step + 1) / WARM_UP) * (LEAST_RATE + (1 - LEAST_RATE) * cosine)


@dataclass(frozen=True)
class Trained:
    """The loss of each step over all tokens; the mean one of batches that were held out; what this rank sent."""

    losses: list[float]
    held_out: float
    sent_bytes: int

    @property
    def end(self) -> float:
        """The mean loss of the last steps."""
        return statistics.fmean(self.losses[-LAST:])


class SplitLinear(nn.Module):
    """A linear layer of which this rank has a part, in bf16; its weight is kept in fp32."""

    def __init__(self, whole: nn.Linear, tp: tr.TensorParallel, dim: int) -> None:
        super().__init__()
        self.weight, self.tp = nn.Parameter(tp.shard(whole.weight.detach(), dim)), tp
        self.multiply = tr.row_linear if dim else tr.column_linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.multiply(x.bfloat16(), self.weight.bfloat16(), self.tp)


class Split:
    """A model over ranks: which part of a batch this rank takes, and which of its gradients are parts of sums."""

    def __init__(self, model: Transformer, part: Callable[[TextBatch], TextBatch], attend: Attention) -> None:
        self.model, self.part, self._attend = model, part, attend
        self.own = [each.weight for each in model.modules() if isinstance(each, SplitLinear)]
        mine = {id(each) for each in self.own}
        self.shared = [each for each in model.parameters() if id(each) not in mine]

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Compute attention in bf16: rotary positions make q and k fp32."""
        return self._attend(q.bfloat16(), k.bfloat16(), v.bfloat16())

    def loss(self, batch: TextBatch) -> torch.Tensor:
        """Return this rank's share of the mean loss over the whole batch."""
        part = self.part(batch)
        with torch.autocast("cpu", torch.bfloat16):
            logits = self.model(part.tokens, part.positions, self.attend)
        summed = F.cross_entropy(logits.float().flatten(0, 1), part.targets.flatten(), reduction="sum")
        return summed / batch.targets.numel()

    def clip(self) -> None:
        """Scale gradients so that the norm of all ranks' is not above the largest."""
        sum_over_ranks(each.grad for each in self.shared if each.grad is not None)
        own = torch.stack([torch.zeros(())] + [each.grad.square().sum() for each in self.own if each.grad is not None])
        squares = own.sum()
        sum_over_ranks([squares])
        squares += sum(each.grad.square().sum() for each in self.shared if each.grad is not None)
        scale = (LARGEST_NORM / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        for each in self.model.parameters():
            if each.grad is not None:
                each.grad.mul_(scale)


def over_tensors(model: Transformer, tp: tr.TensorParallel) -> Split:
    """Split all linear layers of a model's blocks: each rank has some features, some heads, some tokens."""
    for block in model.blocks:
        for name, dim in DIMS.items():
            setattr(block, name, SplitLinear(getattr(block, name), tp, dim))

    def part(batch: TextBatch) -> TextBatch:
        tokens, targets = (each.chunk(tp.world_size, 1)[tp.rank] for each in (batch.tokens, batch.targets))
        return TextBatch(tokens, targets, batch.positions)  # q and k are of all tokens

    return Split(model, part, whole_attention)


def over_sequence(model: Transformer, cp: tr.ContextParallel) -> Split:
    return Split(model, lambda batch: batch.shard(cp), split_attention(cp))


def train(split: Split, size: Size, transport: Transport) -> Trained:
    """Train from the same weights on the same batches as any other of this size."""
    text, losses = Text(text_tokens(), size.tokens, size.seed), list[float]()
    optimizer = torch.optim.AdamW(split.model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    before = sum(transport.sent_bytes.values())
    for step in range(size.steps):
        for group in optimizer.param_groups:
            group["lr"] = size.rate_at(step)
        optimizer.zero_grad()
        share = split.loss(batch_of(text, size.batch))
        share.backward()  # type: ignore[no-untyped-call]
        losses.append(total(share))
        split.clip()
        optimizer.step()
    sent = sum(transport.sent_bytes.values()) - before
    with torch.no_grad():
        held_out = [total(split.loss(batch_of(text, size.batch))) for _ in range(size.held_out)]
    return Trained(losses, statistics.fmean(held_out), sent)


def batch_of(text: Text, count: int) -> TextBatch:
    windows = [text.batch() for _ in range(count)]
    tokens, targets = (torch.cat([getattr(each, name) for each in windows]) for name in ("tokens", "targets"))
    return TextBatch(tokens, targets, windows[0].positions)


def total(share: torch.Tensor) -> float:
    loss = share.detach().double()
    sum_over_ranks([loss])
    return float(loss)


def trained(kind: str, name: str, size: Size, transport: Transport) -> Trained:
    """Train a model split in one way. name: "bf16", AGAIN, or a wire format."""
    model, wire = Transformer(ModelConfig(vocabulary=VOCABULARY), size.seed), None if name.startswith("bf16") else name
    if kind == "tensor":
        partials = torch.float32 if name == AGAIN else None
        with tr.TensorParallel(schedule="direct-q", transport=transport, wire=wire, partials=partials) as tp:
            return train(over_tensors(model, tp), size, transport)
    schedule = "tokenring" if name == AGAIN else "direct-kv"
    with tr.ContextParallel(schedule=schedule, transport=transport, wire=wire) as cp:
        return train(over_sequence(model, cp), size, transport)


def report(kind: str, seed: int, found: dict[str, Trained]) -> Iterable[str]:
    """Return the lines of one split and seed: losses, their ratio to bf16, and bytes."""
    plain = found["bf16"]
    yield f"{kind} parallel, seed {seed}: loss at first, of the last {LAST} steps, held out; the last two over bf16's"
    for name, made in found.items():
        ratios = [100 * (a / b - 1) for a, b in ((made.end, plain.end), (made.held_out, plain.held_out))]
        fewer = plain.sent_bytes / made.sent_bytes
        yield (
            f"  {name:12} {made.losses[0]:.4f} {made.end:.4f} {made.held_out:.4f}   {ratios[0]:+.2f}% {ratios[1]:+.2f}%"
            f"   {made.sent_bytes / 1e6:8.1f} MB a rank, {fewer:.2f} x fewer"
        )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wire", nargs="+", default=["mxfp8"], help="formats of docs/layer.md")
    parser.add_argument("--split", nargs="+", choices=SPLITS, default=SPLITS)
    parser.add_argument("--steps", type=int, default=Size.steps)
    parser.add_argument("--tokens", type=int, default=Size.tokens)
    parser.add_argument("--batch", type=int, default=Size.batch)
    parser.add_argument("--rate", type=float, default=Size.rate, help="the largest learning rate")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    return parser.parse_args()


def main() -> None:
    spec = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with tr.ContextParallel() as base:
        assert base.transport is not None, "give it two ranks or more, with torchrun"
        for kind in spec.split:
            for seed in spec.seeds:
                size = Size(spec.tokens, spec.batch, spec.steps, rate=spec.rate, seed=seed)
                names = ("bf16", AGAIN, *spec.wire)
                found = {name: trained(kind, name, size, base.transport) for name in names}
                for line in report(kind, seed, found) if base.rank == 0 else ():
                    print(line, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
