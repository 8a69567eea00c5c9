"""The tiles of a scheme by rank: what each computes, in which step, and who makes partials of what."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tokenring.schedule.scheme import Pair, Scheme, goes_by_q
from tokenring.schedule.sides import Key, Side

if TYPE_CHECKING:
    from tokenring.schedule.schedule import Schedule


class Placed:
    """The tiles of a scheme, units of one owner by units of one owner, found from the side of one rank or another.

    by_q: q decides where they are; by_rows: and when, whatever is due.
    """

    def __init__(self, scheme: Scheme, empty: Schedule, q: Side, kv: Side) -> None:
        self.scheme, self.empty, self._q, self._kv = scheme, empty, q, kv
        self.by_q = scheme.placed_by_q and scheme.place_for is None
        self.by_rows = goes_by_q(scheme) and not scheme.together
        layouts = empty.q_layout, empty.kv_layout
        self._place = scheme.place if scheme.place_for is None else scheme.place_for(*layouts, empty.mask)
        self._timed_known: tuple[int, list[tuple[Key, Key, int]]] | None = None  # of the rank that was last asked for
        self._last_known: dict[int, int] = {}

    def work(self, rank: int) -> Iterable[tuple[Key, Key, int]]:
        """Return what a rank computes, units of one owner by units of one owner, with its step."""
        if self.scheme.together:
            last = self._last(rank)
            return ((q, kv, last) for q, kv, _ in self._timed(rank))
        return self._timed(rank)

    def _timed(self, rank: int) -> list[tuple[Key, Key, int]]:
        """Return what a rank computes, each with the step in which both are due there, or in which the scheme says."""
        known = self._timed_known
        if known is None or known[0] != rank:
            known = self._timed_known = rank, self._in_time(rank)
        return known[1]

    def _in_time(self, rank: int) -> list[tuple[Key, Key, int]]:
        return [(q, kv, self._step(rank, q, kv)) for q, keys in self._meetings(rank) for kv in keys]

    def _meetings(self, rank: int) -> Iterable[tuple[Key, Sequence[Key]]]:
        """Return units of q, each with units of kv that they meet at a rank."""
        if not self.by_q:
            return self.pairs_at[rank].items()
        return ((q, self._kv.by_heads_and_piece[q[1], kv_piece]) for q, kv_piece in self.rows_at[rank])

    @cached_property
    def rows_at(self) -> dict[int, list[tuple[Key, int]]]:
        """Units of q and pieces of kv, by the rank at which they meet; where tiles are placed by their q."""
        found: dict[int, list[tuple[Key, int]]] = defaultdict(list)
        for (q, kv_piece), rank in self.row_rank.items():
            found[rank].append((q, kv_piece))
        return found

    @cached_property
    def row_rank(self) -> dict[tuple[Key, int], int]:
        """The rank at which a unit of q meets a piece of kv, whoever owns that; where tiles are placed by their q."""
        pieces = range(self.scheme.kv_pieces)
        return {(q, piece): self._place(self._pair(q, (0, q[1], piece))) for q in self._q.keys for piece in pieces}

    @cached_property
    def pairs_at(self) -> dict[int, dict[Key, list[Key]]]:
        """Units of kv that units of q meet, by rank."""
        found: dict[int, dict[Key, list[Key]]] = defaultdict(lambda: defaultdict(list))
        world, place, others = self.empty.world_size, self._place, self._kv.by_heads
        for q in self._q.keys:
            q_owner, heads, q_piece = q
            for kv in others[heads]:
                found[place(Pair(q_owner, kv[0], heads, q_piece, kv[2], world))][q].append(kv)
        return found

    def _pair(self, q: Key, kv: Key) -> Pair:
        return Pair(q[0], kv[0], q[1], q[2], kv[2], self.empty.world_size)

    def _step(self, rank: int, q: Key, kv: Key) -> int:
        """Return the step in which a rank computes, where not everything waits for the last."""
        when = self.scheme.when
        step = 0 if self.scheme.timed else max(self._q.due(q).get(rank, 0), self._kv.due(kv).get(rank, 0))
        return step if when is None else when(self._pair(q, kv), step)

    def row_step(self, q: Key, kv_piece: int) -> int:
        """Return the step in which a unit of q meets a piece of kv; where tiles are timed by their q."""
        assert self.scheme.when is not None
        return self.scheme.when(self._pair(q, (0, q[1], kv_piece)), 0)

    def _last(self, rank: int) -> int:
        """Return the step of a rank's last tile."""
        if rank not in self._last_known:
            self._last_known[rank] = max((step for _, _, step in self._timed(rank)), default=0)
        return self._last_known[rank]

    # ---------- who makes partials, and until when

    def makers(self, side: Side, key: Key) -> dict[int, int]:
        """Return the ranks that make partials for units elsewhere, with the step of the last tile of each."""
        found: dict[int, int] = {}
        for rank, step in self._tiles_of(side, key):
            if rank != key[0] and found.get(rank, -1) < step:
                found[rank] = step
        return found

    def _tiles_of(self, side: Side, key: Key) -> Iterator[tuple[int, int]]:
        """Yield rank and step of each tile of a unit's."""
        if side.kind == "q" and self.by_rows:
            for piece in range(self.scheme.kv_pieces):
                yield self.row_rank[key, piece], self.row_step(key, piece)
            return
        for other in self._other(side).by_heads[key[1]]:
            q, kv = (key, other) if side.kind == "q" else (other, key)
            rank = self.row_rank[q, kv[2]] if self.by_q else self._place(self._pair(q, kv))
            if rank != key[0]:
                yield rank, self._last(rank) if self.scheme.together else self._step(rank, q, kv)

    def _other(self, side: Side) -> Side:
        return self._kv if side.kind == "q" else self._q

    def own_last(self, side: Side, rank: int) -> dict[Key, int]:
        """Return the step of a rank's last tile of each unit that it does not own."""
        found: dict[Key, int] = {}
        if self.by_rows:
            for q, kv_piece in self.rows_at[rank]:
                step = self.row_step(q, kv_piece)
                keys = [q] if side.kind == "q" else self._kv.by_heads_and_piece[q[1], kv_piece]
                for key in keys:
                    found[key] = max(step, found.get(key, -1))
        else:
            for q, kv, step in self.work(rank):
                key = q if side.kind == "q" else kv
                found[key] = max(step, found.get(key, -1))
        return {key: step for key, step in found.items() if key[0] != rank}
