"""Refusals of what a model of diffusers asks for and no split over ranks gives, before it is wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.diffusers.plans import PLANS

NATIVE = "native"  # diffusers' name of torch's own attention, which its models call where nothing else is said
WHOLE = "it has the tokens of the whole image, which this rank holds a part of"
ARGUMENTS = {"controlnet_block_samples": WHOLE, "controlnet_single_block_samples": WHOLE}
KEYWORDS = ("joint_attention_kwargs", "attention_kwargs")
# diffusers' names of hooks that change where weights lie and in which dtype, and not what is computed
KNOWN_HOOKS = frozenset((
    "group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading", "layerwise_casting",
    "peft_autocast_disable",
))  # fmt: skip
HARMLESS = frozenset(("scale",))  # of adapters (LoRA)
WHY = {
    "attn_mask": "a mask of the model's own cannot be cut with its tokens; call the model once for each length of text",
    "dropout_p": "its mask cannot be the same under every split; set it to 0",
    "is_causal": "text and image lie side by side on every rank, in no order",
    "return_lse": "diffusers' own native attention has none either",
}


def check_model(model: Any) -> None:
    """Raise UnsupportedError unless this is a model whose output and gradients were compared with one process."""
    name = type(model).__name__
    if name not in PLANS:
        raise UnsupportedError(
            f"a {name} is not supported: give one of {', '.join(sorted(PLANS))}, before torch.compile or a wrapper; "
            f"for another model call tr.attention as examples/diffusion_transformer.py does"
        )
    if getattr(model, "_parallel_config", None) is not None:
        raise ConfigurationError(
            f"this {name} is split by diffusers' own enable_parallelism: load it again without parallel_config, and "
            f"call use_tokenring alone"
        )


def check_layers(model: torch.nn.Module, config: object) -> None:
    """Raise UnsupportedError unless every attention layer of the model calls ours, with this config."""
    if getattr(model, "is_cache_enabled", False):
        raise UnsupportedError(
            "a model with enable_cache is not supported: each rank would skip blocks by what it sees of its own "
            "tokens; call disable_cache"
        )
    active = active_backend()
    for name, module in model.named_modules():
        _check_diffusers_hooks(name, module)
        if (processor := getattr(module, "processor", None)) is None:
            continue
        if getattr(processor, "_parallel_config", None) is not config:
            raise UnsupportedError(
                f"{name} has the attention processor {type(processor).__name__}, which does not call tokenring: it "
                f"would see this rank's tokens alone; set processors of the model's own and call use_tokenring again"
            )
        backend = getattr(processor, "_attention_backend", None) or active
        if (called := str(getattr(backend, "value", backend))) != NATIVE:
            raise UnsupportedError(
                f"{name} calls attention backend {called!r}, not tokenring's: say model.set_attention_backend("
                f"{NATIVE!r}), and leave DIFFUSERS_ATTN_BACKEND and attention_backend(...) unset; tokenring chooses "
                f"the kernel (kernel= of ContextParallel)"
            )


def _check_diffusers_hooks(name: str, module: torch.nn.Module) -> None:
    """Raise UnsupportedError for hooks of diffusers that skip or replace computations: caches, skipped layers."""
    registry = vars(module).get("_diffusers_hook")  # getattr takes ten times as long where there is none
    for hook in () if registry is None else registry.hooks.keys() - KNOWN_HOOKS:
        raise UnsupportedError(
            f"{name or 'the model'} has diffusers' hook {hook!r}, which is not supported under context "
            f"parallelism: each rank would skip or replace what it computes by what it sees of its own tokens; "
            f"load the model without it"
        )


def active_backend() -> str:
    """Return the name of the backend that diffusers takes where a layer names none."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active = _AttentionBackendRegistry.get_active_backend()[0]
    return str(getattr(active, "value", active))


def check_call(given: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what a model's call wants besides a full attention over text and image."""
    for name, why in ARGUMENTS.items():
        if given.get(name) is not None:
            raise UnsupportedError(f"{name} is not supported under context parallelism: {why}")
    for name in KEYWORDS:
        for key in (given.get(name) or {}).keys() - HARMLESS:
            raise UnsupportedError(
                f"{name}={{{key!r}: ...}} is not supported under context parallelism: tokenring does not know whether "
                f"it holds tokens of all ranks"
            )


def check_attention(wanted: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what a layer asks of its attention and tokenring does not compute."""
    for name, value in wanted.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):  # False is 0, too
            shown = f"{list(value.shape)}" if isinstance(value, torch.Tensor) else f"{value}"
            raise UnsupportedError(f"attention with {name} {shown} is not supported: {WHY[name]}")


def without_padding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a call's arguments without the mask of its text, and without the padding that this says.

    Raises UnsupportedError unless the mask [B, S] is right padding, equally much in each row.
    """
    name, text = "encoder_hidden_states_mask", "encoder_hidden_states"
    mask = given.get(name)
    if mask is None:
        return dict(given)
    real = mask.bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None
    kept = 0 if real is None or real.shape != given[text].shape[:2] else int(real[0].sum())
    if real is None or not kept or not bool(real[:, :kept].all()) or bool(real[:, kept:].any()):
        raise UnsupportedError(
            f"{name} is not supported unless it is right padding, equally much in each row of the batch: call the "
            f"model once for each length of text"
        )
    return {**given, name: None, text: given[text][:, :kept]}
