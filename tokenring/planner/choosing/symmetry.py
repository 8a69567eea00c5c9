"""Large worlds of equal hosts: what one host does, when every host does the same for its neighbours' numbers.

A scheme is shift-equivariant if all its routes and places for the owner `unit` ranks further are those of the
owner itself, `unit` ranks further (and, where head groups are spread over hosts, for head groups that much further).
Then one unit of ranks (a host) says it all: its tiles, and the moves that
touch it, are images of those of blocks that it owns. The result is a Schedule like any other, of which only ranks
0 to unit-1 have tiles and moves; it is lowered and simulated by the same code, for these ranks. It has no mask:
masks spoil the symmetry, and balanced layouts restore it on average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokenring.errors import ConfigurationError
from tokenring.ir.passes import fuse, order
from tokenring.ir.schedule_data import PARTIALS, REQUESTS, Block, Kind, Move, ScheduleData, Tile
from tokenring.planner.interconnects.interconnect import Interconnect, Way
from tokenring.schedule.routes import Gather, Hop, Origin, Return
from tokenring.schedule.scheme import Pair, Scheme
from tokenring.sequence.layout import contiguous
from tokenring.sequence.mask import Mask

PROBES = 3  # owners at which equivariance is checked


@dataclass(frozen=True)
class Symmetry:
    """All ranks `unit` further do the same, with head groups `head_step` further."""

    world_size: int
    unit: int
    head_groups: int = 1
    head_step: int = 0

    def shift_heads(self, heads: int, by: int) -> int:
        """Return the image of a head group when the host of rank `by` becomes host 0."""
        return (heads - by // self.unit * self.head_step) % self.head_groups

    def shift(self, rank: int, by: int) -> int:
        """Return the image of a rank when the host of `by` becomes host 0."""
        return (rank - by // self.unit * self.unit) % self.world_size

    def canonical(self, src: int, dst: int) -> tuple[int, int]:
        """Return the image of a pair whose source is in host 0."""
        return self.shift(src, src), self.shift(dst, src)

    def here(self, rank: int) -> bool:
        """Return whether the rank is in host 0."""
        return rank < self.unit


class FoldedNet:
    """An interconnect of equal hosts, of which one stands for all."""

    def __init__(self, net: Interconnect) -> None:
        self.net = net
        self._ways: dict[tuple[int, int], Way] = {}

    def way(self, src: int, dst: int) -> Way:
        """Return the wires from one rank to another, those of host 0 for all hosts; see Wires.way."""
        known = self._ways.get((src, dst))
        if known is None:
            known = tuple(f"0:{wire.partition(':')[2]}" for wire in self.net.way(src, dst))
            self._ways[src, dst] = known
        return known

    def burst_bytes(self, wire: str) -> float:
        """Return the bytes that pass at once over an idle wire; see Wires.burst_bytes."""
        return self.net.burst_bytes(wire)

    def gbs(self, wire: str) -> float:
        """Return the width of a wire in GB/s; see Wires.gbs."""
        return self.net.gbs(wire)


def symmetry_of(scheme: Scheme, world_size: int, unit: int) -> Symmetry:
    """Return the symmetry of a scheme. Raises ConfigurationError if hosts of `unit` ranks do not all do the same."""
    steps = () if scheme.place_for is not None else (0, scheme.head_groups * unit // world_size)
    for head_step in dict.fromkeys(steps):
        symmetry = Symmetry(world_size, unit, scheme.head_groups, head_step)
        if all(_is_even(scheme, symmetry, probe) for probe in range(PROBES)):
            return symmetry
    raise ConfigurationError(
        f"schedule {scheme.name!r} does not do the same on every host of {unit} ranks: too large to be planned"
    )


def _is_even(scheme: Scheme, symmetry: Symmetry, probe: int) -> bool:
    """Return whether what host 0 does is the image of what another host does."""
    world, unit = symmetry.world_size, symmetry.unit
    owner = probe * (unit - 1) // (PROBES - 1)
    hosts = 1 + probe * (world // unit - 1) // PROBES
    far, by = (owner + unit * hosts) % world, unit * hosts
    for heads in {0, scheme.head_groups - 1}:
        there = (heads + hosts * symmetry.head_step) % scheme.head_groups
        for distance in (0, 1, unit, world // 2):
            kv = (owner + distance) % world
            near = scheme.place(Pair(owner, kv, heads, 0, 0, world))
            if (near + by) % world != scheme.place(Pair(far, (kv + by) % world, there, 0, 0, world)):
                return False
        for gather, pieces in ((scheme.gather_q, scheme.q_pieces), (scheme.gather_kv, scheme.kv_pieces)):
            hops = gather(Origin(owner, world, owner, heads, 0, pieces))
            moved = {hop._replace(src=(hop.src + by) % world, dst=(hop.dst + by) % world) for hop in hops}
            if moved != set(gather(Origin(far, world, far, there, 0, pieces))):
                return False
    return True


def folded(scheme: Scheme, length: int, kv_length: int, symmetry: Symmetry) -> ScheduleData:
    """Return what the ranks of host 0 do, dense, of sequences of these lengths."""
    return _Folding(scheme, length, kv_length, symmetry).schedule()


class _Folding:
    def __init__(self, scheme: Scheme, length: int, kv_length: int, symmetry: Symmetry) -> None:
        self.scheme, self.sym = scheme, symmetry
        self.world = symmetry.world_size
        self.q_layout, self.kv_layout = contiguous(self.world, length), contiguous(self.world, kv_length)
        self._images: dict[tuple[object, ...], Block] = {}
        self._kv_known: dict[int, list[tuple[int, int, int, Block, Mapping[int, int]]]] = {}  # by head group

    def schedule(self) -> ScheduleData:
        scheme = self.scheme
        q_hops = self._hops("q", scheme.gather_q)
        kv_hops = self._hops("kv", scheme.gather_kv)
        by_q = scheme.placed_by_q and scheme.timed_by_q and scheme.when is not None and not scheme.together
        tiles_of = self._tiles_by_q if by_q else self._tiles
        tiles, q_made, kv_made = tiles_of(_arrivals(q_hops), _arrivals(kv_hops))
        moves = [*self._requests(q_hops, tiles), *self._requests(kv_hops, tiles)]
        moves += self._partials(scheme.return_q, q_made)
        moves += self._partials(scheme.return_kv, kv_made)
        dense = ScheduleData(
            scheme.name, self.world, self.q_layout, self.kv_layout, Mask(), tuple(tiles), tuple(moves),
            scheme.head_groups, scheme.q_pieces, scheme.kv_pieces, scheme.keep, scheme.slack, scheme.codecs,
        )  # fmt: skip
        made = order(fuse(dense))
        vars(made)["_wide_partials"] = self._wide(made.moves)  # of its own moves it would see too few
        return made

    def _wide(self, moves: Iterable[Move]) -> frozenset[Block]:
        """Return the partials that travel in fp32: a relay of host 0, or its image in another host, adds to them."""

        def at_home(block: Block) -> Block:
            return self._image(block, block.chunk)

        added = [(each.block, each.block._replace(made_at=each.dst)) for each in moves if each.add]
        wide = {at_home(block) for pair in added for block in pair}
        partials = (each.block for each in moves if each.block.made_at is not None)
        return frozenset(block for block in partials if at_home(block) in wide)

    def _units(self, kind: Kind) -> Iterator[Block]:
        """Yield the units that ranks of host 0 own."""
        pieces = self.scheme.q_pieces if kind == "q" else self.scheme.kv_pieces
        for owner in range(self.sym.unit):
            for heads in range(self.scheme.head_groups):
                for piece in range(pieces):
                    yield Block(kind, owner, heads, piece)

    def _origin(self, block: Block) -> Origin:
        pieces = self.scheme.q_pieces if block.kind == "q" else self.scheme.kv_pieces
        return Origin(block.chunk, self.world, block.chunk, block.heads, block.piece, pieces)

    def _hops(self, kind: Kind, gather: Gather) -> dict[Block, tuple[Hop, ...]]:
        return {block: gather(self._origin(block)) for block in self._units(kind)}

    def _image(self, block: Block, by: int) -> Block:
        """Return the block when the host of rank `by` becomes host 0."""
        kind, chunk, heads, piece, made_at = block
        key = chunk, heads, piece, made_at, by // self.sym.unit, kind
        image = self._images.get(key)
        if image is None:
            maker = None if made_at is None else self.sym.shift(made_at, by)
            image = Block(kind, self.sym.shift(chunk, by), self.sym.shift_heads(heads, by), piece, maker)
            self._images[key] = image
        return image

    # ---------- tiles

    def _tiles(self, q_arrivals: Arrivals, kv_arrivals: Arrivals) -> tuple[list[Tile], Made, Made]:
        """Return all tiles of q units that host 0 owns, moved to host 0.

        And for which units of host 0, of q and of kv, other ranks make partials, with the step of the last tile.
        """
        tiles: list[Tile] = []
        q_made, kv_made = dict[Block, dict[int, int]](), dict[Block, dict[int, int]]()
        world, unit, place, when = self.world, self.sym.unit, self.scheme.place, self.scheme.when
        alone, heads_at = self._alone(), self._heads_by_host()
        for q in self._units("q"):
            _, q_owner, heads, q_piece, _ = q
            q_due, made_of_q = q_arrivals[q], dict[int, int]()
            for kv_owner, kv_host, piece, kv, kv_due in self._kv_of(heads, kv_arrivals):
                pair = Pair(q_owner, kv_owner, heads, q_piece, piece, world)
                rank = place(pair)
                host = rank - rank % unit
                image = (rank - kv_host) % world
                step = 0 if q_owner == rank else q_due.get(rank, 0)
                if kv_owner != rank and (kv_step := kv_due.get(image, 0)) > step:
                    step = kv_step
                if when:
                    step = when(pair, step)
                if q_owner != rank and made_of_q.get(rank, -1) < step:
                    made_of_q[rank] = step
                if kv_owner != rank:
                    made_of_kv = kv_made.setdefault(kv, {})
                    if made_of_kv.get(image, -1) < step:
                        made_of_kv[image] = step
                there = heads_at[heads][rank // unit]
                tiles.append(
                    Tile(
                        step,
                        rank - host,
                        alone["q"][there][q_piece][(q_owner - host) % world],
                        alone["kv"][there][piece][(kv_owner - host) % world],
                    )
                )
            if made_of_q:
                q_made[q] = made_of_q
        return self._after_all(tiles, q_made, kv_made) if self.scheme.together else (tiles, q_made, kv_made)

    def _tiles_by_q(self, q_arrivals: Arrivals, kv_arrivals: Arrivals) -> tuple[list[Tile], Made, Made]:
        """Return the same, fused, of a scheme that places and times tiles whoever owns their kv: not pair by pair."""
        scheme, world, unit, when = self.scheme, self.world, self.sym.unit, self.scheme.when
        assert when is not None
        alone, heads_at = self._alone(), self._heads_by_host()
        q_made, kv_made = dict[Block, dict[int, int]](), dict[Block, dict[int, int]]()
        rows: Rows = defaultdict(list)
        latest: dict[tuple[int, int, int], int] = {}  # of tiles with all kv of a head group and piece, by rank
        for q in self._units("q"):
            _, q_owner, heads, q_piece, _ = q
            for piece in range(scheme.kv_pieces):
                pair = Pair(q_owner, 0, heads, q_piece, piece, world)
                rank, step = scheme.place(pair), when(pair, 0)
                if q_owner != rank:
                    made_of_q = q_made.setdefault(q, {})
                    made_of_q[rank] = max(step, made_of_q.get(rank, step))
                latest[rank, heads, piece] = max(step, latest.get((rank, heads, piece), step))
                host, there = rank - rank % unit, heads_at[heads][rank // unit]
                rows[step, rank - host, there].append((alone["q"][there][q_piece][(q_owner - host) % world], piece))
        for (rank, heads, kv_piece), step in latest.items():
            for kv_owner, kv_host, piece, kv, _ in self._kv_of(heads, kv_arrivals):
                if piece == kv_piece and kv_owner != rank:
                    made_of_kv, image = kv_made.setdefault(kv, {}), (rank - kv_host) % world
                    made_of_kv[image] = max(step, made_of_kv.get(image, step))
        return list(self._fused(rows, alone["kv"])), q_made, kv_made

    @staticmethod
    def _fused(rows: Rows, kv: list[list[list[tuple[Block]]]]) -> Iterator[Tile]:
        """Yield one tile for rows of one step, rank and head group that are all q × all pieces of theirs; else each."""
        for (step, rank, heads), some in rows.items():
            queries, pieces = dict.fromkeys(q for q, _ in some), dict.fromkeys(piece for _, piece in some)
            if len(some) < len(queries) * len(pieces):
                yield from (Tile(step, rank, q, each) for q, piece in some for each in kv[heads][piece])
                continue
            all_q = sorted((block for q in queries for block in q), key=_in_sequence)
            all_kv = sorted((block for piece in pieces for (block,) in kv[heads][piece]), key=_in_sequence)
            yield Tile(step, rank, tuple(all_q), tuple(all_kv))

    def _after_all(self, tiles: list[Tile], q_made: Made, kv_made: Made) -> tuple[list[Tile], Made, Made]:
        """Return the same where each rank computes all of its tiles in the step of its last."""
        last: dict[int, int] = defaultdict(int)
        for tile in tiles:
            last[tile.rank] = max(last[tile.rank], tile.step)
        for made in (*q_made.values(), *kv_made.values()):
            made.update((rank, last[rank % self.sym.unit]) for rank in made)
        return [tile._replace(step=last[tile.rank]) for tile in tiles], q_made, kv_made

    def _kv_of(self, heads: int, arrivals: Arrivals) -> list[tuple[int, int, int, Block, Mapping[int, int]]]:
        """Return all kv units of a head group: owner, first rank of its host, piece, image in host 0, when it is due.

        Due: at images of ranks.
        """
        if heads not in self._kv_known:
            found = []
            for owner in range(self.world):
                here = owner % self.sym.unit
                for piece in range(self.scheme.kv_pieces):
                    image = Block("kv", here, self.sym.shift_heads(heads, owner), piece)
                    found.append((owner, owner - here, piece, image, arrivals[image]))
            self._kv_known[heads] = found
        return self._kv_known[heads]

    def _heads_by_host(self) -> list[list[int]]:
        """Return, of each head group, its image when each host becomes host 0."""
        hosts = range(0, self.world, self.sym.unit)
        return [[self.sym.shift_heads(heads, host) for host in hosts] for heads in range(self.scheme.head_groups)]

    def _alone(self) -> dict[Kind, list[list[list[tuple[Block]]]]]:
        """Return the blocks of q and kv by kind, head group, piece and chunk, each alone as of a tile; made once."""
        scheme, chunks = self.scheme, range(self.world)
        pieces_of: dict[Kind, int] = {"q": scheme.q_pieces, "kv": scheme.kv_pieces}
        return {
            kind: [
                [[(Block(kind, chunk, heads, piece),) for chunk in chunks] for piece in range(pieces)]
                for heads in range(scheme.head_groups)
            ]
            for kind, pieces in pieces_of.items()
        }

    # ---------- moves

    def _requests(self, hops: Mapping[Block, tuple[Hop, ...]], tiles: Iterable[Tile]) -> Iterator[Move]:
        """Yield the moves of hops to ranks that use the block or pass it on, from the last backwards."""
        needed = {(block, tile.rank) for tile in tiles for block in (*tile.q, *tile.kv)}
        every = [(hop, block) for block, of_block in hops.items() for hop in of_block]
        for hop, block in sorted(every, key=lambda each: -each[0].step):
            if (self._image(block, hop.dst), self.sym.shift(hop.dst, hop.dst)) in needed:
                needed.add((self._image(block, hop.src), self.sym.shift(hop.src, hop.src)))
                yield from self._here(Move(hop.step, block, hop.src, hop.dst, REQUESTS))

    def _partials(self, back: Return, makers: Made) -> Iterator[Move]:
        for block, steps in makers.items():
            held = set(steps)  # ranks that have something for it
            for hop in sorted(back(self._origin(block), steps), key=lambda hop: hop.step):
                if hop.src in held:
                    held.add(hop.dst)
                    yield from self._here(Move(hop.step, block.partial(hop.src), hop.src, hop.dst, PARTIALS, hop.add))

    def _here(self, move: Move) -> Iterator[Move]:
        """Yield the images of a move that leave host 0 and that come in; one if it stays inside."""
        for by in dict.fromkeys((move.src // self.sym.unit, move.dst // self.sym.unit)):
            rank = by * self.sym.unit
            yield move._replace(
                block=self._image(move.block, rank),
                src=self.sym.shift(move.src, rank),
                dst=self.sym.shift(move.dst, rank),
            )


Arrivals = Mapping[Block, Mapping[int, int]]
Rows = dict[tuple[int, int, int], list[tuple[tuple[Block, ...], int]]]  # q units and pieces, by step, rank, head group
Made = dict[Block, dict[int, int]]  # of units: ranks elsewhere that make partials for them, each with its last step


def _in_sequence(block: Block) -> tuple[int, int]:
    """Return the sort key of blocks of one kind in contiguous layouts."""
    return block.chunk, block.piece


def _arrivals(hops: Mapping[Block, tuple[Hop, ...]]) -> dict[Block, dict[int, int]]:
    return {block: {hop.dst: hop.arrival for hop in of_block} for block, of_block in hops.items()}
