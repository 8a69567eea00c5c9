"""Results of many documents go to their rows in one go: as many launches as a dense call's, to the bit the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
import torch
from ascend.launches import POST, launched
from ascend.operators import register
from ascend.ranks import NpuPools
from oracle import allowed, attention64, relative_error
from ranks import Here
from test_ascend_runs import context

import tokenring as tr
from tokenring.backends.kernels.npu_fusion import NpuFusion
from tokenring.integrations.megatron.packed import Packing
from tokenring.ir.schedule_data import PASSES
from tokenring.lowering.backend_names import transport_target
from tokenring.lowering.lower import lower
from tokenring.lowering.program import Attend, Fill, Merge, Span
from tokenring.runtime import joined_rows, streams
from tokenring.runtime.bound_kernel import _follows, together
from tokenring.runtime.chains import chained
from tokenring.runtime.joined_rows import SlotRows, with_runs
from tokenring.schedule.names import make_schedule
from tokenring.sequence.layout import Layout, contiguous
from tokenring.sequence.mask import Causal, Mask
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload

DOCUMENTS, RANKS = 26, 8
EXACT = 2e-6


def pack(ranks: int, documents: int) -> tuple[Layout, Mask]:
    """Documents of any length, each cut zigzag, one of them with padding at its end."""
    lengths = [2 * ranks * (1 + 7 * number % 5) for number in range(documents)]
    real = [*lengths[:-1], 3]
    total = sum(lengths)
    mask = Packing(tuple(lengths), tuple(real), 0, ranks, total // ranks).mask_of_all(Causal())
    assert mask is not None
    return contiguous(ranks, total), mask


def launches(here: Here, name: str, ranks: Sequence[int]) -> list[list[int]]:
    """Operators of each pass, of some ranks of a schedule."""
    register("2.9.1")
    layout, mask = pack(RANKS, DOCUMENTS)
    size = Workload(1, layout.length, layout.length, 8, 2, 64, torch.bfloat16)
    schedule = make_schedule(name, layout, layout, mask)
    of_ranks = [launched(schedule, size, rank, NpuFusion(), transport_target("hccl")) for rank in ranks]
    return [[sum(count.total() - count[POST] for _, count in found[each]) for each in PASSES] for found in of_ranks]


@pytest.mark.parametrize("name", ["ring", "tokenring", "direct-kv"])
def test_a_pack_launches_no_more_than_twice_a_dense_call(name: str, npus: NpuPools) -> None:
    """As a dense call's of which each copy and merge is by itself: those that go together need rows without gaps."""
    dense = {"ring": (93, 97), "tokenring": (92, 187), "direct-kv": (93, 97)}[name]
    ranks = (0, 1, RANKS - 1)
    (of_ranks,) = npus(1)(launches, name, ranks)
    for rank, packed in zip(ranks, of_ranks, strict=True):
        assert all(a <= 2 * b for a, b in zip(packed, dense, strict=True)), (rank, packed)


def inputs(length: int) -> list[torch.Tensor]:
    torch.manual_seed(4)
    return [torch.randn(2, length, heads, 16) for heads in (4, 2, 2, 4)]


def computed(here: Here, schedule: str, many: int) -> list[torch.Tensor]:
    """out, dq, dk, dv of this rank, of two packs alike, with results joined from so many on."""
    register("2.13.0")
    joined_rows.MANY, usual = many, joined_rows.MANY
    torch.use_deterministic_algorithms(True)  # else the operator's gradients differ by run, as a real one's
    try:
        layout, mask = pack(here.world_size, 7)
        cp = context(here, layout=layout, schedule=schedule)
        q, k, v, dout = (tr.shard(x, cp, dim=1).to("npu") for x in inputs(layout.length))
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        out = tr.attention(q, k, v, cp, mask)
        return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, (q, k, v), dout))]
    finally:
        joined_rows.MANY = usual
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("schedule", "ranks"), [("ring", 3), ("tokenring", 3), ("ulysses", 2)])
def test_every_row_is_the_same_to_the_bit(schedule: str, ranks: int, npus: NpuPools) -> None:
    joined, alone = (npus(ranks)(computed, schedule, many) for many in (joined_rows.MANY, 10**6))
    for a, b in zip(joined, alone, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    layout, mask = pack(ranks, 7)
    q, k, v, dout = inputs(layout.length)
    want = attention64(q, k, v, dout, allowed(mask, layout.length, layout.length))
    for index, wanted in enumerate((want.out, want.dq, want.dk, want.dv)):
        assert relative_error(torch.cat([parts[index] for parts in joined], 1), wanted) < EXACT


LONG = [8, 16, 16, 16, 24, 24, 24, 32, 32, 32, 32, 32, 40, 40, 40]  # documents, of which tokens are real:
REAL = [8, 9, 2, 3, 12, 24, 24, 32, 32, 32, 17, 32, 40, 40, 6]


def orders(here: Here) -> tuple[list[int], list[int]]:
    """Numbers of a program's instructions as posts on streams are told of them; and as steps are made of them."""
    register("2.9.1")
    told: list[list[Any]] = []
    usual = streams.on_streams

    def noted(steps: Any, instructions: Any, found: Any) -> Any:
        told.append(list(instructions))
        return usual(steps, instructions, found)

    patched: Any = streams
    patched.on_streams = noted
    try:
        total = sum(LONG)
        layout = contiguous(4, total)
        mask = Packing(tuple(LONG), tuple(REAL), 0, 4, total // 4).mask_of_all(Causal())
        assert mask is not None
        size = Workload(1, total, total, 8, 8, 64, torch.bfloat16)
        schedule, target = make_schedule("all-gather-kv", layout, layout, mask), transport_target("hccl")
        launched(schedule, size, 0, NpuFusion(), target)
        program = lower(schedule, 0, "backward", size, target, NpuFusion().supports_patch)
    finally:
        patched.on_streams = usual
    bound = [each for group in together(program.instructions, NpuFusion()) for each in group]
    numbers = {str(each): at for at, each in enumerate(program.instructions)}
    return [numbers[str(each)] for each in told[-1]], [numbers[str(each)] for each in bound]


def test_posts_on_streams_wait_for_calls_where_these_are_made(npus: NpuPools) -> None:
    """Chains make some calls of a pack later than their places in the program: their rows are not there before."""
    ((told, bound),) = npus(1)(orders)
    assert told == bound != sorted(bound)


# ---------- which go together


def call(q: tuple[int, int], kv: tuple[int, int]) -> Attend:
    return Attend(0, Span(0, *q), Span(1, *kv), Patch(0, q[1] - q[0], 0, kv[1] - kv[0]), ())


def test_calls_of_documents_in_several_places_go_in_chains() -> None:
    """Three documents on two ranks, one after another: a chain for each pair of ranks, in the order of the calls."""
    places = {(document, rank): (10 * rank + 2 * document, 10 * rank + 2 * document + 2)
              for document in range(3) for rank in range(2)}  # fmt: skip
    calls = [
        call(places[document, q], places[document, kv]) for document in range(3) for q in range(2) for kv in range(2)
    ]
    chains = chained(calls, _follows)
    assert [len(each) for each in chains] == [3] * 4
    assert [one.q.start for one in chains[1]] == [0, 2, 4] and [one.kv.start for one in chains[1]] == [10, 12, 14]


@pytest.mark.parametrize("seed", range(5))
def test_chains_keep_the_order_of_calls_that_share_anything(seed: int) -> None:
    random = Random(seed)
    spans = [(a, a + random.randint(1, 4)) for a in range(12)]
    calls = [call(random.choice(spans), random.choice(spans)) for _ in range(60)]
    chains = chained(calls, _follows)
    order = [each for chain in chains for each in chain]
    assert sorted(map(id, order)) == sorted(map(id, calls))
    assert all(_follows(a, b) for chain in chains for a, b in pairwise(chain))
    place = {id(each): at for at, each in enumerate(order)}
    for earlier, later in combinations(calls, 2):
        spanning = ((earlier.q, later.q), (earlier.kv, later.kv))
        if any(a.start < b.stop and b.start < a.stop for a, b in spanning):
            assert place[id(earlier)] < place[id(later)]


def merges(*rows: tuple[int, int, bool], slot: int = 2) -> list[tuple[Any, ...]]:
    return [(Merge("q_partial", Span(1, a, b), Span(slot, a, b), first),) for a, b, first in rows]


def tile(*rows: tuple[int, int]) -> tuple[Any, ...]:
    return tuple(Attend(0, Span(0, a, b), Span(1, a, b), Patch(0, b - a, 0, b - a), ()) for a, b in rows)


PACK = tile((0, 2), (2, 4), (4, 6))


def counts(groups: Sequence[tuple[Any, ...]]) -> list[int]:
    return [len(each) for each in with_runs(groups)]


def test_runs_are_of_rows_beyond_each_other_in_one_slot() -> None:
    four = merges((0, 2, False), (2, 3, True), (5, 6, False), (6, 7, True))
    assert counts([PACK, *four]) == [3, 4]
    assert counts([PACK, *four, *four]) == [3, 4, 4]  # the same rows once more: later
    assert counts([PACK, *four[:2]]) == [3, 1, 1]
    assert counts([PACK, *four[:2], *merges((7, 8, False), slot=3)]) == [3, 1, 1, 1]
    fills = [(Fill("q_partial", Span(2, a, a + 1)),) for a in (0, 4, 6)]
    assert counts([PACK, *fills]) == [3, 3]
    assert counts([tile((0, 2)), *four]) == [1] * 5  # of a program without packs everything stays as it is
    everything = [PACK, *four, *fills]
    assert [one for group in with_runs(everything) for one in group] == [one for group in everything for one in group]


def test_rows_with_gaps_and_without() -> None:
    x = torch.arange(10.0)[:, None].repeat(1, 2)
    gaps = SlotRows.of([Span(0, 3, 4), Span(0, 6, 8)], x.device)
    assert gaps.span == Span(0, 3, 8) and gaps.numbers is not None and gaps.numbers.tolist() == [0, 3, 4]
    assert gaps.taken(x[3:8])[:, 0].tolist() == [3.0, 6.0, 7.0]
    gaps.add_(x[3:8], torch.ones(3, 2))
    assert x[:, 0].tolist() == [0, 1, 2, 4, 4, 5, 7, 8, 8, 9]
    gaps.copy_(x[3:8], torch.zeros(3, 2, dtype=torch.bfloat16))
    assert x[:, 0].tolist() == [0, 1, 2, 0, 4, 5, 0, 0, 8, 9]
    assert SlotRows.of([Span(0, 3, 4), Span(0, 4, 8)], x.device) == (Span(0, 3, 8), None)
