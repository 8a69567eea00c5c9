"""The attention function that transformers calls in each layer, on this rank's tokens."""

from __future__ import annotations

from typing import Any

import torch

from tokenring.api.attention import attend
from tokenring.errors import UnsupportedError
from tokenring.integrations.transformers.batches import CutBatch
from tokenring.integrations.transformers.masks import LayerMask, layer_mask
from tokenring.integrations.transformers.refusals import check_attention
from tokenring.runtime.agreement import refusing

ATTENTION_NAME = "tokenring_training"  # as config._attn_implementation has it


def register() -> None:
    """Make the attention function and its masks known to transformers, by ATTENTION_NAME."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, attend_layer)
    AttentionMaskInterface.register(ATTENTION_NAME, layer_mask)


def attend_layer(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    tokenring_batch: CutBatch | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Return out [B, T, Hq, Dv] of query [B, Hq, T, D], key [B, Hkv, T, D] and value [B, Hkv, T, Dv] of T tokens here.

    attention_mask: of `layer_mask`. sliding_window: as the layer says it; it must be the mask's. s_aux: sinks [Hq].
    Raises UnsupportedError for what tokenring does not compute.
    """
    if tokenring_batch is None:
        raise UnsupportedError(
            f"{type(module).__name__} did not get the keyword tokenring_batch: call the model that use_tokenring "
            f"returned with whole sequences, or with what cut_batch returns; where you did, the model keeps keywords "
            f"from its attention"
        )
    with refusing(tokenring_batch.cp, "forward", query):
        check_attention(module, dropout, is_causal, more)
        mask = tokenring_batch.mask_of(_checked(module, attention_mask, sliding_window))
        tokenring_batch.attended.append(type(module).__name__)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    training = module.training or torch.is_grad_enabled()  # also in the forward pass of a checkpoint
    sinks = None if s_aux is None else s_aux.to(q.device)
    out, _ = attend(
        q, k, v, tokenring_batch.cp, mask, scaling, training, None, sinks, softcap or 0.0, tokenring_batch.layout,
        wants_lse=False,
    )  # fmt: skip
    return out, None


def _checked(module: torch.nn.Module, mask: object, sliding_window: int | None) -> LayerMask:
    """Return the mask of a layer. Raises UnsupportedError for one that is not ours, or not that of the layer."""
    layer = type(module).__name__
    if not isinstance(mask, LayerMask):
        raise UnsupportedError(
            f"{layer} got an attention_mask of type {type(mask).__name__}, which tokenring did not make: masks of the "
            f"model's own are not supported"
        )
    if sliding_window is not None and sliding_window != mask.window:
        raise UnsupportedError(
            f"{layer} has sliding_window={sliding_window}, and its mask {mask.window}: which of them is meant differs "
            f"by attention implementation, so tokenring takes neither"
        )
    return mask
