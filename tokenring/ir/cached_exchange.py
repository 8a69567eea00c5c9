"""The exchanges of cached attention as data: where q is, who attends from what, what moves, and where results merge.

Rows of q are cut into parts. Keys and values are of the extent "all that a rank holds": no exchange names rows of them,
so one serves every length, and none may move them. `proof.cached_exchange` proves an exchange;
`runtime.cached_exchange` runs the messages that it lists, and no others.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import PARTIALS, REQUESTS

Content = Literal["q", "partial", "result", "kv"]
OPEN = -1  # the shard that every rank has: the open part of the cache, and new tokens
ONE_SHOT, TWO_STEP, DIRECT_Q = "one-shot", "two-step", "direct-q"
CHANNEL_OF: dict[Content, str] = {"q": REQUESTS, "partial": PARTIALS, "result": REQUESTS}


class AttendPart(NamedTuple):
    """In a step, a rank makes the partial result of a part of the rows over the keys and values that it holds."""

    step: int
    rank: int
    part: int


class SendPart(NamedTuple):
    """In a step, behind what is attended in it, a rank sends a part: rows of q, its partial result, or the result."""

    step: int
    src: int
    dst: int
    content: Content
    part: int


class MergePart(NamedTuple):
    """In a step, behind its messages, a rank merges partial results of a part: those of these shards."""

    step: int
    rank: int
    part: int
    shards: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeData:
    """An exchange between so many ranks, whose rows are cut into so many parts.

    starts: by part, the ranks that have its rows of q at the beginning. homes: by part, the ranks that are to have its
    result in the end; a home is a set.
    """

    name: str
    ranks: int
    parts: int
    starts: tuple[frozenset[int], ...]
    homes: tuple[frozenset[int], ...]
    attends: tuple[AttendPart, ...]
    moves: tuple[SendPart, ...]
    merges: tuple[MergePart, ...]

    def of(self, content: Content) -> tuple[SendPart, ...]:
        """Return the messages with such content."""
        return tuple(move for move in self.moves if move.content == content)

    def sent_bytes(self, rank: int, sizes: dict[Content, int]) -> int:
        """Return the bytes that a rank sends, where a part of each content has so many."""
        return sum(sizes[move.content] for move in self.moves if move.src == rank)


@lru_cache(maxsize=64)
def exchange_data(name: str, ranks: int) -> ExchangeData:
    """Return the exchange of this name between so many ranks. Raises ConfigurationError."""
    makers = {ONE_SHOT: _one_shot, TWO_STEP: _two_step, DIRECT_Q: _direct_q}
    if name not in makers:
        raise ConfigurationError(f"no exchange is called {name!r}; there are {', '.join(makers)}")
    return makers[name](ranks)


def _pairs(ranks: int) -> list[tuple[int, int]]:
    return [(src, dst) for src in range(ranks) for dst in range(ranks) if src != dst]


def _shards(ranks: int) -> tuple[int, ...]:
    return (*range(ranks), OPEN)


def _one_shot(ranks: int) -> ExchangeData:
    """Every rank has all rows: each sends what it makes of them to all, which all merge."""
    every = frozenset(range(ranks))
    return ExchangeData(
        ONE_SHOT, ranks, 1, (every,), (every,),
        tuple(AttendPart(0, rank, 0) for rank in range(ranks)),
        tuple(SendPart(0, src, dst, "partial", 0) for src, dst in _pairs(ranks)),
        tuple(MergePart(0, rank, 0, _shards(ranks)) for rank in range(ranks)),
    )  # fmt: skip


def _two_step(ranks: int) -> ExchangeData:
    """Every rank has all rows: partial results of a part go to one rank, which merges them and sends the result to all.

    A result that is complete becomes a source: it is sent on behind the merge.
    """
    every = frozenset(range(ranks))
    return ExchangeData(
        TWO_STEP, ranks, ranks, (every,) * ranks, (every,) * ranks,
        tuple(AttendPart(0, rank, part) for rank in range(ranks) for part in range(ranks)),
        (
            *(SendPart(0, src, dst, "partial", dst) for src, dst in _pairs(ranks)),
            *(SendPart(1, src, dst, "result", src) for src, dst in _pairs(ranks)),
        ),
        tuple(MergePart(0, rank, rank, _shards(ranks)) for rank in range(ranks)),
    )  # fmt: skip


def _direct_q(ranks: int) -> ExchangeData:
    """Each rank has a part of the rows, of tokens or of heads: it goes to all, and what they make of it comes back."""
    own = tuple(frozenset((rank,)) for rank in range(ranks))
    return ExchangeData(
        DIRECT_Q, ranks, ranks, own, own,
        (
            *(AttendPart(0, rank, rank) for rank in range(ranks)),
            *(AttendPart(1, rank, part) for rank, part in _pairs(ranks)),
        ),
        (
            *(SendPart(0, src, dst, "q", src) for src, dst in _pairs(ranks)),
            *(SendPart(1, src, dst, "partial", dst) for src, dst in _pairs(ranks)),
        ),
        tuple(MergePart(1, rank, rank, _shards(ranks)) for rank in range(ranks)),
    )  # fmt: skip
