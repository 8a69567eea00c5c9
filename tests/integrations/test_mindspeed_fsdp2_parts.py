"""Parts of the integration of FSDP2 trainers in one process: cuts, options, what is replaced, refused and put back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsdp2_calls import Case, Layer, part, visible
from mindspeed_fsdp2_like import (
    LLM_CP,
    MM,
    build,
    context_parallel_attention_forward,
    like_llm,
    like_mm,
    split_lengths,
)
from oracle import allowed

import tokenring as tr
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations.mindspeed_cuts.layouts import hybrid_layout
from tokenring.integrations.mindspeed_fsdp2 import contexts, cuts, stop_tokenring, use_tokenring, using
from tokenring.integrations.mindspeed_fsdp2.calls import LastRead, check_tokens, ends_of, mask_of_layer
from tokenring.integrations.mindspeed_fsdp2.cuts import CutCall, TrainerCut, cut_call, cut_of_documents
from tokenring.integrations.versions import KnownSource

# ---------- cuts

CASES = [
    Case("ulysses", tokens=24, ends=(3, 4, 17, 24)),
    Case("ulysses", tokens=26, ends=(3, 4, 17, 26), window=5),
    Case("ring", tokens=24, ends=(3, 4, 17, 24)),
    Case((1, 4), tokens=25, causal=False, ends=(9, 25)),
    Case((1, 4), tokens=3),
    Case((2, 2), tokens=24, ends=(3, 17, 24)),
    Case((2, 3), tokens=36, window=7),
    Case((3, 2), tokens=26, causal=False, ends=(8, 9, 26), each_document=True),
    Case((4, 1), tokens=26, causal=False, each_document=True),
]


def made(case: Case) -> tuple[CutCall, int]:
    """Return how its call is made, and by how many ranks."""
    cut = (
        TrainerCut(*case.cut)
        if isinstance(case.cut, tuple)
        else TrainerCut(*((4, 1) if case.cut == "ring" else (1, 4)))
    )
    mask = mask_of_layer("Layer", case.causal, None if case.window is None else case.window - 1)
    if case.each_document:
        return cut_of_documents(cut, split_lengths(list(case.documents), cut.ring).tolist(), mask), cut.ranks
    held = part(case, torch.arange(case.tokens)[None], 0, cut.ranks).shape[1]
    ends = None if case.ends is None else (0, *case.ends)
    return cut_call(cut, held, case.tokens, ends, mask), cut.ranks


def says_what_is_seen(case: Case) -> bool:
    """Tell whether the mask of a call, in its layout, shows each token what it is to see, and nothing of padding."""
    call, ranks = made(case)
    assert call.layout is not None
    token_at = torch.full((call.layout.length,), -1)
    for rank in range(ranks):
        tokens = part(case, torch.arange(case.tokens)[None], rank, ranks)[0]
        assert call.tokens is None or call.tokens[rank] == len(tokens)
        places = torch.tensor(call.layout.positions(rank), dtype=torch.int64)
        if len(places) < len(tokens):
            return False
        token_at[places[: len(tokens)]] = tokens
    seen = allowed(call.mask, call.layout.length, call.layout.length)
    real = token_at >= 0
    if int(real.sum()) != case.tokens or bool(seen[:, ~real][real].any()):
        return False
    at = token_at[real]
    right = visible(case, None if case.window is None else case.window - 1)
    return torch.equal(seen[real][:, real], right[at][:, at])


@pytest.mark.parametrize("case", CASES)
def test_calls_say_what_each_token_sees(case: Case) -> None:
    cuts._cut_call.cache_clear()
    cuts._cut_of_documents.cache_clear()
    assert says_what_is_seen(case)


@pytest.mark.parametrize("mutant", ["neighbours", "rest last", "documents lost"])
def test_other_cuts_show(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutant == "neighbours":  # MindSpeed's own order of ranks
        monkeypatch.setattr(cuts, "_ring_layout", lambda cut, length: hybrid_layout(cut.ranks, length, cut.ulysses))
    elif mutant == "rest last":
        whole = cuts._part
        monkeypatch.setattr(cuts, "_part", lambda length, ranks, rank: whole(length, ranks, ranks - 1 - rank))
    else:
        whole_runs = cuts._runs_of_equal_parts
        monkeypatch.setattr(cuts, "_runs_of_equal_parts", lambda n, ends, ranks: whole_runs(n, (0, n), ranks))
    cuts._cut_call.cache_clear()
    cuts._cut_of_documents.cache_clear()
    case = {"neighbours": CASES[6], "rest last": CASES[7], "documents lost": CASES[3]}[mutant]
    try:
        with pytest.raises((AssertionError, ConfigurationError)):
            assert says_what_is_seen(case)
    finally:
        monkeypatch.undo()
        cuts._cut_call.cache_clear()
        cuts._cut_of_documents.cache_clear()


def test_what_does_not_fit_is_refused() -> None:
    causal = tr.Causal()
    with pytest.raises(ConfigurationError, match=r"end at 5, 30, and the sequence of 2 ranks has 24 tokens"):
        cut_call(TrainerCut(1, 2), 12, 24, (0, 5, 30), causal)
    with pytest.raises(ConfigurationError, match=r"26 tokens on a ring of 4 ranks .* multiple of 8"):
        cut_call(TrainerCut(4, 1), 6, 26, None, causal)
    with pytest.raises(ConfigurationError, match="seq_split_lens have 2 rows, and the ring 4 ranks"):
        cut_of_documents(TrainerCut(4, 1), [[3], [4]], tr.Full())
    uneven = cut_call(TrainerCut(1, 4), 7, 26, None, causal)
    with pytest.raises(ConfigurationError, match=r"rank 2 holds 7 and 6 tokens of q and k, and by the lengths .* 6"):
        check_tokens(uneven, 2, 7, 6)
    with pytest.raises(UnsupportedError, match="sliding window and is_causal=False"):
        mask_of_layer("Layer", False, 4)


def test_ends_of_documents_are_read_once() -> None:
    reads: list[object] = []

    def read(given: Any) -> Any:
        reads.append(given)
        return ends_of(given)

    last, ends = LastRead(read), torch.tensor([4, 4, 9])
    assert last.of(ends) == last.of(ends) == (0, 4, 9) and len(reads) == 1
    ends[2] = 12  # in place
    assert last.of(ends) == (0, 4, 12) and last.of([0, 4, 12]) == (0, 4, 12)
    with pytest.raises(ConfigurationError, match=r"end at \[5, 3\]: ends must rise"):
        last.of([5, 3])


# ---------- what is replaced


@pytest.fixture
def on_one_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every context is of this process alone."""
    cp = tr.ContextParallel("self", contexts.LIKE_THEIRS)
    monkeypatch.setattr(contexts.TrainerContexts, "of", lambda self, group: cp)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    yield
    stop_tokenring()


def call(
    attention: Any, *more: Any, tokens: int = 6, layer: Any = None, mask: Any = None, **given: Any
) -> torch.Tensor:
    q = torch.randn(1, 2, tokens, 8)
    out: torch.Tensor = attention(layer or Layer(), q, q, q, mask, *more, **given)[0]
    return out


def is_theirs(out: torch.Tensor) -> bool:
    return bool((out == 7.0).all())


@pytest.mark.parametrize("built_first", [False, True])
def test_models_of_mindspeed_llm_call_ours(built_first: bool, on_one_rank: None) -> None:
    with like_llm() as model:
        if built_first:
            build("qwen3")
            assert is_theirs(call(model.eager_attention_forward))
        use_tokenring(schedule="ring")  # the one that is imported
        if not built_first:
            build("qwen3")
        assert not is_theirs(call(model.eager_attention_forward))
        use_tokenring("mindspeed_llm", schedule="tokenring")  # again: what the model has goes by these options
        assert using._contexts.options == {"schedule": "tokenring"}
        assert not is_theirs(call(model.eager_attention_forward))
        assert model.eager_attention_forward.__wrapped__.__code__ is context_parallel_attention_forward.__code__
        stop_tokenring()
        assert is_theirs(call(model.eager_attention_forward))
        build("qwen3")
        assert is_theirs(call(model.eager_attention_forward))


def test_a_second_call_that_fails_leaves_the_first(on_one_rank: None) -> None:
    with like_llm() as model:
        use_tokenring(schedule="ring")
        build("qwen3")
        with pytest.raises(BackendUnavailable):
            use_tokenring("mindspeed_mm")
        assert using._contexts.options == {"schedule": "ring"}
        assert not is_theirs(call(model.eager_attention_forward))
        build("qwen3")
        assert not is_theirs(call(model.eager_attention_forward))


def test_models_that_do_not_call_it_are_refused(on_one_rank: None) -> None:
    with like_llm():
        use_tokenring("mindspeed_llm")
        for kind in ("glm_moe_dsa", "deepseek_v4"):
            with pytest.raises(UnsupportedError, match=f"type '{kind}' are not supported .* sparse attention"):
                build(kind)
        with pytest.raises(UnsupportedError, match=r"'qwen3_next' were not compared .* \(GDN\) .* any_model=True"):
            sys.modules[f"{LLM_CP}.context_parallel_manager"].ContextParallelMappingManager().get_model_cp_mappings(
                "qwen3_next", None
            )
        use_tokenring("mindspeed_llm", any_model=True)
        found = sys.modules[f"{LLM_CP}.context_parallel_manager"].ContextParallelMappingManager()
        assert len(found.get_model_cp_mappings("qwen3_next", None)) == 2


def test_layers_of_mindspeed_mm_call_ours(on_one_rank: None) -> None:
    with like_mm(ring=1, ulysses=2) as registry:
        theirs = registry["flash_attention_3"]
        use_tokenring()
        for name in ("flash_attention_2", "flash_attention_3"):
            assert not is_theirs(call(registry[name], is_causal=False))
            assert is_theirs(call(registry[name], skip_ulysses=True))  # of tokens that are whole on every rank
        ours = sys.modules[f"{MM}.ops.flash_attn.flash_attn"].flash_attention_forward
        assert ours is registry["flash_attention_2"]
        stop_tokenring()
        assert registry["flash_attention_3"] is theirs
        registry.register("flash_attention_3", ours)  # as apply_ops_patch did meanwhile
        assert is_theirs(call(registry["flash_attention_3"], is_causal=False))
    with like_mm() as registry:  # no context parallelism
        use_tokenring()
        assert is_theirs(call(registry["flash_attention_2"]))


# ---------- what is refused

LLM_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "dropout 0.1 is not supported"),
    ({"mask": torch.ones(1, 12)}, r"attention_mask \[1, 12\] for 6 tokens here"),
    ({"mask": torch.zeros(1, 1, 12, 12)}, r"attention_mask \[1, 1, 12, 12\]"),
    ({"mask": torch.zeros(1, 1, 6, 6), "is_causal": False}, r"attention_mask \[1, 1, 6, 6\]"),
    ({"output_attentions": True}, "output_attentions, which is not supported"),
    ({"is_causal": False, "sliding_window": 3}, "sliding window and is_causal=False"),
    ({"actual_seq_len": torch.tensor([4, 9])}, "gives rank 0 9 of 9 positions, but it holds 6"),
]


@pytest.mark.parametrize(("given", "words"), LLM_REFUSALS)
def test_refusals_of_mindspeed_llm(given: dict[str, Any], words: str, on_one_rank: None) -> None:
    with like_llm() as model:
        use_tokenring("mindspeed_llm")
        build("qwen3")
        with pytest.raises((UnsupportedError, ConfigurationError), match=words):
            call(model.eager_attention_forward, **given)


def test_an_unknown_cut_is_refused(on_one_rank: None) -> None:
    with like_llm(cp_type="helix") as model:
        use_tokenring("mindspeed_llm")
        build("qwen3")
        with pytest.raises(ConfigurationError, match="cp_type 'helix' is not one that tokenring knows"):
            call(model.eager_attention_forward)


LEFT, HOLE = torch.tensor([[0, 0, 1, 1, 1, 1]]), torch.tensor([[1, 1, 0, 1, 1, 1]])
MM_REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"dropout": 0.1}, "dropout 0.1 is not supported"),
    ({"mask": LEFT}, "right padding"),
    ({"block_indices": torch.zeros(1)}, "block_indices, which is not supported: an indexer"),
    ({"mask": HOLE}, "right padding"),
    ({"mask": torch.ones(1, 1, 6, 6)}, r"attention_mask \[1, 1, 6, 6\]"),
    ({"mask": 1 - LEFT, "is_causal": False}, r"attention_mask \[1, 6\]"),
    ({"input_layout": "SBH"}, "input_layout 'SBH' is unknown"),
    ({}, r"Layer does not say how long the whole sequence is \(total_seq_len\)"),
    ({"cu_seq_lens_q": [0, 2, 6]}, r"Layer does not say how long the whole sequence is"),
    ({"cu_seq_lens_q": [0, 2, 6], "cu_seq_lens_k": [0, 3, 6]}, "other ends for keys"),
    ({"seq_split_lens": torch.tensor([[3], [3]])}, "seq_split_lens with is_causal=True"),
    ({"seq_split_lens": torch.ones(1, 1, 1), "is_causal": False}, r"seq_split_lens are \[1, 1, 1\]"),
]


@pytest.mark.parametrize(("given", "words"), MM_REFUSALS)
def test_refusals_of_mindspeed_mm(given: dict[str, Any], words: str, on_one_rank: None) -> None:
    with like_mm(ring=2) as registry:
        use_tokenring("mindspeed_mm")
        with pytest.raises((UnsupportedError, ConfigurationError), match=words):
            call(registry["flash_attention_2"], **given)


def test_rows_of_a_batch_are_no_documents(on_one_rank: None) -> None:
    with like_mm(ulysses=2) as registry:
        use_tokenring("mindspeed_mm")
        q, attention = torch.randn(2, 2, 6, 8), registry["flash_attention_2"]
        out = attention(Layer(), q, q, q, None, is_causal=False, cu_seq_lens_q=[0, 6, 12])[0]
        wanted = torch.nn.functional.scaled_dot_product_attention(q, q, q).transpose(1, 2)
        assert torch.allclose(out, wanted, atol=1e-6)
        for ends in ([0, 5, 12], [0, 3, 6, 9, 12]):
            with pytest.raises(UnsupportedError, match="packed documents in a batch of 2"):
                attention(Layer(), q, q, q, None, is_causal=False, cu_seq_lens_q=ends)


def test_right_padding_is_taken(on_one_rank: None) -> None:
    with like_mm(ulysses=2) as registry:
        use_tokenring("mindspeed_mm")
        mask = 1 - torch.tensor([[0, 0, 0, 0, 1, 1]])
        with pytest.raises(ConfigurationError, match="2 ranks"):  # the one rank here holds 6 of 6
            call(registry["flash_attention_2"], mask=mask, total_seq_len=6)


def test_videos_of_several_sizes_are_refused(on_one_rank: None) -> None:
    with like_mm(ulysses=2):
        use_tokenring("mindspeed_mm")
        layer = sys.modules[f"{MM}.models.wan2_2.modeling_wan2_2"].WanSelfAttention(8, 2)
        with pytest.raises(UnsupportedError, match=r"videos of \[4, 6\] tokens"):
            layer(torch.randn(2, 6, 8), torch.tensor([4, 6]), None, torch.ones(1, 6, 1, 4))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"layout": "zigzag"}, "the trainer's own options say"),
        ({"group": "self"}, "the trainer's own options say"),
        ({"shedule": "ring"}, r"use_tokenring\(shedule=...\) is no option: choose among schedule"),
        ({"schedule": "rign"}, "rign"),
        ({"trainer": "megatron"}, "say one of 'mindspeed_llm', 'mindspeed_mm'"),
    ],
)
def test_options_that_do_not_fit(given: dict[str, Any], words: str) -> None:
    with like_llm(), pytest.raises(ConfigurationError, match=words):
        use_tokenring(**{"trainer": "mindspeed_llm", **given})


# ---------- releases, and missing packages


def test_missing_packages_and_other_releases() -> None:
    source = KnownSource("MindSpeed-LLM", "c77308a1", "torch_npu")
    with pytest.raises(BackendUnavailable, match="run in a checkout of MindSpeed-LLM with torch_npu"):
        source.function("tokenring.no_such_module", "f", ())
    with pytest.raises(UnsupportedError, match="of no_such in types there is none; take one like commit c77308a1"):
        source.function("types", "no_such", ())
    with like_llm() as model:
        home = sys.modules[f"{LLM_CP}.context_parallel_functions"]
        home.context_parallel_attention_forward = lambda module, q, k, v: None  # type: ignore[attr-defined]
        with pytest.raises(
            UnsupportedError, match=r"context_parallel_attention_forward in .* it takes module, q, k, v"
        ):
            use_tokenring("mindspeed_llm")
        assert model.eager_attention_forward is None


def test_none_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mindspeed_llm", "mindspeed_mm"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ConfigurationError, match="neither of mindspeed_llm and mindspeed_mm imported: say which"):
        use_tokenring()
    with pytest.raises(BackendUnavailable, match=r"cannot be imported .* run in a checkout of MindSpeed-MM"):
        use_tokenring("mindspeed_mm")


def test_options_reach_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []

    def make(group: Any, layout: str, **options: Any) -> Any:
        made.append((group, layout, options))
        return SimpleNamespace(check_open=lambda: None, group=group, close=lambda: made.append(("closed", group)))

    monkeypatch.setattr(contexts, "ContextParallel", make)
    monkeypatch.setattr(contexts, "check_options", lambda options: None)
    found, options = contexts.TrainerContexts(), {"schedule": "ring", "timeout_seconds": 7.0}
    found.use(options)
    assert found.of("1") is found.of("1") is not found.of("2")
    found.use({"schedule": "tokenring"})
    found.of("1")
    assert made == [
        ("1", "striped", options), ("2", "striped", options), ("closed", "1"), ("closed", "2"),
        ("1", "striped", {"schedule": "tokenring"}),
    ]  # fmt: skip
