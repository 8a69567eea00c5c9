"""How blocks travel: gather routes bring a block to the ranks that need it, return routes bring partials home.

A gather route is a function of a block's owner: the out-tree of hops by which it reaches every
rank. Hops that nobody needs are pruned later. A return route is a function of the ranks that made
partials for a unit, with the step of the last tile of each: the in-tree by which they come home.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple


class Origin(NamedTuple):
    """What a route starts from: a unit of a kind, its owner, and the world."""

    owner: int
    world_size: int
    chunk: int = 0
    heads: int = 0
    piece: int = 0
    pieces: int = 1


class Hop(NamedTuple):
    """src → dst in `step`; dst first needs the block in step `due` (0: in the step after)."""

    step: int
    src: int
    dst: int
    due: int = 0
    add: bool = False

    @property
    def arrival(self) -> int:
        return self.due or self.step + 1


Gather = Callable[[Origin], tuple[Hop, ...]]
Makers = Mapping[int, int]  # rank that made a partial → step of its last tile for that unit
Return = Callable[[Origin, Makers], tuple[Hop, ...]]


def stay(origin: Origin) -> tuple[Hop, ...]:
    """Nothing is gathered."""
    return ()


def ring(direction: int) -> Gather:
    """Round all ranks, each passing on what it received to rank + direction."""

    def route(origin: Origin) -> tuple[Hop, ...]:
        world = origin.world_size
        at = [(origin.owner + direction * step) % world for step in range(world)]
        return tuple(Hop(step, at[step], at[step + 1]) for step in range(world - 1))

    return route


def both_ways(origin: Origin) -> tuple[Hop, ...]:
    """Even pieces go round the ring towards rank + 1, odd ones towards rank - 1."""
    return ring(1 if origin.piece % 2 == 0 else -1)(origin)


def direct(origin: Origin) -> tuple[Hop, ...]:
    """Straight from the owner to every other rank, all at once; first pieces first.

    All hops are posted in the first step. They are due by piece, then by distance, so that a rank
    computes on what has arrived while the rest is still on its way.
    """
    world = origin.world_size
    return tuple(
        Hop(0, origin.owner, (origin.owner + distance) % world, origin.piece * (world - 1) + distance)
        for distance in range(1, world)
    )


def direct_fused(origin: Origin) -> tuple[Hop, ...]:
    """Like `direct`, but pieces of one number are due together, from whichever rank: one kernel call takes them all."""
    world = origin.world_size
    return tuple(
        Hop(0, origin.owner, (origin.owner + distance) % world, origin.piece + 1) for distance in range(1, world)
    )


def all_to_all(origin: Origin) -> tuple[Hop, ...]:
    """Straight from the owner to every other rank, all needed together in the step after."""
    world = origin.world_size
    return tuple(Hop(0, origin.owner, (origin.owner + distance) % world) for distance in range(1, world))


def return_direct(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
    """Each partial goes straight to the owner, as soon as it is made."""
    return tuple(Hop(step, rank, origin.owner) for rank, step in sorted(makers.items()) if rank != origin.owner)


def follow(gather: Gather) -> Return:
    """The partial follows the block round a ring, each rank adding its own, and then goes home."""

    def route(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
        chain = [hop.dst for hop in gather(origin)]
        hops = []
        step = 0
        for position, (rank, after) in enumerate(zip(chain, [*chain[1:], origin.owner], strict=True)):
            # A rank that makes nothing still passes on what comes by.
            step = max(step + 1 if position else 1, makers.get(rank, 0))
            hops.append(Hop(step, rank, after, add=after != origin.owner))
        return tuple(hops)

    return route
