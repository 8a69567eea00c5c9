"""Scores of all swaps of some ranks at once: what each would cost, as sums and products of small matrices.

A swap gives a rank g's chunk for another rank's chunk c. What the two ranks then receive and send follows from how many
rows the needs of g, of c, and of the two ranks without these, have in common: products of matrices with a line and a
column for each chunk. Rows of one chunk that two others need in part are counted by the larger part, or by the product
of both, and what other ranks then send is left out: the few best swaps are then priced exactly, by `Assignment.swap`.

All entries are multiples of a power of two that fp32 holds exactly, so that sums are the same in any order; the rest
are single operations. So all hosts find the same scores.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import torch

from tokenring.planner.layouts.assignment import GUIDE, OVERLOAD, Assignment
from tokenring.planner.layouts.demand import Demand

EXACT = torch.float32


class SwapScores:
    """Scores of the swaps of an assignment, which it follows: `follow` after each change.

    n chunks in order, R ranks; m chunks of each. Rows are counted in chunks here, so parts of one are fractions.
    """

    def __init__(self, of: Assignment, needs: torch.Tensor) -> None:
        self._of = of
        self._ranks, self._grains = of.ranks, of.demand.grains
        n = len(of.demand.pairs)
        self._count, self._each = n, n // of.ranks
        without = torch.zeros_like(needs)  # needs of a chunk's rank without the chunk
        self._both = torch.stack((needs, without, without, needs.T))  # and of these, those of other ranks' chunks
        self._needs, self._without, self._absent, self._needs_t = self._both.unbind(0)
        self._size = needs.sum(1)
        self._self = needs.diagonal().contiguous()
        self._self_without = self._without.diagonal()
        self._of_ranks = torch.zeros((of.ranks, n), dtype=EXACT, device="cpu")  # needs of ranks
        self._pairs = _floats(each / of.most_pairs for each in of.demand.pairs)
        self.price()
        self.follow(range(of.ranks))

    def price(self) -> None:
        """Take the assignment's prices."""
        self._scale = self._grains / self._of.scale

    def follow(self, ranks: Sequence[int]) -> None:
        """Take up what these ranks hold now."""
        of, n = self._of, self._count
        rows = _integers(chunk for rank in ranks for chunk in of.held[rank])
        held = self._needs.index_select(0, rows).view(len(ranks), self._each, n)
        most = held.amax(1, keepdim=True)
        is_most = (held - most).sign_().add_(1.0)
        next_most = (held - is_most).amax(1, keepdim=True).clamp_(min=0.0)
        once = (2.0 - is_most.sum(1, keepdim=True)).clamp_(min=0.0)  # 1 where one chunk alone needs most
        self._without.index_copy_(0, rows, (most - is_most * (once * (most - next_most))).view(-1, n))
        self._of_ranks.index_copy_(0, _integers(ranks), most[:, 0])
        self._owners = _integers(of.owners)
        holds = torch.zeros((self._ranks, n), dtype=EXACT, device="cpu").scatter_(0, self._owners[None], 1.0)
        same = holds.index_select(0, self._owners)
        torch.mul(self._without, 1.0 - same, out=self._absent)
        self._here = self._needs * same  # what each chunk needs of its own rank
        self._tables(holds)

    def _tables(self, holds: torch.Tensor) -> None:
        """Sum up, for each chunk and rank, all that a swap's other chunk has no part in."""
        of, ranks = self._of, self._of_ranks
        elsewhere, here = self._absent.sum(1), self._here.sum(1)
        needed = torch.mm(holds, self._needs_t)  # [R, n]: how much each chunk needs of a rank
        needed_without = torch.mm(holds, self._without.T)
        # How many other ranks need a chunk's rows, in chunks.
        wanted = ranks.sum(0) - (ranks * holds).sum(0)
        # What each rank (a line) sends to others than each (a column).
        sent = _floats(
            (had - moved) / self._grains for line in of.moved for had, moved in zip(of.sent, line, strict=True)
        ).view(self._ranks, self._ranks).T
        sent_here, sent_there = (each.index_select(1, self._owners) for each in (sent, sent.T))
        self._by_rank = torch.stack(
            (self._size - needed, elsewhere.expand_as(needed), needed_without - ranks + wanted + sent_here,
             ranks - wanted + here + sent_there)
        )  # fmt: skip
        self._by_chunk = torch.stack(
            (elsewhere.expand_as(needed), self._size - needed, ranks + here - wanted, wanted - ranks + needed_without)
        ).transpose(1, 2).contiguous()  # fmt: skip

    def of(self, ranks: Sequence[int]) -> torch.Tensor:
        """Return how much more each swap of these ranks' chunks costs, [ranks, m · n]: for each place all chunks."""
        of, n, owners = self._of, self._count, self._owners
        mine = _integers(chunk for rank in ranks for chunk in of.held[rank])
        of_row = _integers(rank for rank in ranks for _ in range(self._each))
        needs, without, absent, needed_by = self._both.index_select(1, mine).unbind(0)
        shared = torch.empty((4, len(mine), n), dtype=EXACT, device="cpu")
        torch.mm(absent, self._needs_t, out=shared[0])
        torch.mm(needs, self._absent.T, out=shared[1])
        torch.mm(self._here.index_select(0, mine), self._without.T, out=shared[2])
        torch.mm(without, self._here.T, out=shared[3])
        own = self._self_without.index_select(0, mine).unsqueeze(1), self._self.index_select(0, mine).unsqueeze(1)
        got = torch.maximum(own[0], needed_by) - torch.maximum(without, self._self)
        given = torch.maximum(self._self_without, needs)
        given -= torch.maximum(self._without.index_select(1, mine).T, own[1])
        rows = torch.stack((got, given, given, got)).sub_(shared)  # received by both ranks, sent by both
        rows += self._by_rank.index_select(1, of_row)
        rows += self._by_chunk.index_select(1, mine).index_select(2, owners)
        share = torch.maximum(rows[:2], rows[2:]).mul_(self._scale)
        costs = share * share
        costs *= costs
        costs *= costs
        costs += share.mul_(GUIDE)
        load = _floats(load / of.most_pairs - 1 for load in of.loads)
        more = self._pairs - self._pairs.index_select(0, mine).unsqueeze(1)
        loads = torch.stack((more + load.index_select(0, of_row).unsqueeze(1), load.index_select(0, owners) - more))
        costs += loads.clamp_(min=0.0).mul_(OVERLOAD)
        before = _floats(NOT_HERE if a == b else of.costs[a] + of.costs[b] for a in ranks for b in range(self._ranks))
        before = before.view(len(ranks), self._ranks).index_select(1, owners)
        return (costs[0] + costs[1]).view(len(ranks), self._each, n).sub_(before.unsqueeze(1)).view(len(ranks), -1)

    def best(self, ranks: Sequence[int], count: int) -> list[list[tuple[float, int, int]]]:
        """Return for each rank about so many of its best swaps, best first: their scores, places and chunks.

        All hosts return the same: which of equal ones `topk` finds is left to it, so the last ones are left out.
        """
        scores = self.of(ranks)
        values, places = scores.topk(min(count, scores.shape[1]), largest=False, sorted=False)
        found = []
        for row, (some, at) in enumerate(zip(values.tolist(), places.tolist(), strict=True)):
            last = max(some)
            line = sorted((value, place) for value, place in zip(some, at, strict=True) if value < last)
            if not line:
                line = [(last, place) for place in (scores[row] == last).nonzero()[:count, 0].tolist()]
            found.append([(value, *divmod(place, self._count)) for value, place in line])
        return found


NOT_HERE = -1e30  # cost of a swap within a rank, with its sign changed


def fractions(demand: Demand) -> torch.Tensor:
    """Return how much of each chunk (a column) each chunk needs: [chunks, chunks]."""
    needs, chunks, grains = demand.needs, len(demand.needs), demand.grains
    length = -(-chunks * grains // 8)
    packed = torch.frombuffer(bytearray().join(each.to_bytes(length, "little") for each in needs), dtype=torch.uint8)
    bits = packed.view(chunks, length, 1) >> torch.arange(8, dtype=torch.uint8, device="cpu") & 1
    return bits.view(chunks, -1)[:, : chunks * grains].view(chunks, chunks, grains).sum(2).to(EXACT) / grains


def _floats(values: Iterable[float]) -> torch.Tensor:
    return torch.frombuffer(array("f", values), dtype=EXACT)


def _integers(values: Iterable[int]) -> torch.Tensor:
    return torch.frombuffer(array("q", values), dtype=torch.int64)
