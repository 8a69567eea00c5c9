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
from functools import lru_cache

from tokenring.errors import ScheduleError
from tokenring.gc_pause import no_collection
from tokenring.ir.schedule_data import KINDS, PASSES, REQUESTS, Block, Kind, Move, Pass, ScheduleData, Tile
from tokenring.lowering.target import Target, beyond
from tokenring.proof.wellformed import check_form

REPLAY_LIMIT = 16  # ranks up to which verify() also replays the lowered programs


def verify(schedule: ScheduleData) -> None:
    """Prove both passes. Raises ScheduleError, which names schedule, step, rank and block.

    Up to 16 ranks the lowered programs of all ranks are replayed as well (`replay`).
    """
    with no_collection():
        check_form(schedule)
        facts = ProofFacts(schedule)
        for direction in PASSES:
            _Proof(facts, direction).run()
        if schedule.world_size <= REPLAY_LIMIT:
            from tokenring.proof.replay import replay_schedule

            replay_schedule(schedule)


def verify_lowered(schedule: ScheduleData, target: Target) -> None:
    """Replay, once, the programs for such a target that `verify` has not, for up to 16 ranks. Raises ScheduleError."""
    if schedule.world_size > REPLAY_LIMIT:
        return
    if others := beyond(target):
        replay_once(schedule, tuple(others))
    if target.batching:
        replay_batches_once(schedule, target.one_pair)


@lru_cache(maxsize=64)
def replay_once(schedule: ScheduleData, targets: tuple[Target, ...]) -> None:
    """Replay the programs for these targets, unless that was done before."""
    from tokenring.proof.replay import replay_schedule

    with no_collection():
        replay_schedule(schedule, targets)


@lru_cache(maxsize=64)
def replay_batches_once(schedule: ScheduleData, one_pair: bool) -> None:
    """Replay the messages of both passes in batches, unless that was done before."""
    from tokenring.proof.batches import replay_schedule_in_batches

    with no_collection():
        replay_schedule_in_batches(schedule, one_pair)


class ProofFacts:
    """Facts that the proofs of both passes need: who sees whom, and tiles and moves by step.

    Sets of units are bits. Partials are known by their blocks or, as fast, by plain tuples that are equal
    to them; what is merged at an owner by the first four fields.
    """

    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule = schedule
        q, kv = schedule.unit_positions["q"], schedule.unit_positions["k"]
        sees = schedule.mask.visible
        there = [(j, b) for j, b in enumerate(kv) if len(b)]  # units beyond the end of the sequence are not seen
        self.of_q = [sum(1 << j for j, b in there if sees(a, b)) if len(a) else 0 for a in q]
        self.of_kv = [0] * len(kv)
        for i, bits in enumerate(self.of_q):
            for j in range(len(kv)):
                if bits >> j & 1:
                    self.of_kv[j] |= 1 << i
        self.tiles: dict[int, list[tuple[Tile, int, int]]] = defaultdict(list)
        sets: dict[tuple[Block, ...], int] = {}
        for tile in schedule.tiles:
            for blocks in (tile.q, tile.kv):
                if blocks not in sets:
                    sets[blocks] = sum(1 << schedule.unit_index(block) for block in blocks)
            self.tiles[tile.step].append((tile, sets[tile.q], sets[tile.kv]))
        self.owners = {kind: schedule.layout_of(kind).owners for kind in KINDS}
        self.read = {}
        if schedule.cuts_rows:
            from tokenring.proof.moved_rows import rows_read

            self.read = rows_read(schedule)


class _Proof:
    """One pass, replayed step by step: requests, tiles, partials."""

    def __init__(self, facts: ProofFacts, direction: Pass) -> None:
        self.schedule, self.facts, self.direction = facts.schedule, facts, direction
        self.owners = facts.owners
        self.kinds: tuple[Kind, ...] = facts.schedule.operator.home[direction]
        self.carried = facts.schedule.operator.carries
        self.left_out = facts.schedule.operator.left_out if direction == "forward" else ()
        self.lacking: set[tuple[object, ...]] = set()  # units at their owner whose result has come without its lse
        ranks = range(self.schedule.world_size)
        self.held: list[dict[Block, int]] = [{} for _ in ranks]  # at each rank: block → the step in which it came
        self.sent: list[set[tuple[object, ...]]] = [set() for _ in ranks]  # partials that each rank has sent
        self.computed: dict[tuple[int, int], int] = defaultdict(int)  # (head group, q unit) → kv bits
        self.home: dict[tuple[object, ...], int] = defaultdict(int)  # unit at its owner → bits merged
        self.made: dict[tuple[object, ...], int] = defaultdict(int)  # partial → bits in it
        self.added: dict[Block, int] = {}  # partial → the step of the last partial added to it
        self.rows = None
        if facts.read:
            from tokenring.proof.moved_rows import MovedRows

            self.rows = MovedRows(self.schedule, direction, facts.read)

    def run(self) -> None:
        if self.direction == "backward":
            self._hold_kept()
        requests: dict[int, list[Move]] = defaultdict(list)
        partials: dict[int, list[Move]] = defaultdict(list)
        for move in self.schedule.moves_in(self.direction):
            (requests if move[4] == REQUESTS else partials)[move[0]].append(move)
        tiles = self.facts.tiles
        for step in sorted({*requests, *tiles, *partials}):
            for move in requests.get(step, ()):
                self._request(move)
            for tile, q_bits, kv_bits in tiles.get(step, ()):
                self._tile(tile, q_bits, kv_bits)
            for move in partials.get(step, ()):
                self._partial(move)
        self._check_goal()
        self._check_needed(requests)

    def _fail(self, step: int, rank: int, text: str) -> ScheduleError:
        return ScheduleError(f"{self.schedule.name}, {self.direction}: step {step}, rank {rank}: {text}")

    def _hold_kept(self) -> None:
        """Note that what forward gathered and kept is there from the start."""
        if "kv" in self.schedule.keep:
            for move in self.schedule.moves_in("forward"):
                if move.block.kind == "kv":
                    self.held[move.dst][move.block] = -1
                    if self.rows is not None:
                        self.rows.request(move)

    def _request(self, move: Move) -> None:
        step, block, src, dst = move[:4]
        owner, there = self.owners[block[0]][block[1]], self.held[dst]
        if src != owner and self.held[src].get(block, step) >= step:
            raise self._fail(step, src, f"sends {block} to rank {dst} but does not hold it yet")
        if dst == owner or block in there:
            raise self._fail(step, dst, f"receives {block} from rank {src} but holds it already")
        there[block] = step
        if self.rows is not None:
            self.rows.request(move)

    def _tile(self, tile: Tile, q_bits: int, kv_bits: int) -> None:
        step, rank = tile.step, tile.rank
        held, (q_owners, kv_owners) = self.held[rank], (self.owners["q"], self.owners["kv"])
        q_pieces, kv_pieces = self.schedule.q_pieces, self.schedule.kv_pieces
        for blocks, owners in ((tile.q, q_owners), (tile.kv, kv_owners)):
            if (blocks[0][0], self.direction) not in self.carried:
                continue
            for block in blocks:
                if owners[block[1]] != rank and held.get(block, step) >= step:
                    raise self._fail(step, rank, f"computes with {block} but does not hold it yet")
        if self.rows is not None:
            self.rows.tile(tile)
        for block in tile.q:
            unit = block[1] * q_pieces + block[3]
            bits = kv_bits & self.facts.of_q[unit]
            if not bits:
                raise self._fail(step, rank, f"computes {block}, which sees nothing in its tile")
            if again := self.computed[block[2], unit] & bits:
                raise self._fail(step, rank, f"computes {block} with {self._names('kv', again)} a second time")
            self.computed[block[2], unit] |= bits
            if "q_partial" in self.kinds:
                self._contribute(tile, "q_partial", block, q_owners[block[1]], bits)
        of_columns = "kv_partial" in self.kinds
        for block in tile.kv:
            bits = q_bits & self.facts.of_kv[block[1] * kv_pieces + block[3]]
            if not bits:
                raise self._fail(step, rank, f"computes {block}, which the mask hides from its tile")
            if of_columns:
                self._contribute(tile, "kv_partial", block, kv_owners[block[1]], bits)

    def _contribute(self, tile: Tile, kind: Kind, block: Block, owner: int, bits: int) -> None:
        if owner == tile.rank:
            unit = (kind, block[1], block[2], block[3])
            if unit in self.lacking:
                raise self._fail(tile.step, tile.rank, f"computes {block}, whose result has come{self._without()}")
            self.home[unit] |= bits
            return
        partial = (kind, block[1], block[2], block[3], tile.rank)
        if partial in self.sent[tile.rank]:
            raise self._fail(tile.step, tile.rank, f"adds to {block.partial(tile.rank)} after it was sent")
        self.made[partial] |= bits

    def _partial(self, move: Move) -> None:
        step, block, src, dst, _, add, _ = move
        made_here = block[4] == src
        bits = self.made.get(block, 0) if made_here or self.held[src].get(block, step) < step else 0
        if made_here and bits and self.added.get(block, -1) >= step:
            raise self._fail(step, src, f"sends {block} before what is added to it has come")
        if not bits:
            raise self._fail(step, src, f"sends {block} to rank {dst} but holds nothing of it")
        if block in self.sent[src]:
            raise self._fail(step, src, f"sends {block} a second time")
        self.sent[src].add(block)
        if self.rows is not None:
            self.rows.partial(move)
        if dst == self.owners[block[0]][block[1]]:
            unit = block[:4]
            if again := self.home[unit] & bits:
                raise self._twice(move, block._replace(made_at=None), again)
            if self.left_out:
                if self.home[unit]:
                    raise self._fail(step, dst, f"merges {block}, which comes{self._without()}")
                self.lacking.add(unit)
            self.home[unit] |= bits
        elif add:
            if self.left_out:
                raise self._fail(step, dst, f"adds {block}, which comes{self._without()}")
            target = block._replace(made_at=dst)
            if target in self.sent[dst]:
                raise self._fail(step, dst, f"adds {block} to {target} after that was sent")
            if again := self.made[target] & bits:
                raise self._twice(move, target, again)
            self.made[target] |= bits
            self.added[target] = max(step, self.added.get(target, -1))
        else:
            self.held[dst][block] = step

    def _without(self) -> str:
        return f" without its {' and '.join(self.left_out)}: all of a row is to be made by one rank"

    def _twice(self, move: Move, into: Block, again: int) -> ScheduleError:
        other: Kind = "kv" if into.kind == "q_partial" else "q"
        return self._fail(move.step, move.dst, f"merges {move.block} into {into}: {self._names(other, again)} twice")

    def _check_goal(self) -> None:
        for kind in self.kinds:
            goal = self.facts.of_q if kind == "q_partial" else self.facts.of_kv
            pieces = self.schedule.pieces_of(kind)
            for unit, wanted in enumerate(goal):
                chunk, piece = divmod(unit, pieces)
                for heads in range(self.schedule.head_groups):
                    if missing := wanted & ~self.home[kind, chunk, heads, piece]:
                        raise self._missing(Block(kind, chunk, heads, piece), missing)
        if not self.kinds:
            self._check_computed()

    def _check_computed(self) -> None:
        """Check that all is computed, where results stay where they are made."""
        for unit, wanted in enumerate(self.facts.of_q):
            chunk, piece = divmod(unit, self.schedule.q_pieces)
            for heads in range(self.schedule.head_groups):
                if missing := wanted & ~self.computed[heads, unit]:
                    raise self._missing(Block("q_partial", chunk, heads, piece), missing)

    def _check_needed(self, requests: dict[int, list[Move]]) -> None:
        """Check that nothing travels where it is neither used nor sent on: nobody could give its slot back."""
        used: list[set[Block]] = [set() for _ in range(self.schedule.world_size)]
        for tile in self.schedule.tiles:
            used[tile.rank].update(tile.q, tile.kv)
        for moves in requests.values():
            for move in moves:
                used[move[2]].add(move[1])
        for moves in requests.values():
            for _, block, src, dst, *_ in moves:
                if block not in used[dst]:
                    step = self.held[dst][block]
                    raise self._fail(step, dst, f"receives {block} from rank {src} but never needs it")

    def _missing(self, unit: Block, missing: int) -> ScheduleError:
        """Return an error that says why what a unit should see is not merged at its owner."""
        owner = self.schedule.owner(unit)
        other: Kind = "kv" if unit.kind == "q_partial" else "q"
        for rank in range(self.schedule.world_size):
            partial = unit._replace(made_at=rank)
            if self.made.get(partial, 0) & missing:
                last = max((move.step for move in self.schedule.moves), default=0)
                return self._fail(last, rank, f"made {partial}, which never reaches its owner, rank {owner}")
        return self._fail(
            max((tile.step for tile in self.schedule.tiles), default=0),
            owner,
            f"{unit.request()} never meets {self._names(other, missing)}",
        )

    def _names(self, kind: Kind, bits: int) -> str:
        pieces = self.schedule.pieces_of(kind)
        units = [unit for unit in range(bits.bit_length()) if bits >> unit & 1]
        names = [str(Block(kind, unit // pieces, 0, unit % pieces)) for unit in units]
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
