"""Schedules by name. Each is a placement and routes (`families`); none is a loop over steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import count
from math import gcd
from typing import TYPE_CHECKING

from tokenring.errors import ConfigurationError
from tokenring.ir.passes import sight_of
from tokenring.ir.schedule_data import REQUESTS, Kind
from tokenring.schedule.families.basic import (
    at_key,
    at_query,
    bidirectional,
    direct_kv,
    direct_q,
    ring,
    tokenring,
)
from tokenring.schedule.families.change import arranged
from tokenring.schedule.families.registry import FAMILIES, OURS, SMALL_TILE_TOKENS, Named, check_fit, check_heads, parse
from tokenring.schedule.routes import Gather, stay
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import WHOLE_UNITS, Pair, Ranks, Scheme, build, nothing_moves_yet, origin_of, units
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask

if TYPE_CHECKING:
    from tokenring.schedule.own_part import OwnParts
    from tokenring.sequence.workload import Workload

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "ring": ring,
    "tokenring": tokenring,
    "bidirectional": bidirectional,
    "direct-kv": direct_kv,
    "direct-q": direct_q,
}  # those that need no parameters, whatever the heads; all families are in FAMILIES
SAMPLED_OWNERS = 32  # of very many ranks, whose units show which direction moves less
DIRECTIONS = (1, -1)  # of a ring: towards the next rank, or the one before
PIECES_THAT_PAY = (2,)  # measured: more cost more messages than they hide
LEAST_PIECE_BYTES = 1 << 16  # below, a message costs more than its bytes
CUT_BY_DEFAULT = frozenset({"direct-kv", "direct-q"})

__all__ = [
    "CUT_BY_DEFAULT",
    "FAMILIES",
    "SCHEMES",
    "at_key",
    "at_query",
    "bidirectional",
    "default_pieces",
    "direct_kv",
    "direct_q",
    "make_schedule",
    "moved_tokens",
    "named_schedule",
    "ring",
    "tokenring",
]


def make_schedule(
    name: str,
    q_layout: Layout,
    kv_layout: Layout,
    mask: Mask,
    direction: int | None = None,
    pieces: int | None = None,
    order: Sequence[int] | None = None,
    wanted: Callable[[Schedule], bool] | None = None,
) -> Schedule:
    """Make the schedule `name` for these layouts and this mask.

    direction: +1 or -1, for schemes with a ring alone; None takes the one that moves fewer bytes under the mask (at
    a tie, +1).
    pieces: parts of a chunk that move apart; None takes what the name says, or the fewest.
    order: order[i] is the real rank that plays rank i, where ranks are numbered otherwise than their links want.
    wanted: asked of the tiles before moves are made, as of `build`; not where two directions have to be compared.
    Raises NotWanted where it says no; ConfigurationError for unknown names, parameters that do not fit the world size,
    a direction that a scheme does not have, and pieces that do not divide the chunks.
    """
    schemes = _schemes(name, q_layout, kv_layout, direction, pieces, order)
    least = schemes[0] if len(schemes) == 1 else moves_least(schemes, q_layout, kv_layout, mask)
    if least is not None:
        return build(least, q_layout, kv_layout, mask, wanted)
    built = [build(scheme, q_layout, kv_layout, mask) for scheme in schemes]
    return min(built, key=moved_tokens)


def _schemes(
    name: str, q_layout: Layout, kv_layout: Layout, direction: int | None, pieces: int | None,
    order: Sequence[int] | None,
) -> list[Scheme]:  # fmt: skip
    """Return the schemes of a name, one for each direction to choose from."""
    named, world_size = parse(name), q_layout.world_size
    ways = _directions(named, direction)
    scheme = named.make(world_size, pieces=pieces)
    check_fit(name, scheme, None, q_layout, kv_layout)
    small = named.family.small is not None and _is_small(scheme, q_layout, kv_layout)
    # The one that was checked is not made again: of thousands of ranks that takes a while.
    schemes = [scheme if way == 1 and not small else named.make(world_size, way, pieces, small) for way in ways]
    if order is not None and len(order) != world_size:
        raise ConfigurationError(f"order {list(order)} names {len(order)} ranks; the layout has {world_size}")
    return schemes if order is None else [arranged(scheme, order) for scheme in schemes]


def _directions(named: Named, asked: int | None) -> tuple[int, ...]:
    """Return the directions to choose from. Raises ConfigurationError for one that the schedule does not have."""
    if asked not in (None, 1, -1):
        raise ConfigurationError(f"direction {asked!r}: use 1 (towards rank + 1), -1 (towards rank - 1) or None")
    if named.family.turns:
        return DIRECTIONS if asked is None else (asked,)
    if asked is not None:
        having = ", ".join(family.form for family in FAMILIES.values() if family.turns)
        raise ConfigurationError(
            f"direction {asked}: schedule {named.text!r} has none; leave it out, or choose one of {having}"
        )
    return (1,)


def _is_small(scheme: Scheme, q_layout: Layout, kv_layout: Layout) -> bool:
    """Return whether tiles of two ranks are so small that kernels are better off with those of all ranks in one."""
    rows, cols = q_layout.local_length // scheme.q_pieces, kv_layout.local_length // scheme.kv_pieces
    return min(rows, cols) < SMALL_TILE_TOKENS


def moved_tokens(schedule: Schedule) -> int:
    """Return tokens times hops of all requests: what tells two directions of one ring apart."""
    return sum(schedule.moved_rows(move) for move in schedule.moves if move.channel == REQUESTS)


def default_pieces(name: str, workload: Workload, q_layout: Layout, kv_layout: Layout) -> int | None:
    """Return in how many pieces a named schedule moves its chunks by default: direct ones, where it pays."""
    if name not in CUT_BY_DEFAULT:
        return None
    layout = kv_layout if name == "direct-kv" else q_layout
    row = workload.kv_heads * workload.kv_dim if name == "direct-kv" else workload.q_heads * workload.head_dim
    chunk_bytes = layout.chunk_length * workload.batch * row * workload.itemsize
    for pieces in PIECES_THAT_PAY:
        if layout.takes_pieces(pieces) and chunk_bytes // pieces >= LEAST_PIECE_BYTES:
            return pieces
    return 1


def named_schedule(
    name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask, pieces: int | None = None,
    order: Sequence[int] | None = None, wanted: Callable[[Schedule], bool] | None = None,
) -> Schedule:  # fmt: skip
    """Make a named schedule for a workload, in its default pieces unless `pieces` says how many.

    order, wanted: as of `make_schedule`.
    """
    if pieces is None:
        pieces = default_pieces(name, workload, q_layout, kv_layout)
    made = make_schedule(name, q_layout, kv_layout, mask, pieces=pieces, order=order, wanted=wanted)
    check_heads(name, made.head_groups, workload)
    return made


def schedule_in_parts(
    name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask, pieces: int | None = None,
    order: Sequence[int] | None = None, direction: int | None = None,
) -> Schedule:  # fmt: skip
    """Return the schedule of `named_schedule`; where possible its tiles and moves are made when asked for.

    direction: as of `make_schedule`: what `direction_of` says, where that is known already.
    """
    if pieces is None:
        pieces = default_pieces(name, workload, q_layout, kv_layout)
    schemes = _schemes_in_parts(name, q_layout, kv_layout, mask, pieces, order, direction)
    if not schemes:
        return named_schedule(name, workload, q_layout, kv_layout, mask, pieces, order)
    check_heads(name, schemes[0].head_groups, workload)
    return Schedule.in_parts(_parts_that_move_least(schemes, q_layout, kv_layout, mask))


def goes_in_parts(name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask) -> bool:
    """Return whether `schedule_in_parts` makes tiles and moves only when they are asked for."""
    pieces = default_pieces(name, workload, q_layout, kv_layout)
    return bool(_schemes_in_parts(name, q_layout, kv_layout, mask, pieces))


def _schemes_in_parts(
    name: str, q_layout: Layout, kv_layout: Layout, mask: Mask, pieces: int | None, order: Sequence[int] | None = None,
    direction: int | None = None,
) -> list[Scheme]:  # fmt: skip
    """Return the schemes of a name, one for each direction to choose from; none where the whole is made at once."""
    from tokenring.schedule.own_part import halves_in_pieces

    if not _goes_by_owner(name, mask):
        return []
    schemes = _schemes(name, q_layout, kv_layout, direction, pieces, order)
    return [] if any(map(halves_in_pieces, schemes)) else schemes


def _goes_by_owner(name: str, mask: Mask) -> bool:
    """Return whether all units of an owner, head group and piece go the same ways, as those of our families, whole."""
    return mask in WHOLE_UNITS and parse(name).family in OURS


def direction_of(
    name: str, workload: Workload, q_layout: Layout, kv_layout: Layout, mask: Mask, order: Sequence[int] | None = None
) -> int | None:
    """Return the direction that `schedule_in_parts` takes, where there are two; None, too, where it makes the whole."""
    pieces = default_pieces(name, workload, q_layout, kv_layout)
    schemes = _schemes_in_parts(name, q_layout, kv_layout, mask, pieces, order)
    if len(schemes) < 2:
        return None
    least = _parts_that_move_least(schemes, q_layout, kv_layout, mask).scheme
    return DIRECTIONS[schemes.index(least)]


def _parts_that_move_least(schemes: Sequence[Scheme], q_layout: Layout, kv_layout: Layout, mask: Mask) -> OwnParts:
    """Return the parts of the scheme whose requests carry fewest tokens times hops, of equals the first.

    Of very many ranks those of some owners tell: the two differ by what they cost, not by what they compute.
    """
    from tokenring.schedule.own_part import OwnParts
    from tokenring.schedule.size_limits import MADE_RANKS

    some = [OwnParts(each, q_layout, kv_layout, mask) for each in schemes]
    ranks = q_layout.world_size
    every = 1 if ranks <= MADE_RANKS else _coprime(ranks // SAMPLED_OWNERS + 1, ranks)
    return some[0] if len(some) == 1 else min(some, key=lambda each: each.requested_tokens(every))


def _coprime(least: int, ranks: int) -> int:
    """Return a number from `least` on without a common factor: so owners are in every place of a host."""
    return next(each for each in count(least) if gcd(each, ranks) == 1)


# ---------- which of two mirror images moves less, by their routes alone: the schedules take far longer to make


def moves_least(schemes: Sequence[Scheme], q_layout: Layout, kv_layout: Layout, mask: Mask) -> Scheme | None:
    """Return the scheme whose requests carry fewest tokens times hops, of equals the first; None if it takes making.

    That is told where whole units move and ranks of tiles go by their q.
    """
    told = all(each.placed_by_q and each.place_for is None for each in schemes)
    if not told or mask not in WHOLE_UNITS:
        return None

    def tokens(scheme: Scheme) -> int:
        schedule = nothing_moves_yet(scheme, q_layout, kv_layout, mask)
        return _requested_tokens(schedule, scheme, _readers(schedule, scheme))

    return min(schemes, key=tokens)


def _requested_tokens(schedule: Schedule, scheme: Scheme, readers: tuple[Ranks, Ranks]) -> int:
    """Return tokens times hops of all requests in what `build` would make, where these ranks read q and kv."""
    by_q, by_kv = readers
    return _tokens(schedule, "q", scheme.gather_q, by_q) + _tokens(schedule, "kv", scheme.gather_kv, by_kv)


def _readers(schedule: Schedule, scheme: Scheme) -> tuple[Ranks, Ranks]:
    """Return the ranks whose tiles read each unit of q, and of kv, and see or show something; placed by their q."""
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
