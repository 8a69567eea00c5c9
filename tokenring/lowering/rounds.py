"""The rounds of a program, and the batches that they are cut into where a transport moves messages in batches.

A round is what a rank posts in one step on one channel. Both ends of a message have it in the same round, all ranks
come to their rounds in one order, and a rank waits for none of a round's messages before it has posted all of them. So
batches that are cut by what both ends know alike cannot wait for each other in a circle (`proof.batches` replays that).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from tokenring.lowering.program import Instruction, Pack, Recv, Send, Wait


class Round(NamedTuple):
    """Posts that stand in a row, by their positions: of one step and one channel."""

    step: int
    channel: str
    posts: tuple[int, ...]

    @property
    def end(self) -> int:
        """The position of the last post, at which the round's messages begin to move."""
        return self.posts[-1]


class PostEnd(NamedTuple):
    """One end of a message: whether this rank sends it, and the rank at the other end."""

    sends: bool
    peer: int


def rounds(instructions: Sequence[Instruction], steps: Sequence[int]) -> list[Round]:
    """Return the rounds of a program. Only copies, and waits for messages of earlier rounds, stand inside one."""
    found: list[Round] = []
    row: list[int] = []
    key: tuple[int, str] | None = None
    for at, (each, step) in enumerate(zip(instructions, steps, strict=True)):
        if isinstance(each, Pack | Wait):
            continue
        here = (step, each.channel) if isinstance(each, Recv | Send) else None
        if row and key is not None and here != key:
            found.append(Round(*key, tuple(row)))
            row = []
        key = here
        if here is not None:
            row.append(at)
    return [*found, Round(*key, tuple(row))] if row and key is not None else found


def batches(ends: Sequence[PostEnd], rank: int, world_size: int, one_pair: bool = False) -> list[list[int]]:
    """Cut the posts of a round into batches, in order; return the positions in `ends` of each.

    No batch has two messages from one rank to another. one_pair: none has more than one send and one receive; these are
    of ranks equally far apart.
    """
    times = Counter[PostEnd]()
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for at, end in enumerate(ends):
        found[times[end], distance(end, rank, world_size) if one_pair else 0].append(at)
        times[end] += 1
    return [found[key] for key in sorted(found)]


def distance(end: PostEnd, rank: int, world_size: int) -> int:
    """Return how far a message goes, downwards from its source and round after rank 0: the same at both ends."""
    return (rank - end.peer if end.sends else end.peer - rank) % world_size
