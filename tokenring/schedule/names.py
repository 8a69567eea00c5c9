"""Schedules by name. Each is a placement and routes (`families`); none is a loop over steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import REQUESTS
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
from tokenring.schedule.families.registry import FAMILIES, SMALL_TILE_TOKENS, Named, check_fit, parse
from tokenring.schedule.schedule import Schedule
from tokenring.schedule.scheme import Scheme, build
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask

SCHEMES: dict[str, Callable[..., Scheme]] = {
    "ring": ring,
    "tokenring": tokenring,
    "bidirectional": bidirectional,
    "direct-kv": direct_kv,
    "direct-q": direct_q,
}  # those that need no parameters, whatever the heads; all families are in FAMILIES

__all__ = [
    "FAMILIES",
    "SCHEMES",
    "at_key",
    "at_query",
    "bidirectional",
    "direct_kv",
    "direct_q",
    "make_schedule",
    "moved_tokens",
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
) -> Schedule:
    """Make the schedule `name` for these layouts and this mask.

    direction: +1 or -1, for schemes with a ring alone; None takes the one that moves fewer bytes under the mask (at
    a tie, +1).
    pieces: parts of a chunk that move apart; None takes what the name says, or the fewest.
    order: order[i] is the real rank that plays rank i, where ranks are numbered otherwise than their links want.
    Raises ConfigurationError for unknown names, parameters that do not fit the world size, a direction that a
    scheme does not have, and pieces that do not divide the chunks.
    """
    named, world_size = parse(name), q_layout.world_size
    ways = _directions(named, direction)
    scheme = named.make(world_size, pieces=pieces)
    check_fit(name, scheme, None, q_layout, kv_layout)
    small = _is_small(scheme, q_layout, kv_layout)
    schemes = [named.make(world_size, way, pieces, small) for way in ways]
    if order is not None:
        schemes = [arranged(scheme, order) for scheme in schemes]
    built = [build(scheme, q_layout, kv_layout, mask) for scheme in schemes]
    return min(built, key=moved_tokens)


def _directions(named: Named, asked: int | None) -> tuple[int, ...]:
    """Return the directions to choose from. Raises ConfigurationError for one that the schedule does not have."""
    if asked not in (None, 1, -1):
        raise ConfigurationError(f"direction {asked!r}: use 1 (towards rank + 1), -1 (towards rank - 1) or None")
    if named.family.turns:
        return (1, -1) if asked is None else (asked,)
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
    return sum(schedule.unit_length(move.block.kind) for move in schedule.moves if move.channel == REQUESTS)
