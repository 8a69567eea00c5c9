"""Shapes of graphs on names: connected parts, cliques, rings, cube meshes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations

Neighbours = Mapping[str, frozenset[str]]


def neighbours(names: Iterable[str], linked: Iterable[tuple[str, str]]) -> Neighbours:
    around: dict[str, set[str]] = {name: set() for name in names}
    for a, b in linked:
        around[a].add(b)
        around[b].add(a)
    return {name: frozenset(found) for name, found in around.items()}


def parts(around: Neighbours) -> list[tuple[str, ...]]:
    """Connected parts, in the order of their first names."""
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
    return all(len(around[name] & set(part)) == len(part) - 1 for name in part)


def is_ring(part: Sequence[str], around: Neighbours) -> bool:
    """Connected is the caller's part."""
    return len(part) > 3 and all(len(around[name]) == 2 for name in part)


def is_cube_mesh(part: Sequence[str], around: Neighbours) -> bool:
    """Two fully linked quads, each device of one linked to one device of the other: DGX-1."""
    if len(part) != 8 or any(len(around[name]) != 4 for name in part):
        return False
    first, *others = part
    for rest in combinations(others, 3):
        quad = (first, *rest)
        other = [name for name in part if name not in quad]
        if is_clique(quad, around) and is_clique(other, around):
            return True
    return False
