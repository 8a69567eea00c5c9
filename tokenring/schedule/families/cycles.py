"""All links of a full mesh as rings: P - 1 directed Hamiltonian cycles of P ranks that share no link.

They exist for every P but 4 and 6 (Tillson 1980). Odd P: constructed. Even P: searched for, with a limit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from random import Random

Row = list[int]  # of a Latin square: after[rank]
Cycles = tuple[tuple[int, ...], ...]  # each: the rank after each rank
LIMIT = 400_000  # exchanges; 32 ranks take 15,000
WALK_ON = 0.05  # how often an exchange is made that does not help
WORSE = 0.3  # and how much less often for each cycle more


@lru_cache(maxsize=32)
def hamiltonian(world_size: int) -> Cycles | None:
    """Return after[cycle][rank], or None where there are none or the search found none.

    Returns the same on every rank.
    """
    if world_size in (4, 6):
        return None
    if world_size % 2 == 0 and world_size > 2:
        return _search(world_size)
    if all(world_size % factor for factor in range(2, world_size)):
        return tuple(tuple((rank + far) % world_size for rank in range(world_size)) for far in range(1, world_size))
    return _walecki(world_size)


def _walecki(world_size: int) -> Cycles:
    """Return the cycles of an odd number of ranks.

    Each is a zigzag through a circle of all ranks but one, back through that one, turned by one each time; both ways.
    """
    circle = world_size - 1
    zigzag = [(index + 1) // 2 * (1 if index % 2 else -1) for index in range(circle)]
    found = []
    for turn in range(circle // 2):
        path = [circle, *((place + turn) % circle for place in zigzag)]
        found += [_after(path), _after(path[::-1])]
    return tuple(found)


def _after(path: list[int]) -> tuple[int, ...]:
    after = dict(zip(path, [*path[1:], path[0]], strict=True))
    return tuple(after[rank] for rank in range(len(path)))


def _search(world_size: int) -> Cycles | None:
    """Search for the cycles of an even number of ranks.

    Exchanges parts of two rows of a Latin square until every row but the identity is one cycle.
    """
    random = Random(0).random  # its sequence is the same in every version of Python
    first, *rows = _square(world_size, random)
    back = _inverse(first)
    rows = [[row[back[rank]] for rank in range(world_size)] for row in rows]
    extra = [_cycles(row) - 1 for row in rows]
    for _ in range(LIMIT):
        if not any(extra):
            return tuple(map(tuple, rows))
        a, b = int(random() * len(rows)), int(random() * (len(rows) - 1))
        b += b >= a
        if not extra[a] and not extra[b] and random() > WALK_ON:
            continue
        columns = _circle(rows[a], rows[b], int(random() * world_size))
        if len(columns) == world_size:
            continue
        _exchange(rows[a], rows[b], columns)
        now = _cycles(rows[a]) - 1, _cycles(rows[b]) - 1
        worse = sum(now) - extra[a] - extra[b]
        if worse <= 0 or random() < WALK_ON * WORSE**worse:
            extra[a], extra[b] = now
        else:
            _exchange(rows[a], rows[b], columns)
    return None


def _square(size: int, random: Callable[[], float]) -> list[Row]:
    """Return a Latin square to start from, with as many odd rows as the goal has, modulo two.

    Exchanges cannot change that.
    """
    rows = [[(rank + far) % size for rank in range(size)] for far in range(size)]
    while size % 4 == 0:
        a, b = _two(size, random)
        columns = _circle(rows[a], rows[b], int(random() * size))
        if len(columns) < size:
            _exchange(rows[a], rows[b], columns)
        c, d = _two(size, random)
        lines = _circle([row[c] for row in rows], [row[d] for row in rows], int(random() * size))
        if len(lines) % 2 and 1 < len(lines) < size:
            for line in lines:
                rows[line][c], rows[line][d] = rows[line][d], rows[line][c]
            break
    return rows


def _two(size: int, random: Callable[[], float]) -> tuple[int, int]:
    first = int(random() * size)
    return first, (first + 1 + int(random() * (size - 1))) % size


def _circle(one: Row, other: Row, start: int) -> list[int]:
    """Return the least set of columns with `start` in which both rows have the same numbers."""
    where = _inverse(one)
    columns, column = [start], where[other[start]]
    while column != start:
        columns.append(column)
        column = where[other[column]]
    return columns


def _exchange(one: Row, other: Row, columns: list[int]) -> None:
    for column in columns:
        one[column], other[column] = other[column], one[column]


def _inverse(row: Row) -> Row:
    where = [0] * len(row)
    for column, number in enumerate(row):
        where[number] = column
    return where


def _cycles(row: Row) -> int:
    seen, count = [False] * len(row), 0
    for rank in range(len(row)):
        count += not seen[rank]
        while not seen[rank]:
            seen[rank] = True
            rank = row[rank]
    return count
