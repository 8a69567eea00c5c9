"""The split of diffusers' models over ranks, on a stand-in for diffusers: deals, both passes, refusals, versions."""

from __future__ import annotations

import copy
import importlib.util
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers_like import (
    WIDTH,
    AttentionBackendName,
    FluxTransformer2DModel,
    WanTransformer3DModel,
    _AttentionBackendRegistry,
    installed,
)
from gradient_errors import finite
from ranks import Here, RankPools
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tokenring as tr
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations.diffusers import add_up_gradients, splitting, stop_tokenring, use_tokenring
from tokenring.integrations.diffusers.dealing import deal
from tokenring.integrations.diffusers.versions import check_version, pip_requirement

EXACT = 1e-5


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_deals(ranks: int) -> None:
    """Each rank holds its part of the joint sequence, and a token of each stream; or there are too few."""
    refused = set()
    for text, image in product(range(12), range(40)):
        try:
            found = deal({"text": text, "image": image}, ranks)
        except ConfigurationError:
            refused.add((text, image))
            continue
        ours = [found.parts["text"], found.parts["image"]]
        assert [sum(each) for each in ours] == [text, image] and min(map(min, ours)) >= 1
        assert tuple(map(sum, zip(*ours, strict=True))) == found.layout.local_lengths
        assert found.range_of("text", ranks - 1) == (text - found.parts["text"][-1], found.parts["text"][-1])
    assert all(text < ranks or image < ranks or text + image <= ranks**2 for text, image in refused)
    assert deal({"image": 40}, ranks).parts["image"] == deal({"image": 40}, ranks).layout.local_lengths


# ---------- both passes


def inputs(kind: str, text: int = 7, image: int = 23) -> dict[str, Any]:
    made = torch.Generator().manual_seed(1)
    x, words = torch.randn(2, image, WIDTH, generator=made), torch.randn(2, text, WIDTH, generator=made)
    if kind == "wan":
        return {"hidden_states": x, "timestep": torch.rand(2, image, generator=made), "encoder_hidden_states": words}
    places = [torch.arange(length)[:, None] / 10 for length in (image, text)]
    return {"hidden_states": x, "encoder_hidden_states": words, "img_ids": places[0], "txt_ids": places[1]}


def make(kind: str) -> Any:
    torch.manual_seed(2)
    return WanTransformer3DModel() if kind == "wan" else FluxTransformer2DModel()


def gradients(model: Any, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    model.zero_grad()
    out = model(**call)
    (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).sin()).sum().backward()
    return {"out": out.detach(), **{name: each.grad.clone() for name, each in model.named_parameters()}}


def largest_error(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    whole = max(x.norm() for x in wanted.values())
    return max(finite((found[each] - x).norm() / max(x.norm(), 1e-2 * whole)) for each, x in wanted.items())


def in_double(kind: str, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    return gradients(make(kind).double(), {name: x.double() for name, x in call.items()})


def both_passes(here: Here, kind: str, schedule: str, joined: str, text: int, image: int) -> float:
    with installed():
        call, cp = inputs(kind, text, image), here.cp(schedule=schedule)
        wanted = in_double(kind, call)
        model = use_tokenring(make(kind), cp, gradients=joined)  # type: ignore[arg-type]
        gradients(model, call)
        found = {"out": model(**call).detach()}
        add_up_gradients(model, cp)
        scale = here.world_size if joined == "mean" else 1
        found |= {name: each.grad / scale for name, each in model.named_parameters()}
    return largest_error(found, wanted)


@pytest.mark.parametrize(
    ("kind", "schedule", "joined", "ranks_", "text", "image"),
    [("flux", "auto", "sum", 3, 7, 23), ("wan", "ring", "mean", 4, 5, 29), ("flux", "ulysses", "sum", 2, 8, 24)],
)
def test_output_and_gradients_are_those_of_one_process(
    kind: str, schedule: str, joined: str, ranks_: int, text: int, image: int, ranks: RankPools
) -> None:
    assert max(ranks(ranks_)(both_passes, kind, schedule, joined, text, image)) <= EXACT


def told_under_fsdp(here: Here) -> str:
    """Return what a call says of FSDP2 over ranks whose gradients were to be added up; without gradients, nothing."""
    with installed():
        model = use_tokenring(make("flux"), here.cp())
        fully_shard(model, mesh=init_device_mesh("cpu", (here.world_size,)))
        with torch.no_grad():
            model(**inputs("flux"))
        try:
            model(**inputs("flux"))
        except ConfigurationError as error:
            return str(error)
        return "nothing"


@pytest.mark.filterwarnings("ignore")
def test_calls_that_train_refuse_fsdp_over_ranks_of_a_sum(ranks: RankPools) -> None:
    for said in ranks(2)(told_under_fsdp):
        assert "gradients='sum', and FSDP shards parameters over ranks [0, 1]" in said


def unlike_calls(here: Here) -> list[tuple[str, str]]:
    """What each rank hears where rank 1 calls otherwise; afterwards all go on."""
    found = []
    with installed():
        cp = here.cp()
        model = use_tokenring(make("flux"), cp)
        call, other = inputs("flux"), inputs("flux")
        other["hidden_states"] = other["hidden_states"] + 1
        masked = {**call, "mask": torch.ones(15, 15)}
        for theirs in (other, inputs("flux", image=24), masked, {**call, "controlnet_block_samples": [1]}):
            try:
                model(**(theirs if here.rank == 1 else call))
            except (tr.UnsupportedError, ConfigurationError) as error:
                found.append((type(error).__name__, str(error)))
        with torch.no_grad():
            found.append(("", str(largest_error({"out": model(**call)}, {"out": make("flux")(**call)}))))
    return found


def test_what_one_rank_is_given_or_refuses_all_hear(ranks: RankPools) -> None:
    mine, theirs = ranks(2)(unlike_calls)
    for both in zip(mine, theirs, strict=True):
        assert all(text for _, text in both)
    assert [kind for kind, _ in mine[:4]] == ["Disagreement"] * 4
    assert "hidden_states" in mine[0][1] and "[2, 24, 16]" in mine[1][1]
    assert "mask" in mine[2][1]
    assert theirs[3][0] == "UnsupportedError" and "controlnet_block_samples" in mine[3][1]
    assert float(mine[4][1]) < EXACT and float(theirs[4][1]) < EXACT


def mutated(here: Here, mutant: str) -> float:
    with installed(), pytest.MonkeyPatch.context() as patched:
        if mutant == "another split of text":
            whole = splitting.SplitModel._part

            def shifted(self: Any, place: Any, x: torch.Tensor) -> torch.Tensor:
                return whole(self, place, x.roll(1, place.dim) if place.where == "txt_ids" else x)

            patched.setattr(splitting.SplitModel, "_part", shifted)
        call, cp = inputs("flux"), here.cp()
        model = use_tokenring(make("flux"), cp, gradients="mean" if mutant == "doubled" else "sum")
        found = gradients(model, call)
        if mutant != "not added up":
            add_up_gradients(model, cp)
        found |= {name: each.grad for name, each in model.named_parameters()}
        return largest_error(found, in_double("flux", call))


@pytest.mark.parametrize("mutant", ["doubled", "not added up", "another split of text"])
def test_mutants_show(mutant: str, ranks: RankPools) -> None:
    assert min(ranks(2)(mutated, mutant)) > 100 * EXACT


# ---------- on one rank


def test_what_is_refused() -> None:
    with installed():
        model, call = use_tokenring(make("flux"), tr.ContextParallel("self")), inputs("flux")
        joint = "joint_attention_kwargs"
        for given, text in (
            ({"mask": torch.ones(30, 30)}, r"attn_mask \[30, 30\]"),
            ({"controlnet_block_samples": [1]}, "controlnet_block_samples"),
            ({joint: {"ip_adapter_image_embeds": 1}}, "ip_adapter_image_embeds"),
            ({"img_ids": torch.zeros(1, 23, 1)}, r"img_ids \[1, 23, 1\]"),
        ):
            with pytest.raises(UnsupportedError, match=text):
                model(**{**call, **given})
        model(**call, joint_attention_kwargs={"scale": 1.0})
        with pytest.raises(ConfigurationError, match="txt_ids has 6 tokens, and the text has 7"):
            model(**{**call, "txt_ids": torch.zeros(6, 1)})
        for name, value in (("dropout_p", 0.1), ("is_causal", True), ("return_lse", True)):
            model.attn.more = {name: value}
            with pytest.raises(UnsupportedError, match=f"{name} {value}"):
                model(**call)
        model.attn.more = {"scale": 0.5, "dropout_p": 0.0, "is_causal": False}
        plain = make("flux")
        plain.attn.more = {"scale": 0.5}
        assert torch.allclose(model(**call), plain(**call), atol=1e-5)
        with pytest.raises(UnsupportedError, match=r"from 3 tokens to 3 .*image prompts"):
            model.attn(torch.ones(1, 3, WIDTH))


def test_layers_that_would_not_call_ours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with installed():
        model, call = use_tokenring(make("wan"), tr.ContextParallel("self")), inputs("wan")
        layer = model.blocks[1].attn1
        layer.processor._attention_backend = "flash"
        with pytest.raises(UnsupportedError, match=r"blocks[.]1[.]attn1 calls attention backend 'flash'"):
            model(**call)
        layer.processor._attention_backend = AttentionBackendName.NATIVE
        model(**call)
        with monkeypatch.context() as patched:
            patched.setattr(_AttentionBackendRegistry, "_active_backend", AttentionBackendName.FLASH)
            with pytest.raises(UnsupportedError, match=r"blocks[.]0[.]attn1 calls attention backend 'flash'"):
                model(**call)
        layer.processor = type(layer.processor)()
        with pytest.raises(UnsupportedError, match=r"blocks[.]1[.]attn1 has the attention processor Processor"):
            model(**call)
        use_tokenring(model, tr.ContextParallel("self"))(**call)
        model.is_cache_enabled = True
        with pytest.raises(UnsupportedError, match="enable_cache"):
            model(**call)


def test_hooks_of_diffusers_that_skip_are_refused() -> None:
    """Names as in diffusers 0.42.1, hooks/first_block_cache.py, layer_skip.py and group_offloading.py."""
    with installed():
        model, call = use_tokenring(make("wan"), tr.ContextParallel("self")), inputs("wan")
        block: Any = model.blocks[1]
        for name, refused in (("fbc_block_hook", True), ("layer_skip_hook", True), ("group_offloading", False)):
            block._diffusers_hook = SimpleNamespace(hooks={name: object()})
            if refused:
                with pytest.raises(UnsupportedError, match=rf"^blocks[.]1 has diffusers' hook '{name}'"):
                    model(**call)
            else:
                model(**call)


def test_a_module_that_was_replaced_is_refused() -> None:
    with installed():
        model, call = use_tokenring(make("wan"), tr.ContextParallel("self")), inputs("wan")
        wanted = model(**call)
        model.proj_out = torch.nn.Sequential(model.proj_out)
        with pytest.raises(ConfigurationError, match=r"^proj_out of the model is another module .*use_tokenring again"):
            model(**call)
        assert torch.equal(use_tokenring(model, tr.ContextParallel("self"))(**call), wanted)
        with pytest.raises(ConfigurationError, match="a call without tensors"):
            model()


def test_others_keep_their_attention_and_it_is_given_back() -> None:
    with installed():
        model, other, call = use_tokenring(make("wan"), tr.ContextParallel("self")), make("wan"), inputs("wan")
        wanted = other(**call)
        assert torch.allclose(model(**call), wanted, atol=1e-5) and torch.equal(other(**call), wanted)
        assert torch.allclose(copy.deepcopy(model)(**call), wanted, atol=1e-5)
        registered = _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE]
        use_tokenring(model, tr.ContextParallel("self"))
        assert _AttentionBackendRegistry._backends[AttentionBackendName.NATIVE] is registered  # once, not nested
        assert {"attn_mask", "_parallel_config"} <= _AttentionBackendRegistry._supported_arg_names["native"]
        stop_tokenring(model)
        assert torch.equal(model(**call), wanted) and model._parallel_config is None
        stop_tokenring(model)
        other._parallel_config = object()
        with pytest.raises(ConfigurationError, match="enable_parallelism"):
            use_tokenring(other, tr.ContextParallel("self"))


def test_models_versions_and_words() -> None:
    with installed(), pytest.raises(UnsupportedError, match=r"a Linear is not supported: give one of Flux"):
        use_tokenring(torch.nn.Linear(2, 2), tr.ContextParallel("self"))
    with installed(), pytest.raises(ConfigurationError, match="gradients='none'"):
        use_tokenring(make("flux"), tr.ContextParallel("self"), gradients="none")  # type: ignore[arg-type]
    for version in ("0.36.0", "0.43.0", "unknown"):
        with installed(version):
            with pytest.raises(UnsupportedError, match=f"diffusers {version} .*any_version=True"):
                use_tokenring(make("flux"), tr.ContextParallel("self"))
            use_tokenring(make("flux"), tr.ContextParallel("self"), any_version=True)
    with installed("0.37.1"):
        assert check_version() == "0.37.1"
    assert pip_requirement() == ">=0.37,<0.43"


def test_without_diffusers() -> None:
    if importlib.util.find_spec("diffusers") is not None:
        pytest.skip("diffusers is installed")
    with pytest.raises(BackendUnavailable, match=r"pip install 'diffusers>=0[.]37,<0[.]43'"):
        use_tokenring(make("flux"), tr.ContextParallel("self"))
