"""Real Megatron-core layers of multi-latent attention whose latents travel, on four CPU ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mcore import runs
from mcore.gpt import Job
from ranks import Ranks
from test_megatron import DOCUMENTS, LIMIT, NEWEST, check_gradients, megatron, of_the_newest

import tokenring as tr

__all__ = ["megatron"]  # a fixture

pytestmark = pytest.mark.timeout(300)  # the first test of a version waits until it is loaded

MLA = Job(groups=4, layers=1, cp=4, latent=True, travels=True)


class TestLatents:
    """Multi-latent attention whose latents travel: 24 + 8 elements of a token for 4 heads of 24 and 16."""

    @pytest.mark.parametrize("recompute", ["", "selective", "full"])
    def test_gradients_are_those_of_one_rank(self, megatron: tuple[str, Ranks], recompute: str) -> None:
        version, ranks = megatron
        if recompute == "full":
            of_the_newest(version)
        names = ["auto", "ring", "direct-kv", "tokenring"] if version == NEWEST and not recompute else ["ring"]
        check_gradients(ranks(runs.worst_errors, replace(MLA, recompute=recompute), names))

    def test_of_packed_documents(self, megatron: tuple[str, Ranks]) -> None:
        if megatron[0] == "0.12.1":
            pytest.skip("its rotary embeddings of such layers do not take packs with padding")
        job = replace(MLA, batch=1, length=128, documents=DOCUMENTS)
        check_gradients(megatron[1](runs.worst_errors, job, ["ring"]))

    @pytest.mark.parametrize("sequence_parallel", [False, True])
    def test_under_tensor_parallelism(self, megatron: tuple[str, Ranks], sequence_parallel: bool) -> None:
        """As of the same split without latents: Megatron's own differ from those of one rank, by 1e-3."""
        job = replace(MLA, tp=2, cp=2, sequence_parallel=sequence_parallel)
        assert max(megatron[1](runs.difference_of_latents, job, "ring")) <= LIMIT

    def test_bytes_are_those_of_latents(self, megatron: tuple[str, Ranks]) -> None:
        """A fifth of those of keys and values: 32 elements of a token for 4 · (24 + 16)."""
        ranks = megatron[1]
        found = ranks(runs.bytes_of_layers, replace(MLA, cp_comm_type="ring"))
        plain = ranks(runs.bytes_of_layers, replace(MLA, cp_comm_type="ring", travels=False))
        size = tr.Workload(MLA.batch, MLA.length, MLA.length, 4, 1, 24, torch.float32, 16, 32)
        wanted = tr.schedule("ring", ranks=4, mask=tr.Causal(), length=MLA.length).link_bytes(size, "forward")
        for of_rank, (latents, whole) in enumerate(zip(found, plain, strict=True)):
            assert {(of_rank, to): n for to, n in latents[0].items() if n} == {
                link: n for link, n in wanted.items() if n and link[0] == of_rank
            }
            assert 5 * sum(latents[0].values()) == sum(whole[0].values())

    def test_auto_sends_what_is_predicted_to_be_faster(self, megatron: tuple[str, Ranks]) -> None:
        version, ranks = megatron
        of_the_newest(version)
        with_latents, without = (ranks(runs.travels_or_not, MLA, travels) for travels in (True, False))
        check_gradients([errors for found in (with_latents, without) for errors, *_ in found])
        assert sum(sent for *_, sent in with_latents) < sum(sent for *_, sent in without)
        assert "attention of 4 heads of 24, values of 16, latents of 32, 2 × 64 tokens" in with_latents[0][1][-1]
        assert "4 kv heads of 24, values of 16, 2 × 64 tokens" in without[0][1][-1]
        said = ranks(runs.logged, MLA)[0]  # as predicted
        chosen = [text for text in said if text.startswith("latents of 32 elements of a token")]
        assert len(chosen) == 1 and " is predicted with ring, and " in chosen[0]

    def test_specs(self, megatron: tuple[str, Ranks]) -> None:
        for name, again, refused in megatron[1](runs.latent_specs):
            assert (name, again) == ("TokenRingMLASelfAttention", True)
            assert refused.startswith("latents=True, and no layer in this ModuleSpec has multi-latent attention")
