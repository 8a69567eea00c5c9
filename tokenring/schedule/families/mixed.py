"""Q or KV moves, chosen for each pair of ranks: whatever leaves the busier of their two links less."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

from tokenring.lowering.exact_rows import union
from tokenring.schedule import routes
from tokenring.schedule.families.basic import at_query
from tokenring.schedule.scheme import WHOLE_UNITS, Placement, Scheme
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask
from tokenring.sequence.region import Patch

Seen = tuple[float, float]  # rows of q and of kv that tiles need


def mixed(world_size: int, ratio: int = 1, head_groups: int = 1) -> Scheme:
    """Make the scheme in which Q or KV moves, as suits each pair of ranks.

    `ratio` query heads share a kv head. Several head groups can share a pair's work between Q and KV.
    """

    def place_for(q_layout: Layout, kv_layout: Layout, mask: Mask) -> Placement:
        by_q = _choices(q_layout, kv_layout, mask, ratio, head_groups)
        return lambda pair: pair.kv_owner if pair.heads < by_q[pair.q_owner, pair.kv_owner] else pair.q_owner

    return Scheme(
        "mixed", at_query, routes.direct, routes.direct, head_groups=head_groups, place_for=place_for
    )  # fmt: skip


def _choices(q_layout: Layout, kv_layout: Layout, mask: Mask, ratio: int, groups: int) -> dict[tuple[int, int], int]:
    """Return, for each (q owner, kv owner), in how many head groups q moves."""
    world, seen = q_layout.world_size, _seen(q_layout, kv_layout, mask)
    chosen = {(rank, rank): 0 for rank in range(world)}
    for low in range(world):
        for high in range(low + 1, world):
            one, other = seen[low, high], seen[high, low]
            options = product(range(groups + 1), range(groups + 1))
            best = min(options, key=lambda by_q: (*_cost((one, other), by_q, ratio, groups), by_q))
            chosen[low, high], chosen[high, low] = best
    return chosen


def _cost(seen: tuple[Seen, Seen], by_q: tuple[int, int], ratio: int, groups: int) -> tuple[float, ...]:
    """Return the cost of two links: the busier one, both, and how unequal the ranks' work is. Q moves twice, as O."""
    kv, (one, other) = 2 / ratio, seen
    q_and_out = by_q[0] * one[0] + by_q[1] * other[0]  # both ways
    there = q_and_out + (groups - by_q[1]) * kv * other[1]
    back = q_and_out + (groups - by_q[0]) * kv * one[1]
    return max(there, back), there + back, abs(by_q[0] - by_q[1])


def _seen(q_layout: Layout, kv_layout: Layout, mask: Mask) -> dict[tuple[int, int], Seen]:
    """Return, for each (q owner, kv owner), the rows of q and of kv that move if q or kv does.

    These are the rows of q that see something there, and those of kv that are seen; or the whole chunks.
    """
    q_runs: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)  # by the ranks and the chunk
    kv_runs: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, (chunk, owner) in enumerate(zip(q_layout.chunks, q_layout.owners, strict=True)):
        for at in mask.seen(chunk, kv_layout.chunks) if len(chunk) else ():
            kv_owner, kv_chunk = kv_layout.owners[at], kv_layout.chunks[at]
            whole = Patch(0, len(chunk), 0, len(kv_chunk))
            for patch in (whole,) if mask in WHOLE_UNITS else mask.region(chunk, kv_chunk):
                q_runs[owner, kv_owner, number].append((patch.row0, patch.row1))
                kv_runs[owner, kv_owner, at].append((patch.col0, patch.col1))
    q_rows, kv_rows = _counted(q_runs), _counted(kv_runs)
    pairs = product(range(q_layout.world_size), range(kv_layout.world_size))
    return {pair: (q_rows[pair], kv_rows[pair]) for pair in pairs}


def _counted(runs: dict[tuple[int, int, int], list[tuple[int, int]]]) -> dict[tuple[int, int], float]:
    """Return how many rows two ranks' runs of all chunks have, each row once."""
    rows: dict[tuple[int, int], float] = defaultdict(float)
    for (q_owner, kv_owner, _), each in runs.items():
        rows[q_owner, kv_owner] += sum(stop - start for start, stop in union(each))
    return rows
