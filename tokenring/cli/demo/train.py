"""Loss and gradients of a sequence that is split over ranks: each rank has a share, and the shares are added."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.nn import functional as F

import tokenring as tr
from tokenring.cli.demo.data import TextBatch
from tokenring.cli.demo.model import Attention, Transformer

LEARNING_RATE = 1e-2
WARM_UP_STEPS = 2
LEAST_RATE = 0.1  # of the learning rate, at the end of the cosine
LARGEST_NORM = 1.0  # gradients are clipped to it


def split_attention(cp: tr.ContextParallel, mask: tr.Mask | None = None) -> Attention:
    """Return attention over the whole sequence, for a model that holds this rank's part of it; causal by default."""
    seen = tr.Causal() if mask is None else mask
    return lambda q, k, v: tr.attention(q, k, v, cp, mask=seen)


def loss_share(model: Transformer, batch: TextBatch, attend: Attention, whole_length: int) -> torch.Tensor:
    """Return this part's share of the mean cross-entropy over the whole sequence; all ranks' shares add up to it."""
    logits = model(batch.tokens, batch.positions, attend)
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum") / whole_length


def sum_over_ranks(tensors: Iterable[torch.Tensor]) -> None:
    """Add up these tensors over all ranks, in place and in one message."""
    parts = list(tensors)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    flat = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat)
    for part, summed in zip(parts, torch.split(flat, [part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))


def gradients(model: Transformer) -> list[torch.Tensor]:
    """Return the gradients of all parameters, in their order."""
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


class Trainer:
    """AdamW with a cosine schedule over a known number of steps."""

    def __init__(self, model: Transformer, attend: Attention, steps: int) -> None:
        self.model, self.attend, self.steps = model, attend, steps
        self.optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, number: int, part: TextBatch, whole_length: int) -> float:
        """Make one update, the same on every rank; return the loss of the whole sequence before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(number, self.steps)
        self.optimizer.zero_grad()
        share = loss_share(self.model, part, self.attend, whole_length)
        share.backward()  # type: ignore[no-untyped-call]
        loss = share.detach().double()
        sum_over_ranks([loss])
        sum_over_ranks(gradients(self.model))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_NORM)
        self.optimizer.step()
        return loss.item()


def learning_rate(step: int, steps: int) -> float:
    """Return the rate: a short linear warm-up, then a cosine down to a tenth; steps count from 0."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    cosine = 0.5 + 0.5 * math.cos(math.pi * step / steps)
    return LEARNING_RATE * warm * (LEAST_RATE + (1 - LEAST_RATE) * cosine)
