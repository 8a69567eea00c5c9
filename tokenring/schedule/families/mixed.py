"""Q or KV moves, chosen for each pair of ranks: whatever leaves the busier of their two links less."""

from __future__ import annotations

from collections import defaultdict
from itertools import product

from tokenring.schedule import routes
from tokenring.schedule.families.basic import at_query
from tokenring.schedule.scheme import Placement, Scheme
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask

Seen = tuple[float, float]  # tokens of q and of kv that a tile needs


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
    """Return, for each (q owner, kv owner), the tokens of q chunks that see something there, and of kv chunks seen."""
    q_tokens: dict[tuple[int, int], int] = defaultdict(int)
    kv_seen: dict[tuple[int, int], set[int]] = defaultdict(set)
    for chunk, owner in zip(q_layout.chunks, q_layout.owners, strict=True):
        seen = mask.seen(chunk, kv_layout.chunks) if len(chunk) else frozenset[int]()
        for at in seen:
            kv_seen[owner, kv_layout.owners[at]].add(at)
        for kv_owner in {kv_layout.owners[at] for at in seen}:
            q_tokens[owner, kv_owner] += len(chunk)
    pairs = product(range(q_layout.world_size), range(kv_layout.world_size))
    return {
        pair: (float(q_tokens[pair]), float(sum(len(kv_layout.chunks[at]) for at in kv_seen[pair]))) for pair in pairs
    }
