"""Balanced layouts: chunks dealt to ranks so that work is even for a mask and the busiest port moves few rows.

Packed documents leave the usual layouts with one rank that has twice the work of the others. Here each rank gets as
many tokens as before and nearly the same work; among such layouts the search looks for one in which few rows leave
their rank. It starts from greedy deals of large chunks, improves them by swaps, and goes on with smaller ones. It is
deterministic, in integers and in floating-point operations that every host rounds alike, so that ranks need not talk
to find the same layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tokenring.planner.layouts.assignment import Assignment, Swap
from tokenring.planner.layouts.demand import Demand, demand_of
from tokenring.sequence.layout import AUTO, Layout, Positions, contiguous, make_layout, zigzag
from tokenring.sequence.mask import Mask

NAME = "balanced"  # what users get who ask for "auto", where no usual layout does as well
EVEN = "even"  # the balanced layout with its work evened further
SLACK = 1.02  # times the mean work that a rank may have
EVENED = 1.005  # and in an even layout, as far as swaps of two chunks get there
SWAPS = (2500, 3000)
WARMTH = 0.4  # by how much a swap may cost more than before, at most and at first
LIKED = 0.7  # share of tried swaps that bring a rank a chunk that it likes
LOOSENED = 3  # searches with less even work, where transfers take longer
RELIEVED = 0.6  # share of them that begin at the costliest rank
MOST_AT_ONCE = 256  # chunks of which all swaps of two ranks are scored at once
STARTS, DISORDER = 6, 1.0  # deals to start from; by how much of its work a chunk may come sooner or later in one
STEPS = (5, 8, 16)  # with a swap or two each: of each start, then of the best one, then of that in smaller chunks
EVEN_ENOUGH = 1.01  # times the work that a rank may have, where starts are compared
SCORED, PRICED = 16, 4  # swaps of a rank of which the exact cost may be asked, and of which it is
DRAWN = 1  # ranks beside the costliest whose swaps are scored in a step
REST = 7  # steps for which a chunk that was moved stays, and up to twice as many
REPRICED = 0.9  # times the busiest port of the last prices, at which there are new ones
GRAINS = 4  # in the smallest chunk
CHUNKS, CHUNKS_A_RANK = 128, 16  # of the smallest size: at least so many where rows suffice
LEAST_ROWS = 64  # in a chunk


@lru_cache(maxsize=64)
def balanced_layout(mask: Mask, length: int, world_size: int, pairs_a_row: int = 0, links: int = 1) -> Layout:
    """Return the layout for a mask: a usual one where it does as well, else one that was searched for.

    pairs_a_row: (query, key) pairs that a rank computes while one row of kv enters or leaves it. Where transfers would
    take longer than even work, work is less even; 0: transfers are hidden, or nothing is known of them.
    links: of how many links a rank's port is made (Interconnect.port_links): in a mesh, the busiest link decides.
    Raises ConfigurationError for an empty sequence.
    """
    usual = [make(world_size, length) for make in (zigzag, contiguous) if length % (2 * world_size) == 0]
    usual = usual or [contiguous(world_size, length)]
    count = _chunks(length, world_size)
    if world_size == 1 or count is None:
        return usual[0]
    demand = demand_of(mask, length, count, GRAINS)
    most_pairs = SLACK * max(sum(demand.pairs), 1) / world_size
    known = [Assignment(demand, _owners(layout, count), world_size, most_pairs, links) for layout in usual]
    pairs_a_grain = pairs_a_row * (length // (count * GRAINS))
    found = _searched(demand, world_size, most_pairs, pairs_a_grain, links)
    standings = [_standing(each, pairs_a_grain) for each in known]
    best = min(standings)
    if best <= _standing(found, pairs_a_grain):
        return usual[standings.index(best)]
    return _layout(found.owners, world_size, length)


@lru_cache(maxsize=64)
def even_layout(mask: Mask, length: int, world_size: int, links: int = 1) -> Layout:
    """Return the balanced layout for a mask with its work evened further, whatever rows that costs.

    It is for ranks that compute for longer than rows travel, and costs one or two milliseconds more than the balanced
    one. Where that is a usual layout, or as even already, it stays as it is.
    """
    found = balanced_layout(mask, length, world_size, links=links)
    count = _chunks(length, world_size)
    if found.name != NAME or count is None:
        return found
    demand = demand_of(mask, length, count, GRAINS)
    before = _owners(found, count)
    owners = _evened(demand, before, world_size, EVENED * sum(demand.pairs) / world_size)
    return found if owners == before else replace(_layout(owners, world_size, length), name=EVEN)


def may_pay_to_even(balanced_seconds: float, fastest_seconds: float) -> bool:
    """Return whether the even layout may be fastest, by the times of the balanced one and of the fastest known.

    It has less work by what the balanced one may have too much, at most: where that lies further behind, nothing helps.
    """
    return balanced_seconds <= SLACK * fastest_seconds


def layout_of(name: str | Layout, world_size: int, length: int, mask: Mask, links: int = 1) -> Layout:
    """Return the layout of this name, "auto" among them, for a mask. Raises ConfigurationError."""
    if name == AUTO:
        return balanced_layout(mask, length, world_size, links=links)
    return make_layout(name, world_size, length)


def imbalance(mask: Mask, layout: Layout) -> float:
    """Return the pairs that the busiest rank's queries see, as a multiple of the mean over ranks."""
    pairs = pairs_by_rank(mask, layout, layout.length)
    return max(pairs) * layout.world_size / sum(pairs) if any(pairs) else 1.0


def pairs_by_rank(mask: Mask, q_layout: Layout, kv_length: int) -> list[int]:
    """Return how many (query, key) pairs the queries of each rank see."""
    whole = Positions(0, kv_length)
    return [
        sum(patch.pairs() for chunk in q_layout.owned_by(rank) for patch in mask.region(q_layout.chunks[chunk], whole))
        for rank in range(q_layout.world_size)
    ]


def _standing(assignment: Assignment, pairs_a_grain: int) -> tuple[float, int]:
    """Return what makes one assignment better than another: the longer of work and transfers, then the busiest port.

    Both as pairs; work that is even enough is as good as even work.
    """
    port = assignment.busiest_port
    enough = SLACK * sum(assignment.loads) / assignment.ranks
    return max(enough, *assignment.loads, port * pairs_a_grain), port


def _chunks(length: int, world_size: int) -> int | None:
    """Return how many chunks the search deals at last: a multiple of all sizes; None where there are too few rows."""
    coarsest = 1 << (len(SWAPS) - 1)
    wanted = max(CHUNKS, CHUNKS_A_RANK * world_size)
    count = world_size * coarsest
    if length % (count * GRAINS) or length // count < LEAST_ROWS:
        return None
    while 2 * count <= wanted and length % (2 * count * GRAINS) == 0 and length // (2 * count) >= LEAST_ROWS:
        count *= 2
    return count


def _owners(layout: Layout, count: int) -> list[int]:
    """Return the owners of so many chunks in a layout whose own chunks are whole numbers of these."""
    return [owner for owner in layout.owners for _ in range(count // len(layout.owners))]


def _layout(owners: Sequence[int], world_size: int, length: int) -> Layout:
    """Return the layout in which the chunks have these owners, of chunks as large as can be."""
    while len(owners) % 2 == 0 and owners[::2] == owners[1::2]:
        owners = owners[::2]
    rows = length // len(owners)
    chunks = tuple(Positions(at * rows, (at + 1) * rows) for at in range(len(owners)))
    return Layout(NAME, world_size, length, chunks, tuple(owners))


# ---------- the search


def _searched(demand: Demand, world_size: int, most_pairs: float, pairs_a_grain: int, links: int) -> Assignment:
    """Return the best assignment that is found, of the smallest chunks.

    Where its transfers take longer than its work, ranks may have more work, half way between the two, and so on.
    """
    best = _searched_within(demand, world_size, most_pairs, links)
    for _ in range(LOOSENED):
        transfer, work = best.busiest_port * pairs_a_grain, max(best.loads)
        if transfer <= work:
            break
        looser = _searched_within(demand, world_size, (transfer + work) / 2, links)
        if _standing(looser, pairs_a_grain) >= _standing(best, pairs_a_grain):
            break
        best = looser
    return best


def _searched_within(demand: Demand, world_size: int, most_pairs: float, links: int) -> Assignment:
    """Return the best assignment that is found in which no rank has more work than this."""
    if links == 1 and len(demand.pairs) <= MOST_AT_ONCE:
        with _disable_current_modes():  # as while torch traces
            return _searched_at_once(demand, world_size, most_pairs)
    factor = 1 << (len(SWAPS) - 1)
    owners, random = _dealt(demand.coarser(factor), world_size, most_pairs), Random(0)
    for swaps in SWAPS:
        sized = demand.coarser(factor)
        owners = [owner for owner in owners for _ in range(len(sized.pairs) // len(owners))]
        owners = _evened(sized, owners, world_size, most_pairs)
        owners = _improved(Assignment(sized, owners, world_size, most_pairs, links), swaps, random)
        factor //= 2
    return Assignment(demand, owners, world_size, most_pairs, links)


def _searched_at_once(demand: Demand, world_size: int, most_pairs: float) -> Assignment:
    """Return the best assignment that is found where all swaps of two ranks are scored at once."""
    from tokenring.planner.layouts.scores import fractions

    brief, longer, last = STEPS
    random, found = Random(0), []
    large = demand.coarser(2)
    needs = fractions(large)
    for start in range(STARTS):
        owners = _dealt(large, world_size, most_pairs, random if start else None)
        owners = _evened(large, owners, world_size, most_pairs)
        best = _improved_at_once(Assignment(large, owners, world_size, most_pairs), needs, brief, random)
        now = Assignment(large, best, world_size, most_pairs)
        found.append((max(EVEN_ENOUGH * most_pairs, *now.loads), now.busiest_port, best))
    now = Assignment(large, min(found)[-1], world_size, most_pairs)
    owners = [owner for owner in _improved_at_once(now, needs, longer, random) for _ in range(2)]
    owners = _evened(demand, owners, world_size, most_pairs)
    now = Assignment(demand, owners, world_size, most_pairs)
    owners = _improved_at_once(now, fractions(demand), last, random)
    return Assignment(demand, owners, world_size, most_pairs)


def _dealt(demand: Demand, world_size: int, most_pairs: float, random: Random | None = None) -> list[int]:
    """Return owners of chunks, dealt from the one with most work to that with least, each to where it adds least.

    random: by which chunks come sooner or later than their work says.
    """
    count, each = len(demand.pairs), len(demand.pairs) // world_size
    owners, ranks = [0] * count, range(world_size)
    owned, needed, absent, loads, held = ([0] * world_size for _ in range(5))
    shares = [1.0] * count if random is None else [1 + DISORDER * (random.random() - 0.5) for _ in range(count)]
    for chunk in sorted(range(count), key=lambda chunk: -demand.pairs[chunk] * shares[chunk]):
        need, own, pairs = demand.needs[chunk], demand.own(chunk), demand.pairs[chunk]

        def adds(rank: int, need: int = need, own: int = own, pairs: int = pairs) -> tuple[float, int, int]:
            more = ((needed[rank] | need) & ~(owned[rank] | own)).bit_count() - absent[rank]
            return max(0, loads[rank] + pairs - most_pairs), more, loads[rank]

        best = min((rank for rank in ranks if held[rank] < each), key=adds)
        owners[chunk] = best
        owned[best], needed[best] = owned[best] | own, needed[best] | need
        absent[best] = (needed[best] & ~owned[best]).bit_count()
        loads[best], held[best] = loads[best] + pairs, held[best] + 1
    return owners


def _evened(demand: Demand, owners: Sequence[int], world_size: int, most_pairs: float) -> list[int]:
    """Return owners in which no rank has more work than it may, as far as swaps of two chunks get there.

    Each takes from the rank with most work: with the other rank and the two chunks by which these two end evenest.
    """
    owners, pairs = list(owners), demand.pairs
    held = [[chunk for chunk, owner in enumerate(owners) if owner == rank] for rank in range(world_size)]
    loads = [sum(pairs[chunk] for chunk in some) for some in held]
    while (load := max(loads)) > most_pairs:
        rank = loads.index(load)
        most, mine, theirs = min(
            swap for other in range(world_size) for swap in _evenest(pairs, held[rank], load, held[other], loads[other])
        )
        if most >= load:
            break
        other = owners[theirs]
        owners[mine], owners[theirs] = other, rank
        for each, gone, come in ((rank, mine, theirs), (other, theirs, mine)):
            held[each][held[each].index(gone)] = come
            loads[each] += pairs[come] - pairs[gone]
    return owners


def _evenest(
    pairs: Sequence[int], held: list[int], load: int, others: list[int], other_load: int
) -> Iterator[tuple[int, int, int]]:
    """Yield what either of two ranks has at most after the swaps that even them most, for each chunk of the first.

    These bring it as near as can be to the middle of both, from above or from below.
    """
    chunk_of: dict[int, int] = {}  # the first of those that are as much work
    for chunk in sorted(others, reverse=True):
        chunk_of[pairs[chunk]] = chunk
    sizes = sorted(chunk_of)
    for mine in held:
        at = bisect_left(sizes, pairs[mine] - (load - other_load) / 2)
        for size in sizes[max(0, at - 1) : at + 1]:
            yield max(load - pairs[mine] + size, other_load + pairs[mine] - size), mine, chunk_of[size]


def _improved(now: Assignment, swaps: int, random: Random) -> list[int]:
    """Return the cheapest owners met while trying so many swaps; less and less is lost on the way."""
    drawn = random.random
    now.price()
    best, cheapest = list(now.owners), now.cost
    for tried in range(swaps):
        rank = now.costliest() if drawn() < RELIEVED else int(drawn() * now.ranks)
        chunk = _drawn_chunk(now, rank, random)
        fitting = now.fitting(rank, chunk)
        if not fitting:
            continue
        place = fitting[int(drawn() * len(fitting))]
        swap = now.swap(rank, place, chunk, now.cost + WARMTH * drawn() * (1 - tried / swaps))
        if swap is not None:
            now.take(swap)
            if now.cost < cheapest:
                best, cheapest = list(now.owners), now.cost
    return best


def _improved_at_once(now: Assignment, needs: torch.Tensor, steps: int, random: Random) -> list[int]:
    """Return the cheapest owners met on the way of the best swaps of the costliest rank, and of one drawn by lot.

    Of the costliest rank the best is taken though it costs more than nothing, but none of the chunks that were just
    moved: so the way leads out of where no swap gains.
    """
    from tokenring.planner.layouts.scores import SwapScores

    now.price()
    scores, priced = SwapScores(now, needs), now.busiest_port
    best, cheapest = list(now.owners), now.cost
    resting: dict[int, int] = {}  # until which step a chunk stays where it is
    for step in range(steps):
        first = now.costliest()
        ranks = list(dict.fromkeys((first, *(int(random.random() * now.ranks) for _ in range(DRAWN)))))
        changed: set[int] = set()
        for rank, some in zip(ranks, scores.best(ranks, SCORED), strict=True):
            limit = float("inf") if rank == first else now.cost
            swap = _best_swap(now, rank, some, resting, step, cheapest, limit)
            if swap is None:
                continue
            for chunk in (now.held[at][place] for at, place in zip(swap.ranks, swap.places, strict=True)):
                resting[chunk] = step + REST + int(REST * random.random())
            now.take(swap)
            changed.update(swap.ranks)
            if now.cost < cheapest:
                if now.busiest_port < REPRICED * priced:
                    priced = now.busiest_port
                    now.price()
                    scores.price()
                best, cheapest = list(now.owners), now.cost
        if changed:
            scores.follow(sorted(changed))
    return best


def _best_swap(
    now: Assignment, rank: int, some: list[tuple[float, int, int]], resting: dict[int, int], step: int,
    cheapest: float, limit: float,
) -> Swap | None:  # fmt: skip
    """Return the cheapest of the first few of these swaps, without chunks that rest unless it is the cheapest ever."""
    best, tried = None, 0
    for score, place, chunk in some:
        if now.owners[chunk] == rank:
            continue
        rests = max(resting.get(chunk, 0), resting.get(now.held[rank][place], 0)) > step
        if rests and now.cost + score >= cheapest:
            continue
        found = now.swap(rank, place, chunk, limit)
        if found is not None:
            best, limit = found, sum(found.costs)
        tried += 1
        if tried == PRICED:
            break
    return best


def _drawn_chunk(now: Assignment, rank: int, random: Random) -> int:
    """Return a chunk of another rank: one that the rank likes, or any where it has too much work to choose by rows."""
    if random.random() < LIKED and now.loads[rank] <= now.most_pairs:
        liked = now.liked(rank)
        chunk = liked[int(random.random() * len(liked))]
        if now.owners[chunk] != rank:
            return chunk
    other = int(random.random() * (now.ranks - 1))
    held = now.held[other + (other >= rank)]
    return held[int(random.random() * len(held))]
