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
    """Scores of the swaps of some assignments of one demand, which it follows: `follow` after each change.

    S assignments; n chunks in order, R ranks; m chunks of each; k ranks at a time. Rows are counted in chunks here, so
    parts of one are fractions. `holds` is 1 where a rank (a line) holds a chunk (a column). Only short fractions are
    multiplied as matrices, which are exact in bf16, too: users may have torch multiply so.
    """

    def __init__(self, of: Sequence[Assignment], needs: torch.Tensor) -> None:
        self._of, one = of, of[0]
        self._ranks, self._grains = one.ranks, one.demand.grains
        n, count = len(one.demand.pairs), len(of)
        self._count, self._each = n, n // one.ranks
        self._needs, self._needs_t = needs, needs.T.contiguous()
        self._size = needs.sum(1)
        self._self = needs.diagonal().contiguous()
        # Needs of a chunk's rank without the chunk: of other ranks' chunks, of all. What the chunk needs of its rank.
        self._all = torch.zeros((3, count, n, n), dtype=EXACT, device="cpu")
        self._absent, self._without, self._here = self._all.unbind(0)
        self._of_ranks = torch.zeros((count, one.ranks, n), dtype=EXACT, device="cpu")  # needs of ranks
        self._pairs = _floats(each / one.most_pairs for each in one.demand.pairs)
        self.price()
        self.follow([range(one.ranks)] * count)

    def price(self) -> None:
        """Take the assignments' prices."""
        self._scales = _floats(self._grains / each.scale for each in self._of).view(-1, 1, 1)

    def follow(self, changed: Sequence[Iterable[int]]) -> None:
        """Take up what these ranks of each assignment hold now."""
        of, n, ranks = self._of, self._count, self._ranks
        places = [(at, rank) for at, some in enumerate(changed) for rank in some]
        chunks = [(at * n, chunk) for at, rank in places for chunk in of[at].held[rank]]
        held = self._needs.index_select(0, _integers(chunk for _, chunk in chunks)).view(len(places), self._each, n)
        most = held.amax(1, keepdim=True)
        is_most = (held - most).sign_().add_(1.0)
        next_most = (held - is_most).amax(1, keepdim=True).clamp_(min=0.0)
        once = (2.0 - is_most.sum(1, keepdim=True)).clamp_(min=0.0)  # 1 where one chunk alone needs most
        without = (most - is_most * (once * (most - next_most))).view(-1, n)
        self._without.view(-1, n).index_copy_(0, _integers(at + chunk for at, chunk in chunks), without)
        self._of_ranks.view(-1, n).index_copy_(0, _integers(at * ranks + rank for at, rank in places), most[:, 0])
        self._owners = _integers(owner for each in of for owner in each.owners).view(len(of), 1, n)
        self._holds = torch.zeros_like(self._of_ranks).scatter_(1, self._owners, 1.0)
        same = torch.bmm(self._holds.transpose(1, 2), self._holds)
        torch.mul(self._needs, same, out=self._here)
        torch.mul(self._without, same.neg_().add_(1.0), out=self._absent)
        self._tables()

    def _tables(self) -> None:
        """Sum up, for each chunk and rank, all that a swap's other chunk has no part in."""
        of, ranks, holds = self._of, self._of_ranks, self._holds
        elsewhere, here = self._all[::2].sum(3).unsqueeze(2).unbind(0)
        # How much each chunk needs of a rank.
        needed = torch.mm(holds.view(-1, self._count), self._needs_t).view_as(holds)
        needed_without = torch.bmm(holds, self._without.transpose(1, 2))
        # Needs of ranks, without how many other ranks need a chunk's rows, in chunks.
        unwanted = ranks - (ranks - ranks * holds).sum(1, keepdim=True)
        # What each rank (a line) sends to others than each (a column).
        sent = _floats(
            (had - moved) / self._grains
            for each in of for line in each.moved for had, moved in zip(each.sent, line, strict=True)
        ).view(len(of), self._ranks, self._ranks)  # fmt: skip
        sent_here, sent_there = self._of_owners(sent.transpose(1, 2)), self._of_owners(sent)
        needs_more = self._size - needed
        self._by_rank = torch.stack(
            (needs_more, elsewhere.expand_as(needed), needed_without - unwanted + sent_here,
             unwanted + here + sent_there)
        ).view(4, -1, self._count)  # fmt: skip
        self._by_chunk = torch.stack(
            (elsewhere.expand_as(needed), needs_more, unwanted + here, needed_without - unwanted)
        ).transpose(2, 3).reshape(4, -1, self._ranks)  # fmt: skip

    def _of_owners(self, by_rank: torch.Tensor) -> torch.Tensor:
        """Return for each chunk what there is of its owner: [..., S, lines, n] of [..., S, lines, R]."""
        return by_rank.gather(-1, self._owners.expand(*by_rank.shape[:-1], self._count))

    def of(self, ranks: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return how much more each swap of these ranks' chunks costs, [S · k, m · n]: for each place all chunks.

        ranks: equally many of each assignment.
        """
        of, n, count = self._of, self._count, len(ranks)
        places = [(at, rank) for at, some in enumerate(ranks) for rank in some]
        chunks = [(at * n, chunk) for at, rank in places for chunk in of[at].held[rank]]
        mine, placed = _integers(chunk for _, chunk in chunks), _integers(at + chunk for at, chunk in chunks)
        of_row = _integers(at * self._ranks + rank for at, rank in places for _ in range(self._each))
        needs, needed_by = self._needs.index_select(0, mine), self._needs_t.index_select(0, mine)
        lines = self._all.view(3, -1, n).index_select(1, placed)
        absent, without, here = lines.unbind(0)
        both = torch.stack((needs, here, without)).view(3 * count, -1, n)
        others = self._all.view(3 * count, n, n)
        shared = torch.empty((4, len(chunks), n), dtype=EXACT, device="cpu")
        torch.mm(absent, self._needs_t, out=shared[0])
        torch.bmm(both, others.transpose(1, 2), out=shared[1:].view(3 * count, -1, n))
        of_self = self._without.diagonal(dim1=1, dim2=2).unsqueeze(1)  # [S, 1, n]
        own = of_self.reshape(-1).index_select(0, placed).unsqueeze(1), self._self.index_select(0, mine).unsqueeze(1)
        got = torch.maximum(own[0], needed_by) - torch.maximum(without, self._self)
        given = torch.maximum(of_self, needs.view(count, -1, n)).view(-1, n)
        given -= torch.maximum(self._without.transpose(1, 2).reshape(-1, n).index_select(0, placed), own[1])
        rows = torch.stack((got, given, given, got)).sub_(shared)  # received by both ranks, sent by both
        rows += self._by_rank.index_select(1, of_row)
        by_chunk = self._by_chunk.index_select(1, placed).view(4, count, -1, self._ranks)
        rows += self._of_owners(by_chunk).view_as(rows)
        share = torch.maximum(rows[:2], rows[2:])
        share.view(2, count, -1, n).mul_(self._scales)
        costs = share * share
        costs *= costs
        costs *= costs
        costs += share.mul_(GUIDE)
        load = _floats(load / each.most_pairs - 1 for each in of for load in each.loads)
        theirs = self._of_owners(load.view(count, 1, -1))
        more = self._pairs - self._pairs.index_select(0, mine).unsqueeze(1)
        loads = torch.stack((more + load.index_select(0, of_row).unsqueeze(1), more))
        torch.sub(theirs, more.view(count, -1, n), out=loads[1].view(count, -1, n))
        costs += loads.clamp_(min=0.0).mul_(OVERLOAD)
        before = _floats(
            NOT_HERE if a == b else of[at].costs[a] + of[at].costs[b] for at, a in places for b in range(self._ranks)
        )
        before = self._of_owners(before.view(count, -1, self._ranks)).view(len(places), 1, n)
        return (costs[0] + costs[1]).view(len(places), self._each, n).sub_(before).view(len(places), -1)

    def best(self, ranks: Sequence[Sequence[int]], count: int) -> list[list[tuple[float, int, int]]]:
        """Return for each of these ranks about so many of its best swaps, best first: their scores, places and chunks.

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
