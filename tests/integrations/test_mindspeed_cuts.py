"""MindSpeed's cuts of batches and packs: as layouts and masks of ours, and in a layer on ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import mindspeed_layer as layer
import pytest
import torch
from mcore.stand_ins import refusal
from mindspeed_like import ULYSSES, OwnAttention, OwnUlysses, like_mindspeed
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_mindspeed import errors_of, ready

from tokenring import Bidirectional, Causal, Documents, Full, Mask, PrefixLM, SlidingWindow
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron import packs
from tokenring.integrations.mindspeed_cuts import general
from tokenring.integrations.mindspeed_cuts.documents import mask_of_documents, packing_of_ends, sequences_of_ends
from tokenring.integrations.mindspeed_cuts.general import LastMask, mask_of_tensor
from tokenring.integrations.mindspeed_cuts.layouts import layout_of
from tokenring.sequence.layout import contiguous, zigzag

EXACT = 2e-6
HYBRID = "hybrid_cp_algo"


def args(**given: Any) -> Any:
    return SimpleNamespace(**given)


class TestLayouts:
    def test_of_each_algorithm(self) -> None:
        for algorithm in ("megatron_cp_algo", "kvallgather_cp_algo", None):
            assert layout_of(args(context_parallel_algo=algorithm), 2, 16) is None
        packed = args(context_parallel_algo="kvallgather_cp_algo", reset_attention_mask=True)
        whole = args(context_parallel_algo="ulysses_cp_algo"), args(attention_mask_type="general")
        for given in (*whole, packed):
            assert layout_of(given, 2, 16) == contiguous(2, 16)

    @pytest.mark.parametrize(("groups", "neighbours"), [(2, 2), (2, 3), (4, 2), (2, 4)])
    def test_hybrid_cuts_what_a_group_holds(self, groups: int, neighbours: int) -> None:
        ranks, length = groups * neighbours, 4 * groups * neighbours
        found = layout_of(args(context_parallel_algo=HYBRID, ulysses_degree_in_cp=neighbours), ranks, length)
        assert found is not None
        for rank in range(ranks):
            held = torch.tensor(zigzag(groups, length).positions(rank // neighbours))
            assert found.positions(rank) == held.chunk(neighbours)[rank % neighbours].tolist()


def ends(*given: int) -> Any:
    return SimpleNamespace(cu_seqlens_q=torch.tensor(given))


class TestDocuments:
    def test_each_cut_by_itself(self) -> None:
        found = packing_of_ends(ends(2, 8), 1, 4, 8)
        assert (found.padded, found.real, found.rank, found.ranks, found.tokens) == ((8, 24), (8, 24), 1, 4, 8)

    @pytest.mark.parametrize("given", [(3, 8), (2, 10), (8, 2), (2, 6), (4, 2, 8)])
    def test_ends_that_do_not_fit_are_refused(self, given: tuple[int, ...]) -> None:
        text = refusal(ConfigurationError, lambda: packing_of_ends(ends(*given), 0, 2, 8))
        assert text.startswith("packed documents ")
        for last in (14, 17):  # of ends that count the tokens of one rank, or those of another cut
            text = refusal(ConfigurationError, lambda last=last: sequences_of_ends(ends(2, last), 0, 2, 8))
            assert f"end at 2, {last}: ends must rise to 16, the tokens of 2 ranks" in text
        assert sequences_of_ends(ends(2, 16), 0, 2, 8).ends == (0, 2, 16)

    def test_masks_are_made_once_for_all_layers(self) -> None:
        found = sequences_of_ends(ends(2, 16), 0, 2, 8)
        assert found.mask_of_all(Causal(), 2) is found.mask_of_all(Causal(), 2)
        assert found.mask_of_all(Causal(), 1) == Causal() & Documents([0, 2, 16])

    def test_more_slices_than_a_mask_may_have_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(packs, "MOST_SLICES", 3)
        with pytest.raises(UnsupportedError, match="set --micro-batch-size 1"):
            mask_of_documents((0, 3, 8, 10, 16), 2, 2, 8, Causal())

    def test_of_one_sequence_is_a_mask_of_documents(self) -> None:
        assert mask_of_documents((0, 5, 8), 1, 2, 8, Causal()) == Causal() & Documents([0, 5, 8])

    @pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(2, 0)], ids=str)
    def test_of_several_sequences_in_the_order_of_the_ranks(self, mask: Mask) -> None:
        batch, ranks, length, bounds = 2, 2, 8, (0, 3, 8, 10, 16)
        found = mask_of_documents(bounds, batch, ranks, length, mask)
        order = torch.arange(batch * length).view(batch, ranks, -1).transpose(0, 1).flatten().tolist()
        of_one = mask & Documents(bounds)
        for q, a in enumerate(order):
            for kv, b in enumerate(order):
                assert found.allows(q, kv) is of_one.allows(a, b)


def tensor_of(mask: Mask, size: int = 12) -> torch.Tensor:
    """As MindSpeed has it: True where nothing is seen."""
    return torch.tensor([[not mask.allows(q, kv) for kv in range(size)] for q in range(size)])


MASKS = [
    Causal(), Full(), SlidingWindow(3, 0), SlidingWindow(3, 2), Causal() & Documents([0, 3, 9, 12]), PrefixLM(4),
    Causal() | Bidirectional([(2, 5)]), Documents([0, 5, 10]), Mask(low=1),
]  # fmt: skip


class TestGeneral:
    @pytest.mark.parametrize("mask", MASKS, ids=str)
    def test_is_read_from_a_tensor(self, mask: Mask) -> None:
        hidden = tensor_of(mask)
        found = mask_of_tensor(hidden[None, None].expand(2, 1, -1, -1))
        assert torch.equal(tensor_of(found), hidden)

    def test_of_noise_and_of_nothing(self) -> None:
        for hidden in (torch.rand(9, 9, generator=torch.Generator().manual_seed(1)) < 0.5, torch.ones(9, 9).bool()):
            assert torch.equal(tensor_of(mask_of_tensor(hidden), 9), hidden)

    def test_what_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        other = torch.stack([tensor_of(Causal()), tensor_of(Full())])
        assert "set --micro-batch-size 1" in refusal(UnsupportedError, lambda: mask_of_tensor(other))
        text = refusal(UnsupportedError, lambda: LastMask().of(torch.zeros(1, 1, 4, 4).bool(), 8))
        assert "expects a mask [..., 8, 8] of the whole sequence on each rank, and got one of (1, 1, 4, 4)" in text
        text = refusal(UnsupportedError, lambda: LastMask().of(tensor_of(Causal()), 12, (3, 0)))
        assert "leave the window out where the mask has it" in text
        monkeypatch.setattr(general, "MOST_SLICES", 3)
        noise = ~torch.eye(4)[[0, 0, 2, 1, 3, 0]].bool()
        assert "with a mask of 5 slices" in refusal(UnsupportedError, lambda: mask_of_tensor(noise))

    def test_flags_of_the_operator_that_hide_what_the_mask_shows(self) -> None:
        def of(mask: Mask, **flags: int) -> Mask:
            return LastMask().of(tensor_of(mask), 12, None, SimpleNamespace(**flags))

        band = SlidingWindow(3, 2)
        for flags in ({}, {"sparse_mode": 1, "next_tockens": 0}, {"pre_tockens": 3, "next_tockens": 2}):
            assert torch.equal(tensor_of(of(band, **flags)), tensor_of(band))
        of(Causal(), pre_tockens=65536, next_tockens=0)
        for flags, text in (
            ({"pre_tockens": 65536, "next_tockens": 0}, "--next-tockens 0 hides .* say --next-tockens 12"),
            ({"pre_tockens": 2, "next_tockens": 2}, "--pre-tockens 2 hides"),
            ({"sparse_mode": 4}, "--sparse-mode 4"),
        ):
            with pytest.raises(UnsupportedError, match=text):
                of(band, **flags)

    def test_is_read_once_for_all_layers(self) -> None:
        last, hidden = LastMask(), tensor_of(Causal())
        first = last.of(hidden, 12)
        assert last.of(hidden, 12) is first
        hidden[3, 3] = True
        assert last.of(hidden, 12) != first


# ---------- on ranks


def errors_in(here: Here, algorithm: str, schedule: str) -> dict[str, float]:
    more = {"context_parallel_algo": algorithm, "ulysses_degree_in_cp": 2}
    flags = ("--context-parallel-algo", algorithm, "--ulysses-degree-in-cp", "2", "--tokenring-schedule", schedule)
    with like_mindspeed() as mindspeed:
        return errors_of(ready(mindspeed, *flags, **more), seq_dim=0)


@pytest.mark.parametrize(
    ("algorithm", "schedule"),
    [(HYBRID, "usp/2"), (HYBRID, "auto"), ("ulysses_cp_algo", "ring"), ("kvallgather_cp_algo", "all-gather-kv")],
)
def test_layer_is_as_without_context_parallelism(ranks: RankPools, algorithm: str, schedule: str) -> None:
    for found in ranks(4)(errors_in, algorithm, schedule):
        assert max(found.values()) <= layer.LIMIT, found


class MmUlysses(OwnUlysses):
    """As the class by which MindSpeed-MM replaces MindSpeed's."""


def around(here: Here) -> list[str]:
    """What MindSpeed's exchange of heads makes of our attention, and of its own."""
    with like_mindspeed() as mindspeed:
        core = ready(mindspeed, "--context-parallel-algo", "ulysses_cp_algo", context_parallel_algo="ulysses_cp_algo")
        kind: Any = sys.modules[ULYSSES].UlyssesContextAttention
        assert kind(core, None) is core and core._own == ()
        mindspeed.patches.register_patch(f"{ULYSSES}.UlyssesContextAttention", MmUlysses)
        mindspeed.patches.apply()  # as MindSpeed-MM, later
        kind = sys.modules[ULYSSES].UlyssesContextAttention
        assert kind(core, None) is core
        other = kind(OwnAttention(), None)
        assert isinstance(other, MmUlysses)
        assert isinstance(other, OwnUlysses) and isinstance(other, kind)
        return [type(kind(core, None)).__name__, type(other.local_attn).__name__]


def test_heads_are_not_exchanged_around_ours(ranks: RankPools) -> None:
    assert ranks(2)(around) == [["MindSpeedTokenRingAttention", "OwnAttention"]] * 2


BATCH, PACKED, HEADS, DIM = 2, (0, 12, 32, 40, 64), 2, layer.DIM  # ends in both of two sequences
LENGTH = PACKED[-1] // BATCH
Cut = Callable[[int, int], list[int]]


def whole_inputs() -> list[torch.Tensor]:
    torch.manual_seed(5)
    return [torch.randn(PACKED[-1], HEADS, DIM) for _ in range(4)]


def by_documents(rank: int, ranks: int) -> list[int]:
    """Rows that MindSpeed's megatron_cp_algo leaves a rank: of each document two chunks."""
    return [a + at for a, b in pairwise(PACKED) for at in zigzag(ranks, b - a).positions(rank)]


def by_parts(rank: int, ranks: int) -> list[int]:
    """Rows that it leaves a rank otherwise: a part of each sequence."""
    part = LENGTH // ranks
    return [row * LENGTH + rank * part + at for row in range(BATCH) for at in range(part)]


def pack_on(here: Here, given: dict[str, Any], is_batch: bool) -> list[torch.Tensor]:
    """out, dq, dk, dv of the rows of this rank, (b s) h d."""
    cut = by_parts if given else by_documents
    bounds = [end // (1 if given else here.world_size) for end in PACKED[1:]]
    rows = torch.tensor(cut(here.rank, here.world_size))
    q, k, v, dout = (x[rows] for x in whole_inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with like_mindspeed() as mindspeed:
        core = ready(
            mindspeed, "--tokenring-schedule", "ring", reset_attention_mask=True, micro_batch_size=BATCH, **given
        )
        shaped = [x.view(BATCH, -1, HEADS, DIM).transpose(0, 1) if is_batch else x for x in leaves]
        with pytest.raises(ConfigurationError, match="a call has no packed_seq_params"):
            core(*shaped, None)
        params = SimpleNamespace(qkv_format="thd", cu_seqlens_q=torch.tensor(bounds), cu_seqlens_kv=None)
        out = core(*shaped, None, None, None, params)
        out = out.transpose(0, 1).reshape(-1, HEADS, DIM) if is_batch else out
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize(
    ("given", "is_batch"),
    [
        ({}, False),
        ({"context_parallel_algo": "ulysses_cp_algo"}, True),
        ({"attention_mask_type": "general"}, False),
        ({"context_parallel_algo": "kvallgather_cp_algo"}, False),
    ],
    ids=str,
)
def test_packs_are_as_document_by_document(ranks: RankPools, given: dict[str, Any], is_batch: bool) -> None:
    found = ranks(2)(pack_on, given, is_batch)
    cut = by_parts if given else by_documents
    order = torch.tensor([row for rank in range(2) for row in cut(rank, 2)])
    wanted = [torch.zeros(PACKED[-1], HEADS, DIM, dtype=torch.float64) for _ in range(4)]
    for a, b in pairwise(PACKED):
        q, k, v, dout = (x[None, a:b] for x in whole_inputs())
        whole = attention64(q, k, v, dout, allowed(Causal(), b - a, b - a))
        for x, part in zip(wanted, (whole.out, whole.dq, whole.dk, whole.dv), strict=True):
            x[a:b] = part[0]
    for index, want in enumerate(wanted):
        assert relative_error(torch.cat([parts[index] for parts in found]), want[order]) <= EXACT


def general_on(here: Here) -> float:
    """A layer's output under a general mask, which each rank has whole: its error."""
    given = {"context_parallel_algo": "ulysses_cp_algo", "attention_mask_type": "general"}
    q, k, v, dout = (x[:LENGTH] for x in whole_inputs())
    mask = Causal() | Bidirectional([(4, 20)])
    part = slice(here.rank * LENGTH // here.world_size, (here.rank + 1) * LENGTH // here.world_size)
    with like_mindspeed() as mindspeed:
        core = ready(mindspeed, "--tokenring-schedule", "ring", **given)
        out = core(*(x[part, None] for x in (q, k, v)), tensor_of(mask, LENGTH)[None, None])
    wanted = attention64(q[None], k[None], v[None], dout[None], allowed(mask, LENGTH, LENGTH)).out[0, part]
    return relative_error(out.view(-1, HEADS, DIM), wanted)


def test_a_general_mask_in_a_layer(ranks: RankPools) -> None:
    assert max(ranks(2)(general_on)) <= EXACT
