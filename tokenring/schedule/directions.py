"""Which of two mirror images moves less, told from their routes alone: the schedules take far longer to make."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from tokenring.ir.passes import sight_of
from tokenring.ir.schedule_data import Kind
from tokenring.schedule.routes import Gather, stay
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import WHOLE_UNITS, Pair, Scheme, nothing_moves_yet, origin_of, units
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask

Ranks = dict[tuple[int, int, int], set[int]]  # that read a unit, by chunk, head group and piece


def moves_least(schemes: Sequence[Scheme], q_layout: Layout, kv_layout: Layout, mask: Mask) -> Scheme | None:
    """Return the scheme whose requests carry fewest tokens times hops, of equals the first; None if it takes making.

    That is told where whole units move and ranks of tiles go by their q.
    """
    told = all(each.placed_by_q and each.place_for is None for each in schemes)
    if not told or mask not in WHOLE_UNITS:
        return None
    return min(schemes, key=lambda each: _requested_tokens(each, q_layout, kv_layout, mask))


def _requested_tokens(scheme: Scheme, q_layout: Layout, kv_layout: Layout, mask: Mask) -> int:
    """Return tokens times hops of all requests in what `build` would make."""
    schedule = nothing_moves_yet(scheme, q_layout, kv_layout, mask)
    by_q, by_kv = _readers(schedule, scheme)
    return _tokens(schedule, "q", scheme.gather_q, by_q) + _tokens(schedule, "kv", scheme.gather_kv, by_kv)


def _readers(schedule: Schedule, scheme: Scheme) -> tuple[Ranks, Ranks]:
    """Return the ranks whose tiles read each unit of q, and of kv, and see or show something."""
    sees, pieces = sight_of(schedule), range(scheme.kv_pieces)
    by_q: Ranks = defaultdict(set)
    shown: dict[tuple[int, int], set[int]] = defaultdict(set)  # units of kv, by rank and head group
    for block in units(schedule, "q"):
        _, chunk, heads, q_piece, _ = block
        seen = sees.seen_by(schedule.unit_index(block))
        for piece in pieces:
            pair = Pair(schedule.owner(block), 0, heads, q_piece, piece, schedule.world_size)
            here = seen if len(pieces) == 1 else {unit for unit in seen if unit % len(pieces) == piece}
            if here:
                rank = scheme.place(pair)
                by_q[chunk, heads, q_piece].add(rank)
                shown[rank, heads] |= here
    by_kv: Ranks = defaultdict(set)
    for (rank, heads), some in shown.items():
        for unit in some:
            by_kv[unit // len(pieces), heads, unit % len(pieces)].add(rank)
    return by_q, by_kv


def _tokens(schedule: Schedule, kind: Kind, gather: Gather, readers: Ranks) -> int:
    """Return the tokens times hops of this kind that reach a reader, or go on to one."""
    if gather is stay:
        return 0
    total = 0
    for block in units(schedule, kind):
        needed = set(readers.get(block[1:4], ()))
        hops = 0
        for hop in sorted(gather(origin_of(schedule, block)), key=lambda hop: -hop.step):
            if hop.dst in needed:
                needed.add(hop.src)
                hops += 1
        total += hops * schedule.rows(block)
    return total
