"""A layer as Megatron would call it, to see that batch, rotary embeddings and attention fit together.

s tokens held here, b batch, h heads, d head dim, as in Megatron.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

LENGTH, BATCH, HEADS, KV_HEADS, DIM, WIDTH, WORDS = 64, 2, 4, 2, 16, 32, 50
LIMIT = 2e-6  # relative error of gradients in fp32
Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Weights = dict[str, torch.Tensor]


def weights() -> Weights:
    """Embeddings of words and of labels, and the projections to q, k and v; float64."""
    random = torch.Generator().manual_seed(4)
    shapes = {
        "words": (WORDS, WIDTH),
        "labels": (WORDS, HEADS * DIM),
        "q": (WIDTH, HEADS * DIM),
        "k": (WIDTH, KV_HEADS * DIM),
        "v": (WIDTH, KV_HEADS * DIM),
    }
    return {name: torch.randn(*shape, generator=random, dtype=torch.float64) / 4 for name, shape in shapes.items()}


def batch() -> dict[str, torch.Tensor]:
    """Words and labels [b, s] of the whole sequence."""
    random = torch.Generator().manual_seed(5)
    return {name: torch.randint(WORDS, (BATCH, LENGTH), generator=random) for name in ("tokens", "labels")}


def angles() -> torch.Tensor:
    """Of rotary embeddings, [s, 1, 1, d], as Megatron holds them before they are cut."""
    rates = 100.0 ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    each = torch.outer(torch.arange(LENGTH, dtype=torch.float64), rates)
    return torch.cat((each, each), -1)[:, None, None, :]


def loss(given: Weights, words: torch.Tensor, labels: torch.Tensor, turns: torch.Tensor, core: Core) -> torch.Tensor:
    """A number to which every token counts. words, labels [b, s]; turns [s, 1, 1, d]."""
    x = given["words"][words].transpose(0, 1)
    q, k, v = ((x @ given[name]).reshape(*x.shape[:2], -1, DIM) for name in ("q", "k", "v"))
    out = core(_turned(q, turns), _turned(k, turns), v)
    return (out * given["labels"][labels].transpose(0, 1)).sum() / LENGTH


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    low, high = x.chunk(2, -1)
    return x * turns.cos() + torch.cat((-high, low), -1) * turns.sin()


def plain_core(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the whole sequence."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    scores = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(DIM)
    later = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return torch.einsum("bhst,tbhd->sbhd", scores.masked_fill(later, -math.inf).softmax(-1), v).flatten(-2)


def without_context_parallel() -> Weights:
    """The gradients of one process that holds everything."""
    given = {name: x.requires_grad_() for name, x in weights().items()}
    loss(given, **_named(batch()), turns=angles(), core=plain_core).backward()  # type: ignore[no-untyped-call]
    return {name: x.grad for name, x in given.items() if x.grad is not None}


def errors(
    cut_batch: Callable[..., Any], cut_rotary: Callable[..., Any], core: Core, device: str,
    total: Callable[[torch.Tensor], None],
) -> dict[str, float]:  # fmt: skip
    """The largest relative error of each weight's gradient. total: adds up a CPU tensor over the ranks, in place."""
    given = {name: x.float().to(device).requires_grad_() for name, x in weights().items()}
    held = {name: x.to(device) for name, x in cut_batch({name: x.to(device) for name, x in batch().items()}).items()}
    turns = cut_rotary(angles().float().to(device))
    loss(given, **_named(held), turns=turns, core=core).backward()  # type: ignore[no-untyped-call]
    found = {}
    for name, wanted in without_context_parallel().items():
        grad = given[name].grad
        assert grad is not None
        whole = grad.cpu()
        total(whole)  # in fp32: MindSpeed's all_reduce of float64 sums a copy
        found[name] = float((whole.double() - wanted).norm() / wanted.norm())
    return found


def _named(held: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {"words": held["tokens"], "labels": held["labels"]}


def config(ranks: int, **more: Any) -> Any:
    """A TransformerConfig, as far as attention reads it."""
    given = {"context_parallel_size": ranks, "attention_dropout": 0.0, "kv_channels": DIM, "seq_length": LENGTH}
    return SimpleNamespace(**(given | more))
