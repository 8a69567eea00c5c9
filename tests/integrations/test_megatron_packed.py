"""Packed documents as Megatron hands them over: what is read, what is refused, and exact attention of each."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mcore.stand_ins import config, layer, params, refusal
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from sampling import FULL_GRID

from tokenring import Causal, ContextParallel, Documents, Full, Mask, Slices, SlidingWindow, attention
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.integrations.megatron import startup
from tokenring.integrations.megatron.packed import LastPacking, Packing, PackKind, attend_packed, packing_of
from tokenring.sequence.layout import zigzag
from tokenring.sequence.workload import Request, Workload

EXACT = 2e-6


class TestPacking:
    def test_reads_documents(self) -> None:
        assert packing_of(params([3, 8, 0], [4, 8, 0]), 1, 2, 6) == Packing((4, 8, 0), (3, 8, 0), 1, 2, 6)
        assert packing_of(params([8]), 0, 1, 8) == Packing((8,), (8,), 0, 1, 8)

    def test_refuses_what_cannot_be_cut(self) -> None:
        text = refusal(ConfigurationError, lambda: packing_of(params([8, 6]), 0, 2, 7))
        assert text == (
            "packed document 1 has 6 tokens, which 2 ranks cannot cut into 4 equal chunks: pad each document to a "
            "multiple of 4 and give the padded ends as cu_seqlens_q_padded"
        )

    def test_refuses_more_than_there_is(self) -> None:
        text = refusal(ConfigurationError, lambda: packing_of(params([8, 8]), 0, 2, 4))
        assert text.startswith("cu_seqlens end at 16, but 2 ranks hold 4 tokens each, 8 together")

    def test_refuses_what_makes_no_sense(self) -> None:
        text = refusal(ConfigurationError, lambda: packing_of(params([8, 8], [8, 4]), 0, 1, 16))
        assert text.startswith("packed document 1 has 8 tokens and 4 with its padding")
        refusal(ConfigurationError, lambda: packing_of(params([8, 8], [16]), 0, 1, 16))
        refusal(ConfigurationError, lambda: packing_of(SimpleNamespace(), 0, 1, 16))
        other = params([8, 8], cu_seqlens_kv=torch.tensor([0, 4, 16]))
        assert "other cu_seqlens for keys" in refusal(UnsupportedError, lambda: packing_of(other, 0, 1, 16))

    def test_documents_of_one_length_go_together(self) -> None:
        packing = Packing((4, 8, 4, 0, 8), (4, 8, 3, 0, 8), 0, 1, 24)
        assert packing.alike(Causal()) == {(8, Causal()): [1, 4], (4, Causal()): [0, 2]}
        full = {(8, Full()): [1, 4], (4, Full()): [0], (4, Documents([0, 3])): [2]}
        assert packing.alike(Full()) == full

    def test_is_read_once_for_all_layers(self) -> None:
        last, given = LastPacking(), params([8, 8])
        first = last.of(given, 0, 1, 16)
        assert last.of(given, 0, 1, 16) is first
        given.cu_seqlens_q += 0  # whatever was written
        assert last.of(given, 0, 1, 16) == first
        assert last.of(params([4, 12]), 0, 1, 16).real == (4, 12)
        assert last.of(params([8, 8]), 0, 1, 16) is first  # of a micro-batch that is computed again
        assert first.mask_of_all(Causal()) is first.mask_of_all(Causal())
        for length in range(1, 20):
            last.of(params([length, 20 - length]), 0, 1, 20)
        assert last.of(given, 0, 1, 16) is not first  # but not all that there ever were
        with torch.inference_mode():
            given = params([8, 8])
        assert last.of(given, 0, 1, 16) is last.of(given, 0, 1, 16)  # read anew, as a change would not be seen


def seen_pairs(padded: list[int], real: list[int], ranks: int, tokens: int, mask: Mask) -> set[tuple[int, int]]:
    """Which tokens see which, in the order of the ranks, token by token."""
    place, start = {}, 0
    for document, (length, held) in enumerate(zip(padded, real, strict=True)):
        for rank in range(ranks):
            rows = zigzag(ranks, length).positions(rank) if ranks > 1 else range(length)
            for index, row in enumerate(rows):
                if row < held:
                    place[rank * tokens + start + index] = document, row
        start += length // ranks
    return {
        (q, kv) for q, (a, i) in place.items() for kv, (b, j) in place.items() if a == b and mask.allows(i, j)
    }  # fmt: skip


class TestWhole:
    @pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(4, 0), SlidingWindow(2, 5)], ids=str)
    @pytest.mark.parametrize(("ranks", "real"), [(1, [5, 8, 3]), (2, [8, 16, 4]), (2, [5, 16, 1]), (3, [12, 7, 24])])
    def test_is_what_the_documents_see(self, ranks: int, real: list[int], mask: Mask) -> None:
        cut = 2 * ranks if ranks > 1 else 1
        padded = [-(-length // cut) * cut for length in real]
        tokens = sum(padded) // ranks + 1
        whole = Packing(tuple(padded), tuple(real), 0, ranks, tokens).mask_of_all(mask)
        assert whole is not None
        every = range(ranks * tokens)
        found = {(q, kv) for q in every for kv in every if whole.allows(q, kv)}
        assert found == seen_pairs(padded, real, ranks, tokens, mask)

    @pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(4, 0)], ids=str)
    @pytest.mark.parametrize("ranks", [2, 3, 4])
    def test_its_slices_are_disjoint_and_in_order(self, ranks: int, mask: Mask) -> None:
        """As they would be if they were compared, which takes as long as the rest of a new pack's mask."""
        lengths = tuple(2 * ranks * n for n in (3, 1, 7))
        whole = Packing(lengths, (lengths[0], 1, lengths[2] - 3), 0, ranks, sum(lengths)).mask_of_all(mask)
        assert whole is not None and whole.slices is not None
        assert whole == Slices([tuple(each) for each in whole.slices], q_start=None)

    def test_has_one_slice_for_each_pair_of_ranks(self) -> None:
        whole = Packing((8, 16), (8, 16), 0, 4, 6).mask_of_all(Causal())
        assert whole is not None and whole.slices is not None and len(whole.slices) == 2 * 4 * 4

    def test_many_documents_are_one_call(self) -> None:
        """And so many that a mask cannot say them: a call for each length."""
        assert calls_of(26) == [(1, 26 * 4)]
        assert calls_of(2**16 + 1) == [(2**16 + 1, 4)]

    def test_plans_are_for_as_many_documents(self) -> None:
        assert [PackKind(count, 1, Causal()).nominal(32) for count in (1, 3, 5)] == [
            Causal() & Documents(list(range(0, 33, 32 // count))) for count in (1, 2, 4)
        ]


def calls_of(documents: int) -> list[tuple[int, int]]:
    """Batch and length of each call for so many documents of four tokens."""
    called = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, pack: Any) -> torch.Tensor:
        called.append((q.shape[0], q.shape[1]))
        return q

    x = torch.zeros(documents * 4, 1, 1)
    lengths = (4,) * documents
    attend_packed(x, x, x, Packing(lengths, lengths, 0, 1, len(x)), Causal(), attend)
    return called


class TestAnnouncer:
    """One line for each kind of call, not for each pack."""

    def said(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, requests: list[Any]) -> list[str]:
        monkeypatch.setattr(startup, "_has_rank_0", lambda cp: True)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        cp: Any = SimpleNamespace(
            schedule="auto", topology=object(), world_size=2, plan=lambda _: SimpleNamespace(name="ring", reason="ring")
        )
        announcer = startup.Announcer()
        with caplog.at_level("INFO", logger="tokenring"):
            for each in requests:
                announcer.announce(cp, each)
        assert len(announcer._said) <= startup.MOST_SAID
        return [each.message for each in caplog.records]

    def request(self, mask: Mask, length: int = 64) -> Request:
        return Request(Workload(1, length, length, 4, 2, 16), mask, 1.0, True, torch.device("cpu"))

    def test_packs_are_one_kind(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        packs = [Causal() & Documents([0, end, 16, 20, 30, 40, 64]) for end in range(1, 16)]
        found = self.said(monkeypatch, caplog, [*map(self.request, packs), self.request(Causal())])
        assert len(found) == 2 and "a mask of 6 documents" in found[0] and "causal" in found[1]

    def test_kinds_are_bounded(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        every = [self.request(Causal(), length) for length in range(1, 200)]
        assert len(self.said(monkeypatch, caplog, every)) == startup.MOST_SAID


LENGTHS = {"real": [5, 16, 0, 7, 16, 3], "padded": [8, 16, 0, 8, 16, 8]}
TOKENS = 64  # 8 more than the documents


def packed_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, mask: Mask) -> Any:
    """Document by document in float64: out, dq, dk, dv [t, H, D], zero at padding."""
    found = [torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v)]
    ends = torch.tensor([0, *LENGTHS["padded"]]).cumsum(0).tolist()
    for (start, _), real in zip(pairwise(ends), LENGTHS["real"], strict=True):
        if real:
            one = slice(start, start + real)
            whole = attention64(q[None, one], k[None, one], v[None, one], dout[None, one], allowed(mask, real, real))
            for x, part in zip(found, (whole.out, whole.dq, whole.dk, whole.dv), strict=True):
                x[one] = part[0]
    return found


def packed_inputs() -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(TOKENS, heads, 16) for heads in (4, 2, 2, 4)]


def packed_on_ranks(here: Here, mask: Mask, schedule: str) -> list[torch.Tensor]:
    """out, dq, dk, dv of the tokens that this rank holds."""
    kind = {Causal(): "causal", Full(): "no_mask"}.get(mask, "causal")
    window = None if mask in (Causal(), Full()) else (-(mask.low or 0), 0)
    group = SimpleNamespace(cp=dist.group.WORLD)
    settings = config(context_parallel_size=here.world_size, window_size=window)
    made = layer(settings, pg_collection=group, schedule=schedule)
    rows = held_rows(here.rank, here.world_size)
    q, k, v, dout = (x[rows] for x in packed_inputs())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = made(q, k, v, None, attn_mask_type=SimpleNamespace(name=kind), packed_seq_params=params(**LENGTHS))
    gradients = torch.autograd.grad(out, leaves, dout.flatten(1))
    if schedule == "auto":
        sizes = Counter(request.mask for _, request in made._contexts._for_sizes)
        assert max(sizes.values()) == 1  # one for the pack, of three lengths
    return [out.detach().unflatten(-1, (4, 16)), *gradients]


def held_rows(rank: int, ranks: int) -> torch.Tensor:
    """Of each document its zigzag part, and an equal part of the tail."""
    rows, start = [], 0
    for length in LENGTHS["padded"]:
        if length:
            rows += [start + position for position in zigzag(ranks, length).positions(rank)]
        start += length
    tail = (TOKENS - start) // ranks
    return torch.tensor([*rows, *range(start + rank * tail, start + (rank + 1) * tail)])


class TestPackedAttention:
    @pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(4, 0)], ids=str)
    def test_on_one_rank(self, mask: Mask) -> None:
        q, k, v, dout = packed_inputs()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        cp = ContextParallel("self", layout="contiguous")
        packing = packing_of(params(**LENGTHS), 0, 1, TOKENS)
        out = attend_packed(q, k, v, packing, mask, lambda q, k, v, mask, _: attention(q, k, v, cp, mask))
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        for got, want in zip(found, packed_reference(q, k, v, dout, mask), strict=True):
            assert relative_error(got, want) <= EXACT

    @pytest.mark.parametrize("schedule", ["auto", "ring", "tokenring", "ulysses"])
    @pytest.mark.parametrize("mask", [Causal(), Full(), SlidingWindow(4, 0)], ids=str)
    @pytest.mark.parametrize("world_size", [2, 4] if FULL_GRID else [4])
    def test_on_several(self, ranks: RankPools, world_size: int, mask: Mask, schedule: str) -> None:
        found = ranks(world_size)(packed_on_ranks, mask, schedule)
        q, k, v, dout = packed_inputs()
        wanted = packed_reference(q, k, v, dout, mask)
        order = torch.cat([held_rows(rank, world_size) for rank in range(world_size)])
        for index, want in enumerate(wanted):
            got = torch.cat([parts[index] for parts in found])
            assert relative_error(got, want[order]) <= EXACT
            assert relative_error(got, want) > 0.1  # in another order the check fails
