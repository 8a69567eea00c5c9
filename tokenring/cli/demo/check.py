"""Comparison of the split model with one unsplit process: loss and every gradient of one batch."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from tokenring.cli.demo.data import TextBatch
from tokenring.cli.demo.model import Attention, Transformer, whole_attention
from tokenring.cli.demo.results import Checked
from tokenring.cli.demo.train import gradients, loss_share, sum_over_ranks


def check(model: Transformer, whole: TextBatch, part: TextBatch, attend: Attention) -> Checked | None:
    """Compare the model on `part` of each rank with the model on the `whole` batch; return the result at rank 0.

    attend: the split attention. The reference is torch's own attention over the whole sequence, at
    rank 0 alone, while the other ranks wait.
    """
    began = time.perf_counter()
    length = whole.tokens.shape[1]
    split_loss = _backward(model, part, attend, length)
    split = gradients(model)
    sum_over_ranks([split_loss])
    sum_over_ranks(split)
    model.zero_grad()
    checked = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        whole_loss = _backward(model, whole, whole_attention, length)
        names = [name for name, _ in model.named_parameters()]
        errors = map(relative_error, split, gradients(model))
        model.zero_grad()
        by_name = dict(zip(names, errors, strict=True))
        checked = Checked(split_loss.item(), whole_loss.item(), by_name, time.perf_counter() - began)
    if dist.is_initialized():
        dist.barrier()  # under the group's time limit
    return checked


def _backward(model: Transformer, batch: TextBatch, attend: Attention, length: int) -> torch.Tensor:
    share = loss_share(model, batch, attend, length)
    share.backward()  # type: ignore[no-untyped-call]
    return share.detach().double()


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the relative error in the Frobenius norm."""
    return float((found - wanted).norm() / wanted.norm())
