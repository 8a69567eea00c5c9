"""Routes of blocks: gather routes bring a block to the ranks that need it, return routes bring partials home.

A gather route is a function of a block's owner: the out-tree of hops by which it reaches every
rank. Hops that nobody needs are pruned later. A return route is a function of the ranks that made
partials for a unit, with the step of the last tile of each: the in-tree by which they come home.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import prod
from operator import mul
from typing import NamedTuple


class Origin(NamedTuple):
    """The start of a route: a unit of a kind, its owner, and the world."""

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
        """Step in which the block is there: when it is due, or the step after the hop."""
        return self.due or self.step + 1


Gather = Callable[[Origin], tuple[Hop, ...]]
Makers = Mapping[int, int]  # rank that made a partial → step of its last tile for that unit
Return = Callable[[Origin, Makers], tuple[Hop, ...]]


def stay(origin: Origin) -> tuple[Hop, ...]:
    """Return no hops: nothing is gathered."""
    return ()


def ring(direction: int) -> Gather:
    """Return the route round all ranks, each passing on what it received to rank + direction."""

    def route(origin: Origin) -> tuple[Hop, ...]:
        world = origin.world_size
        at = [(origin.owner + direction * step) % world for step in range(world)]
        return tuple(Hop(step, at[step], at[step + 1]) for step in range(world - 1))

    return route


def both_ways(origin: Origin) -> tuple[Hop, ...]:
    """Return the hops round the ring: even pieces go towards rank + 1, odd ones towards rank - 1."""
    return ring(1 if origin.piece % 2 == 0 else -1)(origin)


def direct(origin: Origin) -> tuple[Hop, ...]:
    """Return the hops straight from the owner to every other rank, all at once; first pieces first.

    All hops are posted in the first step. They are due by piece, then by distance, so that a rank
    computes on what has arrived while the rest is still on its way.
    """
    world = origin.world_size
    return tuple(
        Hop(0, origin.owner, (origin.owner + distance) % world, origin.piece * (world - 1) + distance)
        for distance in range(1, world)
    )


def direct_fused(origin: Origin) -> tuple[Hop, ...]:
    """Return the hops of `direct`, due together by piece, from whichever rank: one kernel call takes them all."""
    world = origin.world_size
    return tuple(
        Hop(0, origin.owner, (origin.owner + distance) % world, origin.piece + 1) for distance in range(1, world)
    )


def all_to_all(origin: Origin) -> tuple[Hop, ...]:
    """Return the hops straight from the owner to every other rank, all needed together in the step after."""
    world = origin.world_size
    return tuple(Hop(0, origin.owner, (origin.owner + distance) % world) for distance in range(1, world))


def mesh(sizes: Sequence[int]) -> Gather:
    """Return the route along the first dimension of a mesh, from there along the second, and so on.

    The last dimension counts ranks fastest. So a block crosses a slow first dimension once for each place along it, and
    is passed on inside. It is due in the order of its distance, digit by digit, and passed on when it is due.
    """
    strides = [prod(sizes[index + 1 :]) for index in range(len(sizes))]

    def at(origin: Origin, distance: Sequence[int]) -> int:
        digits = zip(distance, strides, sizes, strict=True)
        return sum((origin.owner // stride + far) % size * stride for far, stride, size in digits)

    def route(origin: Origin) -> tuple[Hop, ...]:
        hops = []
        for number, distance in enumerate(product(*map(range, sizes))):
            if number:
                last = max(index for index, far in enumerate(distance) if far)
                before = (*distance[:last], *[0] * (len(sizes) - last))
                step = sum(map(mul, before, strides))
                hops.append(Hop(step, at(origin, before), at(origin, distance), number))
        return tuple(hops)

    return route


def return_direct(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
    """Return the hops by which each partial goes straight to the owner, as soon as it is made."""
    return tuple(Hop(step, rank, origin.owner) for rank, step in sorted(makers.items()) if rank != origin.owner)


def follow(gather: Gather) -> Return:
    """Make the return route of a partial that follows its block round a ring, each rank adding its own, then home."""

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


def reduce_back(gather: Gather) -> Return:
    """Make the return route back along the tree by which the block came; where branches meet partials are added up."""

    def route(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
        parents = {hop.dst: hop.src for hop in gather(origin)}
        branches = defaultdict(list)
        for child, parent in parents.items():
            branches[parent].append(child)
        hops: list[Hop] = []

        def leave(rank: int) -> int | None:
            """Return the step in which a rank's partial leaves, after all that it waits for; None: there is none."""
            come = [step for child in branches[rank] if (step := leave(child)) is not None]
            if rank == origin.owner or not (come or rank in makers):
                return None
            step = max([makers.get(rank, 0), *(step + 1 for step in come)])
            hops.append(Hop(step, rank, parents[rank], add=parents[rank] != origin.owner))
            return step

        leave(origin.owner)
        return tuple(hops)

    return route


def reduce_inside(local: int) -> Return:
    """Make the return route of one partial a node of `local` ranks: a chain adds them up, in the order made."""

    def route(origin: Origin, makers: Makers) -> tuple[Hop, ...]:
        nodes: dict[int, list[int]] = defaultdict(list)
        for rank in sorted(makers, key=lambda rank: (makers[rank], rank)):
            if rank != origin.owner:
                nodes[rank // local].append(rank)
        hops = []
        for chain in nodes.values():
            step = 0
            for position, (rank, after) in enumerate(zip(chain, [*chain[1:], origin.owner], strict=True)):
                step = max(step + 1 if position else 0, makers[rank])
                hops.append(Hop(step, rank, after, add=after != origin.owner))
        return tuple(hops)

    return route
