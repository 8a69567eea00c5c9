"""generate() of transformers over a cache that is dealt over ranks: token for token as one process."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from ranks import Here, RankPools
from sampling import FULL_GRID
from serving_cases import PAD, Case, generated, make_model, prompt_of, scores_error, served, whole_grid

import tokenring as tr
from tokenring.integrations.transformers.serving import name_of_cache, serve_with_tokenring
from tokenring.sequence.layout import make_layout

transformers = pytest.importorskip("transformers", reason="transformers is not installed here")

def run_case(here: Here, case: Case) -> tuple[bool, float, int]:
    """Whether the tokens are those of one process, how far the scores are, and how many tokens there are."""
    model = make_model(case.model)
    alone, wanted = generated(model, case)
    ids, scores = served(here, model, case)
    again, _ = generated(model, case)
    assert torch.equal(again, alone), "the model is not as it was"
    return torch.equal(ids, alone), scores_error(scores, wanted, case), ids.shape[1] - case.prompt


WHOLE = whole_grid()
SAMPLE = [case._replace(new=24) for case in random.Random(2).sample([c for c in WHOLE if c.prompt < 600], 5)]
CHOSEN = [
    Case("llama", 2, 517, chunk=200),
    Case("sliding", 3, 150, chunk=70, page=1),
    Case("qwen2", 4, 90, layout="striped"),
    Case("mqa", 2, 70, layout="auto", page=16),
    Case("llama", 3, 31, lengths=(31, 9, 20)),
    Case("sliding", 2, 75, lengths=(75, 3, 44)),
    Case("qwen2", 2, 66, 12, options=(("num_beams", 3),)),
    Case("llama", 2, 40, 20, options=(("prompt_lookup_num_tokens", 3),)),
]
CASES = CHOSEN + (WHOLE if FULL_GRID else SAMPLE)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_token_for_token_as_one_process(case: Case, ranks: RankPools) -> None:
    for same, error, count in ranks(case.ranks)(run_case, case):
        assert same and error <= 1e-4 and count == case.new


def drawn(here: Here, seed: int) -> list[int]:
    model = make_model("llama")
    cp = here.cp(transport=here.transport("shm"))
    torch.manual_seed(seed + here.rank)  # ranks that would draw apart
    with serve_with_tokenring(model, cp):
        case = Case("llama", 2, 20, options=(("do_sample", True),))
        return list(generated(model, case)[0][0].tolist())


def test_all_ranks_draw_the_same_tokens(ranks: RankPools) -> None:
    (a, b), (c, _) = ranks(2)(drawn, 1), ranks(2)(drawn, 2)
    assert a == b != c


# ---------- refusals


def alone() -> tuple[Any, Any]:
    model = make_model("llama")
    return model, serve_with_tokenring(model, tr.ContextParallel("self"))


def test_masks_that_are_not_known() -> None:
    model, serving = alone()
    ids = torch.tensor([[5, PAD, 7, 8]])
    with pytest.raises(tr.UnsupportedError, match="pad on the left"):
        model.generate(ids, max_new_tokens=2)  # transformers takes the pad token for padding
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2)
    with pytest.raises(tr.UnsupportedError, match="takes padding"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4))
    with pytest.raises(tr.UnsupportedError, match="give input_ids"):
        model(inputs_embeds=torch.zeros(1, 4, 64))
    with pytest.raises(tr.ConfigurationError, match="is a DynamicCache"):
        model(ids, **{name_of_cache(): transformers.DynamicCache()})
    with pytest.raises(tr.UnsupportedError, match="'static' is another cache"):
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, cache_implementation="static")
    cache = serving.new_cache(8)
    with torch.no_grad():
        model(ids, **{name_of_cache(): cache})
        with pytest.raises(tr.ConfigurationError, match="make a cache for each batch"):
            model(ids.repeat(2, 1), **{name_of_cache(): cache})
        with pytest.raises(tr.ConfigurationError, match="room for 8 tokens"):
            model(ids.repeat(1, 2), **{name_of_cache(): cache})
    with pytest.raises(tr.UnsupportedError, match="keeps its batch"):
        cache.batch_repeat_interleave(2)
    serving.close()
    serving.close()


def test_a_model_without_gradients_or_a_cache_is_as_before() -> None:
    model, serving = alone()
    ids = prompt_of(Case("llama", 1, 30))["input_ids"]
    with torch.no_grad():
        found = model(ids).logits
        serving.close()
        torch.testing.assert_close(found, model(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_cache_that_nobody_gets_is_refused() -> None:
    model, serving = alone()
    ids = prompt_of(Case("llama", 1, 30))["input_ids"]
    with torch.no_grad():
        with pytest.raises(tr.ConfigurationError, match=rf"give {name_of_cache()}=serving.new_cache\(capacity\)"):
            model(ids, use_cache=True)
        cache = serving.new_cache(64)
        assert getattr(model(ids, use_cache=True, **{name_of_cache(): cache}), name_of_cache()) is cache
        assert cache.get_seq_length() == 30
        with pytest.raises(tr.ConfigurationError, match="two caches in one call"):
            model.get_decoder()(ids, past_key_values=cache, cache=serving.new_cache(64))
        cache.crop(0)
        cache.crop(-3)
        assert cache.get_seq_length() == 27
        with pytest.raises(tr.ConfigurationError, match=r"crop\(3\): give how many tokens to remove"):
            cache.crop(3)
        serving.close()
        with pytest.raises(tr.ConfigurationError, match="its model is not served any more"):
            model(ids, **{name_of_cache(): cache})


def test_a_model_is_served_once_and_given_back_as_it_was() -> None:
    model = make_model("llama")
    decoder = model.get_decoder()
    inner = decoder.forward

    def own(*args: Any, **kwargs: Any) -> Any:  # as a library of hooks puts there
        return inner(*args, **kwargs)

    decoder.forward = own
    serving = serve_with_tokenring(model, tr.ContextParallel("self"))
    with pytest.raises(tr.ConfigurationError, match="is served already"):
        serve_with_tokenring(model, tr.ContextParallel("self"))
    serving.close()
    assert decoder.forward is own and "_prepare_cache_for_generation" not in vars(model)
    serve_with_tokenring(model, tr.ContextParallel("self")).close()


def test_gradients_are_refused() -> None:
    model, serving = alone()
    with pytest.raises(tr.UnsupportedError, match=r"call the model under torch\.no_grad"):
        model(prompt_of(Case("llama", 1, 8))["input_ids"])
    serving.close()


def cut_as(here: Here, layout: Any, chunk: int | None, shard_from: int | None, tokens: int) -> tuple[list[Any], float]:
    """The pieces of a prompt, and how far logits and hidden states of all layers are from those of one process."""
    model = make_model("llama")
    ids = prompt_of(Case("llama", 2, tokens))["input_ids"]
    cp = here.cp(transport=here.transport("shm"), schedule="direct-kv", layout=layout)
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True)
        model.config.output_hidden_states = True
        with serve_with_tokenring(model, cp, chunk=chunk, shard_from=shard_from) as serving:
            found = model(ids)
    errors = [found.logits - wanted.logits]
    errors += [a - b for a, b in zip(found.hidden_states, wanted.hidden_states, strict=True)]
    return serving.pieces, max(float(each.abs().max()) for each in errors)


PIECES = {
    "named": ("zigzag", 70, 64, [(0, 68, "tokens"), (68, 136, "tokens"), (136, 150, "all")]),
    "short": ("zigzag", None, 200, [(0, 150, "all")]),
    "never": ("zigzag", 70, None, [(0, 70, "all"), (70, 140, "all"), (140, 150, "all")]),
    "a layout": (make_layout("striped", 2, 64), None, 16, [(0, 64, "tokens"), (64, 128, "tokens"), (128, 150, "all")]),
}


@pytest.mark.parametrize("what", PIECES)
def test_where_a_prompt_is_cut(what: str, ranks: RankPools) -> None:
    layout, chunk, shard_from, pieces = PIECES[what]
    for found, error in ranks(2)(cut_as, layout, chunk, shard_from, 150):
        assert found == pieces and error <= 1e-4


def refused_by_one(here: Here, what: str) -> tuple[str, str]:
    """What a rank hears of a call that rank 1 refuses, and of the next call."""
    model = make_model("llama")
    cp = here.cp(transport=here.transport("shm"))
    ids = torch.full((1, 4), 5)
    more: dict[str, Any] = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 2}
    if here.rank == 1:
        wrong: dict[str, tuple[str, Any]] = {
            "mask": ("attention_mask", torch.tensor([[1, 0, 1, 1]])), "static": ("cache_implementation", "static"),
            "draws": ("do_sample", True),
        }  # fmt: skip
        more |= [wrong[what]]
    with serve_with_tokenring(model, cp):
        try:
            model.generate(ids, **more)
        except tr.TokenRingError as error:
            first = str(error)
        try:
            model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=2)
        except tr.TokenRingError as error:
            return first, str(error)
    return first, ""


@pytest.mark.parametrize(
    ("what", "said"),
    [("mask", "rank 1 refused: attention_mask hides"), ("static", "rank 1 refused: cache_implementation='static'"),
     ("draws", "draws tokens: rank 0: False; rank 1: True")],
)  # fmt: skip
def test_what_one_rank_refuses_all_hear(what: str, said: str, ranks: RankPools) -> None:
    (first, after), (_, also) = ranks(2)(refused_by_one, what)
    assert said in first and after == also == ""
