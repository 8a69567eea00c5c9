"""The tiles and moves of one host, of a scheme that all equal hosts do alike: counted first, and made when asked for.

Tiles and routes of what host 0 owns are followed wherever they lead. What happens in another host happens in host 0,
too, to the image of the block, which another host owns: so these say all that host 0 does. The result is a schedule
like any other, of which only ranks 0 to unit-1 have tiles and moves; it is lowered and simulated by the same code, for
these ranks. It has no mask: masks spoil the symmetry, and balanced layouts restore it on average.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from typing import NamedTuple

from tokenring.ir.passes import tile_order
from tokenring.ir.schedule_data import (
    FULL,
    PARTIAL_OF,
    PARTIALS,
    REQUEST_OF,
    REQUESTS,
    Block,
    Kind,
    Move,
    Pass,
    ScheduleData,
    Tile,
)
from tokenring.lowering.records import Records
from tokenring.planner.choosing.symmetry import Symmetry
from tokenring.schedule.routes import Gather, Hop, Origin, Return
from tokenring.schedule.scheme import Pair, Scheme
from tokenring.sequence.layout import Layout, contiguous
from tokenring.sequence.mask import Mask
from tokenring.sequence.workload import Workload

Unit = tuple[int, int, int]  # of host 0: owner, head group, piece
Steps = dict[int, int]  # by rank
Spot = tuple[int, int, int]  # of tiles that may be one: step, rank of host 0, head group
Pairs = list[tuple[int, int]]  # q and kv units, each counted by chunk and then by piece
Rows = list[tuple[int, int]]  # q units, counted the same, each with all kv units of a piece


class FoldedRoute(NamedTuple):
    """The hops of a unit that are taken, or of the partials for it; all are in the frame of its owner.

    wide: ranks whose partials travel in fp32, since a relay adds to them or they to its own.
    """

    kind: Kind
    unit: Unit
    hops: tuple[Hop, ...]
    wide: frozenset[int] = frozenset()


class Folding:
    """The tiles and routes of what host 0 owns, and the schedule of host 0 that they say."""

    def __init__(self, scheme: Scheme, length: int, kv_length: int, symmetry: Symmetry) -> None:
        self.scheme, self.symmetry = scheme, symmetry
        self.world, self.unit = symmetry.world_size, symmetry.unit
        self.frame = ScheduleData(
            scheme.name, self.world, _layout(self.world, length), _layout(self.world, kv_length), Mask(), (), (),
            scheme.head_groups, scheme.q_pieces, scheme.kv_pieces, scheme.keep, scheme.slack, scheme.codecs,
        )  # fmt: skip
        self._pieces: dict[Kind, int] = {"q": scheme.q_pieces, "kv": scheme.kv_pieces}
        hosts = range(0, self.world, self.unit)
        # Of each head group its image when each host becomes host 0.
        self._heads_at = [[symmetry.shift_heads(heads, host) for host in hosts] for heads in range(scheme.head_groups)]
        self._blocks: dict[tuple[Kind, int, int], list[tuple[Block]]] = {}  # by kind, head group and piece

    def schedule(self, rank: int | None = None) -> ScheduleData:
        """Return the schedule of host 0, or of one rank of it: its tiles and moves. Ranks of other hosts have none.

        The program of the rank is the same in both: each rank owns one chunk, so that what lies where elsewhere does
        not say what goes in one message.
        """
        moves, wide = self._moves(rank)
        made = self.frame.replace(tiles=self._tiles(rank), moves=moves)
        vars(made)["_wide_partials"] = wide  # of its own moves it would see too few
        return made

    def link_bytes(self, workload: Workload, direction: Pass) -> dict[tuple[int, int], int]:
        """Return the bytes that each rank of host 0 sends to each rank in a pass, as `footprint.link_bytes` does."""
        records, moving = Records(self.frame, workload, direction), self.frame.moving(direction)
        counted = ((each, count) for each, count in self._hop_counts.items() if each[2] in moving)
        links: dict[tuple[int, int], int] = defaultdict(int)
        for (src, dst, kind, wide), count in counted:
            links[src, dst] += count * self.frame.unit_length(kind) * records(kind, wide).nbytes
        return links

    @cached_property
    def _hop_counts(self) -> Counter[tuple[int, int, Kind, bool]]:
        """The number of units that each rank of host 0 sends to each rank, by kind and whether in full precision."""
        unit, world, counts = self.unit, self.world, Counter[tuple[int, int, Kind, bool]]()
        full = {kind for kind, codec in self.scheme.codecs if codec == FULL}
        for kind, _, hops, wide in self._routes:
            always = kind in full
            counts.update(
                (src % unit, (dst - src + src % unit) % world, kind, always or src in wide)
                for _, src, dst, _, _ in hops
            )
        return counts

    # ---------- tiles

    def _tiles(self, rank: int | None) -> tuple[Tile, ...]:
        """Return the tiles of the ranks of host 0, or of one of them, in order."""
        placed = self._placed
        pairs, rows = ({spot: some for spot, some in of.items() if rank in (None, spot[1])} for of in placed[:2])
        return tuple(sorted([*self._tiles_of_pairs(pairs), *self._tiles_of_rows(rows)], key=tile_order))

    @cached_property
    def _placed(self) -> tuple[dict[Spot, Pairs], dict[Spot, Rows], dict[Unit, Steps], dict[Unit, Steps]]:
        """The tiles, pair by pair or row by row.

        And for each unit of q and of kv of host 0 the ranks with tiles of it, each with the step of its last one.
        """
        scheme = self.scheme
        q_made, kv_made = ({unit: Steps() for unit in self._units(kind)} for kind in self._pieces)
        if scheme.placed_by_q and scheme.timed_by_q and scheme.when is not None and not scheme.together:
            return {}, self._rows(q_made, kv_made), q_made, kv_made
        pairs = self._pairs(q_made, kv_made)
        return self._after_all(pairs, q_made, kv_made) if scheme.together else pairs, {}, q_made, kv_made

    def _units(self, kind: Kind) -> Iterator[Unit]:
        """Yield the units of a kind that ranks of host 0 own."""
        for owner in range(self.unit):
            for heads in range(self.scheme.head_groups):
                for piece in range(self._pieces[kind]):
                    yield owner, heads, piece

    def _pairs(self, q_made: dict[Unit, Steps], kv_made: dict[Unit, Steps]) -> dict[Spot, Pairs]:
        """Place the tiles of q units of host 0 one by one, moved to host 0, and note who makes what in which step."""
        scheme, world, unit, heads_at = self.scheme, self.world, self.unit, self._heads_at
        place, when, kv_pieces, q_pieces = scheme.place, scheme.when, scheme.kv_pieces, scheme.q_pieces
        q_due, kv_due = _arrivals(self._gathered["q"]), _arrivals(self._gathered["kv"])
        groups: dict[Spot, Pairs] = defaultdict(list)
        for heads in range(scheme.head_groups):
            others = [
                (owner, owner - here, piece, owner * kv_pieces + piece, kv_due[image], kv_made[image])
                for owner in range(world)
                for here in (owner % unit,)
                for piece in range(kv_pieces)
                for image in ((here, heads_at[heads][owner // unit], piece),)
            ]
            for q_owner in range(unit):
                for q_piece in range(q_pieces):
                    due, made_of_q = q_due[q_owner, heads, q_piece], q_made[q_owner, heads, q_piece]
                    by_q = scheme.placed_by_q
                    ranks = [place(Pair(q_owner, 0, heads, q_piece, each, world)) for each in range(kv_pieces) if by_q]
                    for kv_owner, kv_host, kv_piece, kv, due_of_kv, made_of_kv in others:
                        if when or not ranks:
                            pair = Pair(q_owner, kv_owner, heads, q_piece, kv_piece, world)
                        rank = ranks[kv_piece] if ranks else place(pair)
                        image = (rank - kv_host) % world
                        step = 0 if q_owner == rank else due.get(rank, 0)
                        if kv_owner != rank and (kv_step := due_of_kv.get(image, 0)) > step:
                            step = kv_step
                        if when:
                            step = when(pair, step)
                        if made_of_q.get(rank, -1) < step:
                            made_of_q[rank] = step
                        if made_of_kv.get(image, -1) < step:
                            made_of_kv[image] = step
                        here = rank % unit
                        by = rank - here
                        q = (q_owner - by) % world * q_pieces + q_piece
                        kv_image = (kv_owner - by) % world * kv_pieces + kv_piece if by else kv
                        groups[step, here, heads_at[heads][by // unit]].append((q, kv_image))
        return groups

    def _rows(self, q_made: dict[Unit, Steps], kv_made: dict[Unit, Steps]) -> dict[Spot, Rows]:
        """Place tiles of a scheme that places and times them whoever owns their kv: all kv of a piece together."""
        scheme, world, unit, heads_at = self.scheme, self.world, self.unit, self._heads_at
        assert scheme.when is not None
        rows: dict[Spot, Rows] = defaultdict(list)
        latest: dict[Unit, int] = {}  # of tiles with all kv of a head group and piece, by rank
        for q_owner, heads, q_piece in self._units("q"):
            made_of_q = q_made[q_owner, heads, q_piece]
            for piece in range(scheme.kv_pieces):
                pair = Pair(q_owner, 0, heads, q_piece, piece, world)
                rank, step = scheme.place(pair), scheme.when(pair, 0)
                made_of_q[rank] = max(step, made_of_q.get(rank, step))
                latest[rank, heads, piece] = max(step, latest.get((rank, heads, piece), step))
                by = rank - rank % unit
                q = (q_owner - by) % world * scheme.q_pieces + q_piece
                rows[step, rank - by, heads_at[heads][by // unit]].append((q, piece))
        for (rank, heads, piece), step in latest.items():
            for host, there in enumerate(heads_at[heads]):
                image = (rank - host * unit) % world
                for here in range(unit):
                    made_of_kv = kv_made[here, there, piece]
                    if made_of_kv.get(image, -1) < step:
                        made_of_kv[image] = step
        return rows

    def _after_all(
        self, groups: dict[Spot, Pairs], q_made: dict[Unit, Steps], kv_made: dict[Unit, Steps]
    ) -> dict[Spot, Pairs]:
        """Return the same where each rank computes all of its tiles in the step of its last."""
        last: dict[int, int] = {}
        for step, rank, _ in groups:
            last[rank] = max(step, last.get(rank, step))
        for made in (*q_made.values(), *kv_made.values()):
            made.update((rank, last[rank % self.unit]) for rank in made)
        together: dict[Spot, Pairs] = defaultdict(list)
        for (_, rank, heads), pairs in groups.items():
            together[last[rank], rank, heads] += pairs
        return together

    def _tiles_of_pairs(self, groups: dict[Spot, Pairs]) -> Iterator[Tile]:
        """Yield the tiles of each group: one where together they are all q × all kv of theirs."""
        q_pieces, kv_pieces = self.scheme.q_pieces, self.scheme.kv_pieces
        for (step, rank, heads), pairs in groups.items():
            queries, keys = {q for q, _ in pairs}, {kv for _, kv in pairs}
            if 1 < len(pairs) == len(queries) * len(keys):
                yield Tile(step, rank, self._all("q", heads, queries), self._all("kv", heads, keys))
                continue
            for q, kv in pairs:
                q_blocks, kv_blocks = self._of("q", heads, q % q_pieces), self._of("kv", heads, kv % kv_pieces)
                yield Tile(step, rank, q_blocks[q // q_pieces], kv_blocks[kv // kv_pieces])

    def _tiles_of_rows(self, rows: dict[Spot, Rows]) -> Iterator[Tile]:
        """Yield the tiles of each group: one where together they are all q × all pieces of theirs."""
        q_pieces, kv_pieces = self.scheme.q_pieces, self.scheme.kv_pieces
        for (step, rank, heads), some in rows.items():
            queries, pieces = {q for q, _ in some}, {piece for _, piece in some}
            if len(some) == len(queries) * len(pieces):
                keys = (chunk * kv_pieces + piece for chunk in range(self.world) for piece in sorted(pieces))
                yield Tile(step, rank, self._all("q", heads, queries), self._all("kv", heads, keys))
                continue
            for q, piece in some:
                q_block = self._of("q", heads, q % q_pieces)[q // q_pieces]
                yield from (Tile(step, rank, q_block, kv) for kv in self._of("kv", heads, piece))

    def _all(self, kind: Kind, heads: int, units: Iterable[int]) -> tuple[Block, ...]:
        """Return the blocks of these units, in sequence."""
        pieces = self._pieces[kind]
        of_piece = [self._of(kind, heads, piece) for piece in range(pieces)]
        return tuple(of_piece[unit % pieces][unit // pieces][0] for unit in sorted(units))

    def _of(self, kind: Kind, heads: int, piece: int) -> list[tuple[Block]]:
        """Return the blocks of all chunks, each alone as of a tile."""
        known = self._blocks.get((kind, heads, piece))
        if known is None:
            known = [(Block(kind, chunk, heads, piece),) for chunk in range(self.world)]
            self._blocks[kind, heads, piece] = known
        return known

    # ---------- moves

    @cached_property
    def _gathered(self) -> dict[Kind, dict[Unit, tuple[Hop, ...]]]:
        """All hops of each unit, by kind."""
        gathers: dict[Kind, Gather] = {"q": self.scheme.gather_q, "kv": self.scheme.gather_kv}
        return {
            kind: {unit: gather(self._origin(kind, unit)) for unit in self._units(kind)}
            for kind, gather in gathers.items()
        }

    def _origin(self, kind: Kind, unit: Unit) -> Origin:
        owner, heads, piece = unit
        return Origin(owner, self.world, owner, heads, piece, self._pieces[kind])

    @cached_property
    def _routes(self) -> list[FoldedRoute]:
        """The routes of all that host 0 owns, and of what comes back for it."""
        q_made, kv_made = self._placed[2:]
        return [
            *self._requests("q", q_made), *self._requests("kv", kv_made),
            *self._partials("q", self.scheme.return_q, q_made), *self._partials("kv", self.scheme.return_kv, kv_made),
        ]  # fmt: skip

    def _requests(self, kind: Kind, made: dict[Unit, Steps]) -> Iterator[FoldedRoute]:
        """Yield the hops to ranks that use a unit or pass it on."""
        for unit, hops in self._gathered[kind].items():
            needed, taken = set(made[unit]), []
            for hop in sorted(hops, key=_step, reverse=True):
                if hop[2] in needed:
                    needed.add(hop[1])
                    taken.append(hop)
            yield FoldedRoute(kind, unit, tuple(taken))

    def _partials(self, kind: Kind, back: Return, made: dict[Unit, Steps]) -> Iterator[FoldedRoute]:
        """Yield the hops of what ranks elsewhere make for a unit."""
        for unit, steps in made.items():
            makers = {rank: step for rank, step in steps.items() if rank != unit[0]}
            if not makers:
                continue
            held, taken = set(makers), []  # ranks that have something for it
            for hop in sorted(back(self._origin(kind, unit), makers), key=_step):
                if hop[1] in held:
                    held.add(hop[2])
                    taken.append(hop)
            wide = frozenset(rank for _, src, dst, _, add in taken if add for rank in (src, dst))
            yield FoldedRoute(PARTIAL_OF[kind], unit, tuple(taken), wide)

    def _moves(self, rank: int | None) -> tuple[tuple[Move, ...], frozenset[Block]]:
        """Return the moves of host 0, or of one rank of it, in order; and the partials of them that travel in fp32.

        Each hop is two moves: what leaves host 0, and its image that comes in; one if it stays inside.
        """
        unit, world, heads_at = self.unit, self.world, self._heads_at
        found: list[tuple[int, bool, int, int, int, Block, str, bool]] = []  # in whose order moves are
        full: set[Block] = set()
        for kind, (owner, heads, piece), hops, wide in self._routes:
            is_partial = kind in REQUEST_OF
            channel = PARTIALS if is_partial else REQUESTS
            for step, src, dst, _, add in hops:
                if rank is not None and rank not in (src % unit, dst % unit):
                    continue
                for by in {src - src % unit, dst - dst % unit}:
                    here, to = (src - by) % world, (dst - by) % world
                    if rank is not None and rank not in (here, to):
                        continue
                    there = heads_at[heads][by // unit]
                    if not is_partial:
                        block = self._of(kind, there, piece)[(owner - by) % world][0]
                    else:
                        block = Block(kind, (owner - by) % world, there, piece, here)
                        if src in wide:
                            full.add(block)
                    found.append((step, here > to, piece, here, to, block, channel, add))
        found.sort()
        moves = tuple(Move(step, block, src, dst, channel, add) for step, _, _, src, dst, block, channel, add in found)
        return moves, frozenset(full)


def _step(hop: Hop) -> int:
    return hop[0]


def _arrivals(hops: dict[Unit, tuple[Hop, ...]]) -> dict[Unit, Steps]:
    return {unit: {dst: due or step + 1 for step, _, dst, due, _ in of_unit} for unit, of_unit in hops.items()}


@lru_cache(maxsize=16)
def _layout(world_size: int, length: int) -> Layout:
    return contiguous(world_size, length)
