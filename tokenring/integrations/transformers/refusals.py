"""Refusals of what a model of transformers asks for and no split over ranks gives, before it is wrong in silence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tokenring.errors import UnsupportedError
from tokenring.integrations.transformers.configs import text_config

# Families whose gradients benchmarks/transformers_families.py has compared with one process.
COMPARED_FAMILIES = (
    "deepseek_v3", "gemma2", "gemma3_text", "gpt_oss", "granite", "llama", "llama4_text", "mistral", "olmo3", "phi3",
    "qwen2_moe", "qwen3",
)  # fmt: skip
# Keywords of models that say nothing to attention, or what it knows already.
HARMLESS = frozenset((
    "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "labels", "layer_idx", "logits_to_keep",
    "max_length_k", "max_length_q", "num_items_in_batch", "output_hidden_states", "position_embeddings", "position_ids",
    "return_dict", "shift_labels", "skip_logits", "use_cache",
))  # fmt: skip
ATTENDING = ("full_attention", "sliding_attention", "chunked_attention")  # types of layers that are not refused
MIXING = (torch.nn.Conv1d, torch.nn.RNNBase, torch.nn.MultiheadAttention)  # modules that mix tokens by themselves
ALONE = "would see this rank's tokens alone, whatever any_model says; train this model without context parallelism"
BY_LENGTH = ("longrope", "dynamic")  # types of rotary embeddings with other frequencies beyond the original length
WHY = {
    "logits_to_keep": "each rank would keep the last of its own tokens; leave it out, and pick from the logits",
    "output_attentions": "no rank has the weights of all tokens",
    "output_router_logits": "the loss that balances experts is not a sum over tokens; set it to False",
}
CACHES = ("past_key_values", "cache")  # before transformers 5.24, and from there on
WHY |= dict.fromkeys(
    CACHES,
    "a cache holds the tokens of all ranks; for generation take tokenring.integrations.transformers.serving",
)
LOSSES = (None, "ForCausalLM", "ForConditionalGeneration")  # of base models, and sums over next tokens


def check_model(model: Any, any_model: bool) -> None:
    """Raise UnsupportedError unless this is a model of a family that was compared with one process."""
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind is None or not hasattr(model, "set_attn_implementation"):
        raise UnsupportedError(f"a {type(model).__name__} is not supported: give a model of transformers, unwrapped")
    check_adapters(model)
    if kind not in COMPARED_FAMILIES and not any_model:
        raise UnsupportedError(
            f"models of type {kind!r} were not run with tokenring ({', '.join(COMPARED_FAMILIES)} were): compare the "
            f"gradients of a step with those of one process, and say any_model=True"
        )
    if (loss := getattr(model, "loss_type", None)) not in LOSSES:
        raise UnsupportedError(
            f"{type(model).__name__} is not supported: its loss ({loss}) is not the sum over next tokens that ranks "
            f"can add up; give a model for causal language modelling, or compute the loss from the base model's output"
        )
    text = text_config(config)
    if not getattr(text, "is_causal", True):
        raise UnsupportedError(f"{type(model).__name__} with is_causal=False is not supported: its mask is not causal")
    if getattr(text, "use_bidirectional_attention", False):
        raise UnsupportedError(
            f"{type(model).__name__} with use_bidirectional_attention is not supported: its mask is not causal"
        )
    _check_layers(model, text)


def check_adapters(model: Any) -> None:
    """Raise UnsupportedError for PEFT that puts tokens of its own before those of a batch."""
    configs = getattr(model, "peft_config", None)
    for each in configs.values() if isinstance(configs, Mapping) else ():
        if getattr(each, "is_prompt_learning", False):
            raise UnsupportedError(
                f"PEFT's {type(each).__name__} is not supported: each rank would put the learnt tokens before its own "
                f"part of a sequence; take LoRA, or, for prompts without a cache in a loop of your own, call "
                f"use_tokenring with the base model before get_peft_model"
            )


def _check_layers(model: Any, config: Any) -> None:
    """Raise UnsupportedError for layers that mix tokens by more than attention: each rank's would begin anew."""
    others = sorted({str(each) for each in getattr(config, "layer_types", None) or ()} - {*ATTENDING})
    if others:
        raise UnsupportedError(
            f"{type(model).__name__} has layers of type {', '.join(others)}, and {', '.join(ATTENDING)} alone are "
            f"supported: others (state, linear attention) {ALONE}"
        )
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    for name, module in decoder.named_modules() if isinstance(decoder, torch.nn.Module) else ():
        if isinstance(module, MIXING) and getattr(module, "kernel_size", None) != (1,):
            raise UnsupportedError(
                f"{type(model).__name__} is not supported: {name}, a {type(module).__name__}, mixes tokens besides "
                f"attention, and {ALONE}"
            )


def check_attended(model: Any, calls: int) -> None:
    """Raise UnsupportedError unless each layer of a model called tokenring's attention; calls: of one forward pass."""
    layers = getattr(text_config(model.config), "num_hidden_layers", None) or 1
    if calls < layers:
        raise UnsupportedError(
            f"{type(model).__name__} has {layers} layers, and called tokenring's attention {calls} times in a forward "
            f"pass: layers without it (state, linear attention, attention of their own, layers that are dropped at "
            f"random: set config.layerdrop = 0.0) are not supported, as each {ALONE}"
        )


def check_attends(model: Any, name: str) -> None:
    """Raise UnsupportedError unless the attention of this name is the one that the model calls."""
    if (now := getattr(model.config, "_attn_implementation", None)) != name:
        raise UnsupportedError(
            f"{type(model).__name__} calls attention {now!r}, not tokenring's: it would see this rank's tokens alone; "
            f"call use_tokenring again after a change, or stop_tokenring; some models cannot change theirs"
        )


def check_keywords(config: Any, batch: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what a model's call, or its config, wants besides the loss."""
    text = text_config(config)
    for name, why in WHY.items():
        wanted = batch.get(name)
        if wanted is None and name not in CACHES:
            wanted = getattr(config, name, False) or getattr(text, name, False)
        if wanted is not None and not (isinstance(wanted, int) and wanted == 0):  # False is 0, too
            raise UnsupportedError(f"{name} is not supported under context parallelism: {why}")


def check_attention(module: Any, dropout: float, is_causal: bool | None, more: Mapping[str, Any]) -> None:
    """Raise UnsupportedError for what a layer asks of its attention and tokenring does not compute."""
    layer = type(module).__name__
    if dropout:
        raise UnsupportedError(
            f"{layer} with dropout {dropout} is not supported: its mask cannot be the same under every split; set "
            f"config.attention_dropout = 0.0"
        )
    if is_causal is False or not getattr(module, "is_causal", True):
        raise UnsupportedError(f"{layer} with is_causal=False is not supported: only causal layers are")
    for name, value in more.items():
        if name in HARMLESS or value is None or value is False:
            continue
        why = WHY.get(name, "tokenring does not know whether it changes the result")
        raise UnsupportedError(f"{layer} gives its attention {name}={_short(value)}, which is not supported: {why}")


def check_positions(config: Any, length: int, tokens: int) -> None:
    """Raise UnsupportedError where a model counts this rank's tokens in the place of positions.

    length: one more than the largest position. tokens: of a whole sequence.
    """
    config = text_config(config)
    if getattr(config, "attn_temperature_tuning", False) and tokens >= (limit := int(config.floor_scale)):
        raise UnsupportedError(
            f"attn_temperature_tuning with sequences of {tokens} tokens is not supported: from {limit} (floor_scale) "
            f"on the model scales queries by the place among this rank's tokens; set attn_temperature_tuning=False"
        )
    _check_rotary(config, length)


def _check_rotary(config: Any, length: int) -> None:
    """Raise UnsupportedError where rotary frequencies depend on the longest position that a rank holds."""
    given = getattr(config, "rope_parameters", None) or {}
    for each in (given, *given.values()) if isinstance(given, Mapping) else ():
        kind = each.get("rope_type") if isinstance(each, Mapping) else None
        if kind not in BY_LENGTH:
            continue
        limit = each.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", 0)
        if length > limit:
            raise UnsupportedError(
                f"rope_type {kind!r} with {length} positions is not supported: beyond {limit} its frequencies depend "
                f"on the longest position that a rank holds, which differs by rank; take rope_type 'yarn' or 'linear'"
            )


def _short(value: Any) -> str:
    text = str(value) if isinstance(value, (int, float, str, bool)) else f"a {type(value).__name__}"
    return text if len(text) < 60 else f"{text[:57]}..."
