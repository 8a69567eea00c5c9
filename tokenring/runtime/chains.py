"""Chains of kernel calls of one tile: each beyond the one before in rows and columns, so that one call packs them.

Where documents lie in several places, as those that are cut over ranks do in a tile of all ranks, neighbours in the
program are of one document. Chains are of one place of every document instead. Calls that share rows or columns stay in
their order, which says what is copied, and what is merged into it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenring.lowering.program import Attend, Span


class _Axis:
    """Rows or columns, and the chain of the last call that each was in."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._cuts = sorted({end for each in spans for end in (each.start, each.stop)})
        self._chains = [-1] * len(self._cuts)

    def last(self, span: Span) -> int:
        """Return the last chain of any of these rows."""
        return max(self._chains[slice(*self._between(span))])

    def put(self, span: Span, chain: int) -> None:
        """Note the chain of these rows."""
        first, stop = self._between(span)
        self._chains[first:stop] = [chain] * (stop - first)

    def _between(self, span: Span) -> tuple[int, int]:
        return bisect_left(self._cuts, span.start), bisect_left(self._cuts, span.stop)


def chained(calls: Sequence[Attend], follows: Callable[[Attend, Attend], bool]) -> list[list[Attend]]:
    """Return the calls of a tile in chains, in which each follows the one before.

    Of two calls that share rows or columns the earlier one is in the earlier chain.
    """
    rows, columns = _Axis([each.q for each in calls]), _Axis([each.kv for each in calls])
    chains: list[list[Attend]] = []
    for each in calls:
        at = 1 + max(rows.last(each.q), columns.last(each.kv))
        while at < len(chains) and not follows(chains[at][-1], each):
            at += 1
        if at == len(chains):
            chains.append([])
        chains[at].append(each)
        rows.put(each.q, at)
        columns.put(each.kv, at)
    return chains
