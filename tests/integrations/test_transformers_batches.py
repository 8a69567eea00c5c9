"""A batch cut into a rank's part, and the attention of a layer on it: no transformers is needed for these."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from oracle import attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations import comparing
from tokenring.integrations.comparing import checksum, facts_of
from tokenring.integrations.transformers.attention import ATTENTION_NAME, attend_layer
from tokenring.integrations.transformers.batches import BATCH, CutBatch, cut_batch
from tokenring.integrations.transformers.masks import LayerMask
from tokenring.integrations.transformers.training import _Calls, use_tokenring

LENGTH = 13
ENDS = (0, 4, 5, 13)
TOKENS = torch.arange(2 * LENGTH).view(2, LENGTH)


def restarting(*ends: int) -> torch.Tensor:
    return torch.cat([torch.arange(b - a) for a, b in pairwise(ends)])


def alone(**batch: Any) -> dict[str, Any]:
    """On one rank, which holds all."""
    return cut_batch({"input_ids": TOKENS[:1], **batch}, tr.ContextParallel("self"))


def held(here: Here, layout: str, batch: dict[str, Any]) -> dict[str, Any]:
    part = cut_batch(batch, here.cp(layout=layout))
    whole = part.pop(BATCH)
    return {**part, "length": whole.length, "bounds": whole.bounds}


class TestCutting:
    @pytest.mark.parametrize("layout", ["zigzag", "auto", "contiguous"])
    def test_parts_are_the_whole(self, layout: str, ranks: RankPools) -> None:
        """Labels are shifted first; each token keeps its position."""
        parts = ranks(2)(held, layout, {"input_ids": TOKENS, "labels": TOKENS, "use_cache": True, "other": "word"})
        for name, moved in (("input_ids", 0), ("labels", 1), ("shift_labels", 1)):
            found = torch.cat([part[name] for part in parts], 1)
            places = torch.cat([part["position_ids"] for part in parts], 1)
            wanted = torch.cat([TOKENS, torch.full((2, 1), -100)], 1)[:, moved : LENGTH + moved]
            assert torch.equal(found, wanted.gather(1, places)), name
        assert [part["num_items_in_batch"] for part in parts] == [24, 24]
        assert all(part["use_cache"] is False and part["other"] == "word" for part in parts)

    def test_rows_that_are_packed_differently_become_one(self, ranks: RankPools) -> None:
        places = torch.stack([restarting(*ENDS), torch.arange(LENGTH)])
        parts = ranks(2)(held, "zigzag", {"input_ids": TOKENS, "labels": TOKENS, "position_ids": places})
        assert parts[0]["bounds"] == (0, 4, 5, 13, 26) and parts[0]["length"] == 26
        found = sorted(zip(*(torch.cat([part[n][0] for part in parts]).tolist() for n in ("input_ids", "labels")), 
                           strict=True))  # fmt: skip
        assert found == [(t, t + 1 if t % LENGTH < LENGTH - 1 else -100) for t in range(2 * LENGTH)]

    def test_rows_that_are_packed_alike_stay_a_batch(self) -> None:
        part = cut_batch({"input_ids": TOKENS, "position_ids": restarting(*ENDS)[None]}, tr.ContextParallel("self"))
        assert part["input_ids"].shape == TOKENS.shape and part[BATCH].bounds == ENDS

    def test_documents_of_cu_seqlens(self) -> None:
        ends = torch.tensor(ENDS, dtype=torch.int32)
        for more in ({}, {"position_ids": restarting(*ENDS)[None]}, {"cu_seq_lens_k": ends, "max_length_q": 8}):
            part = alone(cu_seq_lens_q=ends, **more)
            assert part[BATCH].bounds == ENDS and "cu_seq_lens_q" not in part and "max_length_q" not in part

    def test_right_padding_goes(self) -> None:
        mask = (torch.arange(LENGTH) < 9).long()[None]
        places = torch.where(mask.bool(), torch.arange(LENGTH), 1)  # as generation numbers padding
        labels = TOKENS[:1].masked_fill(mask == 0, -100)
        part = alone(attention_mask=mask, position_ids=places, labels=labels)
        assert part[BATCH].bounds is None and "attention_mask" not in part

    def test_what_users_counted_stays(self) -> None:
        assert alone(labels=TOKENS[:1], num_items_in_batch=7)["num_items_in_batch"] == 7
        shifted = TOKENS[:1] + 1
        assert torch.equal(alone(labels=TOKENS[:1], shift_labels=shifted)["labels"], shifted)


ONES = torch.ones(1, LENGTH, dtype=torch.long)
LEFT = (torch.arange(LENGTH) > 3).long()[None]
PACKED = restarting(*ENDS)[None]
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "left padding": ({"attention_mask": LEFT}, UnsupportedError, r"left padding, or holes"),
    "holes": ({"attention_mask": (torch.arange(LENGTH) != 3).long()[None]}, UnsupportedError, "holes"),
    "a whole mask": ({"attention_mask": torch.ones(1, 1, 13, 13)}, UnsupportedError, r"\[1, 1, 13, 13\]"),
    "masks by name": ({"attention_mask": {"full_attention": None}}, UnsupportedError, "of type dict"),
    "labels of padding": ({"attention_mask": 1 - LEFT, "labels": TOKENS[:1]}, UnsupportedError, "padding has labels"),
    "types of tokens": ({"token_type_ids": ONES}, UnsupportedError, r"token_type_ids \[1, 13\]"),
    "images": ({"pixel_values": torch.ones(1, 3, 4, 4)}, UnsupportedError, "pixel_values"),
    "documents and a mask": ({"attention_mask": ONES, "position_ids": PACKED}, UnsupportedError, "leave it out"),
    "positions of three kinds": ({"position_ids": torch.ones(3, 1, 13)}, UnsupportedError, r"\[3, 1, 13\]"),
    "two kinds of documents": (
        {"position_ids": PACKED, "cu_seq_lens_q": torch.tensor([0, 5, 13])}, ConfigurationError, "give one",
    ),
    "other keys": (
        {"cu_seq_lens_q": torch.tensor(ENDS), "cu_seq_lens_k": torch.tensor([0, 13])}, UnsupportedError, "alike",
    ),
    "too few documents": ({"cu_seq_lens_q": torch.tensor([0, 5])}, ConfigurationError, "from 0 to its length"),
    "more labels": ({"labels": TOKENS}, ConfigurationError, r"labels are \[2, 13\]"),
    "a longer mask": ({"attention_mask": torch.ones(1, 14)}, ConfigurationError, r"attention_mask is \[1, 14\]"),
    "no tokens": ({"input_ids": None}, ConfigurationError, "give input_ids"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_batches_that_are_refused(what: str) -> None:
    more, error, text = REFUSED[what]
    with pytest.raises(error, match=text):
        alone(**more)


def short(here: Here) -> str:
    try:
        cut_batch({"input_ids": TOKENS[:1, :3]}, here.cp(layout="zigzag"))
    except ConfigurationError as error:
        return str(error)
    return ""


def test_a_batch_that_gives_a_rank_nothing_is_refused(ranks: RankPools) -> None:
    assert all("gives some of 4 ranks none" in text for text in ranks(4)(short))


# ---------- what depends on lengths in other ways


def sized(**config: Any) -> None:
    cut_batch({"input_ids": TOKENS}, tr.ContextParallel("self"), SimpleNamespace(**config))


def test_rotary_frequencies_that_depend_on_a_rank() -> None:
    for kind in ("longrope", "dynamic"):
        for nested in (False, True):
            rope = {"rope_type": kind, "original_max_position_embeddings": 12}
            with pytest.raises(UnsupportedError, match=f"rope_type '{kind}' with 13 positions"):
                sized(rope_parameters={"full_attention": rope} if nested else rope)
    sized(rope_parameters={"rope_type": "longrope", "original_max_position_embeddings": 13})
    sized(rope_parameters={"rope_type": "yarn", "original_max_position_embeddings": 4})


def test_queries_scaled_by_their_place_among_a_ranks_tokens() -> None:
    with pytest.raises(UnsupportedError, match="attn_temperature_tuning"):
        sized(attn_temperature_tuning=True, floor_scale=13)
    sized(attn_temperature_tuning=True, floor_scale=14)
    sized(attn_temperature_tuning=False, floor_scale=13)


# ---------- the attention of a layer


class OneLayer(torch.nn.Module):
    is_causal = True


BOUNDS = (0, 3, 17, 30)
CASES = {
    "causal": ({}, LayerMask(), None),
    "a window": ({"sliding_window": 5}, LayerMask(window=5), None),
    "packed, a window": ({}, LayerMask(window=5), BOUNDS),
    "packed chunks": ({}, LayerMask(chunk=4), BOUNDS),
    "chunks": ({}, LayerMask(chunk=4), None),
}


def seen(mask: LayerMask, bounds: tuple[int, ...] | None) -> torch.Tensor:
    """The mask's own definition, [30, 30]."""
    document = torch.bucketize(torch.arange(30), torch.tensor(bounds or (0, 30)), right=True)
    place = torch.cat([torch.arange(b - a) for a, b in pairwise(bounds or (0, 30))])
    back = torch.arange(30)[:, None] - torch.arange(30)
    found = (back >= 0) & (document[:, None] == document)
    if mask.window is not None:
        found &= back < mask.window
    if mask.chunk is not None:
        found &= place[:, None] // mask.chunk == place // mask.chunk
    return found


def layer_errors(here: Here, name: str, layout: str) -> list[float]:
    more: dict[str, Any] = dict(CASES[name][0])
    _, layer, bounds = CASES[name]
    cp = here.cp(layout=layout)
    part = cut_batch(
        {"input_ids": torch.zeros(2, 30), **({"position_ids": restarting(*bounds)[None]} if bounds else {})}, cp
    )
    torch.manual_seed(2)
    whole = [torch.randn(2, 30, heads, 8) for heads in (4, 2, 2, 4)]
    by = {"mask": part[BATCH].mask_of(LayerMask())}
    q, k, v, dout = (tr.shard(x, cp, **by) for x in whole)
    leaves = [x.transpose(1, 2).clone().requires_grad_() for x in (q, k, v)]
    call: Any = attend_layer
    out, nothing = call(OneLayer(), *leaves, layer, scaling=0.3, **more, **{BATCH: part[BATCH]})
    assert nothing is None
    gradients = torch.autograd.grad(out, leaves, dout)
    want = attention64(whole[0], whole[1], whole[2], whole[3], seen(layer, bounds), 0.3)
    found = [out.detach(), *(x.transpose(1, 2) for x in gradients)]
    return [
        relative_error(tr.unshard(a, cp, **by), b)
        for a, b in zip(found, (want.out, want.dq, want.dk, want.dv), strict=True)
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_layers_attention(name: str, ranks: RankPools) -> None:
    for found in ranks(2)(layer_errors, name, "auto" if "packed" in name else "zigzag"):
        assert max(found) < 5e-6


X = torch.randn(1, 2, 8, 4)
WHOLE = CutBatch(tr.ContextParallel("self"), 8, None)
ATTENTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "dropout": ({"dropout": 0.1}, "OneLayer with dropout 0.1.*attention_dropout"),
    "weights": ({"output_attentions": True}, "output_attentions.*weights of all tokens"),
    "a bias": ({"position_bias": X}, "position_bias=a Tensor, which is not supported"),
    "not causal": ({"is_causal": False}, "is_causal=False"),
    "another window": ({"sliding_window": 3}, "sliding_window=3, and its mask None"),
    "no batch": ({BATCH: None}, "did not get the keyword tokenring_batch"),
    "a mask": ({"attention_mask": torch.ones(1, 1, 8, 8)}, "attention_mask of type Tensor"),
    "no mask": ({"attention_mask": None}, "attention_mask of type NoneType"),
}


@pytest.mark.parametrize("what", ATTENTIONS)
def test_layers_that_are_refused(what: str) -> None:
    more, text = ATTENTIONS[what]
    usual: dict[str, Any] = {BATCH: WHOLE, "attention_mask": LayerMask(), "position_ids": None}
    attend_layer(OneLayer(), X, X, X, **usual)
    with pytest.raises(UnsupportedError, match=text):
        attend_layer(OneLayer(), X, X, X, **{**usual, **more})
    layer = OneLayer()
    layer.is_causal = False
    with pytest.raises(UnsupportedError, match="is_causal"):
        attend_layer(layer, X, X, X, **usual)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendUnavailable, match="pip install 'transformers>=5"):
        use_tokenring(torch.nn.Linear(2, 2), tr.ContextParallel("self"))


# ---------- what ranks compare of a batch


def model_of(here: Here) -> tuple[Any, Any]:
    """The hook before a model's call, and a model that has no more than it reads."""
    config = SimpleNamespace(_attn_implementation=ATTENTION_NAME, num_attention_heads=4, hidden_size=32)
    model = SimpleNamespace(config=config, forward=lambda input_ids: None, modules=lambda: ())
    return _Calls(here.cp(layout="zigzag"), "sum", 1), model


def told(here: Here, changed: dict[str, Any], cut_first: bool = False) -> str:
    """What a rank hears of a call for which rank 1 has changed its batch."""
    calls, model = model_of(here)
    whole = {"input_ids": TOKENS, "labels": TOKENS, "attention_mask": torch.ones_like(TOKENS), "return_dict": 0}
    batch = {**whole, **(changed if here.rank == 1 else {})}
    try:
        calls.before(model, (), cut_batch(batch, calls.cp, None) if cut_first else batch)
    except (ConfigurationError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    found = calls.before(model, (TOKENS,), {})[1]  # the ranks can go on
    return f"{list(found['input_ids'].shape)} of a batch that all ranks have"


SWAPPED = TOKENS.clone()
SWAPPED[0, 3], SWAPPED[0, 9] = TOKENS[0, 9], TOKENS[0, 3]
SHORT_BY_TWO = torch.ones_like(TOKENS)
SHORT_BY_TWO[1, -2:] = 0


@pytest.mark.parametrize("cut_first", [False, True])
@pytest.mark.parametrize(
    ("changed", "name"),
    [
        ({"input_ids": SWAPPED}, "input_ids"),
        ({"labels": TOKENS.roll(1, 0)}, "labels"),
        ({"position_ids": torch.arange(LENGTH).repeat(2, 1)}, "position_ids"),
        ({"attention_mask": SHORT_BY_TWO, "labels": TOKENS.masked_fill(SHORT_BY_TWO == 0, -100)}, "attention_mask"),
        ({"num_items_in_batch": 5}, "num_items_in_batch"),
        ({"return_dict": 1}, "return_dict"),
    ],
)
def test_ranks_with_different_batches_are_refused(
    changed: dict[str, Any], name: str, cut_first: bool, ranks: RankPools
) -> None:
    heard = ranks(2)(told, changed, cut_first)
    assert all(f"{name}: rank" in each and "Disagreement: the ranks disagree" in each for each in heard), heard
    assert not any(f"{other}: rank" in each for each in heard for other in {"input_ids", "labels"} - {*changed})


def test_ranks_with_one_batch_go_on(ranks: RankPools) -> None:
    assert all("of a batch that all ranks have" in each for each in ranks(2)(told, {}))


@pytest.mark.parametrize("cut_first", [False, True])
def test_what_one_rank_refuses_all_ranks_hear(cut_first: bool, ranks: RankPools) -> None:
    left = (torch.arange(LENGTH) > 3).long().repeat(2, 1)
    first, second = ranks(2)(told, {"attention_mask": left}, cut_first)
    assert first.startswith("Disagreement: rank 1 refused: attention_mask has zeros before ones")
    assert second.startswith("UnsupportedError: attention_mask has zeros before ones")


def layer_told(here: Here) -> str:
    part = cut_batch({"input_ids": TOKENS}, here.cp(layout="zigzag"))
    q = torch.randn(2, 2, part["input_ids"].shape[1], 8)
    try:
        attend_layer(OneLayer(), q, q, q, LayerMask(), dropout=0.1 * here.rank, tokenring_batch=part[BATCH])
    except (ConfigurationError, UnsupportedError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_a_layer_of_one_rank_refuses_all_ranks_hear(ranks: RankPools) -> None:
    first, second = ranks(2)(layer_told)
    assert first.startswith("Disagreement: rank 1 refused: OneLayer with dropout 0.1") and "Unsupported" in second


def test_a_cut_batch_without_its_positions() -> None:
    calls, model = model_of(Here(0, 1, tr.ContextParallel("self")))
    part = alone()
    del part["position_ids"]
    with pytest.raises(ConfigurationError, match="without its position_ids"):
        calls.before(model, (), part)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool, torch.bfloat16, torch.float32])
def test_a_checksum_is_of_every_element_and_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.tensor([[1, 0, 0, 1], [1, 1, 0, 1]]).to(dtype)
    others = [x.flip(1), x.flip(0), x.T, x.roll(1), 1 - x if dtype != torch.bool else ~x, torch.zeros_like(x)]
    found = [int(checksum(each)) for each in (x, *others)]
    assert len(set(found)) == len(found)
    monkeypatch.setattr(comparing, "PIECE", 3)
    assert int(checksum(x.T.contiguous().T)) == found[0]


def test_facts_of_what_has_no_bits_of_its_own() -> None:
    found = facts_of({"a": torch.zeros(2, device="meta"), "b": torch.eye(2).to_sparse(), "c": [1], "d": None, "e": 2})
    assert found == {"a": "float32 [2]", "b": "float32 [2, 2]", "c": "['1']", "e": "2"}


def test_facts_tell_batches_apart() -> None:
    """By what they are, not by the order of keywords."""
    x, ten = torch.zeros(2), numpy.int64(10)
    assert list(facts_of({"b": x, "a": 1})) == ["a", "b"] and facts_of({"a": ten}) == facts_of({"a": 10})
    for one, other in ((ten, numpy.int64(11)), ([1, x], [1, x + 1]), ({"a": 1}, {"a": 2}), (1, 1.5)):
        assert facts_of({"it": one}) != facts_of({"it": other})
