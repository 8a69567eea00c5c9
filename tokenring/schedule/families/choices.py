"""Parameters of a family that are worth trying: for a world size, a head count and the ranks of a node."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenring.schedule.families.cycles import hamiltonian
from tokenring.schedule.families.family import Numbers, split_heads

if TYPE_CHECKING:
    from tokenring.sequence.workload import Workload

WAVES = (1, 2, 4)
PACKINGS = 3  # the most head groups first: fewer move more KV
LARGEST_SEARCH = 32  # ranks; above, even worlds take too long to look for rings
LEAST_GAIN = 4  # query heads a kv head from which moving Q never pays


def divisors(number: int) -> list[int]:
    """Return the divisors of a number, from 1 on."""
    return [each for each in range(1, number + 1) if number % each == 0]


def ulysses(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield parameters of Ulysses: in waves only where no rank gets a kv head twice."""
    for waves in WAVES:
        groups = world_size * waves
        if split_heads(workload, groups) and (waves == 1 or (workload is not None and workload.kv_heads >= groups)):
            yield () if waves == 1 else (waves,)


def packed(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield head groups where Ulysses does not fit: as many as there are kv heads, or a few heads in each."""
    if workload is not None:
        fitting = [groups for groups in divisors(workload.kv_heads) if groups > 1 and groups % world_size]
        yield from ((groups,) for groups in fitting[-PACKINGS:])


def uneven(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield parameters of uneven, where Ulysses does not fit and more than half of the ranks have work.

    With the fewest and with the most head groups of those with which the busiest rank has fewest heads.
    """
    heads = 0 if workload is None else workload.kv_heads
    if heads % world_size == 0 or 2 * heads <= world_size:
        return
    fitting = [groups for groups in divisors(heads) if groups >= min(heads, world_size)]
    most = {groups: -(-groups // world_size) * (heads // groups) for groups in fitting}  # heads of the busiest rank
    best = [groups for groups in fitting if most[groups] == min(most.values())]
    yield from ((groups,) for groups in dict.fromkeys((best[0], best[-1])))


def usp(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield parameters of usp that are neither Ulysses nor a ring alone."""
    yield from ((heads,) for heads in divisors(world_size)[1:-1] if split_heads(workload, heads))


def tiles(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield parameters of tiles with which both Q and KV move."""
    yield from ((queries, world_size // queries) for queries in divisors(world_size)[1:-1])


def sub_sharded(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield parameters of sub-sharded, all but those that are Ulysses."""
    for heads in divisors(world_size)[:-1]:
        if split_heads(workload, heads):
            pieces = world_size // heads
            yield from ((heads, queries, pieces // queries) for queries in divisors(pieces))


def mixed(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield parameters of mixed, by the workload's query heads a kv head; in one and in two head groups."""
    ratio = 1 if workload is None else workload.q_heads // workload.kv_heads
    if world_size > 1 and ratio < LEAST_GAIN:
        yield () if ratio == 1 else (ratio,)
        if split_heads(workload, 2):
            yield ratio, 2


def nodes(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield the ranks of a node where there are several nodes of several ranks: what two levels are for."""
    if 1 < local < world_size:
        yield (local,)


def mesh(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield the sizes of meshes: two dimensions inside a node, and one across nodes if there are several."""
    for size in divisors(local)[1:-1]:
        yield (*([world_size // local] if local < world_size else []), size, local // size)


def multi_ring(world_size: int, workload: Workload | None, local: int) -> Iterator[Numbers]:
    """Yield the empty parameters of multi-ring from three ranks on: fewer have one ring."""
    if world_size > 2 and (world_size % 2 or world_size <= LARGEST_SEARCH) and hamiltonian(world_size) is not None:
        yield ()
