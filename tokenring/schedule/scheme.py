"""Make a dense schedule of a placement and routes, and a finished one by the passes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenring.ir.passes import fuse, in_sequence, keep_for_last, order, prune
from tokenring.ir.schedule_data import PARTIAL_OF, PARTIALS, REQUESTS, Block, Kind, Move, Tile
from tokenring.schedule.routes import Gather, Hop, Origin, Return, return_direct, stay
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Causal, Full, Mask


class Pair(NamedTuple):
    """One tile to be placed: the q units of one owner against the kv units of one owner."""

    q_owner: int
    kv_owner: int
    heads: int
    q_piece: int
    kv_piece: int
    world_size: int


# Every unit that another sees anything of it sees all of, but for a row of a striped one: whole units go.
WHOLE_UNITS = (Full(), Causal())
STRAIGHT: frozenset[Kind] = frozenset({"q", "kv"})  # of a scheme in which nobody passes anything on
Placement = Callable[[Pair], int]
PlacementFor = Callable[[Layout, Layout, Mask], Placement]


@dataclass(frozen=True)
class Scheme:
    """A family of schedules: where each tile is computed, and by which routes blocks and partials travel.

    place_for: instead of `place` where the mask decides: the placement for a q layout, a kv layout and a mask.
    when: the step of a tile, given the pair and the step in which its blocks are due; tiles of one step and
        rank may fuse into one kernel call. None: as soon as they are due.
    together: a rank computes when everything has arrived.
    late: part of each rank's local tile is kept for last (`passes.keep_for_last`).
    placed_by_q: `place` says the same of a q unit and a piece of kv whoever owns that.
    timed: `when` says the same whenever blocks are due, so that this need not be known.
    timed_by_q: so does `when`, also whenever they are due; with `placed_by_q`, tiles need not be made one by one.
    may_reach_kv: whether a unit of kv may ever be at a rank that does not own it: cheaper to tell than its route, for
        ranks that make their own part alone. None: routes tell.
    straight: the kinds of which units go from their owner to every rank in one hop: nobody passes them on.
    """

    name: str
    place: Placement
    gather_q: Gather = stay
    gather_kv: Gather = stay
    return_q: Return = return_direct
    return_kv: Return = return_direct
    head_groups: int = 1
    q_pieces: int = 1
    kv_pieces: int = 1
    keep: frozenset[str] = field(default_factory=frozenset)
    together: bool = False
    slack: int | None = None
    codecs: tuple[tuple[str, str], ...] = ()
    place_for: PlacementFor | None = None
    when: Callable[[Pair, int], int] | None = None
    late: bool = False
    placed_by_q: bool = False
    timed: bool = False
    timed_by_q: bool = False
    straight: frozenset[Kind] = field(default_factory=frozenset)
    may_reach_kv: Callable[[Origin, int], bool] | None = None


class NotWanted(Exception):
    """The tiles of a schedule show that it is not wanted: its moves were not made."""


def build(
    scheme: Scheme, q_layout: Layout, kv_layout: Layout, mask: Mask, wanted: Callable[[Schedule], bool] | None = None
) -> Schedule:
    """Build the scheme's schedule for these layouts, pruned by the mask. Not yet verified.

    wanted: asked of the pruned tiles, while there are no moves yet; not where tiles change afterwards. Raises NotWanted
    where it says no.
    """
    if scheme.together:
        made = prune(fuse(dense(scheme, q_layout, kv_layout, mask)))
    else:
        tiles_of = _fused_tiles if goes_by_q(scheme) else _joined_tiles
        made = prune(dense(scheme, q_layout, kv_layout, mask, tiles_of, None if scheme.late else wanted))
    made = order(keep_for_last(made) if scheme.late else made)
    if mask in WHOLE_UNITS:
        return made
    from tokenring.lowering.exact_rows import exact

    return exact(made)


def goes_by_q(scheme: Scheme) -> bool:
    """Return whether tiles are placed and timed by their q alone, whenever what they need arrives."""
    return scheme.placed_by_q and scheme.timed_by_q and scheme.when is not None and scheme.place_for is None


def late_of(made: Schedule, name: str) -> Schedule:
    """Return what `build` makes of a scheme that is late, from what it makes of it otherwise, of whole units alone."""
    return order(keep_for_last(made)).replace(name=name)


def dense(
    scheme: Scheme, q_layout: Layout, kv_layout: Layout, mask: Mask, tiles_of: TilesOf | None = None,
    wanted: Callable[[Schedule], bool] | None = None,
) -> Schedule:  # fmt: skip
    """Return every tile and every move that the scheme would make if everything were visible.

    tiles_of: what makes the tiles, one by one if nothing is said. wanted: as of `build`. Raises NotWanted.
    """
    schedule = nothing_moves_yet(scheme, q_layout, kv_layout, mask)
    first = tiles_of is _fused_tiles  # tiles, for which nothing has to be known of routes
    q_routes: Routes = {} if first else _routes(schedule, "q", scheme.gather_q)
    kv_routes: Routes = {} if first else _routes(schedule, "kv", scheme.gather_kv)
    q_units, kv_units = _units_due(schedule, "q", q_routes), _units_due(schedule, "kv", kv_routes)
    tiles = (tiles_of or _tiles)(schedule, scheme, q_units, kv_units)
    if wanted is not None and not wanted(prune(schedule.replace(tiles=tuple(tiles)))):
        raise NotWanted(scheme.name)
    if first:
        q_routes, kv_routes = _routes(schedule, "q", scheme.gather_q), _routes(schedule, "kv", scheme.gather_kv)
    if scheme.together:
        tiles = _after_all(tiles, [*q_units.values(), *kv_units.values()])
    moves = [*_requests(q_routes), *_requests(kv_routes)]
    moves += _partials(schedule, "q", q_units.values(), scheme.return_q)
    moves += _partials(schedule, "kv", kv_units.values(), scheme.return_kv)
    return schedule.replace(tiles=tuple(tiles), moves=tuple(moves))


def nothing_moves_yet(scheme: Scheme, q_layout: Layout, kv_layout: Layout, mask: Mask) -> Schedule:
    """Return the scheme's schedule without tiles and moves: its units."""
    return Schedule(
        scheme.name, q_layout.world_size, q_layout, kv_layout, mask, (), (), scheme.head_groups, scheme.q_pieces,
        scheme.kv_pieces, scheme.keep, scheme.slack, scheme.codecs,
    )  # fmt: skip


Ranks = dict[tuple[int, int, int], set[int]]  # that read a unit, by chunk, head group and piece
Routes = dict[Block, tuple[Hop, ...]]


def _routes(schedule: Schedule, kind: Kind, gather: Gather) -> Routes:
    return {block: gather(origin_of(schedule, block)) for block in units(schedule, kind)}


def units(schedule: Schedule, kind: Kind) -> Iterable[Block]:
    """Yield every unit of a kind."""
    for chunk in range(len(schedule.layout_of(kind).chunks)):
        for heads in range(schedule.head_groups):
            for piece in range(schedule.pieces_of(kind)):
                yield Block(kind, chunk, heads, piece)


def origin_of(schedule: Schedule, block: Block) -> Origin:
    """Return where the route of a unit, or of partials for it, begins or ends."""
    return Origin(
        schedule.owner(block),
        schedule.world_size,
        block.chunk,
        block.heads,
        block.piece,
        schedule.pieces_of(block.kind),
    )


class UnitsDue(NamedTuple):
    """Units of one owner, head group and piece, and in which step the last of them is at each rank (0: it is its own).

    A rank that they never reach has no step. made: ranks elsewhere that make partials for them, with the step of the
    last tile of each; filled as tiles are placed.
    """

    blocks: tuple[Block, ...]
    steps: dict[int, int]
    made: dict[int, int]


def _units_due(schedule: Schedule, kind: Kind, routes: Routes) -> Units:
    """Return all units of a kind; when they are due by these routes, and at their owners."""
    layout = schedule.layout_of(kind)
    found = {}
    for owner in range(schedule.world_size):
        for heads in range(schedule.head_groups):
            for piece in range(schedule.pieces_of(kind)):
                blocks = tuple(Block(kind, chunk, heads, piece) for chunk in layout.owned_by(owner))
                steps: dict[int, int] = {}
                for block in blocks:
                    for hop in routes.get(block, ()):
                        steps[hop.dst] = max(steps.get(hop.dst, 0), hop.arrival)
                steps[owner] = 0
                found[owner, heads, piece] = UnitsDue(blocks, steps, {})
    return found


Units = dict[tuple[int, int, int], UnitsDue]  # by owner, head group and piece
TilesOf = Callable[[Schedule, Scheme, Units, Units], list[Tile]]


Pairs = list[tuple[tuple[Block, ...], tuple[Block, ...]]]  # q and kv of tiles
Groups = dict[tuple[int, int, int], Pairs]  # by step, rank and head group
Rows = dict[tuple[int, int, int], list[tuple[tuple[Block, ...], int]]]  # q units and kv pieces, by the same


def _tiles(schedule: Schedule, scheme: Scheme, q_units: Units, kv_units: Units) -> list[Tile]:
    groups = _groups(schedule, scheme, q_units, kv_units)
    return [Tile(step, rank, q, kv) for (step, rank, _), pairs in groups.items() for q, kv in pairs]


def _joined_tiles(schedule: Schedule, scheme: Scheme, q_units: Units, kv_units: Units) -> list[Tile]:
    """Return what `fuse` makes of `_tiles`: here tiles are known by their units, of which no two are one."""
    return joined(schedule, _groups(schedule, scheme, q_units, kv_units))


def joined(schedule: Schedule, groups: Groups) -> list[Tile]:
    """Return the tiles of these groups, of each group one where it is all q × all kv of it."""
    in_order: dict[frozenset[int], tuple[Block, ...]] = {}  # by the units' blocks, of which each is one object

    def together(parts: dict[int, tuple[Block, ...]]) -> tuple[Block, ...]:
        key = frozenset(parts)
        if key not in in_order:
            in_order[key] = in_sequence(schedule, parts.values())
        return in_order[key]

    tiles: list[Tile] = []
    for (step, rank, _), pairs in groups.items():
        q, kv = {id(each): each for each, _ in pairs}, {id(each): each for _, each in pairs}
        if 1 < len(pairs) == len(q) * len(kv):
            tiles.append(Tile(step, rank, together(q), together(kv)))
        else:
            tiles += [Tile(step, rank, *pair) for pair in pairs]
    return tiles


def _groups(schedule: Schedule, scheme: Scheme, q_units: Units, kv_units: Units) -> Groups:
    """Return all tiles, each of the units of one owner, head group and piece, by what they must share to be one."""
    world, place, when = schedule.world_size, scheme.place, scheme.when
    if scheme.place_for is not None:
        place = scheme.place_for(schedule.q_layout, schedule.kv_layout, schedule.mask)
    others: dict[int, list[tuple[int, int, UnitsDue]]] = defaultdict(list)  # kv owner, piece and units by head group
    for (kv_owner, heads, kv_piece), units in kv_units.items():
        others[heads].append((kv_owner, kv_piece, units))
    groups: Groups = defaultdict(list)
    placed_by_q, kv_pieces = scheme.placed_by_q and scheme.place_for is None, range(scheme.kv_pieces)
    for (q_owner, heads, q_piece), (q, q_due, q_made) in q_units.items():
        ranks = [place(Pair(q_owner, 0, heads, q_piece, piece, world)) for piece in kv_pieces if placed_by_q]
        for kv_owner, kv_piece, (kv, kv_due, kv_made) in others[heads]:
            if when or not ranks:
                pair = Pair(q_owner, kv_owner, heads, q_piece, kv_piece, world)
            rank = ranks[kv_piece] if ranks else place(pair)
            step, kv_step = q_due.get(rank, 0), kv_due.get(rank, 0)
            if kv_step > step:
                step = kv_step
            if when:
                step = when(pair, step)
            if rank != q_owner and q_made.get(rank, -1) < step:
                q_made[rank] = step
            if rank != kv_owner and kv_made.get(rank, -1) < step:
                kv_made[rank] = step
            groups[step, rank, heads].append((q, kv))
    return groups


def _fused_tiles(schedule: Schedule, scheme: Scheme, q_units: Units, kv_units: Units) -> list[Tile]:
    """Return what `fuse` makes of `_tiles`, of a scheme whose tiles are placed whoever owns their kv.

    A row is a q unit with all kv units of a piece: rows of one rank, step and head group are a tile where together they
    are all q × all kv of theirs.
    """
    assert scheme.when is not None
    others: dict[tuple[int, int], list[tuple[int, UnitsDue]]] = defaultdict(list)  # kv by head group and piece
    for (owner, heads, kv_piece), units in kv_units.items():
        others[heads, kv_piece].append((owner, units))
    groups: Rows = defaultdict(list)
    for (q_owner, heads, q_piece), (q, _, q_made) in q_units.items():
        for kv_piece in range(scheme.kv_pieces):
            pair = Pair(q_owner, 0, heads, q_piece, kv_piece, schedule.world_size)
            rank = scheme.place(pair)
            step = scheme.when(pair, 0)
            if rank != q_owner and q_made.get(rank, -1) < step:
                q_made[rank] = step
            groups[step, rank, heads].append((q, kv_piece))
    for (step, rank, heads), rows in groups.items():
        pieces = dict.fromkeys(kv_piece for _, kv_piece in rows)
        for owner, units in (each for piece in pieces for each in others[heads, piece]):
            if owner != rank and units.made.get(rank, -1) < step:
                units.made[rank] = step
    return joined_rows(schedule, groups, {key: [kv.blocks for _, kv in some] for key, some in others.items()})


def joined_rows(schedule: Schedule, groups: Rows, kv_of: UnitsOf) -> list[Tile]:
    """Return the tiles of rows, each a q unit with all kv units of a piece: as of `joined`."""
    tiles: list[Tile] = []
    in_order: dict[tuple[int, ...], tuple[Block, ...]] = {}  # kv blocks by head group and pieces
    for (step, rank, heads), rows in groups.items():
        queries, pieces = {q for q, _ in rows}, dict.fromkeys(kv_piece for _, kv_piece in rows)
        if schedule.world_size == 1 or len(rows) < len(queries) * len(pieces):
            tiles += [Tile(step, rank, q, kv) for q, piece in rows for kv in kv_of[heads, piece]]
            continue
        key = heads, *pieces
        if key not in in_order:
            in_order[key] = in_sequence(schedule, (kv for piece in pieces for kv in kv_of[heads, piece]))
        tiles.append(Tile(step, rank, in_sequence(schedule, queries), in_order[key]))
    return tiles


UnitsOf = Mapping[tuple[int, int], list[tuple[Block, ...]]]  # by head group and piece


def _after_all(tiles: list[Tile], units: list[UnitsDue]) -> list[Tile]:
    last: dict[int, int] = defaultdict(int)
    for tile in tiles:
        last[tile.rank] = max(last[tile.rank], tile.step)
    for each in units:
        each.made.update((rank, last[rank]) for rank in each.made)
    return [Tile(last[rank], rank, q, kv) for _, rank, q, kv in tiles]


def _requests(routes: Routes) -> Iterable[Move]:
    for block, hops in routes.items():
        for step, src, dst, _, _ in hops:
            yield Move(step, block, src, dst, REQUESTS)


def _partials(schedule: Schedule, kind: Kind, units: Iterable[UnitsDue], back: Return) -> Iterable[Move]:
    """Yield the moves home of what tiles make for units of this kind that are owned elsewhere."""
    partial = PARTIAL_OF[kind]
    for blocks, _, made in units:
        for block in blocks if made else ():
            _, chunk, heads, piece, _ = block
            for step, src, dst, _, add in back(origin_of(schedule, block), made):
                yield Move(step, Block(partial, chunk, heads, piece, src), src, dst, PARTIALS, add)
