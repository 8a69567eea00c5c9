"""Balanced layouts: chunks dealt to ranks so that work is even for a mask and the busiest port moves few rows.

Packed documents leave the usual layouts with one rank that has twice the work of the others. Here each rank gets as
many tokens as before and nearly the same work; among such layouts the search looks for one in which few rows leave
their rank. It starts from greedy deals of large chunks, improves them by swaps, and goes on with smaller ones. It is
deterministic, in integers and in floating-point operations that every host rounds alike, so that ranks need not talk
to find the same layout.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from random import Random

from torch.utils._python_dispatch import _disable_current_modes

from tokenring.planner.layouts.assignment import Assignment
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
STEPS = (6, 6, 12)  # with a few swaps each: of each start, then of the best one, then of that in smaller chunks
EVEN_ENOUGH = 1.01  # times the work that a rank may have, where starts are compared
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

    It is for ranks that compute for longer than rows travel, and costs a small part of the search for the balanced one.
    Where that is a usual layout, or as even already, it stays as it is.
    """
    found = balanced_layout(mask, length, world_size, links=links)
    count = _chunks(length, world_size)
    if found.name != NAME or count is None:
        return found
    demand = demand_of(mask, length, count, GRAINS)
    before = _owners(found, count)
    owners = _evened(demand, before, world_size, EVENED * sum(demand.pairs) / world_size)
    return found if owners == before else replace(_layout(owners, world_size, length), name=EVEN)


def may_pay_to_even(mask: Mask, balanced: Layout, balanced_seconds: float, fastest_seconds: float) -> bool:
    """Return whether the even layout may be fastest, by the times of the balanced one and of the fastest known.

    No layout has less than the mean work: where the balanced one is behind by more than its imbalance, nothing helps.
    """
    return balanced_seconds <= imbalance(mask, balanced) * fastest_seconds


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
    from tokenring.planner.layouts.best_swaps import improved_at_once
    from tokenring.planner.layouts.scores import fractions

    brief, longer, last = STEPS
    randoms, large = [Random(start) for start in range(STARTS)], demand.coarser(2)
    needs, starts = fractions(large), []
    for start, random in enumerate(randoms):
        owners = _dealt(large, world_size, most_pairs, random if start else None)
        owners = _evened(large, owners, world_size, most_pairs)
        starts.append(Assignment(large, owners, world_size, most_pairs))
    found = []
    for owners in improved_at_once(starts, needs, brief, randoms):
        now = Assignment(large, owners, world_size, most_pairs)
        found.append((max(EVEN_ENOUGH * most_pairs, *now.loads), now.busiest_port, owners))
    now = Assignment(large, min(found)[-1], world_size, most_pairs)
    [owners] = improved_at_once([now], needs, longer, randoms[:1])
    owners = _evened(demand, [owner for owner in owners for _ in range(2)], world_size, most_pairs)
    now = Assignment(demand, owners, world_size, most_pairs)
    [owners] = improved_at_once([now], fractions(demand), last, randoms[:1])
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

        best, least = -1, (float("inf"), 0, 0)
        for rank in ranks:
            over = loads[rank] + pairs - most_pairs
            if held[rank] == each or over > least[0] > 0:
                continue
            more = ((needed[rank] | need) & ~(owned[rank] | own)).bit_count() - absent[rank]
            if (adds := (max(0, over), more, loads[rank])) < least:
                best, least = rank, adds
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
    by_size = [_by_size(pairs, some) for some in held]
    while (load := max(loads)) > most_pairs:
        rank = loads.index(load)
        most, mine, theirs = min(
            _evenest(pairs, held[rank], load, *by_size[other], loads[other]) for other in range(world_size)
        )
        if most >= load:
            break
        other = owners[theirs]
        owners[mine], owners[theirs] = other, rank
        for each, gone, come in ((rank, mine, theirs), (other, theirs, mine)):
            held[each][held[each].index(gone)] = come
            loads[each] += pairs[come] - pairs[gone]
            by_size[each] = _by_size(pairs, held[each])
    return owners


def _by_size(pairs: Sequence[int], held: Sequence[int]) -> tuple[list[int], dict[int, int]]:
    """Return the sizes of chunks in order, and the first chunk of each."""
    chunk_of = {pairs[chunk]: chunk for chunk in sorted(held, reverse=True)}
    return sorted(chunk_of), chunk_of


def _evenest(
    pairs: Sequence[int], held: Sequence[int], load: int, sizes: list[int], chunk_of: dict[int, int], other_load: int
) -> tuple[int, int, int]:
    """Return what either of two ranks has at most after the swap that evens them most, and its two chunks.

    For a chunk of the first that is one of the two that bring it nearest to the middle, from above or from below.
    """
    best, middle = (load + other_load, -1, -1), (load - other_load) / 2
    for mine in held:
        size = pairs[mine]
        at = bisect_left(sizes, size - middle)
        for come in sizes[max(0, at - 1) : at + 1]:
            most = max(load - size + come, other_load + size - come)
            if most <= best[0]:
                best = min(best, (most, mine, chunk_of[come]))
    return best


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
