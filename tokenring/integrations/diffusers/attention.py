"""The attention that diffusers dispatches to under the name "native": ours for models that are split, else its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tokenring.api.attention import attend
from tokenring.integrations.diffusers.refusals import NATIVE, check_attention
from tokenring.integrations.diffusers.splitting import SplitModel
from tokenring.runtime.agreement import refusing

OURS = "_tokenring_native"  # attribute of the function that was registered


def register() -> None:
    """Put our function in front of diffusers' native one, once in a process.

    Calls of models without `use_tokenring`, and cross-attention, go on to diffusers' own.
    """
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

    backend, known = AttentionBackendName(NATIVE), _AttentionBackendRegistry
    own = known._backends[backend]
    if not hasattr(own, OURS):
        constraints = known._constraints[backend]
        known.register(backend, constraints=constraints, supports_context_parallel=True)(in_front_of(own))


def in_front_of(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the function that is called in the place of diffusers' `own`, with its signature: diffusers reads that."""

    def native_or_tokenring(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        return_lse: bool = False,
        _parallel_config: Any = None,
    ) -> torch.Tensor:
        if not isinstance(_parallel_config, SplitModel):
            return own(
                query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale,
                enable_gqa=enable_gqa, return_lse=return_lse, _parallel_config=_parallel_config,
            )  # fmt: skip
        wanted = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "return_lse": return_lse}
        return _attended(query, key, value, scale, _parallel_config, wanted)

    setattr(native_or_tokenring, OURS, own)
    return native_or_tokenring


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, split: SplitModel,
    wanted: dict[str, Any],
) -> torch.Tensor:  # fmt: skip
    """Return out [B, T, H, Dv] of query [B, T, H, D] and the keys and values of all ranks."""
    with refusing(split.cp, "forward", query, key, value):
        check_attention(wanted)
        layout = split.layout_of(query.shape[1], key.shape[1])
    out, _ = attend(query, key, value, split.cp, None, scale, split.training, layout=layout, wants_lse=False)
    return out
