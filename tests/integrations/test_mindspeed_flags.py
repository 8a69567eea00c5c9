"""Flags of MindSpeed and MindSpeed-LLM: which go together with tokenring's attention, and what is said of others."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.stand_ins import refusal
from mindspeed_like import BUILD, OURS, LikeMindSpeed, like_mindspeed

from tokenring import ConfigurationError


@pytest.fixture
def mindspeed() -> Iterator[LikeMindSpeed]:
    with like_mindspeed() as made:
        yield made


CONFLICTS = {
    ("context_parallel_algo", "adaptive_cp_algo"): (
        "batches are cut by it: choose one of megatron_cp_algo, ulysses_cp_algo, hybrid_cp_algo, kvallgather_cp_algo"
    ),
    ("attention_mask_type", "general"): (
        "each rank has a part of the mask only: use causal, or --context-parallel-algo ulysses_cp_algo"
    ),
    ("apply_query_key_layer_scaling", True): "scores are not divided by the layer's number here: leave it out",
    ("position_embedding_type", "alibi"): "a bias of attention cannot be split: use rope",
    ("tp_2d", True): "its ranks share the sequence, too: leave it out",
    ("attention_dropout", 0.1): (
        "it cannot be the same under every split: set it to 0 (Megatron's default is 0.1)"
    ),
}


class TestArguments:
    @pytest.mark.parametrize(("name", "value"), CONFLICTS)
    def test_conflict(self, mindspeed: LikeMindSpeed, name: str, value: object) -> None:
        import_module(OURS)
        with pytest.raises(ConfigurationError) as error:
            mindspeed.validate(parsed(**{name: value}))
        flag = f"--{name.replace('_', '-')} {value}"
        assert str(error.value) == (
            f"{flag} does not go with --context-parallel-attention tokenring: {CONFLICTS[name, value]}"
        )

    @pytest.mark.parametrize(("name", "value"), CONFLICTS)
    def test_no_conflict_without_ours(self, mindspeed: LikeMindSpeed, name: str, value: object) -> None:
        import_module(OURS)
        mindspeed.validate(parsed(**{"context_parallel_attention": "mindspeed", name: value}))
        mindspeed.validate(parsed(**{"context_parallel_size": 1, name: value}))

    @pytest.mark.parametrize(
        ("given", "flag"),
        [
            ({"context_parallel_algo": "hybrid_cp_algo"}, "--reset-attention-mask True"),
            ({"context_parallel_algo": "kvallgather_cp_algo", "attention_mask_type": "general"},
             "--reset-attention-mask True"),
            ({"reset_position_ids": False}, "--position-embedding-type rope"),
            ({"reset_position_ids": False, "context_parallel_algo": "kvallgather_cp_algo"},
             "--position-embedding-type rope"),
            ({"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        ],
    )
    def test_packs_that_do_not_go_together(self, mindspeed: LikeMindSpeed, given: dict[str, Any], flag: str) -> None:
        import_module(OURS)
        text = refusal(ConfigurationError, lambda: mindspeed.validate(parsed(reset_attention_mask=True, **given)))
        assert text.startswith(f"{flag} does not go with --context-parallel-attention tokenring: ")
        mindspeed.validate(parsed(**{**given, "attention_mask_type": "causal"}))

    def test_what_goes_together(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        for algorithm in ("ulysses_cp_algo", "hybrid_cp_algo", "kvallgather_cp_algo"):
            mindspeed.validate(parsed(context_parallel_algo=algorithm))
        mindspeed.validate(parsed(reset_attention_mask=True))
        mindspeed.validate(parsed(reset_attention_mask=True, attention_mask_type="general", reset_position_ids=False))
        mindspeed.validate(
            parsed(reset_attention_mask=True, position_embedding_type="learned_absolute", reset_position_ids=False)
        )
        mindspeed.validate(parsed(context_parallel_algo="ulysses_cp_algo", attention_mask_type="general"))
        mindspeed.validate(parsed())
        mindspeed.validate(parsed(tokenring_schedule="usp/2", context_parallel_size=4))

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"tokenring_schedule": "rings"}, "unknown schedule 'rings'"),
            ({"tokenring_schedule": "usp/4"}, "--tokenring-schedule usp/4: "),
            (
                {"tokenring_schedule": "ring", "context_parallel_attention": "mindspeed"},
                "--tokenring-schedule ring has no effect without --context-parallel-attention tokenring: add it",
            ),
        ],
    )
    def test_schedule(self, mindspeed: LikeMindSpeed, given: dict[str, Any], text: str) -> None:
        import_module(OURS)
        with pytest.raises(ConfigurationError, match=text):
            mindspeed.validate(parsed(**given))


class TestLatents:
    """--tokenring-latents: layers of multi-latent attention, by whatever spec, are built to send their latents."""

    GIVEN = ("--context-parallel-attention", "tokenring", "--context-parallel-size", "2")

    def test_layers_are_built_so(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        mindspeed.import_adaptor(*self.GIVEN, "--tokenring-latents")
        made = [built(of) for of in (latent_spec(), plain_spec())]
        assert [each.__name__ for each in made] == ["TokenRingModule", "Module"]

    def test_without_the_flag_they_are_not(self, mindspeed: LikeMindSpeed) -> None:
        import_module(OURS)
        mindspeed.import_adaptor(*self.GIVEN)
        assert built(latent_spec()) is torch.nn.Module

    @pytest.mark.parametrize(
        ("given", "text"),
        [
            ({"multi_latent_attention": False}, "--tokenring-latents is of --multi-latent-attention, which this model"),
            ({"mla_mm_split": True}, "--mla-mm-split True does not go with --tokenring-latents: the projection must"),
            ({"mla_zero_memory": True}, "--mla-zero-memory True does not go with --tokenring-latents: attention is"),
            ({"context_parallel_attention": "mindspeed"}, "--tokenring-latents has no effect without --context-parall"),
        ],
    )
    def test_refused(self, mindspeed: LikeMindSpeed, given: dict[str, Any], text: str) -> None:
        import_module(OURS)
        flags = {"tokenring_latents": True, "multi_latent_attention": True}
        mindspeed.validate(parsed(**flags))
        assert refusal(ConfigurationError, lambda: mindspeed.validate(parsed(**flags | given))).startswith(text)


@dataclass
class Spec:
    """As Megatron's ModuleSpec."""

    module: Any
    submodules: Any


def latent_spec() -> Spec:
    return Spec(torch.nn.Module, SimpleNamespace(linear_kv_up_proj=1, core_attention=2))


def plain_spec() -> Spec:
    return Spec(torch.nn.Module, SimpleNamespace(linear_qkv=1, core_attention=2))


def built(spec: Spec) -> Any:
    """The class of a layer that Megatron builds of a spec."""
    return import_module(BUILD).build_module(spec).module


def parsed(**more: Any) -> Namespace:
    """Arguments as Megatron has parsed them."""
    given = {
        "context_parallel_attention": "tokenring", "tokenring_schedule": "auto", "context_parallel_size": 2,
        "context_parallel_algo": "megatron_cp_algo", "attention_mask_type": "causal", "attention_dropout": 0.0,
        "reset_attention_mask": False, "position_embedding_type": "rope", "tp_2d": False,
        "reset_position_ids": True,
    }  # fmt: skip
    return Namespace(**(given | more))
