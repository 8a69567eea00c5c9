"""Models of torchtitan whose attention is replaced: which, and what of their layers is read."""

from __future__ import annotations

from typing import Any

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.torchtitan.batches import Window, check_window
from tokenring.integrations.torchtitan.inputs import Setup, inner_of, layers_of

# By module and class of their configs: causal attention within documents, of which every gradient was compared.
KNOWN = {
    ("torchtitan.models.llama3.model", "Llama3Model"),
    ("torchtitan.models.qwen3.model", "Qwen3Model"),
    ("torchtitan.models.gpt_oss.model", "GptOssModel"),
    ("torchtitan.models.deepseek_v3.model", "DeepSeekV3Model"),
}


def replace_attention(model: Any, setup: Setup, any_model: bool = False) -> None:
    """Put ours into the place of each layer's inner attention, in the config of a model; note the layers' windows.

    setup: by whose options its batches are cut. any_model: take models that were not compared with one process. Raises
    UnsupportedError for others, and for inner attention that is not torchtitan's; then nothing is changed.
    """
    from tokenring.integrations.torchtitan.inner_attention import TitanAttention

    _check_model(model, any_model)
    layers = layers_of(model)
    windows = [_window(name, layer.attention) for name, layer in enumerate(layers)]
    setup.windows, setup.replaced, number = frozenset(windows), inner_of(model), setup.number()
    for layer, window in zip(layers, windows, strict=True):
        was = layer.attention.inner_attention
        layer.attention.inner_attention = TitanAttention.Config(
            window=window, tokenring_setup=number, param_init=was.param_init, sharding_config=was.sharding_config
        )


def _check_model(model: Any, any_model: bool) -> None:
    kind = type(model)
    name = (kind.__module__, kind.__qualname__.removesuffix(".Config"))
    if not any_model and name not in KNOWN:
        raise UnsupportedError(
            f"a model of {'.'.join(name)} is not one that tokenring was run with: take one of "
            f"{', '.join(sorted(each for _, each in KNOWN))}; or, if its layers attend causally within documents and "
            f"windows alone, compare the gradients of a step with those of one process and say any_model=True"
        )
    if not hasattr(model, "layers"):
        raise UnsupportedError(f"{name[1]} has no layers whose attention could be replaced: give a Decoder's config")


def _window(layer: int, attention: Any) -> Window:
    """Return the sliding window of a layer. Raises UnsupportedError for attention that is not causal and known."""
    from torchtitan.models.common import attention as made_by

    from tokenring.integrations.torchtitan.inner_attention import TitanAttention

    if attention is None:
        raise UnsupportedError(
            f"layer {layer} has no attention: a layer that carries a state over the sequence is not supported"
        )
    inner = attention.inner_attention
    if type(inner) is TitanAttention.Config:
        return inner.window
    if type(inner) not in (
        made_by.FlexAttention.Config, made_by.VarlenAttention.Config, made_by.ScaledDotProductAttention.Config
    ):  # fmt: skip
        raise UnsupportedError(
            f"layer {layer} has the inner attention {type(inner).__qualname__}, which is not torchtitan's "
            f"FlexAttention, VarlenAttention or ScaledDotProductAttention: what it computes would be lost"
        )
    window = getattr(attention, "sliding_window_size", None)
    check_window(window, f"layer {layer} has sliding_window_size={window}")
    if isinstance(inner, made_by.VarlenAttention.Config):
        return _varlen_window(layer, inner.window_size, window)
    return window


def _varlen_window(layer: int, sides: tuple[int, int], said: Window) -> Window:
    left, right = sides
    window = None if left == -1 else left + 1
    if right != 0 or left < -1:
        raise UnsupportedError(f"layer {layer} has window_size={sides}: only (left, 0) is supported, which is causal")
    if said is not None and said != window:
        raise ConfigurationError(
            f"layer {layer} has sliding_window_size={said} and window_size={sides}, of {window} tokens: make them equal"
        )
    return window
