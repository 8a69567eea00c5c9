"""Configs of one model alone: transformers' models keep the name of their attention there, and may share them."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

SAYS_ATTENTION = "_attn_implementation"  # an attribute of every config
Given = list[tuple[torch.nn.Module, str, Any]]  # modules, with the names and values of attributes that are configs


def with_own_configs(model: torch.nn.Module) -> Given:
    """Give all modules of a model copies of their configs, parts of configs too; return what they had.

    Modules that share a config share its copy.
    """
    given = [
        (module, name, value)
        for module in model.modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and hasattr(value, SAYS_ATTENTION) and not isinstance(value, torch.nn.Module)
    ]
    copies: dict[int, Any] = {}
    for module, name, value in given:
        setattr(module, name, deepcopy(value, copies))
    return given


def put_back(given: Given) -> None:
    """Give modules the configs that they had."""
    for module, name, value in given:
        setattr(module, name, value)


def text_config(config: Any) -> Any:
    """Return the part of a config that is of the decoder of text; all of it where there is no such part."""
    part = getattr(config, "get_text_config", None)
    return config if part is None else part()
