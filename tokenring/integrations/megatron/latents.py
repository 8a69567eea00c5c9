"""Multi-latent attention layers whose latents travel: what their up-projection is given, in place of keys and values.

A layer's own code runs as it is: projections, norms, rotary embeddings. Only its `linear_kv_up_proj` notes its input
and returns a stand-in without data. Attention then takes the noted latents, of the keys what each of them ends with,
and the projection's weight; each rank makes keys and values of a tile when it computes it (`tr.latent_attention`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from tokenring.errors import ConfigurationError, UnsupportedError

UP = "linear_kv_up_proj"  # of Megatron's layers, and of MindSpeed-LLM's
CONFLICTS: dict[str, tuple[Callable[[Any], bool], str]] = {  # attribute of the config → which of its values, what to do
    "softmax_type": (lambda value: value not in (None, "vanilla"), "sinks are not supported: set it to 'vanilla'"),
    "fp8": (bool, "the projection is not computed in 8 bits here: set it to None"),
    "fp4": (bool, "the projection is not computed in 4 bits here: set it to None"),
    "delay_wgrad_compute": (bool, "the projection's gradient is made with that of attention: set it to False"),
    "fine_grained_activation_offloading": (bool, "it frees what attention is given, here a weight: set it to False"),
    "recompute_modules": (
        lambda value: "mla_up_proj" in (value or ()), "keys and values are not kept anyway: take mla_up_proj out"
    ),
    "recompute_mla_up_proj": (bool, "keys and values are not kept anyway: leave it out"),
    "mla_zero_memory": (bool, "attention is made again there with keys and values: leave it out"),
    "mla_mm_split": (bool, "the projection must be one: leave it out"),
    "enable_mla_absorb": (bool, "the projection is absorbed into queries there: leave it out"),
    "enable_dsa_indexer": (bool, "an indexer's choice of tokens is not supported: leave it out"),
}  # fmt: skip


class LatentSource:
    """The input of a layer's up-projection, in a forward pass that is under way.

    up: a linear layer without bias, weight [H · (Dn + Dv), L] of this tensor-parallel rank's heads; config: has
    qk_head_dim Dn and qk_pos_emb_head_dim R.
    """

    def __init__(self, up: Any, config: Any) -> None:
        self.up, self.nope, self.rope = up, config.qk_head_dim, config.qk_pos_emb_head_dim
        self.tensor_parallel = int(getattr(config, "tensor_model_parallel_size", 1))
        self.gathers = self.tensor_parallel > 1 and bool(getattr(config, "sequence_parallel", False))
        self._given: torch.Tensor | None = None

    def note(self, x: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, None]:
        """Return a stand-in for keys and values [..., H · (Dn + Dv)], all of one element, and note the latents."""
        self._given = x
        tokens = x.shape[0] * (self.tensor_parallel if self.gathers else 1)
        return x.new_zeros(()).expand(tokens, *x.shape[1:-1], self.up.weight.shape[0]), None

    def taken(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query [..., H, Dn + R], latents with what keys end with [..., 1, L + R], and the weight.

        key: as the layer made it of the stand-in. What it was made of is given back as it is.
        """
        x, self._given = self._given, None
        if x is None:
            raise UnsupportedError(
                f"attention was called, and the layer's {UP} was not: tokenring does not know how this layer makes "
                f"its keys; leave latents out"
            )
        x = self._of_all_tokens(x)
        ends = key[..., 0, self.nope : self.nope + self.rope]
        return query[..., : self.nope + self.rope], torch.cat([x, ends], dim=-1)[..., None, :], self.up.weight

    def _of_all_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Return the latents as the projection multiplies them under tensor parallelism, with its sum of gradients."""
        if self.tensor_parallel == 1:
            return x
        from megatron.core.tensor_parallel import mappings

        if self.gathers:
            found = mappings.gather_from_sequence_parallel_region(x)
        else:
            found = mappings.copy_to_tensor_model_parallel_region(x)
        return _DenseGradient.apply(found)  # type: ignore[no-any-return, no-untyped-call]


class _DenseGradient(torch.autograd.Function):
    """The identity, whose gradient is contiguous: Megatron's sums over ranks lose those of views."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0].contiguous()


class SendsLatents:
    """Mark of layers whose latents travel."""


def latent_layer(part: Any) -> type[Any] | None:
    """Return the class of a layer of multi-latent attention that a part of a spec names; None: it names none."""
    parts, layer = getattr(part, "submodules", None), getattr(part, "module", None)
    found = isinstance(layer, type) and all(getattr(parts, name, None) is not None for name in (UP, "core_attention"))
    return layer if found else None


def build_latents_wrapper(build: Callable[..., Any]) -> Callable[..., Any]:
    """Return Megatron's `build_module` as one that makes layers of multi-latent attention send their latents.

    Named as MindSpeed's patches tell wrappers.
    """

    @wraps(build)
    def build_module(spec: Any, *args: Any, **kwargs: Any) -> Any:
        layer = latent_layer(spec)
        return build(spec if layer is None else replace(spec, module=with_latents(layer)), *args, **kwargs)

    return build_module


_MADE: dict[type[Any], type[Any]] = {}


def with_latents(layer: type[Any]) -> type[Any]:
    """Return the class of a multi-latent attention layer as one whose latents travel; made once of each class."""
    if layer not in _MADE:
        _MADE[layer] = layer if issubclass(layer, SendsLatents) else _latent_class(layer)
    return _MADE[layer]


def _latent_class(layer: type[Any]) -> type[Any]:

    class LatentLayer(SendsLatents, layer):  # type: ignore[misc]
        """The layer, of which attention gets latents where they are fewer bytes than keys and values."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            check_latents(self)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not _travel(self) or _infers(*args, **kwargs):
                return super().forward(*args, **kwargs)
            with _noting(self):
                return super().forward(*args, **kwargs)

        def _checkpointed_attention_forward(self, query: Any, key: Any, value: Any, *rest: Any, **more: Any) -> Any:
            """Give a checkpoint the latents, so that their gradients go through it."""
            given = self.core_attention.as_latents(query, key, value)
            return super()._checkpointed_attention_forward(*given, *rest, **more)

    LatentLayer.__name__ = f"TokenRing{layer.__name__}"
    LatentLayer.__qualname__ = LatentLayer.__name__
    return LatentLayer


def check_latents(layer: Any) -> None:
    """Raise UnsupportedError for a multi-latent attention layer whose latents cannot travel."""
    config, asked = layer.config, "latents cannot travel"
    for name, (conflicts, what_to_do) in CONFLICTS.items():
        if conflicts(value := getattr(config, name, None)):
            raise UnsupportedError(f"{asked} with {name} {value!r}: {what_to_do}")
    if getattr(getattr(layer, "core_attention", None), "softcap", 0.0):
        raise UnsupportedError(f"{asked} where scores are soft-capped: leave latents out")
    up = getattr(layer, UP, None)
    if up is None:
        raise UnsupportedError(f"{asked}: {type(layer).__name__} has no {UP}; leave latents out")
    if getattr(up, "layer_norm_weight", None) is not None:
        raise UnsupportedError(
            f"{asked}: {UP} is a {type(up).__name__}, which normalises latents itself: give the layer's spec a "
            f"linear layer without a norm there, and the norm as kv_layernorm; or leave latents out"
        )
    if isinstance(getattr(up, "bias", None), torch.Tensor) and up.bias.numel():
        raise UnsupportedError(f"{asked}: {UP} has a bias: make it without one, or leave latents out")
    weight, rows = getattr(up, "weight", None), config.qk_head_dim + config.v_head_dim
    heads = layer.num_attention_heads_per_partition
    if not isinstance(weight, torch.Tensor) or weight.shape != (heads * rows, config.kv_lora_rank):
        found = list(weight.shape) if isinstance(weight, torch.Tensor) else f"a {type(weight).__name__}"
        raise UnsupportedError(
            f"{asked}: the weight of {UP} is {found}, and with {heads} heads here it must be "
            f"[{heads * rows}, {config.kv_lora_rank}]; leave latents out"
        )


def check_latent_flags(args: Any, asked: str) -> None:
    """Raise ConfigurationError where arguments leave no layer whose latents can travel. asked: the flag for it.

    What else a layer cannot do it says when it is made.
    """
    if not getattr(args, "multi_latent_attention", False):
        raise ConfigurationError(f"{asked} is of --multi-latent-attention, which this model has not: leave it out")
    for name, (conflicts, what_to_do) in CONFLICTS.items():
        if conflicts(value := getattr(args, name, None)):
            raise ConfigurationError(f"--{name.replace('_', '-')} {value} does not go with {asked}: {what_to_do}")


def _travel(layer: Any) -> bool:
    """Tell whether latents are fewer bytes than keys and values of this rank's heads, and go anywhere."""
    config = layer.config
    widths = config.qk_head_dim + config.qk_pos_emb_head_dim + config.v_head_dim
    fewer = config.kv_lora_rank + config.qk_pos_emb_head_dim < layer.num_attention_heads_per_partition * widths
    return fewer and layer.core_attention.is_split and not torch.compiler.is_compiling()


def _infers(
    hidden_states: Any, attention_mask: Any = None, key_value_states: Any = None, inference_context: Any = None,
    *rest: Any, inference_params: Any = None, **more: Any,
) -> bool:  # fmt: skip
    """Tell whether a layer's forward is called with a cache, which has keys and values."""
    return inference_context is not None or inference_params is not None


@contextmanager
def _noting(layer: Any) -> Iterator[None]:
    """Let a layer's up-projection note its input, for the layer's attention, until the layer's forward is done.

    The projection's hooks run: some of them gather its weight.
    """
    up = getattr(layer, UP)
    source = LatentSource(up, layer.config)
    up.forward, layer.core_attention.latent_source = source.note, source
    try:
        yield
    finally:
        del up.forward
        layer.core_attention.latent_source = None
