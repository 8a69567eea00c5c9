"""Models and calls of transformers that are refused: no transformers is needed for these."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import Here, RankPools

import tokenring as tr
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.transformers.attention import ATTENTION_NAME, attend_layer
from tokenring.integrations.transformers.batches import BATCH
from tokenring.integrations.transformers.masks import LayerMask
from tokenring.integrations.transformers.refusals import check_attends, check_keywords, check_model
from tokenring.integrations.transformers.training import _Calls


def test_models_and_calls_that_are_refused() -> None:
    def model(**config: Any) -> Any:
        return SimpleNamespace(config=SimpleNamespace(**config), set_attn_implementation=None)

    check_model(model(model_type="llama"), False)
    check_model(model(model_type="gpt2"), True)
    for given, text in (
        (model(model_type="gpt2"), "type 'gpt2' were not run"),
        (model(model_type="llama", is_causal=False), "is_causal=False"),
        (model(model_type="gemma3_text", use_bidirectional_attention=True), "use_bidirectional_attention"),
        (torch.nn.Linear(2, 2), "a Linear is not supported"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            check_model(given, False)
    nothing = SimpleNamespace(output_router_logits=False)
    check_keywords(nothing, {"output_attentions": False, "past_key_values": None, "logits_to_keep": 0})
    for config, call, text in (
        (nothing, {"output_router_logits": True}, "balances experts"),
        (SimpleNamespace(output_attentions=True), {}, "output_attentions"),
        (nothing, {"past_key_values": object()}, "serving"),
        (nothing, {"cache": object()}, "serving"),
        (nothing, {"logits_to_keep": 1}, "the last of its own tokens"),
    ):
        with pytest.raises(UnsupportedError, match=text):
            check_keywords(config, call)


def test_other_losses_and_other_attention_are_refused() -> None:
    """Pooling and means would be of this rank's tokens; so would attention that was exchanged after the first call."""
    config = SimpleNamespace(model_type="llama", _attn_implementation="ours")
    given = SimpleNamespace(config=config, set_attn_implementation=None, loss_type="ForCausalLM")
    check_model(given, False)
    given.loss_type = "ForSequenceClassification"
    for any_model in (False, True):
        with pytest.raises(UnsupportedError, match=r"its loss \(ForSequenceClassification\)"):
            check_model(given, any_model)
    check_attends(given, "ours")
    config._attn_implementation = "sdpa"
    with pytest.raises(UnsupportedError, match="calls attention 'sdpa', not tokenring's"):
        check_attends(given, "ours")


class Model(torch.nn.Module):
    """A model of one module besides its config, as far as it is read."""

    def __init__(self, module: torch.nn.Module | None = None, **config: Any) -> None:
        super().__init__()
        self.inner = module
        self.config = SimpleNamespace(model_type="new", _attn_implementation=ATTENTION_NAME, **config)

    def set_attn_implementation(self, name: str) -> None:
        """Stand for that of transformers."""

    def get_decoder(self) -> torch.nn.Module:
        return self

    def forward(self, input_ids: torch.Tensor) -> None:
        """Be called by nobody: hooks read its arguments."""


@pytest.mark.parametrize("kind", ["linear_attention", "mamba", "conv", "hybrid", "compressed_sparse_attention"])
def test_layers_that_carry_a_state_are_refused(kind: str) -> None:
    """Whatever any_model says: each rank's recurrence would begin anew."""
    check_model(Model(layer_types=["full_attention", "sliding_attention", "chunked_attention"]), True)
    check_model(Model(layer_types=None), True)
    with pytest.raises(UnsupportedError, match=f"Model has layers of type {kind}, and full_attention"):
        check_model(Model(layer_types=["full_attention", kind]), True)


def test_modules_that_mix_tokens_are_refused() -> None:
    for module in (torch.nn.Linear(2, 2), torch.nn.Conv1d(2, 2, 1), torch.nn.Conv2d(2, 2, 3)):
        check_model(Model(module), True)
    for mixing in (torch.nn.Conv1d(2, 2, 4), torch.nn.LSTM(2, 2), torch.nn.MultiheadAttention(2, 1)):
        with pytest.raises(UnsupportedError, match=f"inner, a {type(mixing).__name__}, mixes tokens besides attention"):
            check_model(Model(mixing), True)


class PromptTuningConfig:
    """A config of PEFT, as far as it is read."""

    def __init__(self, is_prompt_learning: bool) -> None:
        self.is_prompt_learning = is_prompt_learning


def test_learnt_prompts_are_refused() -> None:
    """Each rank would put them before its own part of a sequence; also where they come after use_tokenring."""
    model: Any = Model()
    model.peft_config = {"default": PromptTuningConfig(is_prompt_learning=False)}
    check_model(model, True)
    model.peft_config["other"] = PromptTuningConfig(is_prompt_learning=True)
    for call in (
        lambda: check_model(model, True),
        lambda: _Calls(tr.ContextParallel("self"), "sum", 1).before(model, (), {"input_ids": TOKENS}),
    ):
        with pytest.raises(UnsupportedError, match="PEFT's PromptTuningConfig is not supported"):
            call()


TOKENS = torch.arange(16).view(1, 16)


def called(here: Here, layers: int, calls: tuple[int, ...]) -> str:
    """Return what a rank hears after a model's call, in which so many of its layers came to attention on each rank."""
    hooks, model = _Calls(here.cp(layout="zigzag"), "sum", 1), Model(num_hidden_layers=layers)
    try:
        for _ in range(2):  # of the last call alone
            given = hooks.before(model, (), {"input_ids": TOKENS})[1]
            q = torch.randn(1, 2, 16 // here.world_size, 8)
            for _ in range(calls[here.rank]):
                attend_layer(model, q, q, q, LayerMask(), tokenring_batch=given[BATCH])
            assert hooks.after(model, (), given, "output") == "output"
    except (ConfigurationError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return "fine"


def test_layers_that_do_not_come_to_attention_are_refused(ranks: RankPools) -> None:
    assert ranks(2)(called, 2, (2, 2)) == ["fine", "fine"]
    for said in ranks(2)(called, 2, (1, 1)):
        assert "UnsupportedError: Model has 2 layers, and called tokenring's attention 1 times" in said


def test_a_layer_that_one_rank_drops_is_heard_by_all(ranks: RankPools) -> None:
    first, second = ranks(2)(called, 2, (2, 1))
    assert first.startswith("Disagreement: rank 1 refused: Model has 2 layers, and called")
    assert "set config.layerdrop = 0.0" in second
