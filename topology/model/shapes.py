"""Shapes of graphs on names: connected parts, cliques, rings, cube meshes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Neighbours = Mapping[str, frozenset[str]]


def neighbours(names: Iterable[str], linked: Iterable[tuple[str, str]]) -> Neighbours:
    """Return the neighbours of each name."""
    around: dict[str, set[str]] = {name: set() for name in names}
    for a, b in linked:
        around[a].add(b)
        around[b].add(a)
    return {name: frozenset(found) for name, found in around.items()}


def parts(around: Neighbours) -> list[tuple[str, ...]]:
    """Return the connected parts, in the order of their first names."""
    order = {name: i for i, name in enumerate(around)}
    left = dict.fromkeys(around)
    found = []
    while left:
        waiting, part = [next(iter(left))], set()
        while waiting:
            name = waiting.pop()
            if name in left:
                del left[name]
                part.add(name)
                waiting.extend(around[name])
        found.append(tuple(sorted(part, key=order.__getitem__)))
    return found


def is_clique(part: Sequence[str], around: Neighbours) -> bool:
    """Return whether each name of a part is linked to all others of it."""
    return all(len(around[name] & set(part)) == len(part) - 1 for name in part)


def is_ring(part: Sequence[str], around: Neighbours) -> bool:
    """Return whether a part of four names or more, which the caller knows to be connected, is a ring."""
    return len(part) > 3 and all(len(around[name]) == 2 for name in part)


def is_cube_mesh(part: Sequence[str], around: Neighbours) -> bool:
    """Return whether a part is two fully linked quads, each device linked to one of the other quad: DGX-1."""
    if len(part) != 8 or any(len(around[name]) != 4 for name in part):
        return False
    first, *others = part
    for rest in combinations(others, 3):
        quad = (first, *rest)
        other = [name for name in part if name not in quad]
        if is_clique(quad, around) and is_clique(other, around):
            return True
    return False
