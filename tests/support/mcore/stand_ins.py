"""What Megatron hands to attention, made without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenring.errors import TokenRingError
from tokenring.integrations.megatron import TokenRingAttention


def config(**more: Any) -> SimpleNamespace:
    """What a TransformerConfig says of attention."""
    return SimpleNamespace(**{"context_parallel_size": 1, "attention_dropout": 0.0, "kv_channels": 16} | more)


def layer(settings: Any = None, **more: Any) -> TokenRingAttention:
    """A causal self-attention, as Megatron makes it, but of no version."""
    settings = config() if settings is None else settings
    kind = SimpleNamespace(name="causal")
    given: dict[str, Any] = {"attention_type": "self", "any_version": True} | more
    return TokenRingAttention(settings, 1, kind, **given)


def refusal(kind: type[TokenRingError], call: Any) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def params(real: list[int], padded: list[int] | None = None, **more: Any) -> SimpleNamespace:
    """packed_seq_params of documents by their lengths."""
    ends = {"cu_seqlens_q": torch.tensor([0, *real]).cumsum(0)}
    if padded is not None:
        ends["cu_seqlens_q_padded"] = torch.tensor([0, *padded]).cumsum(0)
    both = ends | {name.replace("_q", "_kv"): value for name, value in ends.items()}
    return SimpleNamespace(**{"qkv_format": "thd"} | both | more)
