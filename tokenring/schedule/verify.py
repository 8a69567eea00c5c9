"""The proof of a schedule: replay it and compare with what the mask asks for.

For each pass: a rank sends only what it holds; each visible (q unit, kv unit, head group) is
computed exactly once, by a rank that holds both, and nothing hidden is; each partial reaches its
owner and is merged once. Progress: whatever a move waits for (a block, a tile, a partial added to
it) stands in an earlier phase of the order, and both ends of a pair share one order, so the first
move that is not done yet can always be done, even if every message is a blocking rendezvous.
That the lowered programs keep to this is proved by `replay`.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from tokenring.errors import ConfigurationError, ScheduleError
from tokenring.layout import check_partition
from tokenring.schedule.ir import PARTIALS, PASSES, REQUESTS, Block, Kind, Move, Pass, Schedule, Tile
from tokenring.schedule.passes import move_order, tile_order

REPLAY_LIMIT = 16  # ranks up to which verify() also replays the lowered programs


def verify(schedule: Schedule) -> None:
    """Prove both passes. Raises ScheduleError, which names schedule, step, rank and block.

    Up to 16 ranks the lowered programs of all ranks are replayed as well (`replay`).
    """
    check_form(schedule)
    seen = Visible(schedule)
    for direction in PASSES:
        _Proof(schedule, direction, seen).run()
    if schedule.world_size <= REPLAY_LIMIT:
        from tokenring.schedule.replay import replay_schedule

        replay_schedule(schedule)


class Visible:
    """For each unit, the set of units of the other kind that it sees or is seen by, as bits."""

    def __init__(self, schedule: Schedule) -> None:
        q, kv = schedule.unit_positions["q"], schedule.unit_positions["k"]
        region = schedule.mask.region
        self.of_q = [sum(1 << j for j, b in enumerate(kv) if region(a, b)) for a in q]
        self.of_kv = [0] * len(kv)
        for i, bits in enumerate(self.of_q):
            for j in range(len(kv)):
                if bits >> j & 1:
                    self.of_kv[j] |= 1 << i


def check_form(schedule: Schedule) -> None:
    """Layouts hold every position once, tiles and moves name things that exist, and stand in their total order."""
    _check_units(schedule)
    for tile in schedule.tiles:
        where = f"{schedule.name}: step {tile.step}, rank {tile.rank}: tile"
        if not tile.q or not tile.kv:
            raise ScheduleError(f"{where} has no q or no kv block")
        _check_place(schedule, where, tile.step, (tile.rank,))
        for kind, blocks in (("q", tile.q), ("kv", tile.kv)):
            for block in blocks:
                _check_block(schedule, where, block)
                if block.kind != kind or block.heads != tile.heads:
                    raise ScheduleError(f"{where} has {block} among its {kind} blocks of head group {tile.heads}")
            if len(set(blocks)) != len(blocks):
                raise ScheduleError(f"{where} names a {kind} block twice: {', '.join(map(str, blocks))}")
    for move in schedule.moves:
        where = f"{schedule.name}: step {move.step}, rank {move.src}: {move.block} to rank {move.dst}"
        _check_place(schedule, where, move.step, (move.src, move.dst))
        _check_block(schedule, where, move.block)
        partial = move.block.made_at is not None
        if partial != move.block.kind.endswith("partial") or move.channel != (PARTIALS if partial else REQUESTS):
            raise ScheduleError(f"{where} cannot travel on channel {move.channel!r}")
        if move.src == move.dst:
            raise ScheduleError(f"{where}: a rank sends to itself")
        if move.add and (not partial or schedule.owner(move.block) == move.dst):
            raise ScheduleError(f"{where}: add is for partials on their way, not for requests or the owner")
    if list(schedule.tiles) != sorted(schedule.tiles, key=tile_order):
        raise ScheduleError(f"{schedule.name}: its tiles are not in order of step, rank and blocks")
    for before, after in pairwise(schedule.moves):
        if move_order(before) >= move_order(after):
            raise ScheduleError(
                f"{schedule.name}: step {after.step}, rank {after.src}: {after.block} to rank {after.dst} stands "
                f"behind {before.block} of step {before.step}, or twice, against the order that both ends share"
            )


def _check_units(schedule: Schedule) -> None:
    """Units are equal parts of the sequence that together are all of it."""
    kinds: tuple[Kind, ...] = ("q", "kv")
    for kind in kinds:
        layout, pieces = schedule.layout_of(kind), schedule.pieces_of(kind)
        if layout.world_size != schedule.world_size:
            raise ScheduleError(
                f"{schedule.name}: its {kind} layout is for {layout.world_size} ranks, not {schedule.world_size}"
            )
        if pieces < 1 or layout.chunk_length % pieces:
            raise ScheduleError(
                f"{schedule.name}: {pieces} pieces do not divide {kind} chunks of {layout.chunk_length} positions"
            )
        try:
            check_partition(layout)
        except ConfigurationError as error:
            raise ScheduleError(f"{schedule.name}: {error}") from None
    named = {*schedule.keep, *(kind for kind, _ in schedule.codecs)}
    if not named <= set(kinds) or (schedule.slack is not None and schedule.slack < 0):
        raise ScheduleError(f"{schedule.name}: keep and codecs are for q and kv, and slack is not negative")


def _check_place(schedule: Schedule, where: str, step: int, ranks: tuple[int, ...]) -> None:
    if step < 0:
        raise ScheduleError(f"{where}: there is no step {step}")
    for rank in ranks:
        if not 0 <= rank < schedule.world_size:
            raise ScheduleError(f"{where}: {rank} is not a rank of {schedule.world_size}")


def _check_block(schedule: Schedule, where: str, block: Block) -> None:
    fits = (
        0 <= block.chunk < len(schedule.layout_of(block.kind).chunks)
        and 0 <= block.heads < schedule.head_groups
        and 0 <= block.piece < schedule.pieces_of(block.kind)
        and (block.made_at is None or 0 <= block.made_at < schedule.world_size)
    )
    if not fits:
        raise ScheduleError(f"{where}: there is no block {block}")


class _Proof:
    """One pass, replayed step by step: requests, tiles, partials."""

    def __init__(self, schedule: Schedule, direction: Pass, visible: Visible) -> None:
        self.schedule, self.direction, self.visible = schedule, direction, visible
        self.kinds: tuple[Kind, ...] = ("q_partial",) if direction == "forward" else ("q_partial", "kv_partial")
        self.held: dict[tuple[Block, int], int] = {}  # (block, rank) → the step in which it came
        self.computed: dict[tuple[int, int], int] = defaultdict(int)  # (head group, q unit) → kv bits
        self.home: dict[Block, int] = defaultdict(int)  # partial unit at its owner → bits merged
        self.made: dict[Block, int] = defaultdict(int)  # partial → bits in it
        self.added: dict[Block, int] = {}  # partial → the step of the last partial added to it
        self.sent: dict[tuple[Block, int], Move] = {}

    def run(self) -> None:
        if self.direction == "backward":
            self._hold_kept()
        requests: dict[int, list[Move]] = defaultdict(list)
        tiles: dict[int, list[Tile]] = defaultdict(list)
        partials: dict[int, list[Move]] = defaultdict(list)
        for move in self.schedule.moves_in(self.direction):
            (requests if move.channel == REQUESTS else partials)[move.step].append(move)
        for tile in self.schedule.tiles:
            tiles[tile.step].append(tile)
        for step in sorted({*requests, *tiles, *partials}):
            for move in requests[step]:
                self._request(move)
            for tile in tiles[step]:
                self._tile(tile)
            for move in partials[step]:
                self._partial(move)
        self._check_goal()

    def _fail(self, step: int, rank: int, text: str) -> ScheduleError:
        return ScheduleError(f"{self.schedule.name}, {self.direction}: step {step}, rank {rank}: {text}")

    def _hold_kept(self) -> None:
        """What forward gathered and kept is there from the start."""
        for move in self.schedule.moves_in("forward"):
            if move.block.kind in self.schedule.keep and move.block.kind == "kv":
                self.held[move.block, move.dst] = -1

    def _holds(self, block: Block, rank: int, step: int) -> bool:
        return self.schedule.owner(block) == rank or self.held.get((block, rank), step) < step

    def _request(self, move: Move) -> None:
        if not self._holds(move.block, move.src, move.step):
            raise self._fail(move.step, move.src, f"sends {move.block} to rank {move.dst} but does not hold it yet")
        if self.schedule.owner(move.block) == move.dst or (move.block, move.dst) in self.held:
            raise self._fail(move.step, move.dst, f"receives {move.block} from rank {move.src} but holds it already")
        self.held[move.block, move.dst] = move.step

    def _tile(self, tile: Tile) -> None:
        for block in (*tile.q, *tile.kv):
            if not self._holds(block, tile.rank, tile.step):
                raise self._fail(tile.step, tile.rank, f"computes with {block} but does not hold it yet")
        index = self.schedule.unit_index
        kv_bits = sum(1 << index(block) for block in tile.kv)
        q_bits = sum(1 << index(block) for block in tile.q)
        for block in tile.q:
            self._count(tile, block, kv_bits & self.visible.of_q[index(block)])
        for block in tile.kv:
            bits = q_bits & self.visible.of_kv[index(block)]
            if not bits:
                raise self._fail(tile.step, tile.rank, f"computes {block}, which the mask hides from its tile")
            if self.direction == "backward":
                self._contribute(tile, block, bits)

    def _count(self, tile: Tile, block: Block, bits: int) -> None:
        if not bits:
            raise self._fail(tile.step, tile.rank, f"computes {block}, which sees nothing in its tile")
        key = (block.heads, self.schedule.unit_index(block))
        if again := self.computed[key] & bits:
            raise self._fail(tile.step, tile.rank, f"computes {block} with {self._names('kv', again)} a second time")
        self.computed[key] |= bits
        self._contribute(tile, block, bits)

    def _contribute(self, tile: Tile, block: Block, bits: int) -> None:
        partial = block.partial(tile.rank)
        if self.schedule.owner(block) == tile.rank:
            self.home[partial._replace(made_at=None)] |= bits
        elif (partial, tile.rank) in self.sent:
            raise self._fail(tile.step, tile.rank, f"adds to {partial} after it was sent")
        else:
            self.made[partial] |= bits

    def _partial(self, move: Move) -> None:
        block, owner = move.block, self.schedule.owner(move.block)
        if block.made_at == move.src:
            bits = self.made.get(block, 0)
            if bits and self.added.get(block, -1) >= move.step:
                raise self._fail(move.step, move.src, f"sends {block} before what is added to it has come")
        else:
            bits = self.made.get(block, 0) if self.held.get((block, move.src), move.step) < move.step else 0
        if not bits:
            raise self._fail(move.step, move.src, f"sends {block} to rank {move.dst} but holds nothing of it")
        if (block, move.src) in self.sent:
            raise self._fail(move.step, move.src, f"sends {block} a second time")
        self.sent[block, move.src] = move
        if move.dst == owner:
            unit = block._replace(made_at=None)
            self._merge(move, unit, self.home[unit] & bits)
            self.home[unit] |= bits
        elif move.add:
            target = block._replace(made_at=move.dst)
            if (target, move.dst) in self.sent:
                raise self._fail(move.step, move.dst, f"adds {block} to {target} after that was sent")
            self._merge(move, target, self.made[target] & bits)
            self.made[target] |= bits
            self.added[target] = max(move.step, self.added.get(target, -1))
        else:
            self.held[block, move.dst] = move.step

    def _merge(self, move: Move, into: Block, again: int) -> None:
        if again:
            other: Kind = "kv" if into.kind == "q_partial" else "q"
            raise self._fail(move.step, move.dst, f"merges {move.block} into {into}: {self._names(other, again)} twice")

    def _check_goal(self) -> None:
        for kind in self.kinds:
            goal = self.visible.of_q if kind == "q_partial" else self.visible.of_kv
            pieces = self.schedule.pieces_of(kind)
            for unit, wanted in enumerate(goal):
                for heads in range(self.schedule.head_groups):
                    self._check_unit(Block(kind, unit // pieces, heads, unit % pieces), wanted)
        self._check_needed()

    def _check_needed(self) -> None:
        """Nothing travels to where it is neither used nor sent on: its slot would be nobody's to give back."""
        used = {(block, tile.rank) for tile in self.schedule.tiles for block in (*tile.q, *tile.kv)}
        requests = [move for move in self.schedule.moves_in(self.direction) if move.channel == REQUESTS]
        used |= {(move.block, move.src) for move in requests}
        for move in requests:
            if (move.block, move.dst) not in used:
                raise self._fail(move.step, move.dst, f"receives {move.block} from rank {move.src} but never needs it")

    def _check_unit(self, unit: Block, wanted: int) -> None:
        missing = wanted & ~self.home[unit]
        if not missing:
            return
        owner = self.schedule.owner(unit)
        other: Kind = "kv" if unit.kind == "q_partial" else "q"
        for partial, bits in self.made.items():
            if partial._replace(made_at=None) == unit and bits & missing and partial.made_at is not None:
                last = max((move.step for move in self.schedule.moves), default=0)
                raise self._fail(last, partial.made_at, f"made {partial}, which never reaches its owner, rank {owner}")
        raise self._fail(
            max((tile.step for tile in self.schedule.tiles), default=0),
            owner,
            f"{unit.request()} never meets {self._names(other, missing)}",
        )

    def _names(self, kind: Kind, bits: int) -> str:
        pieces = self.schedule.pieces_of(kind)
        units = [unit for unit in range(bits.bit_length()) if bits >> unit & 1]
        names = [str(Block(kind, unit // pieces, 0, unit % pieces)) for unit in units]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
