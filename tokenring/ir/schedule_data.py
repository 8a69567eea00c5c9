"""The schedule as data: blocks, moves, tiles.

A *unit* is one piece of one chunk. A block is a unit of q or kv of one head group, or a partial
result for such a unit, named also by the rank that made it. The order inside a step is: requests
(moves of q and kv blocks that were held before the step), tiles, partials (moves of results of
tiles up to this step). A step is an order, never a barrier.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import Layout, Positions
from tokenring.sequence.mask import Mask

if TYPE_CHECKING:
    from typing_extensions import Self

Kind = Literal["q", "kv", "q_partial", "kv_partial"]
KINDS: tuple[Kind, ...] = ("q", "kv", "q_partial", "kv_partial")
Pass = Literal["forward", "backward"]
PASSES: tuple[Pass, ...] = ("forward", "backward")
REQUESTS = "requests"
PARTIALS = "partials"
CHANNELS = (REQUESTS, PARTIALS)
Joined = tuple[int, int, int]  # owner, head group and piece of units that a tile reads together with others
Runs = tuple[tuple[int, int], ...]  # rows [start, stop) of a unit: ascending, with rows between them that are left out
PARTIAL_OF: dict[str, Kind] = {"q": "q_partial", "kv": "kv_partial"}
REQUEST_OF: dict[str, Kind] = {"q_partial": "q", "kv_partial": "kv"}
SHORT_NAMES: dict[str, str] = {"q": "q", "kv": "kv", "q_partial": "o", "kv_partial": "dkv"}  # in texts
FULL = "fp32"  # the codec of partials that go in fp32 where they need not

Names = tuple[tuple[str, ...], tuple[str, ...]]  # statistics, which are fp32 everywhere; tensors


@dataclass(frozen=True)
class TileOperator:
    """One kind of tile, as data: `ATTENTION` here, all others in `ir.operators`.

    carries: what a block carries in a pass; a kind that is not there does not move. home: the kinds of results, which
    are reduced at the owner of their unit. pairs: tensors with an element, or a row, for each (row, column) pair; they
    lie where their tile is computed. merge: of forward; gradients are added.
    flops: of a pair, for each element of head_dim and of value_dim. left_out: statistics of results of forward that
    stay with who made them: each row is made by one rank, and merged with nothing where it goes.
    """

    name: str
    carries: Mapping[tuple[Kind, Pass], Names]
    home: Mapping[Pass, tuple[Kind, ...]]
    merge: Literal["log-sum-exp", "sum"]
    flops: Mapping[Pass, tuple[int, int]]
    pairs: Mapping[Pass, tuple[str, ...]] | None = None
    left_out: tuple[str, ...] = ()

    def __hash__(self) -> int:
        return hash(self.name)


ATTENTION = TileOperator(
    "attention",
    {
        ("q", "forward"): ((), ("q",)),
        ("q", "backward"): (("lse", "delta"), ("q", "dout")),
        ("kv", "forward"): ((), ("k", "v")),
        ("kv", "backward"): ((), ("k", "v")),
        ("q_partial", "forward"): (("lse",), ("out",)),
        ("q_partial", "backward"): ((), ("dq",)),
        ("kv_partial", "backward"): ((), ("dk", "dv")),
    },
    {"forward": ("q_partial",), "backward": ("q_partial", "kv_partial")},
    "log-sum-exp",
    {"forward": (2, 2), "backward": (6, 4)},
)
# Attention for calls that want no lse, and so have no backward pass: out goes home alone, where nothing is merged.
ATTENTION_OUT = replace(ATTENTION, name="attention-out", left_out=("lse",))


@lru_cache(maxsize=64)
def units_of(layout: Layout, pieces: int) -> tuple[Positions, ...]:
    """Return the positions of every unit of a layout, chunk by chunk, each chunk in so many pieces."""
    size = -(-layout.chunk_length // pieces)
    return tuple(chunk.cut(piece * size, size) for chunk in layout.chunks for piece in range(pieces))


class Block(NamedTuple):
    """One unit of `kind`; partials also say at which rank they were made."""

    kind: Kind
    chunk: int
    heads: int = 0
    piece: int = 0
    made_at: int | None = None

    def partial(self, rank: int) -> Block:
        """Return the partial result for this q or kv unit, as made at a rank."""
        return Block(PARTIAL_OF[self.kind], self.chunk, self.heads, self.piece, rank)

    def request(self) -> Block:
        """Return the q or kv unit that this partial belongs to."""
        return Block(REQUEST_OF[self.kind], self.chunk, self.heads, self.piece)

    def __str__(self) -> str:
        kind, chunk, heads, piece, made_at = self
        text = f"{SHORT_NAMES[kind]}{chunk}"
        if heads:
            text += f".h{heads}"
        if piece:
            text += f".p{piece}"
        return text if made_at is None else f"{text}@{made_at}"


class Move(NamedTuple):
    """`block` goes from rank src to rank dst; with `add`, dst adds it to its own partial for that unit.

    rows: the only rows of the unit that go; None: all of them.
    """

    step: int
    block: Block
    src: int
    dst: int
    channel: str
    add: bool = False
    rows: Runs | None = None


class Tile(NamedTuple):
    """Attention of all these q blocks over all these kv blocks, where the mask lets them see each other."""

    step: int
    rank: int
    q: tuple[Block, ...]
    kv: tuple[Block, ...]

    @property
    def heads(self) -> int:
        """Head group of the tile's blocks."""
        return self.q[0].heads


@dataclass(frozen=True)
class ScheduleData:
    """Tiles that each rank computes and blocks that move between ranks, in their order, for both passes.

    `q_pieces` and `kv_pieces` cut each chunk into so many neighbouring parts that move apart.
    `keep` names the kinds ("q", "kv") that backward finds where forward gathered them: kept kv do
    not move again, kept q carry only what is new. `slack` is how many steps a partial may be on its
    way before its owner waits for it (None: until the end). `codecs` says in which format blocks of a kind are
    written on the wire (`ir.wire_formats`; or FULL, for partials of a layer). `operator` is what tiles compute.
    """

    name: str
    world_size: int
    q_layout: Layout
    kv_layout: Layout
    mask: Mask
    tiles: tuple[Tile, ...]
    moves: tuple[Move, ...]
    head_groups: int = 1
    q_pieces: int = 1
    kv_pieces: int = 1
    keep: frozenset[str] = frozenset()
    slack: int | None = None
    codecs: tuple[tuple[str, str], ...] = ()
    operator: TileOperator = ATTENTION

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """The hash of all fields: worked out once, it is that of thousands of tiles and moves."""
        return hash(tuple(getattr(self, each.name) for each in fields(self)))

    def __getstate__(self) -> dict[str, object]:
        """Return what is pickled: without the hash, since another process has other hashes of texts."""
        return {name: value for name, value in vars(self).items() if name != "_hash"}

    def layout_of(self, kind: Kind) -> Layout:
        """Return the layout of the blocks of this kind: that of q or that of kv."""
        return self.q_layout if kind.startswith("q") else self.kv_layout

    def pieces_of(self, kind: Kind) -> int:
        """Return how many pieces a chunk of this kind is cut into."""
        return self.q_pieces if kind.startswith("q") else self.kv_pieces

    def owner(self, block: Block) -> int:
        """Return the rank that owns the block."""
        return self._owners[block.kind][block.chunk]

    @cached_property
    def _owners(self) -> dict[Kind, tuple[int, ...]]:
        return {kind: self.layout_of(kind).owners for kind in KINDS}

    def positions(self, block: Block) -> Positions:
        """Return the positions of the sequence that the block covers."""
        return self.unit_positions[block.kind[0]][block.chunk * self.pieces_of(block.kind) + block.piece]

    @cached_property
    def unit_positions(self) -> dict[str, tuple[Positions, ...]]:
        """The positions of every unit, by the first letter of its kind, then chunk · pieces + piece."""
        kinds: tuple[Kind, ...] = ("q", "kv")
        return {kind[0]: units_of(self.layout_of(kind), self.pieces_of(kind)) for kind in kinds}

    def unit_index(self, block: Block) -> int:
        """Return the number of the block's unit among all units of its kind, counted by chunk and then by piece."""
        return block.chunk * self.pieces_of(block.kind) + block.piece

    def unit_length(self, kind: Kind) -> int:
        """Return the tokens in one unit that the end of the sequence does not cut."""
        return self._unit_lengths[kind]

    def rows(self, block: Block) -> int:
        """Return the tokens in the block's unit."""
        length = self._even_lengths[block[0]]
        return len(self.positions(block)) if length is None else length

    @cached_property
    def _unit_lengths(self) -> dict[Kind, int]:
        return {kind: -(-self.layout_of(kind).chunk_length // self.pieces_of(kind)) for kind in KINDS}

    @cached_property
    def _even_lengths(self) -> dict[Kind, int | None]:
        """The tokens in each unit of a kind, None where the end of the sequence cuts one."""
        return {kind: length if self.layout_of(kind).is_even else None for kind, length in self._unit_lengths.items()}

    def runs(self, move: Move) -> Runs:
        """Return the rows of its unit that a move carries."""
        return ((0, self.rows(move.block)),) if move.rows is None else move.rows

    def moved_rows(self, move: Move) -> int:
        """Return how many rows a move carries."""
        if move.rows is None:
            return self.rows(move.block)
        return sum(stop - start for start, stop in move.rows)

    def tiles_at(self, rank: int) -> list[Tile]:
        """Return the tiles of a rank, in order."""
        return self._tiles_by_rank.get(rank, [])

    @cached_property
    def _tiles_by_rank(self) -> dict[int, list[Tile]]:
        found: dict[int, list[Tile]] = defaultdict(list)
        for tile in self.tiles:
            found[tile.rank].append(tile)
        return found

    def joined_at(self, rank: int, block: Block) -> Collection[Joined] | None:
        """Return whose units lie in one slot with a block's at a rank, itself included; None: as tiles there say."""
        return None

    def of_rank(self, rank: int) -> ScheduleData:
        """Return a schedule in which the program of a rank is the same as in this one: this one, or the rank's part."""
        return self

    @cached_property
    def cuts_rows(self) -> bool:
        """True if a move carries only some rows of its unit."""
        return any(move.rows is not None for move in self.moves)

    def moves_in(self, direction: Pass) -> tuple[Move, ...]:
        """Return the moves that take place in a pass."""
        return self._moves_by_pass[direction]

    @cached_property
    def _moves_by_pass(self) -> dict[Pass, tuple[Move, ...]]:
        moving = {direction: self.moving(direction) for direction in PASSES}
        return {
            direction: tuple(move for move in self.moves if move.block.kind in kinds)
            for direction, kinds in moving.items()
        }

    @cached_property
    def moves_by_pair(self) -> Mapping[tuple[int, int, Kind], int]:
        """The number of moves from one rank to another of blocks of a kind, of all that any pass makes."""
        return self._count_by_pair()

    def _count_by_pair(self) -> Mapping[tuple[int, int, Kind], int]:
        return Counter((src, dst, block[0]) for _, block, src, dst, _, _, _ in self.moves)

    def moving(self, direction: Pass) -> frozenset[Kind]:
        """Return the kinds of blocks that move in a pass."""
        kept = {"kv"} & self.keep if direction == "backward" else set()
        return frozenset(kind for kind in KINDS if (kind, direction) in self.operator.carries and kind not in kept)

    @property
    def any_adds(self) -> bool:
        """True if a relay adds partials on their way."""
        return bool(self._wide_partials)

    @cached_property
    def _wide_partials(self) -> frozenset[Block]:
        added = [(move.block, move.block._replace(made_at=move.dst)) for move in self.moves if move.add]
        return frozenset(block for pair in added for block in pair)

    def in_full_precision(self, move: Move) -> bool:
        """Return whether a partial travels in fp32 on its whole way.

        One that a relay adds, or adds to, does, and those of a kind with codec FULL.
        """
        return move.block in self._wide_partials or (bool(self.codecs) and move.block.kind in self._wide_kinds)

    @cached_property
    def formats(self) -> dict[str, str]:
        """The wire formats in which the owners of requests, and the makers of partials, encode blocks, by kind."""
        return {kind: codec for kind, codec in self.codecs if codec != FULL}

    @cached_property
    def _wide_kinds(self) -> frozenset[str]:
        return frozenset(kind for kind, codec in self.codecs if codec == FULL)

    def replace(self, **changes: object) -> Self:
        """Return a copy with some fields changed; not verified. Raises ConfigurationError for an unknown field."""
        if unknown := changes.keys() - {field.name for field in fields(self)}:
            raise ConfigurationError(f"a schedule has no {min(unknown)!r} to replace")
        return replace(self, **changes)  # type: ignore[arg-type]
