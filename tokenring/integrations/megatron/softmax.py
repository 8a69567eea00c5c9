"""Megatron's kinds of softmax: with nothing beside the scores, with a 0 beside them, or with a learned logit a head."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch

KINDS = ("vanilla", "off-by-one", "learnable")  # config.softmax_type, from Megatron-core 0.16 on


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
