"""Real Megatron-core models, on four CPU ranks: gradients and training as without context parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from mcore import linear_runs, own_step, runs
from mcore.gpt import Job
from mcore.versions import PINNED, folder, need
from mcore.world import load
from patience import patient
from ranks import RankPools, Ranks
from sampling import FULL_GRID

import tokenring as tr
from tokenring.schedule.families.registry import misfit, variants
from tokenring.sequence.layout import zigzag

pytestmark = pytest.mark.timeout(300)  # the first test of a version waits until it is loaded
LOAD_SECONDS = 240
NEWEST = PINNED[-1]
VERSIONS = PINNED if FULL_GRID else [NEWEST]
STEPS = 10 if FULL_GRID else 3
LIMIT = 2e-6  # of a gradient, relative, in float32 against float64
STEP_LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2e-3}
HEADS = {"GQA": (4, 2), "MHA": (4, 4), "MQA": (4, 1)}
FEW = ["auto", "ring", "ulysses"]


@pytest.fixture(scope="module", params=VERSIONS)
def megatron(request: pytest.FixtureRequest) -> Iterator[tuple[str, Ranks]]:
    """A version of Megatron-core, and four ranks that have it loaded."""
    with loaded(request.param, 4) as made:
        yield request.param, made


@pytest.fixture(scope="module", params=VERSIONS)
def eight(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """Eight ranks that have this version loaded."""
    with loaded(request.param, 8) as made:
        yield made


@contextmanager
def loaded(version: str, ranks: int) -> Iterator[Ranks]:
    need(version)
    pools = RankPools(load, str(folder(version)))
    try:
        assert pools.loaded is not None and pools.loaded.result(patient(LOAD_SECONDS)) == version
        yield pools(ranks)
    finally:
        pools.close()


def schedules_for(version: str, job: Job) -> list[str]:
    """All that fit, of the newest version with grouped heads; else a few: they know of no versions."""
    size = tr.Workload(job.batch, job.length, job.length, job.heads, job.groups, job.head_dim)
    every = FULL_GRID or (version == NEWEST and 1 < job.groups < job.heads)
    names = ["auto", *variants(job.cp, size, 2)] if every else FEW
    layout = zigzag(job.cp, job.length)
    return [name for name in names if name == "auto" or misfit(name, job.cp, size, layout, layout) is None]


def of_the_newest(version: str) -> None:
    """Skip what other versions of Megatron do not make different: they run a sample."""
    if version != NEWEST and not FULL_GRID:
        pytest.skip("of the newest version only, without TOKENRING_FULL_GRID=1")


def check_gradients(found: list[dict[str, float]]) -> None:
    worst = max(error for each in found for error in each.values())
    print(f"{len(found[0])} schedules, largest relative error {worst:.1e}")
    wrong = {name: error for each in found for name, error in each.items() if not error <= LIMIT}
    assert not wrong, f"gradients off by {wrong}"


class TestCut:
    """Gradients below are of data and rotary embeddings that Megatron's own functions cut, not ours."""

    @pytest.mark.parametrize("cp", [2, 4])
    def test_is_megatrons_own_and_our_layout(self, megatron: tuple[str, Ranks], cp: int) -> None:
        job = Job(cp=cp, batch=4)
        layout = zigzag(cp, job.length)
        for rank, (batch, rotary, is_own) in enumerate(megatron[1](runs.cut_by_megatron, job)):
            assert is_own
            assert batch == rotary == list(layout.positions(rank % cp))

    def test_contiguous_is_another(self, megatron: tuple[str, Ranks]) -> None:
        job = Job(cp=2, rows="contiguous")
        assert all(batch != rotary for batch, rotary, _ in megatron[1](runs.cut_by_megatron, job))


class TestGradients:
    @pytest.mark.parametrize("heads", HEADS)
    @pytest.mark.parametrize("cp", [2, 4])
    def test_are_those_of_one_rank(self, megatron: tuple[str, Ranks], cp: int, heads: str) -> None:
        version, ranks = megatron
        if (cp, heads) != (4, "GQA"):
            of_the_newest(version)
        layers = 1 if heads != "GQA" and not FULL_GRID else 2  # that layers go together is the same with all heads
        job = Job(*HEADS[heads], cp=cp, layers=layers)
        check_gradients(ranks(runs.worst_errors, job, schedules_for(version, job)))

    @pytest.mark.parametrize("softmax", ["off-by-one", "learnable"])
    def test_with_sinks(self, megatron: tuple[str, Ranks], softmax: str) -> None:
        """The learned ones' too: they are a parameter of each layer."""
        version, ranks = megatron
        if version != NEWEST:
            pytest.skip("Megatron-core has them from 0.16 on")
        check_gradients(ranks(runs.worst_errors, Job(cp=4, softmax=softmax), FEW))
        if softmax == "learnable":
            assert ranks(runs.kept_sinks, Job(cp=4, softmax=softmax)) == [True] * 4

    @pytest.mark.parametrize("recompute", ["selective", "full"])
    def test_when_recomputed(self, megatron: tuple[str, Ranks], recompute: str) -> None:
        version, ranks = megatron
        if recompute != "full":
            of_the_newest(version)
        job = Job(cp=4, recompute=recompute)
        check_gradients(ranks(runs.worst_errors, job, schedules_for(version, job) if FULL_GRID else FEW))

    def test_recomputed_layers_are_planned_once(self, megatron: tuple[str, Ranks]) -> None:
        """Forward without gradients and forward again with them take one schedule."""
        assert set(megatron[1](runs.plans_of_a_step, Job(cp=4, recompute="full"))) == {1}

    def test_of_latent_attention(self, megatron: tuple[str, Ranks]) -> None:
        """Megatron's own layer, whose values are narrower than its keys."""
        check_gradients(megatron[1](runs.worst_errors, Job(cp=4, groups=4, layers=1, latent=True), FEW))

    def test_under_tensor_parallelism(self, megatron: tuple[str, Ranks]) -> None:
        check_gradients(megatron[1](runs.worst_errors, Job(tp=2, cp=2), FEW))

    def test_wrong_data_layout_is_seen(self, megatron: tuple[str, Ranks]) -> None:
        found = megatron[1](runs.worst_errors, Job(cp=4, rows="contiguous"), ["ring"])
        with pytest.raises(AssertionError, match="gradients off by"):
            check_gradients(found)

    def test_wrong_attention_layout_is_seen(self, megatron: tuple[str, Ranks]) -> None:
        found = megatron[1](runs.worst_errors, Job(cp=4), ["ring"], "contiguous")
        with pytest.raises(AssertionError, match="gradients off by"):
            check_gradients(found)


DOCUMENTS = ((48, 48), (16, 16), (5, 16), (0, 0), (30, 32), (16, 16))  # real and padded tokens


class TestPacked:
    """Documents of unequal lengths, some padded, one empty."""

    @pytest.mark.parametrize("cp", [2, 4])
    def test_gradients_are_those_of_one_rank(self, megatron: tuple[str, Ranks], cp: int) -> None:
        if cp != 4:
            of_the_newest(megatron[0])
        job = Job(cp=cp, batch=1, length=128, documents=DOCUMENTS)
        check_gradients(megatron[1](runs.worst_errors, job, FEW))

    def test_cut_as_one_sequence_is_seen(self, megatron: tuple[str, Ranks]) -> None:
        job = Job(cp=4, batch=1, length=128, documents=DOCUMENTS, rows="contiguous")
        found = megatron[1](runs.worst_errors, job, ["ring"])
        with pytest.raises(AssertionError, match="gradients off by"):
            check_gradients(found)


SPLITS: dict[str, dict[str, Any]] = {
    "TP 2 × CP 2": {"tp": 2, "cp": 2},
    "CP 2 × DP 2": {"cp": 2},
    "PP 2 × CP 2": {"pp": 2, "cp": 2},
}


class TestTraining:
    """Steps of Adam: loss and gradient norm as without context parallelism."""

    @pytest.mark.parametrize("dtype", STEP_LIMITS, ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("split", SPLITS)
    def test_goes_the_same_way(self, megatron: tuple[str, Ranks], split: str, dtype: torch.dtype) -> None:
        version, ranks = megatron
        if dtype == torch.bfloat16 or "DP" not in split:
            of_the_newest(version)
        job = Job(dtype=dtype, seed=2, **SPLITS[split])
        # "Without CP" in half precision is the same split but for CP, as tensor parallelism rounds otherwise by itself
        # (the next test). In float32 it is one rank, where nothing is split.
        without = replace(job, cp=1) if dtype == torch.bfloat16 else replace(job, tp=1, cp=1, pp=1)
        wanted = steps_without(ranks, without, STEPS, dtype == torch.float32)
        check_steps(ranks(runs.train, job, STEPS), wanted, STEP_LIMITS[dtype])

    def test_in_half_precision_is_near_one_rank_too(self, megatron: tuple[str, Ranks]) -> None:
        """At a rate at which Adam does not make much of roundings; at the rate above TP 2 alone is 2.3e-3 off."""
        version, ranks = megatron
        of_the_newest(version)
        job = Job(tp=2, cp=2, dtype=torch.bfloat16, seed=2)
        wanted = ranks(runs.train, replace(job, tp=1, cp=1), STEPS, learning_rate=1e-4)
        check_steps(ranks(runs.train, job, STEPS, learning_rate=1e-4), wanted, STEP_LIMITS[torch.bfloat16])

    def test_other_steps_are_seen(self, megatron: tuple[str, Ranks]) -> None:
        ranks = megatron[1]
        found, wanted = ranks(runs.train, Job(cp=2, rows="contiguous"), 2), ranks(runs.train, Job(), 2, True)
        with pytest.raises(AssertionError):
            check_steps(found, wanted, STEP_LIMITS[torch.bfloat16])


class TestMegatronsOwnStep:
    """Megatron's DistributedDataParallel, its sums of gradients and its optimizer: as without context parallelism."""

    @pytest.mark.parametrize("split", SPLITS)
    def test_goes_the_same_way(self, megatron: tuple[str, Ranks], split: str) -> None:
        if "DP" not in split and not FULL_GRID:
            pytest.skip("one split only, without TOKENRING_FULL_GRID=1")
        job, ranks = Job(seed=3, batch=4, **SPLITS[split]), megatron[1]
        wanted = ranks(own_step.train, replace(job, tp=1, cp=1, pp=1), 3, True)
        check_steps(ranks(own_step.train, job, 3), wanted, STEP_LIMITS[torch.float32])

    def test_other_steps_are_seen(self, megatron: tuple[str, Ranks]) -> None:
        job, ranks = Job(cp=2, rows="contiguous"), megatron[1]
        found, wanted = ranks(own_step.train, job, 1), ranks(own_step.train, replace(job, cp=1), 1, True)
        with pytest.raises(AssertionError):
            check_steps(found, wanted, STEP_LIMITS[torch.float32])

    @pytest.mark.skipif(not FULL_GRID, reason="eight ranks, by hand: TOKENRING_FULL_GRID=1")
    @pytest.mark.parametrize("batch", [4, 8])
    def test_all_splits_together(self, eight: Ranks, batch: int) -> None:
        """TP 2 × CP 2 × PP 2; without CP that leaves TP 2 × PP 2 × DP 2, and without any split one rank's work."""
        job = Job(tp=2, cp=2, pp=2, seed=4, batch=batch)
        found = eight(own_step.train, job, 3)
        for without in (replace(job, cp=1), replace(job, tp=1, cp=1, pp=1)):
            wanted = eight(own_step.train, without, 3, True)
            check_steps(found, wanted, STEP_LIMITS[torch.float32])


History = list[tuple[float, float]]  # of a rank: (loss, gradient norm) of each step; NaN where a pipeline has no loss


@cache
def steps_without(ranks: Ranks, job: Job, steps: int, whole_attention: bool) -> list[History]:
    """Without context parallelism: what several splits are compared with, once for these ranks."""
    return ranks(runs.train, job, steps, whole_attention)


def check_steps(found: list[History], wanted: list[History], limit: float) -> None:
    ends = [history for history in found if not math.isnan(history[0][0])]
    end = next(history for history in wanted if not math.isnan(history[0][0]))
    assert ends
    off = [abs(got / want - 1) for history in ends for (got, _), (want, _) in zip(history, end, strict=True)]
    off += [abs(got / want - 1) for history in found for (_, got), (_, want) in zip(history, end, strict=True)]
    print(f"largest relative difference {max(off):.1e}")
    assert max(off) <= limit


class TestSpecs:
    def test_of_layers_and_blocks_get_our_attention(self, megatron: tuple[str, Ranks]) -> None:
        for given, layer, block, params in megatron[1](runs.specs):
            assert given == "DotProductAttention"  # the given spec stays what it is
            assert (layer, block) == ("TokenRingAttention", ["TokenRingAttention"] * 2)
            assert params == {"schedule": "usp/2", "any_version": False, "timeout_seconds": 30}

    def test_without_attention_are_refused(self, megatron: tuple[str, Ranks]) -> None:
        for text in megatron[1](runs.refused_spec):
            assert text.startswith("there is no core_attention of a self-attention in this ModuleSpec: give a layer")


class TestLayers:
    def test_schedule_of_each_comes_from_cp_comm_type(self, megatron: tuple[str, Ranks]) -> None:
        """Seen by the bytes on the wire, which are those of the schedules."""
        names = ["ring", "ulysses", "all_gather"]
        job = Job(4, 4, layers=3, cp=4, batch=1, cp_comm_type=tuple(names))
        found = megatron[1](runs.bytes_of_layers, job)
        for layer, name in enumerate(["ring", "ulysses", "all-gather-kv"]):
            size = tr.Workload(job.batch, job.length, job.length, job.heads, job.groups, job.head_dim)
            schedule = tr.schedule(name, ranks=4, mask=tr.Causal(), length=job.length)
            wanted = schedule.link_bytes(size, "forward")
            sent = {(rank, to): count for rank in range(4) for to, count in found[rank][layer].items() if count}
            assert sent == {link: count for link, count in wanted.items() if count}, name

    def test_share_one_context(self, megatron: tuple[str, Ranks]) -> None:
        assert set(megatron[1](runs.shared_contexts, Job(cp=2))) == {(1, 1)}

    def test_have_nothing_in_checkpoints(self, megatron: tuple[str, Ranks]) -> None:
        for ours, others in megatron[1](runs.names_in_state, Job(cp=2)):
            assert ours == others

    def test_load_checkpoints_of_other_attention(self, megatron: tuple[str, Ranks]) -> None:
        assert set(megatron[1](runs.loads_strictly, Job(cp=2))) == {"<All keys matched successfully>"}

    def test_rank_0_says_once_what_they_do(self, megatron: tuple[str, Ranks]) -> None:
        found = megatron[1](runs.logged, Job(cp=2))
        ours, *others = [[text for text in said if not text.startswith("schedule auto")] for said in found]
        assert others == [[], [], []]
        assert ours[0] == "topology: machine without accelerators"
        kind = "attention of 4 query and 2 kv heads of 16, 1 × 64 tokens in float32, causal, over 2 ranks: "
        assert [text.startswith(kind) for text in ours[1:]] == [True]


TP_CP = Job(tp=2, cp=2, sequence_parallel=True)
REFUSED = {
    "no linears": "ConfigurationError: there is no linear_qkv, linear_fc1 or other linear layer in this ModuleSpec: ",
    "TransformerEngine": "UnsupportedError: linear_fc1 is TELayerNormColumnParallelLinear, which is not replaced: ",
    "schedule": "ConfigurationError: schedule 'ring' moves weights, and Megatron's layers keep theirs: take one where",
    "several": "ConfigurationError: schedule='auto:direct-q': linear layers take 'auto', or one by name",
    "option": "ConfigurationError: use_tokenring_linears got stays; known are transport, topology, partials, ",
    "kernel": "UnsupportedError: kernel 'mc2' is for layers under sequence_parallel: set config.sequence_parallel=True",
    "gather_output": "UnsupportedError: gather_output=True is not supported: keep Megatron's own layer, as of output",
    "disable_grad_reduce": "UnsupportedError: disable_grad_reduce=True is not supported: keep Megatron's own layer",
    "input_is_parallel": "UnsupportedError: input_is_parallel=False is not supported: keep Megatron's own layer",
    "fp16": "UnsupportedError: linear layers in float16 are not supported: use bf16, or float32",
    "graphs": "UnsupportedError: CUDA graphs of tensor-parallel layers are not supported, as ranks agree on each call",
    "nothing": "not refused",
}
ONE_REFUSES = {
    "width": "ConfigurationError: TokenRingColumnParallelLinear was given [16, 1, 63]: give [s, b, 64], what its",
    "length": "ConfigurationError: TokenRingRowParallelLinear was given 3 tokens, which 2 tensor-parallel ranks do not",
    "gather": "UnsupportedError: runtime_gather_output is not supported: keep Megatron's own layer for it",
    "dtype": "ConfigurationError: column_linear was given torch.float64 on cpu and a weight of torch.float32 on cpu: ",
    "right": "not refused",
}


class TestLinears:
    """Column and row linears by our schedules, TP 2 × CP 2 beside our attention."""

    @pytest.mark.parametrize("sequence_parallel", [True, False])
    @pytest.mark.parametrize("schedule", ["auto", "tokenring"])
    def test_gradients_are_those_of_one_rank(
        self, megatron: tuple[str, Ranks], schedule: str, sequence_parallel: bool
    ) -> None:
        if schedule != "auto" or not sequence_parallel:
            of_the_newest(megatron[0])
        job = replace(TP_CP, linears=schedule, sequence_parallel=sequence_parallel)
        assert max(megatron[1](linear_runs.worst_error, job)) <= LIMIT

    def test_of_latent_attention(self, megatron: tuple[str, Ranks]) -> None:
        """As with Megatron's own linears, whose gradient of linear_kv_down_proj is 1.4e-3 off under TP 2."""
        of_the_newest(megatron[0])
        job = replace(TP_CP, groups=4, layers=1, latent=True)
        theirs = megatron[1](linear_runs.worst_error, job)
        ours = megatron[1](linear_runs.worst_error, replace(job, linears="auto"))
        assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) <= LIMIT

    def test_sums_that_stay_away_are_seen(self, megatron: tuple[str, Ranks]) -> None:
        of_the_newest(megatron[0])
        job = replace(TP_CP, linears="auto", sequence_parallel=False, layers=1)
        assert max(megatron[1](linear_runs.worst_error, job, True)) > 100 * LIMIT

    def test_in_half_precision_err_as_megatrons_own(self, megatron: tuple[str, Ranks]) -> None:
        of_the_newest(megatron[0])
        job = replace(TP_CP, dtype=torch.bfloat16)
        theirs = max(megatron[1](linear_runs.worst_error, job))
        assert max(megatron[1](linear_runs.worst_error, replace(job, linears="auto"))) <= 1.1 * theirs

    @pytest.mark.parametrize("schedule", ["direct-q", "tokenring"])
    def test_send_what_their_schedules_say(self, megatron: tuple[str, Ranks], schedule: str) -> None:
        of_the_newest(megatron[0])
        for counted, planned in megatron[1](linear_runs.bytes_and_plans, replace(TP_CP, linears=schedule, layers=1)):
            assert counted == planned
            assert all(sum(links.values()) for passes in counted.values() for links in passes.values())

    @pytest.mark.parametrize("sequence_parallel", [True, False])
    def test_add_to_main_grad(self, megatron: tuple[str, Ranks], sequence_parallel: bool) -> None:
        of_the_newest(megatron[0])
        job = replace(TP_CP, linears="auto", sequence_parallel=sequence_parallel)
        for found in megatron[1](linear_runs.fused, job):
            assert {name: (added, zeros) for name, (_, added, zeros) in found.items()} == dict.fromkeys(
                linear_runs.NAMES, (True, True)
            )
            assert max(error for error, *_ in found.values()) <= LIMIT

    @pytest.mark.parametrize("fused", [False, True])
    def test_train_by_megatrons_own_step(self, megatron: tuple[str, Ranks], fused: bool) -> None:
        if fused:
            of_the_newest(megatron[0])
        job, ranks = replace(TP_CP, seed=3, batch=4, linears="auto"), megatron[1]
        wanted = ranks(own_step.train, job.whole_in(torch.float32), 3, True)
        check_steps(ranks(own_step.train, job, 3, False, fused), wanted, STEP_LIMITS[torch.float32])

    def test_share_one_group_until_it_is_released(self, megatron: tuple[str, Ranks]) -> None:
        for count, closed, error in megatron[1](linear_runs.shared, replace(TP_CP, linears="auto")):
            assert (count, closed) == (1, True) and error <= LIMIT

    def test_refuse_by_name(self, megatron: tuple[str, Ranks]) -> None:
        of_the_newest(megatron[0])
        for found in megatron[1](linear_runs.refusals):
            assert {name: text[: len(REFUSED[name])] for name, text in found.items()} == REFUSED

    def test_all_hear_what_one_rank_refuses(self, megatron: tuple[str, Ranks]) -> None:
        """Ranks 0 and 1 are of one tensor-parallel group, 2 and 3 of another, where nobody refuses."""
        of_the_newest(megatron[0])
        heard, refused, *others = megatron[1](linear_runs.one_refuses, replace(TP_CP, linears="auto", layers=1))
        assert {name: text[: len(ONE_REFUSES[name])] for name, text in refused.items()} == ONE_REFUSES
        assert heard == dict.fromkeys(ONE_REFUSES, "Disagreement") | {"right": "not refused"}
        for each in others:
            assert each == dict.fromkeys(ONE_REFUSES, "not refused")
