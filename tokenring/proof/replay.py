"""The proof of programs: run those of all ranks together, every message a blocking rendezvous.

A message is done when it stands first in its queue at both ends. Where a transport serialises
both directions of a pair, there is one queue for each pair and channel, else one for each
direction; where communicators share streams, one for all messages of a rank. Slots are watched,
and what lies in them (`slot_contents`): nothing is read before it has arrived, and nothing written
while it is on its way. How long a slot's content lives follows from its uses: a result is used
once, when it is sent or merged, and not overwritten before; requests are used as often as tiles
want them, and one that is overwritten too early shows in what is computed. Each visible pair of
tokens is computed in one kernel call (`visible_pairs`), whose result is merged once into the row of
its token's owner.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PASSES, REQUEST_OF, Kind, ScheduleData
from tokenring.lowering.lower import agenda_of, lower_agenda
from tokenring.lowering.program import (
    NOTHING,
    OWN,
    Attend,
    Fill,
    Merge,
    Multiply,
    Pack,
    Program,
    Recv,
    Send,
    Span,
    Wait,
)
from tokenring.lowering.storage import storage_of
from tokenring.lowering.target import APART, Target
from tokenring.proof.encodings import check_merged, encoded, rewritten
from tokenring.proof.paired import PAIR_KINDS, BeyondPairs, PairTokens
from tokenring.proof.rendezvous import Queues, Rank, Rendezvous, Wrong, name_of, tile_name
from tokenring.proof.slot_contents import (
    NOBODY,
    ContentRun,
    Missing,
    Mixed,
    Rows,
    Tokens,
    Twice,
    add,
    empty,
    moved,
    overlaps,
    read,
    results,
    tokens_of,
)
from tokenring.proof.visible_pairs import Kinds, Pairs, Tally, proof_workload

RESULTS = REQUEST_OF.keys()  # the kinds of what tiles make
Kept = list[list[dict[int, Rows]]]  # by rank: what each kept slot holds, by head group


def replay_schedule(schedule: ScheduleData, targets: Sequence[Target] = APART) -> None:
    """Lower both passes for every rank, for all kinds of transport or those asked for, and replay them.

    Programs of the strict kind in one queue a rank for everything: they then run where there are several, too. So do
    those with collectives.
    """
    workload = proof_workload(schedule)
    pairs, storage = Pairs(schedule), storage_of(schedule)
    kept: dict[Target, Kept] = {}
    for direction in PASSES:
        agendas = [agenda_of(storage, rank, direction, workload) for rank in range(schedule.world_size)]
        for target in targets:
            early = target.early_receives
            programs = [lower_agenda(agenda, workload, target) for agenda in agendas]
            kept[target] = replay(schedule, programs, not early, kept.get(target), pairs, one_queue_a_rank=not early)


def replay(
    schedule: ScheduleData,
    programs: Sequence[Program],
    one_queue_a_pair: bool,
    kept: Kept | None = None,
    pairs: Pairs | None = None,
    channels: int = 2,
    one_queue_a_rank: bool = False,
) -> Kept:
    """Run all ranks' programs of one pass; what they keep. Backward is given what forward kept.

    one_queue_a_pair: both directions of a pair share a queue in each channel; channels: 1 if these share it too;
    one_queue_a_rank: all messages of a rank share one, whatever the peer.
    The programs' head groups have kv heads of their own. Raises ScheduleError, which names step,
    rank and block, when programs deadlock, mismatch or misuse a slot, or when a result does not
    come home once.
    """
    machine = _Replay(pairs or Pairs(schedule), programs, Queues(one_queue_a_pair, channels, one_queue_a_rank), kept)
    try:
        return machine.run()
    except Wrong as wrong:
        where = f"{schedule.name}, {machine.direction}: step {wrong.step}, rank {wrong.rank}"
        raise ScheduleError(f"{where}: {wrong.text}") from None


class _Replay:
    def __init__(self, pairs: Pairs, programs: Sequence[Program], queues: Queues, kept: Kept | None) -> None:
        self.pairs, self.schedule = pairs, pairs.schedule
        self.direction = programs[0].direction
        self.kinds: tuple[Kind, ...] = self.schedule.operator.home[self.direction]
        self.in_pairs, self.encoded = PairTokens(self.schedule), rewritten(self.schedule, self.direction)
        self.tally = Tally(pairs, self.kinds)
        self.ranks = [Rank(program) for program in programs]
        for rank, slots in zip(self.ranks, kept or [], strict=bool(kept)):
            for slot, held in zip(_kept_slots(rank.program), slots, strict=True):
                rank.held[slot].update({heads: dict(rows) for heads, rows in held.items()})
        self.rendezvous = Rendezvous(self.ranks, queues)
        self.ready = deque(self.ranks)

    def run(self) -> Kept:
        while self.ready:
            self._advance(self.ready.popleft())
        if cause := self.rendezvous.cause():
            raise cause
        self._check_messages()
        self._check_pairs()
        self._check_home()
        return [[rank.held[slot] for slot in _kept_slots(rank.program)] for rank in self.ranks]

    def _advance(self, rank: Rank) -> None:
        """Run a rank until it must wait."""
        instructions, done = rank.program.instructions, rank.done
        rank.waits = None
        for at in range(rank.at, len(instructions)):
            rank.at, instruction = at, instructions[at]
            if type(instruction) is Wait and instruction.message not in done:
                if instruction.message not in rank.posted:
                    raise rank.wrong(f"waits for message {instruction.message}, which it never posted")
                rank.waits = instruction.message
                return
            DOES[type(instruction)](self, rank, instruction)
        rank.at = len(instructions)

    # ---------- messages

    def _recv(self, rank: Rank, post: Recv) -> None:
        self._check_free(rank, post.span)
        self._post(rank, post)

    def _send(self, rank: Rank, post: Send) -> None:
        rank.carried[post.message] = self._read(rank, post.span)
        self._use(rank, post.span)
        self._post(rank, post)

    def _post(self, rank: Rank, post: Recv | Send) -> None:
        rank.flying[post.span.slot][post.message] = post
        for meeting in self.rendezvous.post(rank, post):
            self._met(*meeting)

    def _met(self, sender: Rank, send: Send, receiver: Rank, recv: Recv) -> None:
        given, taken = sender.program.slots[send.span.slot], receiver.program.slots[recv.span.slot]
        if given.kind != taken.kind or (self.encoded and given.full_precision != taken.full_precision):
            raise receiver.wrong(f"{name_of(recv)} goes into a slot of another kind")
        receiver.carried[recv.message] = moved(sender.carried.pop(send.message), recv.span.start - send.span.start)
        for end, message in ((sender, send.message), (receiver, recv.message)):
            if end.waits == message:
                self.ready.append(end)

    def _waited(self, rank: Rank, wait: Wait) -> None:
        post = rank.posted[wait.message]
        slot = post.span.slot
        if rank.flying[slot].pop(wait.message, None) is not None and type(post) is Recv:
            rows = rank.held[slot][post.span.heads]
            for run in rank.carried.pop(wait.message):
                rows[run.start] = run

    # ---------- slots

    def _read(self, rank: Rank, span: Span) -> list[ContentRun]:
        slot, start, stop, heads = span
        for post in rank.flying[slot].values():
            if type(post) is Recv and post.span.start < stop and start < post.span.stop:
                raise rank.wrong(f"reads slot {slot} before waiting for {name_of(post)}")
        try:
            return read(rank.held[slot][heads], start, stop)
        except Missing as missing:
            nothing = f"which hold nothing from row {missing.row} on"
            raise rank.wrong(f"reads rows {start} to {stop} of slot {slot}, {nothing}{self._of(rank)}") from None

    def _check_landed(self, rank: Rank, span: Span) -> None:
        for post in rank.flying[span.slot].values():
            if post.span.start < span.stop and span.start < post.span.stop:
                raise rank.wrong(f"writes slot {span.slot} before waiting for {name_of(post)}")

    def _check_free(self, rank: Rank, span: Span) -> None:
        """Check that nothing moves to or from these rows and nobody needs their contents; then empty them."""
        slot, start, stop, heads = span
        self._check_landed(rank, span)
        spec = rank.program.slots[slot]
        for group, rows in rank.held[slot].items():
            if (group == heads or not spec.all_heads) and overlaps(rows, start, stop):
                if spec.kept or spec.kind in RESULTS:
                    why = "which are kept for backward" if spec.kept else "which nobody has used"
                    raise rank.wrong(f"overwrites rows {start} to {stop} of slot {slot}, {why}{self._of(rank)}")
                empty(rows, start, stop)

    def _use(self, rank: Rank, span: Span) -> None:
        """Empty the rows of results that are sent or merged: results are in one place."""
        if rank.program.slots[span.slot].kind in RESULTS:
            empty(rank.held[span.slot][span.heads], span.start, span.stop)

    def _accumulate(self, rank: Rank, kind: Kind, span: Span, runs: list[ContentRun], first: bool) -> None:
        """Put results into rows that hold nothing, if `first`, else merge them into those that hold some."""
        slot, heads = span.slot, span.heads
        if rank.program.slots[slot].kind != kind:
            raise rank.wrong(f"puts {self._names(kind, runs, heads)} into slot {slot}, which is of another kind")
        if slot in rank.home:
            for run in runs:
                if run.owner != NOBODY and (run.owner != rank.rank or run.row != run.start):
                    there = self.pairs.block(REQUEST_OF[kind], rank.rank, run.start, heads)
                    raise rank.wrong(f"puts {self._names(kind, [run], heads)} home into the rows of {there}")
        if kind in self.encoded and not rank.program.slots[slot].full_precision:
            runs = encoded(rank, span, runs, first)
        if first:
            self._check_free(rank, span)
            rank.held[slot][heads].update({run.start: run for run in runs})
            return
        self._check_landed(rank, span)
        rows = rank.held[slot][heads]
        for run in runs:
            try:
                add(rows, run)
            except (Missing, Mixed, Twice) as clash:
                text = f"merges {self._names(kind, [run], heads)} {self._clash(kind, span, clash)}"
                raise rank.wrong(text) from None
        if self.schedule.operator.left_out:
            check_merged(rank, span, rows)

    def _clash(self, kind: Kind, span: Span, clash: Missing | Mixed | Twice) -> str:
        match clash:
            case Missing(row=row):
                return (
                    f"into rows {span.start} to {span.stop} of slot {span.slot}, which hold nothing from row {row} on"
                )
            case Mixed(held=held):
                return f"into {self._names(kind, [held], span.heads)}"
            case Twice(again=again):
                call = self.tally.first(again)
                return f"a second time: rank {call.rank} made that in step {call.step}"

    def _names(self, kind: Kind, runs: list[ContentRun], heads: int) -> str:
        """Return results as text, by their blocks; each as made by the rank of its first kernel call."""
        names = []
        for run in runs:
            made_at = self.tally.first(run.made).rank if run.made else None
            filled = run.owner == NOBODY
            names.append("nothing" if filled else str(self.pairs.block(kind, run.owner, run.row, heads, made_at)))
        return ",".join(names)

    def _of(self, rank: Rank) -> str:
        """Return the blocks that an instruction is about, as errors name them."""
        does = rank.program.instructions[rank.at]
        if isinstance(does, Recv | Send):
            return f", for {name_of(does)}"
        if isinstance(does, Attend | Multiply):
            here = (does.step, rank.rank, does.q.heads)
            tiles = [tile for tile in self.schedule.tiles if (tile.step, tile.rank, tile.heads) == here]
            return f", for {' or '.join(tile_name(tile) for tile in tiles)}"
        if isinstance(does, Merge):
            for slot, start, stop, heads in (does.source, does.into):
                rows = rank.held[slot][heads].values()
                if runs := [run for run in rows if run.start < stop and start < run.stop]:
                    return f", for {self._names(does.kind, runs, heads)}"
            if does.into.slot in rank.home:
                return f", for {self.pairs.block(does.kind, rank.rank, does.into.start, does.into.heads)}"
            moves = [move for move in self.schedule.moves_in(self.direction) if move.block.kind == does.kind]
            sent = [str(move.block) for move in moves if (move.step, move.src) == (rank.step, rank.rank)]
            return f", for {','.join(sent)}"
        return ""

    # ---------- other instructions

    def _pack(self, rank: Rank, pack: Pack) -> None:
        self._check_free(rank, pack.into)
        if rank.program.slots[pack.into.slot].kind != pack.kind or pack.source.rows != pack.into.rows:
            raise rank.wrong(f"packs rows of {pack.kind} into {pack.into}, which is of another kind or size")
        if pack.source.slot != OWN:
            raise rank.wrong(f"packs rows of slot {pack.source.slot}: what is not its own it sends on as it came")
        slot, start, stop, heads = pack.into
        rank.held[slot][heads][start] = ContentRun(start, stop, rank.rank, pack.source.start)

    def _attend(self, rank: Rank, call: Attend) -> None:
        q, kv = self._tokens(rank, call.q, "q"), self._tokens(rank, call.kv, "kv")
        if call.kept_q is not None and self._tokens(rank, call.kept_q, "q") != q:
            raise rank.wrong(f"computes with other q than it kept{self._of(rank)}")
        self._compute(rank, call, q, kv)

    def _multiply(self, rank: Rank, call: Multiply) -> None:
        """Check that rows and columns of the tensors of pairs are those of the operands, which may be one of them."""
        try:
            made, there = self.in_pairs.kinds(call, self.direction), self.in_pairs.of(rank.rank, call)
        except BeyondPairs as beyond:
            raise rank.wrong(f"{beyond}{self._of(rank)}") from None
        for kind, span, tokens in zip(PAIR_KINDS, (call.q, call.kv), there, strict=True):
            if span.slot != NOTHING and self._tokens(rank, span, kind) != tokens:
                raise rank.wrong(f"has {kind} in its tensor of pairs among those of other tokens{self._of(rank)}")
        self._compute(rank, call, *there, made)

    def _compute(self, rank: Rank, call: Attend | Multiply, q: Tokens, kv: Tokens, kinds: Kinds = None) -> None:
        """Note a kernel call, and put its results where they go. kinds: of results; None: all of the pass."""
        patch, shape = call.patch, (0, call.q.rows, 0, call.kv.rows)
        spans = [call.q, call.kv, *(result.into for result in call.results)]
        if patch[:4] != shape or len({span.heads for span in spans}) != 1:
            raise rank.wrong(f"computes {patch} of {call.q.rows} × {call.kv.rows} rows, or mixes heads{self._of(rank)}")
        try:
            made = self.tally.call(rank.rank, call.step, call.q.heads, q, kv, patch, kinds)
        except Twice:
            raise rank.wrong(f"computes some tokens twice in one call{self._of(rank)}") from None
        for result in call.results:
            into, tokens = result.into, q if result.kind == "q_partial" else kv
            runs = results(tokens, result.start, into.start, into.stop, made)
            self._accumulate(rank, result.kind, into, runs, result.first)

    def _tokens(self, rank: Rank, span: Span, kind: Kind) -> Tokens:
        if span.slot == OWN:
            return ((span.stop - span.start, rank.rank, span.start),)
        if rank.program.slots[span.slot].kind != kind:
            raise rank.wrong(f"takes slot {span.slot} for {kind}{self._of(rank)}")
        return tokens_of(self._read(rank, span))

    def _merge(self, rank: Rank, merge: Merge) -> None:
        source, into = merge.source, merge.into
        runs = moved(self._read(rank, source), into.start - source.start)
        if source.rows != into.rows or source.heads != into.heads:
            raise rank.wrong(f"merges {source} into {into}, which is of another size or other heads{self._of(rank)}")
        self._accumulate(rank, merge.kind, into, runs, merge.first)
        self._use(rank, source)

    def _fill(self, rank: Rank, fill: Fill) -> None:
        _, start, stop, _ = fill.into
        self._accumulate(rank, fill.kind, fill.into, [ContentRun(start, stop, NOBODY, 0)], True)

    # ---------- the end

    def _check_messages(self) -> None:
        for rank in self.ranks:
            if left := rank.posted.keys() - rank.done:
                raise rank.wrong(f"ends although {name_of(rank.posted[min(left)])} was never met by its peer")
            for flying in rank.flying:
                for post in flying.values():
                    raise rank.wrong(f"ends without waiting for {name_of(post)}")

    def _check_pairs(self) -> None:
        """Check that each visible pair of tokens is in one kernel call, and nothing hidden in any."""
        if (found := self.tally.check()) is not None:
            raise Wrong(*found)

    def _check_home(self) -> None:
        """Check that the result for each own row is there, from all kernel calls that make one."""
        for rank in self.ranks:
            for slot, kind in rank.home.items():
                for heads in range(self.schedule.head_groups):
                    self._check_result(rank, kind, heads, rank.held[slot][heads])

    def _check_result(self, rank: Rank, kind: Kind, heads: int, rows: Rows) -> None:
        due = self.tally.due[kind, rank.rank, heads]
        length = self.schedule.layout_of(kind).local_lengths[rank.rank]
        if not length:
            return
        try:
            runs = read(rows, 0, length)
        except Missing as missing:
            lost = self.pairs.block(kind, rank.rank, missing.row, heads)
            raise rank.wrong(f"ends without a result for {lost}") from None
        for run in runs:
            for wanted in read(due, run.start, run.stop):
                if missed := wanted.made & ~run.made:
                    call = self.tally.first(missed)
                    lost = self.pairs.block(kind, rank.rank, wanted.row, heads, call.rank)
                    text = f"ends without {lost}, which rank {call.rank} made in step {call.step}"
                    raise rank.wrong(f"{text} and nobody merged into its result")


DOES: dict[type, Callable[[_Replay, Rank, Any], None]] = {
    Pack: _Replay._pack,
    Recv: _Replay._recv,
    Send: _Replay._send,
    Wait: _Replay._waited,
    Attend: _Replay._attend,
    Multiply: _Replay._multiply,
    Merge: _Replay._merge,
    Fill: _Replay._fill,
}


def _kept_slots(program: Program) -> list[int]:
    return [index for index, slot in enumerate(program.slots) if slot.kept]
