"""The calls of users: split a model of diffusers over the ranks of a ContextParallel, and put it back."""

from __future__ import annotations

from typing import TypeVar

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context
from tokenring.integrations.diffusers.attention import register
from tokenring.integrations.diffusers.plans import PLANS
from tokenring.integrations.diffusers.refusals import check_layers, check_model
from tokenring.integrations.diffusers.splitting import SplitModel
from tokenring.integrations.diffusers.versions import check_version
from tokenring.integrations.gradient_joins import GradientReduction, check_reduction

Model = TypeVar("Model", bound=torch.nn.Module)
HELD = "_tokenring_handles"  # attribute of a model that was changed


def use_tokenring(
    model: Model, cp: ContextParallel, *, gradients: GradientReduction = "sum", any_version: bool = False
) -> Model:
    """Split the tokens of a diffusion transformer over the ranks of cp; its calls stay those of one process.

    model: a FluxTransformer2DModel, QwenImageTransformer2DModel or WanTransformer3DModel, as diffusers makes it; change
    it before torch.compile, DDP or FSDP wraps it. It is changed in place, and returned.
    gradients: what becomes of the ranks' gradients, of a loss that every rank computes from the whole output. "sum":
    `add_up_gradients`, or your own all-reduce. "mean": DDP or FSDP over these ranks.
    any_version: take versions of diffusers that were not compared with one process.

    A call takes whole tensors, the same on every rank of cp, and returns the whole output on every rank. The schedule
    of the attention is that of cp; the layout of cp is not used, as full attention needs none.

    Raises UnsupportedError for models and versions that were not run, and in calls for what would be wrong;
    ConfigurationError for a model that diffusers has split; BackendUnavailable without diffusers.
    """
    check_context(cp)
    check_reduction(gradients)
    check_version(any_version)
    stop_tokenring(model)
    check_model(model)
    register()
    split = SplitModel(cp, PLANS[type(model).__name__], gradients)
    _configure(model, split)
    try:
        check_layers(model, split)
    except Exception:
        _configure(model, None)
        raise
    setattr(model, HELD, split.hook(model))
    return model


def stop_tokenring(model: torch.nn.Module) -> None:
    """Give a model back the attention that it had before `use_tokenring`; others stay as they are."""
    if not hasattr(model, HELD):
        return
    for handle in getattr(model, HELD):
        handle.remove()
    delattr(model, HELD)
    _configure(model, None)


def _configure(model: torch.nn.Module, split: SplitModel | None) -> None:
    """Say to the attention processors of a model by what it is split, as diffusers' own enable_parallelism does."""
    model._parallel_config = split  # type: ignore[assignment]
    for module in model.modules():
        processor = getattr(module, "processor", None)
        if processor is not None and hasattr(processor, "_parallel_config"):
            processor._parallel_config = split
