"""Everything in one hop: Ulysses, also for heads that do not divide, tiles, and tiles of everybody's pieces."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from tokenring.schedule.families.family import refuse
from tokenring.schedule.routes import Hop, Origin
from tokenring.schedule.scheme import STRAIGHT, Scheme

KEEP = frozenset({"q", "kv"})


def to(rank: int, origin: Origin, step: int = 0, due: int = 0) -> tuple[Hop, ...]:
    """Return the hop straight to one rank, none if that is the owner."""
    return () if rank == origin.owner else (Hop(step, origin.owner, rank, due),)


def ulysses(world_size: int, waves: int = 1) -> Scheme:
    """Make Ulysses with `waves` head groups a rank; one is exchanged while the one before is computed."""
    return replace(uneven(world_size, world_size * waves), name="ulysses")


def packed(world_size: int, groups: int) -> Scheme:
    """Make Ulysses for any number of head groups: a rank computes some whole, and of one or two more some rows.

    Each head group is a row of tiles for each owner of queries. All groups × P rows, head group after head group, are
    cut into P equal shares. So every rank computes equally much, Q and O move once, and the KV of a head group moves
    to the few ranks that have rows of it. With P groups this is Ulysses; with one, all ranks gather KV.
    """
    cycle = world_size // gcd(groups, world_size)

    def rank_with(share: int) -> int:
        """Return the rank of a share, which has rows of `groups` neighbouring owners: one of these, whose rows stay."""
        return (share * groups + share // cycle) % world_size

    def share_of(heads: int, q_owner: int) -> int:
        """Return the share of a row of tiles."""
        return (heads * world_size + q_owner) // groups

    def rank_of(heads: int, q_owner: int) -> int:
        return rank_with(share_of(heads, q_owner))

    def shares_of(heads: int) -> range:
        return range(share_of(heads, 0), share_of(heads, world_size - 1) + 1)

    ranks_of = [tuple(dict.fromkeys(map(rank_with, shares_of(heads)))) for heads in range(groups)]
    first = {rank: heads for heads in reversed(range(groups)) for rank in ranks_of[heads]}

    def due(heads: int, rank: int) -> int:
        """Return when a rank's head group is due: it computes one while the next is on its way."""
        return 1 + heads - first[rank]

    due_at = [[(rank, due(heads, rank)) for rank in ranks] for heads, ranks in enumerate(ranks_of)]

    def gather_q(origin: Origin) -> tuple[Hop, ...]:
        rank = rank_of(origin.heads, origin.owner)
        return to(rank, origin, due=due(origin.heads, rank))

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        owner = origin.owner
        return tuple([Hop(0, owner, rank, when) for rank, when in due_at[origin.heads] if rank != owner])

    return Scheme(
        "packed", lambda pair: rank_of(pair.heads, pair.q_owner), gather_q, gather_kv, head_groups=groups, keep=KEEP,
        when=lambda pair, _: due(pair.heads, rank_of(pair.heads, pair.q_owner)), placed_by_q=True, timed_by_q=True,
        straight=STRAIGHT,
    )  # fmt: skip


def uneven(world_size: int, groups: int) -> Scheme:
    """Make Ulysses for any number of head groups, each computed whole, so that some ranks have one more than others.

    As DeepSpeed's uneven heads, also for fewer than ranks. Every tensor moves once, to one rank, so bytes are those of
    Ulysses; but kernels of the busiest rank take longer than in `packed`, where all compute equally much.
    """

    def rank_of(heads: int) -> int:
        """Spread over runs of ranks, so that hosts get as equally many as can be."""
        return heads * world_size // groups

    def wave(heads: int) -> int:
        """Return when a rank's head group is due: one is exchanged while the one before is computed."""
        first = -(-rank_of(heads) * groups // world_size)
        return heads - first

    def gather(origin: Origin) -> tuple[Hop, ...]:
        return to(rank_of(origin.heads), origin, wave(origin.heads))

    return Scheme(
        "uneven", lambda pair: rank_of(pair.heads), gather, gather, head_groups=groups, keep=KEEP,
        when=lambda pair, due: 1 + wave(pair.heads), placed_by_q=True, timed_by_q=True, straight=STRAIGHT,
    )  # fmt: skip


def tiles(world_size: int, queries: int, keys: int) -> Scheme:
    """Make the scheme in which rank (x, y) computes Q of all (x', y) with KV of all (x, y')."""
    refuse(queries * keys != world_size, f"{queries} × {keys} is not {world_size}")

    def gather_q(origin: Origin) -> tuple[Hop, ...]:
        x, y = divmod(origin.owner, keys)
        return tuple(
            Hop(0, origin.owner, (x + far) % queries * keys + y, origin.piece * (queries - 1) + far)
            for far in range(1, queries)
        )

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        x, y = divmod(origin.owner, keys)
        return tuple(Hop(0, origin.owner, x * keys + (y + far) % keys, far) for far in range(1, keys))

    return Scheme(
        "tiles", lambda pair: pair.kv_owner // keys * keys + pair.q_owner % keys, gather_q, gather_kv, straight=STRAIGHT
    )


def sub_sharded(world_size: int, heads: int, queries: int, keys: int) -> Scheme:
    """Make a scheme where each rank computes one head group: one piece of everybody's Q with one of everybody's KV."""
    product = heads * queries * keys
    refuse(product != world_size, f"{heads} × {queries} × {keys} is {product}, not {world_size}")

    def gather_q(origin: Origin) -> tuple[Hop, ...]:
        first = (origin.heads * queries + origin.piece) * keys
        return tuple(Hop(0, origin.owner, rank) for rank in range(first, first + keys) if rank != origin.owner)

    def gather_kv(origin: Origin) -> tuple[Hop, ...]:
        first = origin.heads * queries * keys + origin.piece
        return tuple(
            Hop(0, origin.owner, rank) for rank in range(first, first + queries * keys, keys) if rank != origin.owner
        )

    return Scheme(
        "sub-sharded", lambda pair: (pair.heads * queries + pair.q_piece) * keys + pair.kv_piece, gather_q, gather_kv,
        head_groups=heads, q_pieces=queries, kv_pieces=keys, when=lambda pair, due: 1,
        placed_by_q=True, timed_by_q=True, straight=STRAIGHT,
    )  # fmt: skip
