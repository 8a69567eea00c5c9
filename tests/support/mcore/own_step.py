"""Training steps with nothing of ours but attention: Megatron's data-parallel wrapper, its gradient sums, its Adam."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from ranks import Here

from mcore.gpt import Data, Job, build, build_whole, data_of, local_data, take_weights, whole_gradients
from mcore.runs import LEARNING_RATE, forward_backward
from tokenring.integrations.megatron.linears import SplitLinear


def train(
    here: Here, job: Job, steps: int, whole_attention: bool = False, fused: bool = False
) -> list[tuple[float, float]]:
    """Loss and Megatron's gradient norm of each step; NaN for the loss where this rank has no last pipeline stage.

    fused: our linears add to main_grad by themselves.
    """
    _, weights, _ = whole_gradients(here, job)
    model = build_whole(here, job) if whole_attention else build(here, job)
    for each in model.modules():
        if fused and isinstance(each, SplitLinear):
            each.gradient_accumulation_fusion = True
    take_weights(model, weights)
    wrapped, optimizer = _wrapped(model)
    history = []
    for step in range(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        sums = forward_backward(job, wrapped, local_data(job, data_of(job, step)), _sum_and_count)
        loss = _mean(sums)
        done, norm, _ = optimizer.step()
        assert done
        history.append((loss, float(norm)))
    return history


def _wrapped(model: Any) -> tuple[Any, Any]:
    """The model in Megatron's DistributedDataParallel, and its optimizer, not distributed: that wants CUDA tensors."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
    wrapped = DistributedDataParallel(model.config, settings, model)
    # Without clipping, which asserts that gradients are on a GPU; the norm is computed all the same.
    made = get_megatron_optimizer(OptimizerConfig(lr=LEARNING_RATE, weight_decay=0.0, clip_grad=0.0), [wrapped])
    model.config.grad_scale_func = made.scale_loss
    model.config.finalize_model_grads_func = finalize_model_grads
    return wrapped, made


def _sum_and_count(losses: torch.Tensor, part: Data) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As Megatron's own training script: sums, which Megatron divides by the tokens of all ranks and microbatches."""
    from megatron.core import parallel_state as state

    counted = part.weights > 0
    total, count = losses[counted].sum(), counted.sum().int()
    handed = torch.stack([total.detach().double(), count.double()])
    if _counts_without_context_parallel():
        dist.all_reduce(count, group=state.get_context_parallel_group())
    return total, count, handed


def _counts_without_context_parallel() -> bool:
    """Megatron-core 0.12 adds tokens up over data-parallel ranks only; its training script does it over the others."""
    from megatron.core import __version__

    return tuple(map(int, __version__.split(".")[:2])) < (0, 14)


def _mean(sums: list[torch.Tensor]) -> float:
    from megatron.core import parallel_state as state

    if not state.is_pipeline_last_stage():
        return math.nan
    total, count = whole = torch.stack(sums).sum(0)
    dist.all_reduce(whole, group=state.get_data_parallel_group(with_context_parallel=True))
    return float(total / count)
