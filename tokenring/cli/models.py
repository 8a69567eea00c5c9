"""Facts of a model that decide how its attention can be split: from a config.json, or of a model known by name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenring.errors import ConfigurationError
from tokenring.nearest import hint
from tokenring.sequence.layout import as_integer

FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER = "full_attention", "sliding_attention", "chunked_attention"
ALTERNATING = ("gemma2", "gpt_oss")  # types whose older configs do not list their layers: every other one slides


@dataclass(frozen=True)
class ModelFacts:
    """Attention of a model. head_dim: of q and k. layers: how many there are of each kind.

    causal: whether tokens see those before them only. window, chunk: of the layers that have one.
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
        _plain("llama-3.1-8b", 32, 8, 128, 32),
        _plain("llama-3.1-70b", 64, 8, 128, 80),
        _plain("qwen3-8b", 32, 8, 128, 36),
        _plain("deepseek-v3", 128, 128, 192, 61, value_dim=128),
        _mixed(_plain("gemma-2-9b", 16, 8, 256, 42), 21, window=4096, softcap=True),
        _mixed(_plain("gpt-oss-20b", 64, 8, 64, 24), 12, window=128, sinks=True),
        _plain("flux.1-dev", 24, 24, 128, 57, causal=False),
        _plain("wan2.1-14b", 40, 40, 128, 40, causal=False),
        _plain("qwen-image", 24, 24, 128, 60, causal=False),
    )
}


def read_model(text: str) -> ModelFacts:
    """Return the facts of a model: a name of KNOWN, or a config.json or its folder. Raises ConfigurationError."""
    if text.lower() in KNOWN:
        return KNOWN[text.lower()]
    path = Path(text)
    path = path / "config.json" if path.is_dir() else path
    if not path.exists():
        raise ConfigurationError(
            f"--model {text}: there is no such file, and the models known by name are {', '.join(KNOWN)}"
            f"{hint(text.lower(), list(KNOWN))}; give the model's config.json"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--model {text} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(config, dict):
        raise ConfigurationError(f"--model {text} has no object at its top: give the model's config.json")
    return facts_of(config, path.parent.name or path.name)


def sizes_of(text: str) -> dict[str, int | str]:
    """Return options of commands that plan one call of a model's full attention. Raises ConfigurationError."""
    found = read_model(text)
    sizes: dict[str, int | str] = {"heads": found.heads, "kv_heads": found.kv_heads, "dim": found.head_dim}
    return sizes | {"value_dim": found.value_dim, "mask": found.mask_of(FULL_LAYER)}


def facts_of(config: Mapping[str, Any], name: str) -> ModelFacts:
    """Return the facts of a config of transformers, or of a diffusers transformer. Raises ConfigurationError."""
    if "attention_head_dim" in config:
        heads, dim = _number(config, "num_attention_heads", name), _number(config, "attention_head_dim", name)
        layers = sum(_number(config, each, name) for each in ("num_layers", "num_single_layers") if each in config)
        return ModelFacts(name, heads, heads, dim, dim, {FULL_LAYER: max(1, layers)}, causal=False)
    config = config.get("text_config") or config
    if not isinstance(config, Mapping):
        raise ConfigurationError(f"--model {name}: text_config is {config!r}: give a config with an object there")
    heads = _number(config, "num_attention_heads", name)
    count = _number(config, "num_hidden_layers", name)
    value_dim = dim = _head_dim(config, heads, name)
    kv_heads = heads if config.get("num_key_value_heads") is None else _number(config, "num_key_value_heads", name)
    if config.get("kv_lora_rank"):  # multi-latent attention: training attends with as many heads of keys
        dim, kv_heads = _number(config, "qk_nope_head_dim", name) + _number(config, "qk_rope_head_dim", name), heads
        value_dim = _number(config, "v_head_dim", name)
    kinds = _layer_kinds(config, count, name)
    unknown = set(kinds) - {FULL_LAYER, SLIDING_LAYER, CHUNKED_LAYER}
    if unknown:
        raise ConfigurationError(
            f"--model {name} has layers of type {', '.join(sorted(unknown))}: advice is for attention only"
        )
    return ModelFacts(
        name, heads, kv_heads, dim, value_dim, kinds, True,
        _size_of_kind(config, "sliding_window", SLIDING_LAYER in kinds, name),
        _size_of_kind(config, "attention_chunk_size", CHUNKED_LAYER in kinds, name),
        bool(config.get("attn_logit_softcapping")), config.get("model_type") == "gpt_oss",
    )  # fmt: skip


def _layer_kinds(config: Mapping[str, Any], count: int, name: str) -> dict[str, int]:
    listed = config.get("layer_types")
    if listed:
        if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
            raise ConfigurationError(f"--model {name}: layer_types is {listed!r}: give a config with a list of names")
        return {kind: listed.count(kind) for kind in sorted(set(listed))}
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return {FULL_LAYER: count}
    half = count // 2 if config.get("model_type") in ALTERNATING else 0
    return {FULL_LAYER: half, SLIDING_LAYER: count - half} if half else {SLIDING_LAYER: count}


def _size_of_kind(config: Mapping[str, Any], key: str, has_kind: bool, name: str) -> int | None:
    return _number(config, key, name) if has_kind and config.get(key) is not None else None


def _head_dim(config: Mapping[str, Any], heads: int, name: str) -> int:
    if config.get("head_dim") is not None:
        return _number(config, "head_dim", name)
    return _number(config, "hidden_size", name) // heads


def _number(config: Mapping[str, Any], key: str, name: str) -> int:
    found = as_integer(config.get(key))
    if found is None or found < 1:
        raise ConfigurationError(f"--model {name}: {key} is {config.get(key)!r}: give a config with a number from 1 on")
    return found
