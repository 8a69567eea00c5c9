"""Context parallelism of MindSpeed-LLM's and -MM's FSDP2 trainers: both passes on ranks against float64."""

from __future__ import annotations

import pytest
from ascend.ranks import NpuPools
from fsdp2_calls import Case, llm_error, mm_error, npu_errors, refused_by_rank_1, wan_error
from ranks import RankPools

EXACT = 2e-6
PACK = (5, 6, 23, 40, 48)

LLM = [
    (2, Case("ulysses", ends=PACK)),
    (4, Case("ulysses", tokens=50, ends=(7, 8, 31, 50), schedule="ring")),  # 13, 13, 12, 12 tokens
    (4, Case("ring", batch=2, heads=(3, 3), dims=(12, 8))),  # as multi-latent attention; 4 ranks share no 3 heads
    (2, Case("ring", ends=PACK, schedule="tokenring")),
    (2, Case("ulysses", window=9, sinks=True)),
    (2, Case("kvallgather", window=9)),
    (2, Case("ring", causal=False)),
]


@pytest.mark.parametrize(("count", "case"), LLM)
def test_layers_of_mindspeed_llm(count: int, case: Case, ranks: RankPools) -> None:
    assert max(ranks(count)(llm_error, case)) <= EXACT


MM = [
    (4, Case((1, 4), tokens=50, ends=(7, 8, 31, 50))),  # text, packed, of a length that does not divide
    (4, Case((1, 4), tokens=49, window=6, layout="BSND")),
    (4, Case((2, 2), batch=2, schedule="ring", layout="BNSD")),
    (4, Case((2, 2), tokens=51, causal=False, ends=(20, 26, 51), each_document=True)),  # images, under a ring
    (4, Case((4, 1), tokens=51, causal=False, ends=(20, 26, 51), each_document=True, layout="1TND")),
    (2, Case((1, 2), tokens=51, causal=False, ends=(20, 26, 51))),
    (4, Case((1, 4), tokens=50, causal=False, told=False, batch=2)),  # DiT
    (4, Case((1, 4), tokens=50, causal=False, kv=13, batch=2)),  # cross-attention
    (4, Case((4, 1), tokens=50, causal=False, each_document=True)),  # one document, lengths by rank
    (2, Case((2, 1), causal=False, ends=(16, 24, 48), each_document=True, lengths=False)),  # encoders of Omni, Qwen3.5
    (4, Case((2, 2), tokens=51, causal=False, ends=(20, 26, 51), each_document=True, lengths=False)),
    (2, Case((2, 1), ends=(16, 24, 48), of_dataset=True)),  # text of Qwen3-VL under a ring
    (2, Case((2, 1), ends=(16, 24, 42, 48), of_dataset=True)),
    (2, Case((1, 2), causal=False, ends=(16, 24, 48), total=12)),  # an encoder that computes a layer again
]


@pytest.mark.parametrize(("count", "case"), MM)
def test_layers_of_mindspeed_mm(count: int, case: Case, ranks: RankPools) -> None:
    assert max(ranks(count)(mm_error, case)) <= EXACT


@pytest.mark.parametrize(("ring", "ulysses", "tokens", "real"), [(1, 2, 30, 30), (2, 2, 30, 26)])
def test_self_attention_of_wan(ring: int, ulysses: int, tokens: int, real: int, ranks: RankPools) -> None:
    """Three heads on four ranks, and lengths that divide by neither."""
    assert max(ranks(ring * ulysses)(wan_error, ring, ulysses, tokens, real)) <= EXACT


def test_layers_on_npus(npus: NpuPools) -> None:
    """Emulated ones, over HCCL: packed documents, and a length that is padded."""
    given = [("llm", Case("ulysses", ends=PACK, schedule="ring")), ("mm", Case((2, 1), batch=2, layout="BSND"))]
    given.append(("mm", Case((2, 1), tokens=51, causal=False, ends=(20, 26, 51), each_document=True)))
    for found in npus(2)(npu_errors, given):
        assert max(found) <= EXACT


def test_what_one_rank_refuses_all_hear(ranks: RankPools) -> None:
    for heard in ranks(2)(refused_by_rank_1):
        assert len(heard) == 2
        assert "Layer with dropout 0.5 is not supported" in heard[0]
        assert "attention_mask [1, 1, 48, 48] for 24 tokens" in heard[1]
