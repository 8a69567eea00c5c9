"""Copies that are one: rows that follow each other, and blocks that lie equally far apart on both sides.

An accelerator takes as long to launch a copy as to make a small one, and schedules of heads copy many: of each head
group, chunk and tensor. What is copied and where is the same; only how often a device is asked changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import torch

from tokenring.lowering.program import Instruction, Merge, Pack, Recv, Send, Wait

MOST_DIMS = 7  # of what is copied as one


class MemoryPlace(NamedTuple):
    """The place of a tensor: which memory it is in, and there its offset, sizes and strides, in elements."""

    home: Hashable
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor, home: Hashable) -> MemoryPlace:
        """Return where a tensor lies; home: which memory that is, in words of the caller's."""
        return MemoryPlace(home, tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


class Copied(NamedTuple):
    """Copies that are made as one, from the places of the first of them on; first: its number."""

    first: int
    shape: tuple[int, ...]
    source: tuple[int, ...]  # strides
    into: tuple[int, ...]


class CopyRun(NamedTuple):
    """Instructions that only copy, by their positions, and the position at which all of it is done."""

    at: int
    positions: tuple[int, ...]


def copy_runs(instructions: Sequence[Instruction | None]) -> Iterator[CopyRun]:
    """Yield runs of instructions that copy together; no run goes beyond a None.

    Packs that follow each other: at the first, since nothing that they need comes in between. First results that are
    put home behind the last message, with waits between them: at the last, when all have come.
    """
    behind = max((at for at, each in enumerate(instructions) if isinstance(each, Send | Recv)), default=-1)
    run: list[int] = []
    kind: type | None = None
    for at, each in enumerate([*instructions, None]):
        here = type(each) if isinstance(each, Pack) or _comes_home(each, at, behind) else None
        if here is None and kind is Merge and isinstance(each, Wait):
            continue
        if here is not kind:
            if len(run) > 1:
                yield CopyRun(run[0] if kind is Pack else run[-1], tuple(run))
            run, kind = [], here
        if here is not None:
            run.append(at)


def _comes_home(each: Instruction | None, at: int, behind: int) -> bool:
    return isinstance(each, Merge) and each.first and at > behind


class _Block(NamedTuple):
    number: int
    source: int
    into: int


Alike = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]  # sizes, and strides of both sides


def as_one(copies: Sequence[tuple[MemoryPlace, MemoryPlace]]) -> list[Copied]:
    """Return how to make copies (source, into) with as few as this finds; their order does not matter."""
    groups: dict[tuple[Hashable, ...], dict[Alike, list[_Block]]] = defaultdict(lambda: defaultdict(list))
    for number, (source, into) in enumerate(copies):
        homes = source.home, source.dtype, into.home, into.dtype
        alike = into.shape, _strides(source), _strides(into)
        groups[homes][alike].append(_Block(number, source.offset, into.offset))
    found: list[Copied] = []
    for some in groups.values():
        joined = _in_steps(_in_rows(some))
        found += [Copied(block.number, *alike) for alike, blocks in joined.items() for block in blocks]
    return sorted(found)


def _strides(place: MemoryPlace) -> tuple[int, ...]:
    """Return the strides, 0 where there is but one element."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(place.shape, place.strides, strict=True))


def _in_rows(some: dict[Alike, list[_Block]]) -> dict[Alike, list[_Block]]:
    """Join blocks whose rows, the first dimension, follow each other on both sides."""
    found: dict[Alike, list[_Block]] = defaultdict(list)
    whole: dict[Alike, dict[tuple[int, int], tuple[int, _Block]]] = defaultdict(dict)
    for (shape, source, into), blocks in some.items():
        if shape[0] < 2:  # its stride is not known
            found[shape, source, into] += blocks
            continue
        for block in blocks:
            whole[shape[1:], source, into][block.source, block.into] = shape[0], block
    for (rest, source, into), at in whole.items():
        for start, (rows, block) in sorted(at.items()):
            if start not in at:
                continue
            del at[start]
            while (then := (block.source + rows * source[0], block.into + rows * into[0])) in at:
                rows += at.pop(then)[0]
            found[(rows, *rest), source, into].append(block)
    return found


def _in_steps(some: dict[Alike, list[_Block]]) -> dict[Alike, list[_Block]]:
    """Join blocks that lie equally far apart on both sides, and what comes of that again."""
    while True:
        found: dict[Alike, list[_Block]] = defaultdict(list)
        for (shape, source, into), blocks in some.items():
            left = sorted(blocks, key=lambda block: (block.source, block.into))
            while left:
                run = _progression(left) if len(shape) < MOST_DIMS else left[:1]
                left = [block for block in left if block not in run]
                if len(run) == 1:
                    found[shape, source, into].append(run[0])
                    continue
                step = run[1].source - run[0].source, run[1].into - run[0].into
                found[(len(run), *shape), (step[0], *source), (step[1], *into)].append(run[0])
        if sum(map(len, found.values())) == sum(map(len, some.values())):
            return found
        some = found


def _progression(blocks: list[_Block]) -> list[_Block]:
    """Return the longest run from the first block on, in steps that a tensor can have on both sides."""
    first, at = blocks[0], {(block.source, block.into): block for block in blocks}
    best = [first]
    for second in blocks[1:]:
        step = second.source - first.source, second.into - first.into
        if step[0] < 0 or step[1] <= 0:
            continue
        run = [first]
        while (then := at.get((run[-1].source + step[0], run[-1].into + step[1]))) is not None:
            run.append(then)
        best = max(best, run, key=len)
    return best
