"""Tiny models of transformers, each cut over ranks: gradients of one process, or a refusal by name.

A seeded sample; `python benchmarks/transformers_families.py` runs every family, kind of batch and number of ranks.
"""

from __future__ import annotations

import random
import warnings
from typing import Any, Literal

import pytest
import torch
from gradient_errors import largest_error
from hf_families import FAMILIES, KINDS, alone, gradients, make_batch, make_model, need, split
from ranks import Here, RankPools
from sampling import FULL_GRID
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tokenring as tr
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.transformers import attention as ours
from tokenring.integrations.transformers import masks
from tokenring.integrations.transformers.masks import LayerMask, read_mask_function
from tokenring.integrations.transformers.training import add_up_gradients, cut_batch, stop_tokenring, use_tokenring
from tokenring.integrations.transformers.versions import check_version, pip_requirement

need()
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
EXACT = 1e-5
FIRST = ("llama", "qwen3", "gemma2", "gpt_oss")
EVERY = [(family, kind) for family in FAMILIES for kind in KINDS]
SAMPLE = EVERY if FULL_GRID else [(each, random.Random(each).choice(KINDS)) for each in FIRST]


@pytest.mark.parametrize(("family", "kind"), SAMPLE)
def test_gradients_are_those_of_one_process(family: str, kind: str, ranks: RankPools) -> None:
    for error, name in ranks(2)(split, family, kind, "auto" if kind == "packed" else "zigzag"):
        assert error <= EXACT, name


# ---------- on one rank: what is seen there is the same


def on_one_rank(family: str, kind: str = "dense") -> float:
    batch, model = make_batch(kind), make_model(family)
    _, wanted = alone(make_model(family), batch)
    use_tokenring(model, tr.ContextParallel("self"))
    model(**batch).loss.backward()
    return largest_error(gradients(model), wanted)[0]


@pytest.mark.parametrize(
    ("dropped", "family"), [("s_aux", "gpt_oss"), ("softcap", "gemma2"), ("scaling", "gemma2"), ("window", "gemma2")]
)
def test_what_a_rival_drops_shows(dropped: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutants: an attention that swallows it is found out."""
    assert on_one_rank(family) <= EXACT
    whole, mask_of = ours.attend_layer, masks.layer_mask

    def losing(*args: Any, **more: Any) -> Any:
        return whole(*args, **{**more, dropped: None, "sliding_window": None})

    monkeypatch.setattr(ours, "attend_layer", losing)
    if dropped == "window":
        monkeypatch.setattr(ours, "layer_mask", lambda **more: (mask_of(**more), LayerMask())[1])
    try:
        assert on_one_rank(family) > 100 * EXACT
    finally:
        monkeypatch.undo()
        ours.register()


def test_documents_that_are_dropped_show() -> None:
    batch = make_batch("packed")
    _, wanted = alone(make_model("llama"), batch)
    found = make_model("llama")
    found(input_ids=batch["input_ids"], labels=batch["labels"]).loss.backward()
    assert largest_error(gradients(found), wanted)[0] > 100 * EXACT


def test_checkpointed_layers() -> None:
    batch, model = make_batch("packed"), make_model("gemma2").train()
    _, wanted = alone(make_model("gemma2"), batch)
    for reentrant in (True, False):
        model.zero_grad()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        use_tokenring(model, tr.ContextParallel("self"))(**batch).loss.backward()
        assert largest_error(gradients(model), wanted)[0] <= EXACT


def test_calls_of_every_form() -> None:
    """Positional, as a tuple, with what transformers' own loop gives; without labels; and put back."""
    batch, model = make_batch("dense"), make_model("llama")
    tokens, labels = batch["input_ids"], batch["labels"]
    wanted = model(**batch)
    use_tokenring(use_tokenring(model, tr.ContextParallel("self")), tr.ContextParallel("self"))
    assert torch.allclose(model(tokens, labels=labels).loss, wanted.loss)
    assert torch.allclose(model(tokens, labels=labels, return_dict=False)[0], wanted.loss)
    half = model(**batch, num_items_in_batch=2 * int(labels[:, 1:].ne(-100).sum())).loss
    assert torch.allclose(2 * half, wanted.loss)
    assert torch.allclose(model(tokens).logits, wanted.logits, atol=1e-5)
    with pytest.raises(UnsupportedError, match="past_key_values"):
        model.generate(tokens, max_new_tokens=2, do_sample=False)
    stop_tokenring(model)
    assert model.config._attn_implementation == "eager" and torch.equal(model(**batch).loss, wanted.loss)
    stop_tokenring(model)


def test_models_that_share_a_config_keep_their_attention() -> None:
    batch, model = make_batch("dense"), make_model("llama")
    other = type(model)(model.config).eval()
    config, wanted = model.config, other(**batch).loss
    use_tokenring(model, tr.ContextParallel("self"))(**batch)
    assert other.config is config and config._attn_implementation == "eager" and model.config is not config
    assert model.model.layers[0].self_attn.config is model.model.config is model.config
    assert torch.equal(other(**batch).loss, wanted)
    stop_tokenring(model)
    assert model.config is config and model.model.layers[0].self_attn.config is config


def embedding_gradient(here: Here) -> tuple[torch.Tensor, torch.Tensor]:
    """Of inputs_embeds: this rank's, and that of one process."""
    found = []
    for cut in (True, False):
        model, batch = make_model("llama"), make_batch("dense")
        embeds = model.get_input_embeddings()(batch.pop("input_ids")).detach().requires_grad_()
        if cut:
            use_tokenring(model, here.cp(layout="zigzag"))
        model(inputs_embeds=embeds, **batch).loss.backward()
        found.append(embeds.grad)
    return found[0], found[1]


def test_gradients_of_embeddings_are_shares_that_add_up(ranks: RankPools) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = ranks(2)(embedding_gradient)
    shares, wanted = [share for share, _ in found], found[0][1]
    assert torch.allclose(sum(shares), wanted, atol=1e-6)  # type: ignore[arg-type]
    assert not (shares[0].any(-1) & shares[1].any(-1)).any()  # each token has its gradient on one rank


def test_dropout_outside_of_attention_is_drawn_by_each_rank_for_its_tokens() -> None:
    """As in one process, where one rank holds all tokens."""
    batch, losses = make_batch("dense"), []
    for changed in (True, False):
        model = make_model("phi3", resid_pdrop=0.5, embd_pdrop=0.5).train()
        if changed:
            use_tokenring(model, tr.ContextParallel("self"))
        torch.manual_seed(3)
        losses.append(model(**batch).loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def mean_factor(here: Here, cut_first: bool) -> tuple[float, float]:
    """By how much gradients="mean" multiplies the gradients of "sum", and the loss."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, losses = [], []
        for joined in ("sum", "mean"):
            model, cp, batch = make_model("llama"), here.cp(), make_batch("dense")
            use_tokenring(model, cp, gradients=joined)
            loss = model(**cut_batch(batch, cp) if cut_first else batch).loss
            loss.backward()
            found.append(gradients(model)["lm_head.weight"].norm())
            losses.append(loss.item())
    return float(found[1] / found[0]), losses[1] / losses[0]


@pytest.mark.parametrize("cut_first", [False, True])
def test_gradients_for_ddp(cut_first: bool, ranks: RankPools) -> None:
    for gradient, loss in ranks(2)(mean_factor, cut_first):
        assert gradient == pytest.approx(2.0) and loss == pytest.approx(1.0)


def beside_fsdp(here: Here, gradients: Literal["sum", "mean"]) -> tuple[float, str]:
    """The largest error of gradients where two groups of two ranks have a batch each, and FSDP2 joins the groups."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
        model, cp, kinds = make_model("gemma2"), tr.ContextParallel(mesh["cp"], "auto"), ("packed", "right-padded")
        use_tokenring(model, cp, gradients=gradients)
        for each in (*model.model.layers, model):
            fully_shard(each, mesh=mesh["dp"] if gradients == "sum" else mesh)
        model(**make_batch(kinds[mesh["dp"].get_local_rank()])).loss.backward()
        if gradients == "sum":
            add_up_gradients(model, cp)
        wanted = [alone(make_model("gemma2"), make_batch(kind))[1] for kind in kinds]
        mean = {name: (wanted[0][name] + wanted[1][name]) / 2 for name in wanted[0]}
        return largest_error({name: each.grad.full_tensor() for name, each in model.named_parameters()}, mean)


@pytest.mark.parametrize("gradients", ["sum", "mean"])
def test_gradients_beside_fsdp(gradients: Literal["sum", "mean"], ranks: RankPools) -> None:
    for error, name in ranks(4)(beside_fsdp, gradients):
        assert error <= EXACT, name


# ---------- refusals


def told_under_fsdp(here: Here) -> str:
    """Return what a call says of FSDP2 over ranks whose gradients were to be added up; without gradients, nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = use_tokenring(make_model("llama"), here.cp())
        fully_shard(model, mesh=init_device_mesh("cpu", (here.world_size,)))
        with torch.no_grad():
            assert model(**make_batch("dense")).loss > 0
        try:
            model(**make_batch("dense"))
        except ConfigurationError as error:
            return str(error)
        return "nothing"


def test_calls_that_train_refuse_fsdp_over_ranks_of_a_sum(ranks: RankPools) -> None:
    for said in ranks(2)(told_under_fsdp):
        assert "gradients='sum', and FSDP shards parameters over ranks [0, 1]" in said


def under_ddp(here: Here, joined: Literal["sum", "mean"]) -> str:
    """Return the largest error of gradients that DDP joins, or what the call says."""
    model, batch = use_tokenring(make_model("llama"), here.cp(), gradients=joined), make_batch("dense")
    wrapped = DistributedDataParallel(model)  # which joins nothing once it is gone
    try:
        wrapped(**batch).loss.backward()
    except ConfigurationError as error:
        return str(error)
    return str(largest_error(gradients(model), alone(make_model("llama"), batch)[1])[0])


def test_ddp_takes_means(ranks: RankPools) -> None:
    """With "sum" its gradients were too small by the number of ranks, in silence."""
    found = [float(error) for error in ranks(2)(under_ddp, "mean")]
    assert max(found) <= EXACT
    for said in ranks(2)(under_ddp, "sum"):
        assert "gradients='sum', and DDP joins gradients over ranks [0, 1]" in said


def test_masks_that_are_read() -> None:
    from transformers import masking_utils as made_by

    where, none = torch.arange(6)[None], torch.zeros(1, dtype=torch.int64)
    window, chunks = made_by.sliding_window_causal_mask_function(4), made_by.chunked_causal_mask_function(5, none)
    assert read_mask_function(made_by.causal_mask_function) == LayerMask()
    assert read_mask_function(window) == LayerMask(window=4)
    assert read_mask_function(chunks) == LayerMask(chunk=5)
    packed = made_by.packed_sequence_compatibility_function(window, where, where)
    assert read_mask_function(packed) == LayerMask(window=4)
    both = made_by.and_masks(window, made_by.sliding_window_overlay(3))
    assert read_mask_function(both) == LayerMask(window=3)

    def causal_mask_function(*_: Any) -> bool:
        return True

    for each in (
        made_by.bidirectional_mask_function,
        made_by.or_masks(made_by.causal_mask_function, made_by.blockwise_overlay(where)),
        made_by.and_masks(window, made_by.padding_mask_function(where)),
        made_by.and_masks(window, made_by.sliding_window_bidirectional_overlay(3)),
        causal_mask_function,
        object(),
    ):
        with pytest.raises(UnsupportedError, match=r"mask function .* is not one that tokenring reads"):
            read_mask_function(each)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="chunks of"):
        read_mask_function(made_by.and_masks(chunks, made_by.chunked_overlay(3, none)))


@pytest.mark.parametrize(
    ("family", "config", "call", "text"),
    [
        ("llama", {"attention_dropout": 0.1}, {}, "dropout 0.1"),
        ("llama", {}, {"output_attentions": True}, "output_attentions"),
        ("gpt_oss", {"output_router_logits": True}, {}, "output_router_logits"),
        ("llama", {}, {"token_type_ids": torch.ones(2, 42)}, "token_type_ids"),
        ("llama", {}, {"head_mask": True}, "head_mask=True"),
        ("llama4_text", {"floor_scale": 8}, {}, "attn_temperature_tuning"),
    ],
)
def test_models_that_are_refused(family: str, config: Any, call: Any, text: str) -> None:
    model = use_tokenring(make_model(family, **config).train(), tr.ContextParallel("self"))
    with pytest.raises(UnsupportedError, match=text):
        model(**make_batch("dense"), **call)


def test_families_and_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16)
    with pytest.raises(UnsupportedError, match="type 'gpt2' were not run"):
        use_tokenring(transformers.GPT2LMHeadModel(config), tr.ContextParallel("self"))
    with pytest.raises(ConfigurationError, match="gradients='none'"):
        use_tokenring(make_model("llama"), tr.ContextParallel("self"), gradients="none")  # type: ignore[arg-type]
    for version in ("4.57.1", "99.0.0", "unknown"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(UnsupportedError, match=f"transformers {version} .*any_version=True"):
            check_version()
        assert check_version(any_version=True) == version
    assert pip_requirement().startswith(">=5.")


def test_every_family_is_one_that_is_allowed() -> None:
    from tokenring.integrations.transformers.refusals import COMPARED_FAMILIES

    assert sorted(make_model(each).config.model_type for each in FAMILIES) == sorted(COMPARED_FAMILIES)
