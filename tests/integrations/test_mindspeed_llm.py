"""MindSpeed-LLM's ways with MindSpeed's features and attention, by a stand-in of what its source does.

Read at c77308a1: features_manager/__init__.py (set_default_features_list), tasks/megatron_adaptor_v2.py (execute),
features_manager/context_parallel/context_parallel_feature.py:82-126 (what is patched),
core/context_parallel/dot_product_attention.py (query_pre_attn_scalar), and
tasks/models/transformer/mla_dot_product_attention.py (what its subclass touches).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from mcore.stand_ins import refusal
from mindspeed_like import (
    DPA,
    OURS,
    TE,
    ContextParallelFeature,
    Feature,
    LikeMindSpeed,
    OwnAttention,
    Patches,
    like_mindspeed,
    without,
)
from test_mindspeed import ASKED, attentions
from test_mindspeed import arguments as made_with
from test_mindspeed_flags import parsed

from tokenring import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron import TokenRingAttention

ADAPTOR = "mindspeed_llm.tasks.megatron_adaptor_v2"
FEATURE = "context_parallel_attention"


class LlmAttention(OwnAttention):
    """As CPDotProductAttention of MindSpeed-LLM."""


class LlmTeAttention(OwnAttention):
    """As TECPDotProductAttention of MindSpeed-LLM."""


class LlmPatches(Patches):
    """As MindSpeedPatchesManager (mindspeed/patch_utils.py): its patches can be looked up by their targets."""

    def __init__(self) -> None:
        super().__init__()
        self.patches_info: dict[str, Any] = {}

    def register_patch(self, name: str, new: Any, force_patch: bool = False, create_dummy: bool = False) -> None:
        super().register_patch(name, new, force_patch, create_dummy)
        self.patches_info[name] = SimpleNamespace(patch_func=new)


class LlmFeature(ContextParallelFeature):
    """As MindSpeed-LLM's own of that name: other classes at both targets."""

    def register_patches(self, patches: Any, args: Any) -> None:
        super().register_patches(patches, args)
        patches.register_patch(f"{DPA}.DotProductAttention", LlmAttention, force_patch=True)
        patches.register_patch(f"{TE}.TEDotProductAttention", LlmTeAttention, force_patch=True)


class Manager:
    """As MindSpeedFeaturesManager."""

    FEATURES_LIST: list[Any] = []  # noqa: RUF012  (theirs is the class's, too)

    @classmethod
    def set_features_list(cls, features_list: list[Any]) -> None:
        cls.FEATURES_LIST[:] = features_list


@pytest.fixture
def llm() -> Iterator[LikeMindSpeed]:
    with like_mindspeed() as made, pytest.MonkeyPatch.context() as patched, without("mindspeed_llm"):
        manager = type("MindSpeedFeaturesManager", (Manager,), {"FEATURES_LIST": made.features})
        patched.setattr(sys.modules["mindspeed.features_manager"], "MindSpeedFeaturesManager", manager)
        made.patches = LlmPatches()
        yield made


def import_llm(made: LikeMindSpeed, *command_line: str) -> Any:
    """`from mindspeed_llm import megatron_adaptor`: its own list of features, which it then applies."""
    manager: Any = sys.modules["mindspeed.features_manager"].MindSpeedFeaturesManager
    manager.set_features_list([LlmFeature("whole"), Feature("something-else")])
    adaptor = ModuleType(ADAPTOR)
    adaptor.__spec__ = ModuleSpec(ADAPTOR, None)
    sys.modules[ADAPTOR] = adaptor
    args = made.import_adaptor(*command_line)
    del sys.modules["mindspeed.megatron_adaptor"]  # which nobody imports here
    return args


def test_our_feature_stays_and_is_last(llm: LikeMindSpeed) -> None:
    import_module(OURS)
    args = import_llm(llm, *ASKED)
    assert [each.feature_name for each in llm.features] == ["context_parallel_size", "something_else", FEATURE]
    assert args.context_parallel_attention == "tokenring"
    assert all(issubclass(each, TokenRingAttention) for each in attentions())


def test_without_the_flag_theirs_stay(llm: LikeMindSpeed) -> None:
    import_module(OURS)
    import_llm(llm, "--context-parallel-size", "2")
    assert attentions() == [LlmAttention, LlmTeAttention]


def test_a_list_that_is_set_twice_has_it_once(llm: LikeMindSpeed) -> None:
    import_module(OURS).register()
    manager: Any = sys.modules["mindspeed.features_manager"].MindSpeedFeaturesManager
    for _ in range(2):
        manager.set_features_list([LlmFeature("whole")])
    assert [each.feature_name for each in llm.features].count(FEATURE) == 1


def test_what_would_stay_is_what_was_registered(llm: LikeMindSpeed) -> None:
    import_module(OURS)
    import_llm(llm, *ASKED)
    found = [made(**made_with())._own for made in attentions()]
    assert [type(own) for (own,) in found] == [LlmAttention, LlmTeAttention]


def test_features_that_are_applied_again_find_the_same(llm: LikeMindSpeed) -> None:
    """As `repatch` does: ours stands at the targets then, and must not stay for itself."""
    import_module(OURS)
    args = import_llm(llm, *ASKED)
    llm.features[-1].register_patches(llm.patches, args)
    llm.patches.apply()
    (own,) = attentions()[0](**made_with())._own
    assert type(own) is LlmAttention


def test_too_late(llm: LikeMindSpeed) -> None:
    import_llm(llm, "--context-parallel-size", "2")
    text = refusal(ConfigurationError, lambda: import_module(OURS))
    assert text.startswith(f"tokenring.integrations.mindspeed was imported after {ADAPTOR}, which had applied")


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"attn_logit_softcapping": 50.0}, "--attn-logit-softcapping 50.0 does not go with"),
        ({"enable_dsa_indexer": True}, "--enable-dsa-indexer True does not go with"),
    ],
)
def test_what_it_adds_and_we_lack_is_refused(llm: LikeMindSpeed, given: dict[str, Any], says: str) -> None:
    import_module(OURS)
    assert refusal(ConfigurationError, lambda: llm.validate(parsed(**given))).startswith(says)
    llm.validate(parsed(**dict.fromkeys(given)))


def attention(llm: LikeMindSpeed, **settings: Any) -> Any:
    import_module(OURS)
    import_llm(llm, *ASKED)
    return attentions()[0](**made_with(**settings))


def test_scale_is_that_of_its_config(llm: LikeMindSpeed) -> None:
    made = attention(llm, query_pre_attn_scalar=256)
    assert made.softmax_scale == made.scale == 1 / 16
    assert made_plain(llm).softmax_scale == 0.25  # of kv_channels 16


def made_plain(llm: LikeMindSpeed) -> Any:
    return attentions()[0](**made_with())


def test_keys_in_parts_are_joined(llm: LikeMindSpeed) -> None:
    """As --mla-fa-divide-qk gives them; and with what its multi-latent attention says beside."""
    made, (q, k, v) = attention(llm), torch.randn(3, 4, 1, 2, 16)
    made.schedule = "ring"
    wanted = made(q, k, v, None)
    assert torch.equal(made([q[..., :12], q[..., 12:]], [k[..., :12], k[..., 12:]], v, None), wanted)
    assert torch.equal(made(q, k, v, None, topk_indices=None, return_softmax=False), wanted)
    assert "topk_indices" in refusal(UnsupportedError, lambda: made(q, k, v, None, topk_indices=q))


def test_a_forward_of_another_attention_is_not_ours(llm: LikeMindSpeed) -> None:
    """MindSpeed-LLM patches the forward of what stands there under kvallgather_cp_algo."""
    import_module(OURS)
    target, patches = f"{DPA}.DotProductAttention.forward", llm.patches
    assert isinstance(patches, LlmPatches)
    patches.patches_info[target] = SimpleNamespace(patch_func=LlmAttention.forward)
    import_llm(llm, *ASKED)
    assert target not in patches.patches_info


def test_multi_latent_attention_is_a_subclass(llm: LikeMindSpeed) -> None:
    """It sets a scale after the fact, touches scale_mask_softmax, and computes by ours."""
    base: Any = type(attention(llm))

    class MlaDotProductAttention(base):  # type: ignore[misc]
        """The members that MindSpeed-LLM's touches."""

        def __init__(self, **given: Any) -> None:
            super().__init__(**given)
            self.scale_mask_softmax.scale = True
            self.hidden_size_per_partition = 32
            self.softmax_scale = 0.125
            self.norm_factor = 1.0 / self.softmax_scale
            width = self.hidden_size_per_attention_head
            self.scale = 1.0 / width**0.5 if self.scale_mask_softmax.scale is None else self.softmax_scale

    made = MlaDotProductAttention(**made_with())
    assert made.scale == made.softmax_scale == 0.125
    assert made._own == () and not made._compares  # the class at the target knows nothing of that scale
    q = torch.randn(8, 1, 4, 16)
    out = made(q, q, q, None)
    wanted = base(**made_with() | {"softmax_scale": 0.125, "cp_comm_type": "ring"})(q, q, q, None)
    assert torch.equal(out, wanted)
    assert dict(made.state_dict()) == {} and list(made.children()) == []


def test_a_window_is_ours_alone(llm: LikeMindSpeed) -> None:
    """MindSpeed's asserts that there is none, as soon as it is made."""
    made = attention(llm, window_size=(8, 0))
    assert made.window == (8, 0) and made._own == ()


def test_head_dims_of_their_own_are_ours_alone(llm: LikeMindSpeed) -> None:
    """Megatron's multi-latent attention gives them; MindSpeed's constructor does not take them."""
    attention(llm)
    made = attentions()[0](**made_with() | {"k_channels": 24, "v_channels": 16})
    assert made._own == ()


def test_what_cannot_stay_is_not_made(llm: LikeMindSpeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constructor asserts what it cannot compute; and it would hold the groups that it is given."""

    def never(self: LlmAttention, **given: object) -> None:
        raise AssertionError("it was made")

    attention(llm)
    monkeypatch.setattr(LlmAttention, "__init__", never)
    made = attentions()[0](**made_with() | {"k_channels": 24, "v_channels": 16})
    made.schedule = "auto"  # set afterwards: there is nothing to compare with
    assert made._own == () and made._compares is False
