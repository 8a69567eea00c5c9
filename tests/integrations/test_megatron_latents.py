"""Layers of multi-latent attention whose latents cannot travel are refused by name, when they are made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tokenring.errors import UnsupportedError
from tokenring.integrations.megatron.latents import LatentSource, check_latents, with_latents

HEADS, NOPE, ROPE, VALUE, LATENT = 4, 16, 8, 12, 24
SIZES = {"qk_head_dim": NOPE, "qk_pos_emb_head_dim": ROPE, "v_head_dim": VALUE, "kv_lora_rank": LATENT}


class Layer(torch.nn.Module):
    """What a layer of Megatron's has that latents go by."""

    def __init__(self, up: Any = None, **settings: Any) -> None:
        super().__init__()
        self.config, self.num_attention_heads_per_partition = SimpleNamespace(**SIZES, **settings), HEADS
        self.linear_kv_up_proj = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False) if up is None else up


def fused() -> torch.nn.Module:
    """A projection with a norm inside, as TELayerNormColumnParallelLinear names it."""
    made = torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE), bias=False)
    made.layer_norm_weight = torch.nn.Parameter(torch.ones(LATENT))
    return made


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"softmax_type": "learnable"}, "softmax_type 'learnable': sinks are not supported"),
        ({"fp8": "hybrid"}, "fp8 'hybrid'"),
        ({"fp4": "e2m1"}, "fp4 'e2m1'"),
        ({"delay_wgrad_compute": True}, "delay_wgrad_compute True"),
        ({"fine_grained_activation_offloading": True}, "fine_grained_activation_offloading True"),
        ({"recompute_modules": ["mla_up_proj"]}, "take mla_up_proj out"),
        ({"mla_mm_split": True}, "mla_mm_split True: the projection must be one"),
        ({"up": fused()}, "is a Linear, which normalises latents itself: give the layer's spec a linear layer without"),
        ({"up": torch.nn.Linear(LATENT, HEADS * (NOPE + VALUE))}, "linear_kv_up_proj has a bias"),
        ({"up": torch.nn.Linear(LATENT, 7, bias=False)}, "is [7, 24], and with 4 heads here it must be [112, 24]"),
        ({"up": torch.nn.Identity()}, "is a NoneType, and with 4 heads"),
    ],
)  # fmt: skip
def test_what_cannot_travel_is_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UnsupportedError) as found:
        check_latents(Layer(**settings))
    assert says in str(found.value) and str(found.value).startswith("latents cannot travel")


@pytest.mark.parametrize("settings", [{}, {"softmax_type": "vanilla", "fp8": None, "recompute_modules": ["core_attn"]}])
def test_what_can_travel_is_not(settings: dict[str, Any]) -> None:
    check_latents(Layer(**settings))


def test_a_layer_without_the_projection() -> None:
    made = Layer()
    del made.linear_kv_up_proj
    with pytest.raises(UnsupportedError, match="Layer has no linear_kv_up_proj; leave latents out"):
        check_latents(made)


def test_soft_capped_scores() -> None:
    made = Layer()
    made.core_attention = torch.nn.Identity()
    made.core_attention.softcap = 30.0  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="soft-capped: leave latents out"):
        check_latents(made)


def test_a_projection_that_was_not_called() -> None:
    source = LatentSource(Layer().linear_kv_up_proj, Layer().config)
    with pytest.raises(UnsupportedError, match="the layer's linear_kv_up_proj was not"):
        source.taken(*(torch.ones(2, 1, HEADS, NOPE + ROPE) for _ in range(3)))


def test_classes_are_made_once_and_check_themselves() -> None:
    made = with_latents(Layer)
    assert with_latents(Layer) is with_latents(made) is made
    with pytest.raises(UnsupportedError):
        made(fp8="e4m3")


def test_padded_queries_and_keys_are_read_as_wide_as_they_are() -> None:
    """As MindSpeed-LLM pads them."""
    source = LatentSource(Layer().linear_kv_up_proj, Layer().config)
    latent, key = torch.randn(5, 2, LATENT), torch.zeros(5, 2, HEADS, 32)
    key[..., NOPE : NOPE + ROPE] = 7
    stand_in, _ = source.note(latent)
    assert stand_in.shape == (5, 2, HEADS * (NOPE + VALUE)) and stand_in.untyped_storage().nbytes() == 4
    query, both, weight = source.taken(torch.ones(5, 2, HEADS, 32), key, torch.ones(5, 2, HEADS, 32))
    assert query.shape[-1] == NOPE + ROPE and weight.shape == (HEADS * (NOPE + VALUE), LATENT)
    assert both.shape == (5, 2, 1, LATENT + ROPE)
    assert torch.equal(both[..., 0, :LATENT], latent) and both[..., LATENT:].eq(7).all()
