"""Differences of MindSpeed-LLM, which builds on MindSpeed, as far as our feature must know them.

Its features take the place of MindSpeed's list as a whole when its adaptor is imported; its attention reads more of the
configuration, and its multi-latent attention is a subclass of whatever stands at Megatron's DotProductAttention.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

ADAPTOR = "mindspeed_llm.tasks.megatron_adaptor_v2"  # applies features when it is imported
Parts = torch.Tensor | list[torch.Tensor]
CONFLICTS: dict[str, tuple[Callable[[Any], bool], str]] = {  # attribute → which of its values, and why
    "attn_logit_softcapping": (bool, "logits cannot be capped here: leave it out"),
    "enable_dsa_indexer": (bool, "an indexer's choice of tokens is not supported: leave out one of the two"),
}


def keep_last(manager: Any, feature: Any) -> None:
    """Put a feature last in MindSpeed's list, and last again whenever another list takes its place."""
    manager.FEATURES_LIST.append(feature)
    replace_list = getattr(manager, "set_features_list", None)
    if replace_list is None:
        return

    def set_features_list(features_list: list[Any]) -> None:
        replace_list(features_list)
        manager.FEATURES_LIST.append(feature)

    manager.set_features_list = staticmethod(set_features_list)


def registered(patch_manager: Any, target: str) -> Any:
    """Return the class that MindSpeed's patches have put at a target so far; None: there is none, or none is known.

    A second application of all features finds one of ours there; then the class that ours replaced is returned.
    """
    found = getattr(getattr(patch_manager, "patches_info", {}).get(target), "patch_func", None)
    return getattr(found, "replaces", found)


def joined_parts(x: Parts) -> torch.Tensor:
    """Return query or key as one tensor: --mla-fa-divide-qk makes lists of their parts without and with rotation."""
    return x if isinstance(x, torch.Tensor) else torch.cat(x, -1)


def as_subclasses_expect(attention: Any) -> None:
    """Set what MindSpeed-LLM's attentions read beside what Megatron's have, and the scale that its config gives."""
    config = attention.config
    if scalar := getattr(config, "query_pre_attn_scalar", None):
        attention.softmax_scale = scalar**-0.5
    attention.scale_mask_softmax, attention.scale = SimpleNamespace(scale=None), attention.softmax_scale
    attention.hidden_size_per_attention_head = config.kv_channels
    attention.norm_factor = math.sqrt(config.kv_channels)
