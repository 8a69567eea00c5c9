"""Facts of a model that decide how its layers can be split: from a config.json, or of a model known by name."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenring.errors import ConfigurationError
from tokenring.nearest import hint
from tokenring.sequence.layout import as_integer

FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER = "full_attention", "sliding_attention", "chunked_attention"
EXPERTS = "experts"  # in keys of configs with several MLPs in a layer: num_experts, moe_num_experts, n_routed_experts
GATED = ("silu", "swish")  # activations that come with a gate; Gemma's GELU has one too
ALTERNATING = ("gemma2", "gpt_oss")  # types whose older configs do not list their layers: every other one slides


@dataclass(frozen=True)
class ModelFacts:
    """Attention of a model. head_dim: of q and k. layers: how many there are of each kind.

    causal: whether tokens see those before them only. window, chunk: of the layers that have one. width, mlp_features:
    elements of a token, and features inside a dense MLP; None where its layers are no plain attention and MLP. gated:
    whether that MLP has a second product of as many features beside the first.
    """

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    layers: Mapping[str, int]
    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: bool = False
    sinks: bool = False
    width: int | None = None
    mlp_features: int | None = None
    gated: bool = True

    def mask_of(self, kind: str) -> str:
        """Return the mask of a kind of layer, as text."""
        if not self.causal:
            return "full"
        if kind == SLIDING_LAYER and self.window is not None:
            return f"window({self.window - 1},0)"
        return f"causal&chunks({self.chunk})" if kind == CHUNKED_LAYER and self.chunk else "causal"


def _plain(name: str, heads: int, kv_heads: int, dim: int, layers: int, **more: Any) -> ModelFacts:
    return ModelFacts(name, heads, kv_heads, dim, more.pop("value_dim", dim), {FULL_LAYER: layers}, **more)


def _mixed(found: ModelFacts, sliding: int, **more: Any) -> ModelFacts:
    full = found.layers[FULL_LAYER] - sliding
    return replace(found, layers={FULL_LAYER: full, SLIDING_LAYER: sliding}, **more)


KNOWN = {
    each.name: each
    for each in (
        _plain("llama-3.1-8b", 32, 8, 128, 32, width=4096, mlp_features=14336),
        _plain("llama-3.1-70b", 64, 8, 128, 80, width=8192, mlp_features=28672),
        _plain("qwen3-8b", 32, 8, 128, 36, width=4096, mlp_features=12288),
        _plain("deepseek-v3", 128, 128, 192, 61, value_dim=128),
        _mixed(_plain("gemma-2-9b", 16, 8, 256, 42, width=3584, mlp_features=14336), 21, window=4096, softcap=True),
        _mixed(_plain("gpt-oss-20b", 64, 8, 64, 24), 12, window=128, sinks=True),
        _plain("flux.1-dev", 24, 24, 128, 57, causal=False),
        _plain("wan2.1-14b", 40, 40, 128, 40, causal=False),
        _plain("qwen-image", 24, 24, 128, 60, causal=False),
    )
}
ALSO = {"llama3-8b": "llama-3.1-8b", "llama3-70b": "llama-3.1-70b"}  # of the same sizes


def read_model(text: str, option: str = "--model") -> ModelFacts:
    """Return the facts of a model: a name of KNOWN, or a config.json or its folder. Raises ConfigurationError.

    option: where it was given, for what is said of it.
    """
    name = ALSO.get(text.lower(), text.lower())
    if name in KNOWN:
        return KNOWN[name]
    path = Path(text)
    path = path / "config.json" if os.path.isdir(path) else path
    if not os.path.exists(path):  # False, too, of what is too long for a name
        raise ConfigurationError(
            f"{option} {text}: there is no such file, and the models known by name are {', '.join(KNOWN)}"
            f"{hint(text.lower(), [*KNOWN, *ALSO])}; give the model's config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{option} {text} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"{option} {text} has no object at its top: give the model's config.json")
    return facts_of(config, path.parent.name or path.name, option)


def sizes_of(text: str) -> dict[str, int | str]:
    """Return options of commands that plan one call of a model's full attention. Raises ConfigurationError."""
    found = read_model(text)
    sizes: dict[str, int | str] = {"heads": found.heads, "kv_heads": found.kv_heads, "dim": found.head_dim}
    return sizes | {"value_dim": found.value_dim, "mask": found.mask_of(FULL_LAYER)}


def facts_of(config: Mapping[str, Any], name: str, option: str = "--model") -> ModelFacts:
    """Return the facts of a config of transformers, or of a diffusers transformer. Raises ConfigurationError."""
    named = f"{option} {name}"
    if "attention_head_dim" in config:
        heads, dim = _number(config, "num_attention_heads", named), _number(config, "attention_head_dim", named)
        layers = sum(_number(config, each, named) for each in ("num_layers", "num_single_layers") if each in config)
        return ModelFacts(name, heads, heads, dim, dim, {FULL_LAYER: max(1, layers)}, causal=False)
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"{named}: text_config is {config!r}: give a config with an object there")
    heads = _number(config, "num_attention_heads", named)
    count = _number(config, "num_hidden_layers", named)
    value_dim = dim = _head_dim(config, heads, named)
    kv_heads = _number_if_given(config, "num_key_value_heads", named) or heads
    if config.get("kv_lora_rank"):  # multi-latent attention: training attends with as many heads of keys
        dim, kv_heads = _number(config, "qk_nope_head_dim", named) + _number(config, "qk_rope_head_dim", named), heads
        value_dim = _number(config, "v_head_dim", named)
    kinds = _layer_kinds(config, count, named)
    unknown = set(kinds) - {FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER}
    if unknown:
        raise ConfigurationError(
            f"{named} has layers of type {', '.join(sorted(unknown))}: advice is for attention only"
        )
    return ModelFacts(
        name, heads, kv_heads, dim, value_dim, kinds, True,
        _number_if_given(config, "sliding_window", named) if SLIDING_LAYER in kinds else None,
        _number_if_given(config, "attention_chunk_size", named) if CHUNKED_LAYER in kinds else None,
        bool(config.get("attn_logit_softcapping")), config.get("model_type") == "gpt_oss",
        *_linear_sizes(config),
    )  # fmt: skip


def _linear_sizes(config: Mapping[str, Any]) -> tuple[int | None, int | None, bool]:
    """Return width, features of the MLP, and whether that is gated; None of both sizes where layers are not plain."""
    width, features = (as_integer(config.get(key)) for key in ("hidden_size", "intermediate_size"))
    experts = any(EXPERTS in key and _several(value) for key, value in config.items())
    plain = not config.get("kv_lora_rank") and not experts and min(width or 0, features or 0) > 0
    activation = str(config.get("hidden_act") or config.get("hidden_activation") or GATED[0])
    gated = activation in GATED or str(config.get("model_type")).startswith("gemma")
    return (width, features, gated) if plain else (None, None, gated)


def _several(experts: object) -> bool:
    """Return whether a config says that there are several of them; of each layer, if it is a list. One is an MLP."""
    if isinstance(experts, list):
        return any(map(_several, experts))
    count = as_integer(experts)
    return bool(experts) if count is None else count not in (0, 1)


def _layer_kinds(config: Mapping[str, Any], count: int, named: str) -> dict[str, int]:
    listed = config.get("layer_types")
    if listed:
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise ConfigurationError(f"{named}: layer_types is {listed!r}: give a config with a list of names")
        return {kind: listed.count(kind) for kind in sorted(set(listed))}
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return {FULL_LAYER: count}
    half = count // 2 if config.get("model_type") in ALTERNATING else 0
    return {FULL_LAYER: half, SLIDING_LAYER: count - half} if half else {SLIDING_LAYER: count}


def _head_dim(config: Mapping[str, Any], heads: int, named: str) -> int:
    return _number_if_given(config, "head_dim", named) or _number(config, "hidden_size", named) // heads


def _number_if_given(config: Mapping[str, Any], key: str, named: str) -> int | None:
    return None if config.get(key) is None else _number(config, key, named)


def _number(config: Mapping[str, Any], key: str, named: str) -> int:
    found = as_integer(config.get(key))
    if found is None or found < 1:
        raise ConfigurationError(f"{named}: {key} is {config.get(key)!r}: give a config with a number from 1 on")
    return found
