"""Megatron's kinds of softmax: with nothing beside the scores, with a 0 beside them, or with a learned logit a head.

And what becomes of scores before it: their scale, and Gemma 2's soft cap.
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any

import torch

from tokenring.errors import UnsupportedError
from tokenring.runtime.bound_kernel import checked_softcap

KINDS = ("vanilla", "off-by-one", "learnable")  # config.softmax_type, from Megatron-core 0.16 on

SOFTCAP = "attn_logit_softcapping"  # of Megatron-Bridge's configurations; Megatron-core's own have none


def softcap_of_layer(config: Any) -> float:
    """Return the soft cap of a layer's scores, config.attn_logit_softcapping; 0: none.

    Raises ConfigurationError where it is no positive number, UnsupportedError where Gemma 2's own attention, which this
    one replaces, has windows in some layers of which the configuration does not tell.
    """
    cap = checked_softcap(getattr(config, SOFTCAP, None))
    if cap and getattr(config, "window_size", None) and getattr(config, "window_attn_skip_freq", None) is None:
        raise UnsupportedError(
            f"{SOFTCAP} with window_size {config.window_size} does not say which layers have windows (of Gemma 2 "
            f"every second has none): set config.window_attn_skip_freq, 2 for Gemma 2, or a list of one entry a layer"
        )
    return cap


def scale_of_layer(config: Any, given: float | None, k_channels: int | None) -> float:
    """Return the scale of scores: that which is given, else by config.query_pre_attn_scalar, else by the head dim."""
    if given is not None:
        return given
    return 1 / math.sqrt(getattr(config, "query_pre_attn_scalar", None) or k_channels or config.kv_channels)


def offset_of_layer(config: Any) -> torch.Tensor | None:
    """Return the sinks of a layer's heads on this tensor-parallel rank, as Megatron's own attention makes them.

    A parameter, where they are learned, initialised by the config; zeros; or None.
    """
    kind = getattr(config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    heads = config.num_attention_heads // getattr(config, "tensor_model_parallel_size", 1)
    on_host = getattr(config, "use_cpu_initialization", False) or not torch.cuda.is_available()
    device = "cpu" if on_host else torch.cuda.current_device()
    dtype = getattr(config, "params_dtype", torch.float32)
    zeros = torch.zeros(heads, dtype=dtype, device=device)
    if kind == "off-by-one":
        return zeros
    made = torch.nn.Parameter(zeros)
    if getattr(config, "perform_initialization", True):
        config.init_method(made)
    return made


def sharded_offset(
    layer: torch.nn.Module, prefix: str, sharded_offsets: tuple[Any, ...], metadata: Any, tp_group: Any
) -> dict[str, Any]:
    """Return what a distributed checkpoint holds of the layer: learned sinks, along its heads; else nothing."""
    state = layer.state_dict(prefix="", keep_vars=True)
    if "softmax_offset" not in state:
        return {}
    from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

    groups = {"tp_group": tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
    taken = signature(make_sharded_tensors_for_checkpoint).parameters
    more = {name: group for name, group in groups.items() if name in taken and group is not None}
    made: dict[str, Any] = make_sharded_tensors_for_checkpoint(
        {"softmax_offset": state["softmax_offset"]}, prefix, {"softmax_offset": 0}, sharded_offsets, **more
    )
    return made
