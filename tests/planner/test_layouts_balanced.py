"""Balanced layouts: even work, few rows on the busiest port, the same on every host."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tokenring as tr
from tokenring.planner.interconnects.interconnect import Interconnect, full_mesh, ring, switch
from tokenring.planner.layouts.assignment import Assignment
from tokenring.planner.layouts.balanced import (
    EVEN,
    EVENED,
    NAME,
    SLACK,
    balanced_layout,
    even_layout,
    imbalance,
    may_pay_to_even,
)
from tokenring.planner.layouts.demand import demand_of
from tokenring.planner.layouts.scores import SwapScores, fractions
from tokenring.sequence.layout import Positions, contiguous

LENGTH = 16384


def pack(seed: int, length: int = LENGTH) -> tr.Mask:
    """Causal documents of a length: most are short, a few have a quarter of it."""
    random, bounds = Random(seed), [0]
    while bounds[-1] < length:
        size = random.choice((40, 200, 500, 900, 2500, length // 4))
        bounds.append(min(length, bounds[-1] + random.randint(size // 2, size)))
    return tr.Causal() & tr.Documents(bounds)


MASKS = {
    "causal": tr.Causal(),
    "full": tr.Full(),
    "window": tr.SlidingWindow(100),
    "documents": tr.Documents([0, 100, 130, 400, 512]),
    "pack": tr.Causal() & tr.Documents([0, 7, 250, 260, 500]),
}


@pytest.mark.parametrize("name", MASKS)
def test_demand_is_what_the_mask_shows(name: str) -> None:
    mask, length, chunks, grains = MASKS[name], 512, 16, 4
    found, rows = demand_of(mask, length, chunks, grains), length // chunks
    for chunk in range(chunks):
        seen = [(q, kv) for q in range(chunk * rows, chunk * rows + rows) for kv in range(length) if mask.allows(q, kv)]
        needed = {kv * chunks * grains // length for _, kv in seen}
        assert found.pairs[chunk] == len(seen)
        assert {bit for bit in range(chunks * grains) if found.needs[chunk] >> bit & 1} == needed


def test_coarser_demand_is_that_of_larger_chunks() -> None:
    mask = pack(1)
    assert demand_of(mask, LENGTH, 64, 4).coarser(4) == demand_of(mask, LENGTH, 16, 16)


@pytest.mark.parametrize(
    ("ranks", "length"), [(2, 256), (2, 512), (3, 384), (4, 512), (4, 10_016), (8, 1024), (8, 64_064)]
)
def test_there_may_be_few_chunks_to_swap(ranks: int, length: int) -> None:
    found = balanced_layout(tr.Causal(), length, ranks)
    assert sum(found.local_lengths) == length
    assert imbalance(tr.Causal(), found) < 1.1


def state(of: Assignment) -> tuple[object, ...]:
    return of.owners, of.loads, of.received, of.sent, of.moved, of.owned, of.needed


@pytest.mark.parametrize("links", [1, 3])
def test_swaps_keep_the_books(links: int) -> None:
    """After each swap all sums are those of the owners that result."""
    ranks, demand, random = 4, demand_of(pack(2), LENGTH, 32, 4), Random(5)
    now = Assignment(demand, [chunk % ranks for chunk in range(32)], ranks, sum(demand.pairs) / ranks, links)
    now.price()
    for _ in range(60):
        rank, chunk = random.randrange(ranks), random.randrange(32)
        if now.owners[chunk] == rank:
            continue
        swap = now.swap(rank, random.randrange(len(now.held[rank])), chunk, float("inf"))
        assert swap is not None
        now.take(swap)
        fresh = Assignment(demand, now.owners, ranks, now.most_pairs, links)
        assert now.busiest_port == fresh.busiest_port
        assert state(now) == state(fresh)
        assert sorted(map(tuple, map(sorted, now.held))) == sorted(map(tuple, fresh.held))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_work_is_even_and_fewer_rows_move_than_by_work_alone(ranks: int) -> None:
    for seed in range(3):
        mask = pack(seed)
        found = balanced_layout(mask, LENGTH, ranks)
        assert imbalance(mask, found) <= SLACK + 0.02
        assert busiest(mask, found) <= 0.75 * busiest(mask, by_work_alone(mask, ranks, len(found.chunks)))


def by_work_alone(mask: tr.Mask, ranks: int, chunks: int) -> tr.Layout:
    """Each chunk, from that with most work on, goes to the rank that has least and room for it."""
    pairs, rows = demand_of(mask, LENGTH, chunks, 1).pairs, LENGTH // chunks
    owners, loads, held = [0] * chunks, [0] * ranks, [0] * ranks
    for chunk in sorted(range(chunks), key=lambda chunk: -pairs[chunk]):
        owner = min((rank for rank in range(ranks) if held[rank] < chunks // ranks), key=lambda rank: loads[rank])
        owners[chunk] = owner
        loads[owner], held[owner] = loads[owner] + pairs[chunk], held[owner] + 1
    where = tuple(Positions(chunk * rows, (chunk + 1) * rows) for chunk in range(chunks))
    return tr.Layout("by work", ranks, LENGTH, where, tuple(owners))


def busiest(mask: tr.Mask, layout: tr.Layout) -> int:
    """Rows that the busiest rank sends or receives."""
    table = moved(mask, layout)
    return max(*map(sum, table), *map(sum, zip(*table, strict=True)))


def moved(mask: tr.Mask, layout: tr.Layout) -> list[list[int]]:
    """Rows that each rank (a line) receives from each (a column), counted one by one."""
    table = [[0] * layout.world_size for _ in range(layout.world_size)]
    owner = [0] * layout.length
    for rank in range(layout.world_size):
        for position in layout.positions(rank):
            owner[position] = rank
    ends = [end for end in mask.cu_seqlens or (0, layout.length)]
    start = [0] * layout.length
    for a, b in pairwise(ends):
        start[a:b] = [a] * (b - a)
    for rank in range(layout.world_size):
        needed: set[int] = set()
        for index in layout.owned_by(rank):
            chunk = layout.chunks[index]
            needed |= set(range(min(start[chunk.start : chunk.stop]), chunk.stop))
        for position in needed:
            if owner[position] != rank:
                table[rank][owner[position]] += 1
    return table


def test_in_a_mesh_the_busiest_link_carries_less() -> None:
    """A port of 7 links; work is as even as before."""
    for seed in range(3):
        mask = pack(seed)
        by_port, by_link = (balanced_layout(mask, LENGTH, 8, links=links) for links in (1, 7))
        assert imbalance(mask, by_link) <= SLACK + 0.02
        widest = [max(map(max, moved(mask, each))) for each in (by_port, by_link)]
        assert widest[1] <= 0.8 * widest[0], widest


def test_ports_of_a_mesh_are_of_links() -> None:
    assert [full_mesh(ranks, 10.0).port_links for ranks in (1, 2, 8)] == [1, 1, 7]
    assert [make(8, 10.0).port_links for make in (switch, ring)] == [1, 1]
    places = tuple((host, device) for host in (0, 1) for device in range(4))
    assert Interconnect("two hosts", full_mesh(4, 10.0).fabrics * 2, places).port_links == 1


def test_usual_layouts_stay_where_they_do_as_well() -> None:
    assert balanced_layout(tr.Causal(), LENGTH, 4).name == "zigzag"
    assert balanced_layout(tr.SlidingWindow(64), LENGTH, 4).name == "contiguous"
    assert balanced_layout(tr.Full(), LENGTH, 4).name in ("zigzag", "contiguous")
    assert balanced_layout(pack(0), LENGTH, 1).world_size == 1
    assert balanced_layout(pack(0, 96), 96, 4).name in ("zigzag", "contiguous")  # too few rows to search


def test_a_pack_gets_a_layout_of_its_own() -> None:
    found = balanced_layout(pack(0), LENGTH, 8)
    assert found.name == NAME
    assert found == balanced_layout.__wrapped__(pack(0), LENGTH, 8)  # searched again


@pytest.mark.parametrize("links", [1, 7])
def test_an_even_layout_is_evener_than_the_balanced_one(links: int) -> None:
    """With as many tokens on each rank; one that is as even already stays, and a usual one."""
    evened = 0
    for seed in range(4):
        mask = pack(seed, 4 * LENGTH)
        balanced, even = balanced_layout(mask, 4 * LENGTH, 8, links=links), even_layout(mask, 4 * LENGTH, 8, links)
        assert set(even.local_lengths) == {LENGTH // 2}
        assert imbalance(mask, even) <= EVENED
        evened += even.name == EVEN
        assert (even == balanced) == (even.name == NAME) == (imbalance(mask, balanced) <= EVENED)
    assert evened > 1
    assert even_layout(tr.Causal(), LENGTH, 4).name == "zigzag"
    assert even_layout(pack(0, 96), 96, 4) == balanced_layout(pack(0, 96), 96, 4)


def test_an_even_layout_may_win_by_all_that_the_balanced_one_is_uneven() -> None:
    """It may win by more than `SLACK`, too, where few ranks are left with work that uneven."""
    mask, halves = tr.Causal(), contiguous(2, LENGTH)
    uneven = imbalance(mask, halves)
    assert uneven == pytest.approx(1.5, rel=0.01)
    assert may_pay_to_even(mask, halves, 0.99 * uneven, 1.0) and not may_pay_to_even(mask, halves, 1.01 * uneven, 1.0)


def test_slow_links_get_fewer_rows_and_less_even_work() -> None:
    """The longer of work and transfers gets shorter than in the layout that only balances."""
    for seed in range(3):
        mask = pack(seed)
        even = balanced_layout(mask, LENGTH, 8)
        pairs = sum(demand_of(mask, LENGTH, 8, 1).pairs) / 8
        pairs_a_row = round(3 * pairs / busiest(mask, even))  # transfers take three times as long as even work
        found = balanced_layout(mask, LENGTH, 8, pairs_a_row)

        def longest(layout: tr.Layout, mask: tr.Mask = mask, slow: int = pairs_a_row, even: float = pairs) -> float:
            return max(imbalance(mask, layout) * even, busiest(mask, layout) * slow)

        assert longest(found) <= 0.9 * longest(even), (longest(found), longest(even))


@pytest.mark.parametrize("seed", range(3))
def test_scores_are_the_costs_of_both_ranks(seed: int) -> None:
    """For documents of whole chunks, of which no row is needed in part; after swaps, too, of several assignments."""
    random, ranks, chunks, bounds = Random(seed), 4, 32, [0]
    while bounds[-1] < LENGTH:
        bounds.append(min(LENGTH, bounds[-1] + random.choice((1, 2, 3, 8)) * LENGTH // chunks))
    demand = demand_of(tr.Causal() & tr.Documents(bounds), LENGTH, chunks, 4)
    nows = []
    for _ in range(3):
        owners = [chunk % ranks for chunk in range(chunks)]
        random.shuffle(owners)
        nows.append(Assignment(demand, owners, ranks, sum(demand.pairs) / ranks))
        nows[-1].price()
    scores = SwapScores(nows, fractions(demand))
    for turn in range(4):
        pairs = [random.sample(range(ranks), 2) for _ in nows]
        tables = scores.of(pairs).view(len(nows), 2, chunks // ranks, chunks)
        best = iter(scores.best(pairs, 5))
        for now, pair, table in zip(nows, pairs, tables, strict=True):
            for rank, line in zip(pair, table, strict=True):
                check_line(now, rank, line)
                some = next(best)
                assert some[0][0] == line.min() and some == sorted(some)
        changed: list[list[int]] = [[] for _ in nows]
        for at in {turn % 3, 2}:  # one or two of them, not all
            taken = nows[at].swap(pairs[at][0], 1, nows[at].held[pairs[at][1]][0], float("inf"))
            assert taken is not None
            nows[at].take(taken)
            changed[at] = list(taken.ranks)
            if turn == 2:
                nows[at].price()
                scores.price()
        scores.follow(changed)


def check_line(now: Assignment, rank: int, line: torch.Tensor) -> None:
    """Refuse scores of one rank's swaps that are not what `swap` prices."""
    for place, row in enumerate(line):
        for chunk, other in enumerate(now.owners):
            swap = None if other == rank else now.swap(rank, place, chunk, float("inf"))
            if swap is None:
                assert row[chunk] > 1e29
                continue
            wanted = sum(swap.costs[each] - now.costs[each] for each in (rank, other))
            assert row[chunk].item() == pytest.approx(wanted, rel=1e-4, abs=1e-4)


def test_the_search_is_the_same_while_torch_traces() -> None:
    """And whatever dtype and device tensors have there by default, and how torch multiplies."""
    mask, length = pack(2, 4 * LENGTH), 4 * LENGTH
    want = balanced_layout(mask, length, 4)
    before, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.bfloat16)
    torch.set_float32_matmul_precision("medium")
    try:
        with FakeTensorMode(), torch.device("meta"):
            assert balanced_layout.__wrapped__(mask, length, 4) == want
    finally:
        torch.set_default_dtype(before)
        torch.set_float32_matmul_precision(precision)
