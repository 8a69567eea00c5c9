"""Configs of a model: a changed one has copies of its own, and that of its text part counts. Needs no transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_transformers_batches import TOKENS, OneLayer

import tokenring as tr
from tokenring.errors import UnsupportedError
from tokenring.integrations.transformers.batches import cut_batch
from tokenring.integrations.transformers.configs import put_back, with_own_configs
from tokenring.integrations.transformers.refusals import check_keywords, check_model


class Config(SimpleNamespace):
    """With a part, as models of images and text have it."""

    def get_text_config(self) -> Any:
        return getattr(self, "text_config", self)


def nested() -> Config:
    return Config(_attn_implementation="eager", text_config=Config(_attn_implementation="sdpa"))


def test_a_model_gets_configs_of_its_own() -> None:
    """Parts too, shared by its modules as before; another model with the same ones keeps them."""
    whole = nested()
    model: Any = torch.nn.Sequential(OneLayer(), OneLayer())
    other: Any = OneLayer()
    other.config = model.config = whole
    model[0].config = model[1].config = whole.text_config
    given = with_own_configs(model)
    assert model.config is not whole and model.config == whole and other.config is whole
    assert model[0].config is model[1].config is model.config.text_config is not whole.text_config
    model[0].config._attn_implementation = "ours"
    assert whole == nested()
    put_back(given)
    assert model.config is whole and model[1].config is whole.text_config


def test_what_the_config_of_text_says_counts() -> None:
    rope = Config(text_config=Config(rope_parameters={"rope_type": "dynamic"}, max_position_embeddings=12))
    with pytest.raises(UnsupportedError, match="rope_type 'dynamic' with 13 positions"):
        cut_batch({"input_ids": TOKENS}, tr.ContextParallel("self"), rope)
    router = Config(output_router_logits=False, text_config=Config(output_router_logits=True))
    with pytest.raises(UnsupportedError, match="output_router_logits"):
        check_keywords(router, {})
    both_ways = Config(model_type="gemma3_text", text_config=Config(use_bidirectional_attention=True))
    with pytest.raises(UnsupportedError, match="use_bidirectional_attention"):
        check_model(SimpleNamespace(config=both_ways, set_attn_implementation=None), False)
