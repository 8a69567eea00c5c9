"""What the Megatron integration consists of, without Megatron: what it refuses, masks, schedules, groups."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.stand_ins import config, layer, refusal
from mcore.versions import PINNED
from oracle import allowed, attention64, relative_error, variant64
from ranks import Here, RankPools
from said import said

from tokenring import Causal, ContextParallel, Full, Mask, SlidingWindow
from tokenring.errors import BackendUnavailable, ConfigurationError, UnsupportedError
from tokenring.integrations.megatron import per_layer, use_tokenring, version
from tokenring.integrations.megatron.arguments import check_layer
from tokenring.integrations.megatron.groups import SELF, group_of_call, group_of_layer
from tokenring.integrations.megatron.masks import mask_of_call, window_of_layer
from tokenring.integrations.megatron.schedules import schedule_of_layer
from tokenring.integrations.megatron.version import check_known
from tokenring.sequence.layout import zigzag
from tokenring.topology.ranks import full_mesh

EXACT = 2e-6


@pytest.fixture
def fake_megatron(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package of that name with nothing but a version and a parallel_state without groups."""
    package, core = ModuleType("megatron"), ModuleType("megatron.core")
    state = SimpleNamespace(get_context_parallel_group=lambda check_initialized: None)
    core.__dict__.update(__version__="0.16.1", parallel_state=state)
    monkeypatch.setitem(sys.modules, "megatron", package)
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    return core


class TestRefusals:
    def test_dropout(self) -> None:
        text = refusal(UnsupportedError, lambda: layer(config(attention_dropout=0.1)))
        assert text == (
            "attention_dropout is 0.1 (Megatron's default is 0.1), which attention that is split over ranks cannot "
            "repeat: set config.attention_dropout=0.0 (--attention-dropout 0.0)"
        )
        assert layer(config(attention_dropout=0.1), attention_dropout=0.0) is not None

    def test_cross_attention(self) -> None:
        text = refusal(UnsupportedError, lambda: layer(attention_type="cross"))
        assert text == "attention of type 'cross' is not supported: keep Megatron's own core_attention for it"

    @pytest.mark.parametrize(
        "settings", [{"softmax_type": "none such"}, {"qk_clip": True}, {"log_max_attention_logit": True}]
    )
    def test_what_changes_the_softmax_or_looks_into_it(self, settings: dict[str, Any]) -> None:
        text = refusal(UnsupportedError, lambda: layer(config(**settings)))
        assert text.startswith(next(iter(settings)))

    def test_a_soft_cap_that_does_not_say_which_layers_have_windows(self) -> None:
        capped = {"attn_logit_softcapping": 50.0, "window_size": (8, 0)}
        text = refusal(UnsupportedError, lambda: layer(config(**capped)))
        assert text.startswith("attn_logit_softcapping with window_size (8, 0) does not say which layers have windows")
        assert layer(config(**capped, window_attn_skip_freq=2)).window == (8, 0)
        assert layer(config(window_size=(8, 0), attn_logit_softcapping=None)).softcap == 0
        text = refusal(ConfigurationError, lambda: layer(config(attn_logit_softcapping=-1.0)))
        assert text.startswith("softcap is -1.0; give a positive number")

    @pytest.mark.parametrize(
        ("settings", "refused"),
        [
            ({"enable_cuda_graph": True}, True),
            ({"external_cuda_graph": True, "cuda_graph_scope": "attn"}, True),
            ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, True),
            ({"cuda_graph_impl": "local", "cuda_graph_scope": [SimpleNamespace(name="mlp")]}, False),
            ({"cuda_graph_impl": "none", "cuda_graph_scope": "full"}, False),
        ],
    )
    def test_cuda_graphs_of_attention(self, settings: dict[str, Any], refused: bool) -> None:
        def check(ranks: int) -> None:
            check_layer(config(context_parallel_size=ranks, **settings), "self", None)

        check(1)
        if refused:
            assert refusal(UnsupportedError, lambda: check(2)).startswith("CUDA graphs of attention are not supported")
        else:
            check(2)

    def test_unknown_options(self) -> None:
        text = refusal(ConfigurationError, lambda: layer(speed=11))
        assert text.startswith("TokenRingAttention got speed; known are transport, topology,")

    def test_bias(self) -> None:
        x = torch.zeros(4, 1, 2, 16)
        text = refusal(UnsupportedError, lambda: layer()(x, x, x, None, attention_bias=torch.zeros(1)))
        assert text.startswith("attention_bias is not supported: only masks of positions can be split")

    def test_arguments_of_calls_that_are_not_known(self) -> None:
        x = torch.zeros(4, 1, 2, 16)
        text = refusal(UnsupportedError, lambda: layer()(x, x, x, None, sinks=torch.zeros(2)))
        assert text == "core_attention was called with sinks, which tokenring does not know"
        assert layer()(x, x, x, None, sinks=None) is not None

    @pytest.mark.parametrize("found", ["0.11.0", "0.20.0", "1.0", "main"])
    def test_unknown_versions(self, found: str) -> None:
        text = refusal(UnsupportedError, lambda: check_known(found))
        assert text.startswith(f"Megatron-core {found} is not one that tokenring knows (0.12 to 0.19): install")

    @pytest.mark.parametrize("found", ["0.12.0rc1", "0.12.1", "0.19.2"])
    def test_known_versions(self, found: str) -> None:
        check_known(found)

    def test_unknown_version_where_it_matters(self, fake_megatron: ModuleType) -> None:
        fake_megatron.__dict__["__version__"] = "0.42.0"
        refusal(UnsupportedError, lambda: layer(any_version=False))
        refusal(UnsupportedError, lambda: use_tokenring(SimpleNamespace()))

    def test_no_megatron(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "megatron", None)
        text = refusal(BackendUnavailable, lambda: use_tokenring(SimpleNamespace()))
        assert text.startswith("Megatron-core cannot be imported (")
        assert text.endswith("pip install megatron-core, 0.12 to 0.19")


class TestVersionsThatWereNotRun:
    @pytest.fixture(autouse=True)
    def first(self) -> None:
        version._warn.cache_clear()

    @pytest.mark.parametrize("found", ["0.13.1", "0.19.0"])
    def test_are_warned_of_once(self, fake_megatron: ModuleType, found: str) -> None:
        fake_megatron.__dict__["__version__"] = found
        with said() as messages:
            layer(any_version=False), layer(any_version=False)
        assert messages == [
            f"Megatron-core {found} was read, but never run with tokenring; 0.12, 0.14, 0.16 were: before you train, "
            f"compare the gradients of a step with those of context_parallel_size=1"
        ]

    def test_others_are_not(self, fake_megatron: ModuleType) -> None:
        with said() as messages:
            for each in PINNED:
                fake_megatron.__dict__["__version__"] = each
                layer(any_version=False)
        assert messages == []

    @pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 0)])
    def test_rank_0_says_it(
        self, fake_megatron: ModuleType, monkeypatch: pytest.MonkeyPatch, rank: int, count: int
    ) -> None:
        fake_megatron.__dict__["__version__"] = "0.15.0"
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        with said() as messages:
            layer(any_version=False)
        assert len(messages) == count

    def test_run_are_those_that_are_pinned(self) -> None:
        assert [each.rpartition(".")[0] for each in PINNED] == [".".join(map(str, each)) for each in version.RUN]


class TestMasks:
    @pytest.mark.parametrize(
        ("name", "packed", "wanted"),
        [("causal", False, Causal()), ("padding_causal", False, Causal()), ("no_mask", False, Full()),
         ("causal", True, Causal()), ("padding_causal", True, Causal()), ("no_mask", True, Full()),
         ("padding", True, Full())],
    )  # fmt: skip
    def test_come_from_the_type(self, name: str, packed: bool, wanted: Mask) -> None:
        assert mask_of_call(SimpleNamespace(name=name), None, packed, None) == wanted

    @pytest.mark.parametrize("name", ["padding", "arbitrary", "causal_bottom_right"])
    def test_others_are_refused_by_name(self, name: str) -> None:
        text = refusal(UnsupportedError, lambda: mask_of_call(SimpleNamespace(name=name), None, False, None))
        assert text.startswith(f"attention mask type {name!r} is not supported: ")

    def test_tensor_with_padding_is_refused(self) -> None:
        kind = SimpleNamespace(name="padding_causal")
        text = refusal(UnsupportedError, lambda: mask_of_call(kind, torch.ones(1), False, None))
        assert text.startswith("attention mask type 'padding_causal' with a mask tensor is not supported")
        assert mask_of_call(SimpleNamespace(name="causal"), torch.ones(1), False, None) == Causal()

    def test_window_is_joined(self) -> None:
        assert mask_of_call(SimpleNamespace(name="causal"), None, False, (8, 4)) == SlidingWindow(8, 0)
        assert mask_of_call(SimpleNamespace(name="no_mask"), None, False, (8, 4)) == SlidingWindow(8, 4)
        assert mask_of_call(SimpleNamespace(name="causal"), None, False, (-1, 0)) == Causal()

    def test_windows_of_some_layers(self) -> None:
        numbers = range(1, 5)
        every = [window_of_layer(config(window_size=(8, 0)), n) for n in numbers]
        second = [window_of_layer(config(window_size=(8, 0), window_attn_skip_freq=2), n) for n in numbers]
        listed = [window_of_layer(config(window_size=(8, 0), window_attn_skip_freq=[0, 1, 1, 0]), n) for n in numbers]
        assert every == [(8, 0)] * 4
        assert second == [(8, 0), None, (8, 0), None]
        assert listed == [None, (8, 0), (8, 0), None]
        assert window_of_layer(config(), 1) is None
        refusal(ConfigurationError, lambda: window_of_layer(config(window_size=(8, 0), window_attn_skip_freq="2"), 1))


class TestScheduleOfLayer:
    @pytest.mark.parametrize(
        ("cp_comm_type", "wanted"),
        [(None, "tiles/2x2"), ("p2p", "tiles/2x2"), ("ring", "ring"), ("all_gather", "all-gather-kv"),
         ("a2a", "ulysses"), ("a2a+p2p", "auto:usp"), ("auto:ring,usp", "auto:ring,usp"), ("usp/4/keep", "usp/4/keep")],
    )  # fmt: skip
    def test_is_what_cp_comm_type_says(self, cp_comm_type: str | None, wanted: str) -> None:
        assert schedule_of_layer(cp_comm_type, "tiles/2x2", config()) == wanted

    def test_takes_hierarchical_sizes(self) -> None:
        assert schedule_of_layer("a2a+p2p", "auto", config(hierarchical_context_parallel_sizes=[4, 2])) == "usp/4"

    def test_unknown_names_are_refused(self) -> None:
        text = refusal(ConfigurationError, lambda: schedule_of_layer("p2q", "auto", config()))
        assert text.startswith("cp_comm_type 'p2q' is not one of Megatron's (p2p, all_gather, a2a, a2a+p2p), and as")

    @pytest.mark.parametrize(("version", "first"), [("0.12.1", 1), ("0.16.1", 1), ("0.17.0", 0), ("0.19.2", 0)])
    def test_list_counts_as_megatron_does(self, fake_megatron: ModuleType, version: str, first: int) -> None:
        fake_megatron.__dict__["__version__"] = version
        names = per_layer(["a", "b", "c"])
        assert isinstance(names, list) and len(names) == 3 and list(names) == ["a", "b", "c"]
        for each in (names, copy.deepcopy(names), pickle.loads(pickle.dumps(names))):
            assert [each[index + first] for index in range(3)] == ["a", "b", "c"]


class TestGroups:
    def test_one_rank_needs_none(self) -> None:
        assert group_of_layer(config(), None, None) == SELF

    def test_missing_ones_are_refused(self, fake_megatron: ModuleType) -> None:
        wanted = config(context_parallel_size=2)
        text = refusal(ConfigurationError, lambda: group_of_layer(wanted, None, None))
        assert text.startswith("context_parallel_size is 2, but parallel_state has no group for it: call initialize")
        text = refusal(ConfigurationError, lambda: group_of_layer(wanted, SimpleNamespace(), None))
        assert text.startswith("context_parallel_size is 2, but SimpleNamespace.cp has no group for it")

    def test_of_another_size_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
        given = SimpleNamespace(cp=object())
        text = refusal(ConfigurationError, lambda: group_of_layer(config(context_parallel_size=2), None, given))
        assert text == "context_parallel_size is 2, but the group of SimpleNamespace.cp has 4 ranks: make them agree"
        assert group_of_layer(config(context_parallel_size=4), None, given) is given.cp

    def test_calls_may_bring_their_own(self, monkeypatch: pytest.MonkeyPatch) -> None:
        own: Any = object()
        monkeypatch.setattr(dist, "get_world_size", lambda group: 1 if group is own else 2)
        theirs = object()
        assert group_of_call(own, None) is own
        assert group_of_call(own, SimpleNamespace(cp_group=theirs)) is theirs
        assert group_of_call(theirs, SimpleNamespace(cp_group=own)) == SELF
        assert group_of_call(own, SimpleNamespace(cp_group=None, local_cp_size=1)) == SELF
        text = refusal(ConfigurationError, lambda: group_of_call(own, SimpleNamespace(cp_group=None, local_cp_size=2)))
        assert "local_cp_size is 2, but its cp_group is None" in text


class TestOneRank:
    """Without context parallelism the same module computes here."""

    def test_causal_and_grouped_heads(self) -> None:
        q, k, v, dout = (torch.randn(10, 2, heads, 16) for heads in (4, 2, 2, 4))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = layer(softmax_scale=0.3)(q, k, v, None)
        assert out.shape == (10, 2, 64)
        found = [out.detach().unflatten(-1, (4, 16)), *torch.autograd.grad(out, leaves, dout.flatten(2))]
        q, k, v, dout = (x.transpose(0, 1) for x in (q, k, v, dout))
        whole = attention64(q, k, v, dout, allowed(Causal(), 10, 10), 0.3)
        for got, want in zip(found, (whole.out, whole.dq, whole.dk, whole.dv), strict=True):
            assert relative_error(got.transpose(0, 1), want) <= EXACT

    @pytest.mark.parametrize("widths", [(24, 16), (16, 24)])
    def test_values_of_another_width(self, widths: tuple[int, int]) -> None:
        """As in multi-latent attention."""
        wide, narrow = widths
        q, k, v = torch.randn(8, 1, 4, wide), torch.randn(8, 1, 4, wide), torch.randn(8, 1, 4, narrow)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = layer(k_channels=wide, v_channels=narrow)(q, k, v, None)
        scores = torch.einsum("sbhd,tbhd->bhst", q.double(), k.double()) / math.sqrt(wide)
        shares = torch.softmax(scores.masked_fill(~allowed(Causal(), 8, 8), -math.inf), -1)
        want = torch.einsum("bhst,tbhd->sbhd", shares, v.double()).flatten(2)
        assert relative_error(out, want) <= EXACT
        wanted = torch.autograd.grad(want.square().sum(), leaves)
        for got, gradient in zip(torch.autograd.grad(out.square().sum(), leaves), wanted, strict=True):
            assert relative_error(got, gradient) <= EXACT

    def test_scale_and_cap_of_gemma_2(self) -> None:
        """Megatron-Bridge's configuration has both; a scale that Megatron gives comes first."""
        gemma = config(query_pre_attn_scalar=4, attn_logit_softcapping=0.7)
        x = torch.randn(9, 1, 4, 16)
        one = x.transpose(0, 1)
        for given, scale in ((None, 0.5), (0.3, 0.3)):
            out = layer(gemma, softmax_scale=given)(x, x, x, None).unflatten(-1, (4, 16)).transpose(0, 1)
            whole, _ = variant64(one, one, one, one, None, allowed(Causal(), 9, 9), scale, None, 0.7)
            assert relative_error(out, whole.out) <= EXACT

    def test_one_query_and_a_cache(self) -> None:
        q, k = torch.randn(1, 1, 4, 16), torch.randn(9, 1, 4, 16)
        out = layer()(q, k, k, None, attn_mask_type=SimpleNamespace(name="no_mask"))
        q, k = q.transpose(0, 1), k.transpose(0, 1)
        whole = attention64(q, k, k, q, torch.ones(1, 9, dtype=torch.bool))
        assert relative_error(out.unflatten(-1, (4, 16)).transpose(0, 1), whole.out) <= EXACT

    def test_has_no_state(self) -> None:
        assert not list(layer().state_dict()) and not list(layer().parameters()) and not list(layer().buffers())

    def test_takes_any_schedule_and_topology(self) -> None:
        """Of the ranks that there are with context parallelism."""
        x = torch.randn(4, 1, 4, 16)
        out = layer(schedule="usp/2", topology=full_mesh(8))(x, x, x, None)
        assert torch.equal(out, layer()(x, x, x, None))

    def test_groups_are_named_self_or_given(self) -> None:
        text = refusal(ConfigurationError, lambda: ContextParallel("world"))  # type: ignore[arg-type]
        assert text == "group is 'world'; of names there is 'self' only, for this rank alone"


def cache_on_ranks(here: Here) -> str:
    made = layer(config(context_parallel_size=here.world_size), pg_collection=SimpleNamespace(cp=dist.group.WORLD))
    return refusal(UnsupportedError, lambda: made(torch.zeros(1, 1, 4, 16), *[torch.zeros(9, 1, 4, 16)] * 2, None))


def test_cache_on_several_ranks_is_refused(ranks: RankPools) -> None:
    for text in ranks(2)(cache_on_ranks):
        assert re.match("1 queries and 9 keys on a rank: a KV cache is not supported under context parallelism", text)


def groups_of_calls(here: Here) -> list[torch.Tensor]:
    """The same layer in its own group of all ranks, in one of two that the call brings, and alone."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    made = layer(config(context_parallel_size=4), pg_collection=SimpleNamespace(cp=dist.group.WORLD))
    torch.manual_seed(4)
    whole = torch.randn(32, 1, 4, 16)
    found = []
    for rank, ranks, more in (
        (here.rank, 4, {}),
        (here.rank % 2, 2, {"cp_group": pairs[here.rank // 2], "local_cp_size": 2}),
        (0, 1, {"cp_group": None, "local_cp_size": 1}),
    ):
        rows = torch.tensor(zigzag(ranks, 32).positions(rank))
        x = whole[rows]
        out = torch.zeros(32, 1, 64)
        out[rows] = made(x, x, x, None, packed_seq_params=SimpleNamespace(qkv_format="sbhd", **more) if more else None)
        found.append(out)
    return found


def test_auto_hears_of_tensor_parallelism() -> None:
    """Its groups use the same wires at the same time."""
    made = layer(config(tensor_model_parallel_size=4))
    assert made._contexts.context("ring").tensor_parallel == 4
    assert layer()._contexts.context("ring").tensor_parallel == 1


def test_calls_bring_groups_of_their_own(ranks: RankPools) -> None:
    """Hybrid context parallelism: each sequence takes as many ranks as it needs."""
    found = ranks(4)(groups_of_calls)
    alone = found[0][2]
    assert relative_error(torch.stack([each[0] for each in found]).sum(0), alone) <= EXACT
    assert relative_error(found[0][1] + found[1][1], alone) <= EXACT
    assert relative_error(found[2][1] + found[3][1], alone) <= EXACT
