"""Debug models of torchtitan under FSDP2 and context parallelism: gradients of one process; and what is refused.

A sample; `python benchmarks/torchtitan_models.py` runs every model and number of ranks, and counts bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any

import pytest
import tiny_torchtitan as tiny
import torch
from ranks import RankPools
from sampling import FULL_GRID

from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.torchtitan import stop_tokenring, use_tokenring

tiny.need()
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PACKS = [[[100, 30, 126], [20, 236]], [[10] * 25 + [6], [256]]]
BACKENDS = ("partial_dtensor", "full_dtensor")


@pytest.fixture(autouse=True)
def _torchtitan_on_cpu() -> Iterator[None]:
    with tiny.on_cpu():
        yield


@pytest.mark.parametrize("name", tiny.MODELS if FULL_GRID else ("gpt_oss", "deepseek_v3"))
@pytest.mark.parametrize("backend", BACKENDS if FULL_GRID else BACKENDS[:1])
def test_packed_rows(name: str, backend: str, ranks: RankPools) -> None:
    """In gpt_oss sinks and a window, in deepseek_v3 values of another width than keys."""
    for error, what in ranks(2).within(300, tiny.split, name, 256, PACKS, 2, 2, "flex", 2, backend):
        assert error <= 1e-5, what


@pytest.mark.parametrize("attention", ["flex", "varlen"])
def test_windows_are_read_off_the_layers(attention: str) -> None:
    config = tiny.make_config("gpt_oss", 256, attention)
    config.training.disable_cuda_graphs = False
    own = [type(each.attention.inner_attention) for each in config.model_spec.model.layers]
    assert use_tokenring(config) is config
    layers = config.model_spec.model.layers
    assert [each.attention.inner_attention.window for each in layers] == [128, None, 128, None]
    assert config.training.disable_cuda_graphs
    use_tokenring(config)
    assert [each.attention.inner_attention.window for each in layers] == [128, None, 128, None]
    for each in (use_tokenring(deepcopy(config)), config):
        stop_tokenring(each)
        assert [type(layer.attention.inner_attention) for layer in each.model_spec.model.layers] == own


@pytest.mark.parametrize("window", [0, -1])
def test_windows_without_a_token_are_refused(window: int) -> None:
    config = tiny.make_config("gpt_oss", 256)
    config.model_spec.model.layers[0].attention.sliding_window_size = window
    with pytest.raises(ConfigurationError, match=f"layer 0 has sliding_window_size={window}: a token sees itself"):
        use_tokenring(config)


def test_models_and_attention_that_are_not_known_are_refused() -> None:
    from torchtitan.models.common.attention import VarlenAttention
    from torchtitan.models.llama3.model import Llama3Model

    class Mine(Llama3Model):  # type: ignore[misc]
        class Config(Llama3Model.Config):  # type: ignore[misc]
            __slots__ = ()

    config = tiny.make_config("llama3", 256)
    model = config.model_spec.model
    config.model_spec.model = Mine.Config(**{each.name: getattr(model, each.name) for each in fields(model)})
    with pytest.raises(UnsupportedError, match=r"Mine is not one that tokenring was run with: take one of DeepSeekV3"):
        use_tokenring(config)
    inner: Any
    for inner, said in (
        (VarlenAttention.Config(window_size=(4, 4)), "only \\(left, 0\\) is supported"),
        (model.norm, "has the inner attention RMSNorm.Config"), (None, "layer 3 has no attention"),
    ):  # fmt: skip
        config = tiny.make_config("llama3", 256)
        layer = config.model_spec.model.layers[3]
        if inner is None:
            layer.attention = None
        else:
            layer.attention.inner_attention = inner
        with pytest.raises(UnsupportedError, match=said):
            use_tokenring(config)
        assert "Flex" in type(config.model_spec.model.layers[0].attention.inner_attention).__qualname__  # as it was
    config = tiny.make_config("gpt_oss", 256, "varlen")
    config.model_spec.model.layers[0].attention.sliding_window_size = 64
    with pytest.raises(ConfigurationError, match="sliding_window_size=64 and window_size="):
        use_tokenring(config)


def test_the_flag_of_torchtitan_changes_the_model_in_place() -> None:
    from torchtitan.config.override import OverrideConfig, apply_overrides

    config = tiny.make_config("qwen3", 256, layers=2)
    config.override = OverrideConfig(imports=["tokenring.integrations.torchtitan.override.attention"])
    model = config.model_spec.model
    model.update_from_config(config=config)
    assert len(apply_overrides(config.override, config)) == 1
    assert config.model_spec.model is model
    for layer in model.layers:
        made = layer.attention.inner_attention.build()
        assert type(made).__name__ == "TitanAttention"
        sharding = made._sharding_config
        assert sharding.in_dst_shardings == sharding.in_src_shardings  # K and V stay where they are


def test_a_model_without_a_cut_batch_is_refused() -> None:
    model = tiny.make_model(use_tokenring(tiny.make_config("llama3", 256, layers=1)))
    batch = tiny.make_batch(1, 256, [[256]])
    with pytest.raises(ConfigurationError, match="got attention_masks of type NoneType, not a batch that was cut"):
        model(batch["input"], batch["positions"])
    inner = model.layers["0"].attention.inner_attention
    from tokenring import ContextParallel
    from tokenring.integrations.torchtitan import cut_batch

    cut = cut_batch(batch["input"], batch["labels"], {"positions": batch["positions"]}, ContextParallel("self"))[2]
    q = torch.randn(1, 256, 2, 8)
    with pytest.raises(UnsupportedError, match="calls its attention with score_mod"):
        inner(q, q, q, attention_masks=cut["attention_masks"], score_mod=abs)
