"""Lower a schedule to the program of one rank.

Steps are worked off in order: receives are posted first (transports that match messages by pair
order get both ends' posts in the one total order instead), then requests are sent on, tiles
computed, partials sent, and partials merged that have had `slack` steps to arrive. Every wait is
for one message, and stands where its content is needed. Where a transport has collectives, the messages
of each exchange (`exchange`) are posted together, before the others of their step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from tokenring.errors import ConfigurationError
from tokenring.ir.schedule_data import PARTIAL_OF, PARTIALS, REQUESTS, Block, Kind, Pass, ScheduleData, Tile
from tokenring.lowering.accumulators import Accumulators
from tokenring.lowering.agenda import Agenda, incoming_key
from tokenring.lowering.calls import KernelCall, Supports, anything
from tokenring.lowering.program import (
    NOTHING,
    OWN,
    Attend,
    Collective,
    Multiply,
    Pack,
    Program,
    Recv,
    Result,
    Send,
    Slot,
    Span,
)
from tokenring.lowering.records import Records, check_workload, nbytes
from tokenring.lowering.storage import Group, Message, Slab, Storage, storage_of
from tokenring.lowering.target import IDEAL, Target
from tokenring.sequence.layout import as_integer
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.lowering.bundles import Bundle
    from tokenring.lowering.exchanges import Exchange
    from tokenring.lowering.pair_box import PairBox

MANY_RANKS = 64  # of more, Python's garbage collector would take most of the time


def lower(
    schedule: ScheduleData,
    rank: int,
    direction: Pass,
    workload: Workload,
    target: Target = IDEAL,
    supports: Supports = anything,
) -> Program:
    """Make the program of one rank in one pass.

    target: of its transport. Without early receives posts follow the total order of `passes.order`.
    supports: says why the kernel refuses a patch; such patches are cut until it does not.
    Raises ConfigurationError for a rank, a pass or a workload that the schedule does not have.
    """
    check_workload(schedule, workload, direction)
    if as_integer(rank) not in range(schedule.world_size):
        raise ConfigurationError(f"there is no rank {rank!r}; the schedule has ranks 0 to {schedule.world_size - 1}")
    if schedule.world_size <= MANY_RANKS:
        return _program(schedule, rank, direction, workload, target, supports)
    from tokenring.gc_pause import no_collection

    with no_collection():
        return _program(schedule, rank, direction, workload, target, supports)


def _program(
    schedule: ScheduleData, rank: int, direction: Pass, workload: Workload, target: Target, supports: Supports
) -> Program:
    needs_all = target.bundle_bytes if target.early_receives else target.collectives
    part = schedule if needs_all else schedule.of_rank(rank)
    agenda = agenda_of(storage_of(part), rank, direction, workload, supports)
    return lower_agenda(agenda, workload, target)


def agenda_of(
    storage: Storage, rank: int, direction: Pass, workload: Workload, supports: Supports = anything
) -> Agenda:
    """Return what the program of a rank has to do, whenever the transport wants receives posted."""
    return Agenda(storage, rank, direction, supports, half=workload.dtype != torch.float32)


def lower_agenda(agenda: Agenda, workload: Workload, target: Target) -> Program:
    """Make the program that does it."""
    storage, direction = agenda.storage, agenda.direction
    together: Sequence[Exchange | Bundle] = ()
    if target.early_receives and target.bundle_bytes:
        from tokenring.lowering.bundles import bundles

        records = Records(agenda.schedule, workload, direction)
        together = bundles(storage, agenda.rank, direction, records, target.bundle_bytes)
    elif target.collectives and not target.early_receives:
        from tokenring.lowering.exchanges import exchanges

        together = exchanges(storage, direction)
    return _Lowering(agenda, workload, target.early_receives, together).run(target.ahead_bytes)


class _Lowering(Accumulators):
    """Steps, messages, requests and tiles."""

    box: PairBox | None = None

    def run(self, ahead_bytes: int) -> Program:
        self._keep_slots()
        small = ahead_bytes > 0 and nbytes(self.agenda.incoming(REQUESTS), self.records) <= ahead_bytes
        messages = self.agenda.by_step(self.early, small)
        for step in sorted({*self.agenda.tiles, *messages}):
            self.listing.step = step
            self._one_step(messages.get(step, []), self.agenda.tiles.get(step, []))
        self._merge_home(None)
        self.slots.settle_all()
        self._fill_home()
        return Program(
            self.rank, self.direction, tuple(self.slots.specs), tuple(self.listing.instructions),
            tuple(self.home.items()), self.scratch_rows, tuple(self.listing.steps), self._collectives(),
        )  # fmt: skip

    def _collectives(self) -> tuple[Collective, ...]:
        numbers = {message: number for number, message in enumerate(self.posted)}
        return tuple(
            Collective(
                each.kind,
                each.ranks,
                tuple(sorted(numbers[message] for message in each.messages if message in numbers)),
                each.parts,
                each.label,
            )
            for each in self.exchanges
            if self.rank in each.ranks
        )

    def _one_step(self, messages: list[Message], tiles: list[tuple[Tile, list[KernelCall]]]) -> None:
        messages = sorted(messages, key=lambda message: self.turns.get(message, len(self.exchanges)))
        requests = [message for message in messages if message.channel == REQUESTS]
        partials = [message for message in messages if message.channel == PARTIALS]
        leaving = [message for message in requests if message.src == self.rank]
        going_home = [message for message in partials if message.src == self.rank]
        if self.early:
            for message in (*requests, *partials):
                if message.dst == self.rank:
                    self._post(message)
        for message in leaving:
            self._have_request(message)
        for message in leaving if self.early else requests:
            self._post(message)
        now, later = self._kinds_in_turn(going_home)
        for tile, made in tiles:
            self._tile(tile, made, now)
        for message in going_home:
            self._finish_partial(message)
        for message in going_home if self.early else partials:
            self._post(message)
        for tile, made in tiles if later else ():
            self._tile(tile, made, later)
        if self.schedule.slack is not None:
            self._merge_home(self.listing.step - self.schedule.slack)

    # ---------- messages

    def _post(self, message: Message) -> None:
        """Post the send or the receive of neighbouring blocks."""
        number = len(self.posted)
        self.posted.append(message)
        if message.dst == self.rank:
            span = self._receive_span(message)
            for block in message.blocks:
                self.arriving.setdefault(block, []).append(number)
            self.emit(Recv(number, span, message.src, message.channel, message.label))
            return
        span, sources = self._send_span(message)
        self.emit(Send(number, span, message.dst, message.channel, message.label))
        self.slots.sent(span.slot, number, self.listing.step)
        self._used(self.agenda.use_key(message), *sources)

    def _receive_span(self, message: Message) -> Span:
        if message.channel == REQUESTS:
            slot = self._request_slot(self.storage.slab(self.rank, message.unit))
            row = self.storage.row(self.rank, message.unit)
        else:
            slot, row = self._incoming_slot(message), self.storage.group_row(message.unit)
        return self._span(slot, row + message.first, message.rows, message.unit)

    def _send_span(self, message: Message) -> tuple[Span, list[int]]:
        """Return the span that is sent, and the slots that are done with when this was the last send from them."""
        unit, rows, first = message.unit, message.rows, message.first
        if message.channel == REQUESTS:
            slab = self.storage.slab(self.rank, unit)
            slot = self.staged[message.group] if slab.own_only else self._request_slot(slab)
            row = self.storage.group_row(unit) if slab.own_only else self.storage.row(self.rank, unit)
            return self._span(slot, row + first, rows, unit), [slot]
        if message.made_at == self.rank:
            slab = self.storage.slab(self.rank, unit)
            span = self._span(self._wire_slot(message, slab), self.storage.row(self.rank, unit) + first, rows, unit)
            wire = self.wire_slots.get(slab.key)
            return span, [self._partial_slot(message.kind, slab), *([] if wire is None else [wire])]
        slot = self.incoming_slots[incoming_key(message)]
        return self._span(slot, self.storage.group_row(unit) + first, rows, unit), [slot]

    # ---------- requests

    def _have_request(self, message: Message) -> None:
        """Make a request ready to send: wait for what is passed on, pack what is the rank's own."""
        self._await(message.blocks)
        if message.owner == self.rank:
            self._pack(message.blocks)

    def _pack(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            if block in self.packed:
                continue
            self.packed.add(block)
            slab, group = self.storage.slab(self.rank, block), self.storage.group(block)
            length, source = self.schedule.unit_length(block.kind), self.storage.own_row(block)
            runs = [(0, self.schedule.rows(block))]
            if slab.own_only:
                if group not in self.staged:
                    rows = len(self.storage.group_blocks(group)) * length
                    # Not where an earlier piece lies that is still being sent: waiting for it would leave the
                    # wires empty between any two pieces.
                    self.staged[group] = self.slots.take(Slot(block.kind, rows), self.listing.step, None)
                slot, row = self.staged[group], self.storage.group_row(block)
                runs = self.agenda.leaving_rows(block)
            else:
                slot, row = self._request_slot(slab), self.storage.row(self.rank, block)
            for start, stop in runs:
                own = self._span(OWN, source + start, stop - start, block)
                self.emit(Pack(block.kind, own, self._span(slot, row + start, stop - start, block)))

    def _request_slot(self, slab: Slab) -> int:
        if slab.key not in self.request_slots:
            kind = slab.key[0]
            spec = Slot(kind, len(slab.blocks) * self.schedule.unit_length(kind))
            self.request_slots[slab.key] = self.slots.take(spec, self.listing.step, 0)
        return self.request_slots[slab.key]

    def _keep_slots(self) -> None:
        """Take the slots that outlive the pass first, in an order on which both passes agree."""
        slabs = {
            slab.key: slab
            for tiles in self.agenda.tiles.values()
            for tile, _ in tiles
            for slab in self.agenda.slabs(tile)
        }
        self.kept: dict[Group, int] = {}
        for key in sorted(slabs):
            slab = slabs[key]
            if key[0] in self.schedule.keep and not slab.own_only:
                rows = len(slab.blocks) * self.schedule.unit_length(key[0])
                self.kept[key] = self.slots.take(Slot(key[0], rows, kept=True), 0, None)
                if self.direction == "forward" or key[0] == "kv":
                    self.request_slots[key] = self.kept[key]

    # ---------- tiles

    def _kinds_in_turn(self, going_home: list[Message]) -> tuple[tuple[Kind, ...], tuple[Kind, ...]]:
        """Return the kinds of results that tiles make before the step's partials go home, and those after it.

        A layer's products are apart: what leaves goes first, and waits for its own factor alone. Where both kinds
        leave, the order of posts stays as it is.
        """
        leaving = {message.kind for message in going_home}
        if self.schedule.operator.pairs is None or len(self.kinds) < 2 or len(leaving) != 1:
            return self.kinds, ()
        return tuple(leaving), tuple(kind for kind in self.kinds if kind not in leaving)

    def _tile(self, tile: Tile, made: list[KernelCall], kinds: tuple[Kind, ...]) -> None:
        """Emit a tile's calls for these kinds of results."""
        q_slab, kv_slab = self.agenda.slabs(tile)
        for blocks, slab in ((tile.q, q_slab), (tile.kv, kv_slab)):
            if not self._takes(slab, kinds):
                continue
            self._await(blocks)
            packs = not slab.own_only and self.request_slots.get(slab.key) not in self._kept_before()
            if packs:
                self._pack([block for block in blocks if self.schedule.owner(block) == self.rank])
        q_slot, kv_slot = self._operand_slot(q_slab, kinds), self._operand_slot(kv_slab, kinds)
        corners: Iterable[tuple[int, int] | None] = (None,) * len(made)
        if self.schedule.operator.pairs is not None:
            made, corners = self._apart(tile, made)
        for call, corner in zip(made, corners, strict=True):
            q = Span(q_slot, call.q_row, call.q_row + call.patch.rows, tile.heads)
            kv = Span(kv_slot, call.kv_row, call.kv_row + call.patch.cols, tile.heads)
            results: list[Result] = []
            if "q_partial" in kinds:
                results += self._results("q_partial", q_slab, tile.q, q)
            if "kv_partial" in kinds:
                results += self._results("kv_partial", kv_slab, tile.kv, kv)
            if corner is not None:
                self.emit(Multiply(tile.step, q, kv, call.patch, tuple(results), corner))
                continue
            kept_q = None
            if self.direction == "backward" and q_slab.key in self.kept:
                kept_q = q._replace(slot=self.kept[q_slab.key])
            self.emit(Attend(tile.step, q, kv, call.patch, tuple(results), kept_q))
        for slab, slot in ((q_slab, q_slot), (kv_slab, kv_slot)):
            if not slab.own_only and slot != NOTHING:
                self._used(slab.key, slot)

    def _takes(self, slab: Slab, kinds: tuple[Kind, ...]) -> bool:
        """Return whether calls for these kinds have an operand from a slab: a result of its own side alone has not."""
        alone = len(kinds) < len(self.kinds) and kinds == (PARTIAL_OF[slab.key[0]],)
        return (slab.key[0], self.direction) in self.schedule.operator.carries and not alone

    def _operand_slot(self, slab: Slab, kinds: tuple[Kind, ...]) -> int:
        if not self._takes(slab, kinds):
            return NOTHING
        return OWN if slab.own_only else self._request_slot(slab)

    def _apart(self, tile: Tile, made: list[KernelCall]) -> tuple[list[KernelCall], list[tuple[int, int]]]:
        """Return calls that are rectangles of the tensors of pairs, too, and their corners there."""
        from tokenring.lowering.pair_box import apart, pair_box

        if self.box is None:
            self.box = pair_box(self.schedule, self.rank)
        found = [part for call in made for part in apart(self.storage, self.box, tile, call)]
        return [call for call, _ in found], [corner for _, corner in found]

    def _kept_before(self) -> set[int]:
        """Return the slots that forward has filled already."""
        if self.direction == "forward":
            return set()
        return {slot for key, slot in self.kept.items() if key[0] == "kv"}
