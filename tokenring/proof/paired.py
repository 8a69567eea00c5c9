"""The form of schedules whose operator has tensors of pairs: columns, rows, and collectives."""

from __future__ import annotations

from tokenring.errors import ScheduleError
from tokenring.ir.schedule_data import PARTIAL_OF, Kind, Pass, ScheduleData
from tokenring.lowering.pair_box import PairBox, pair_box
from tokenring.lowering.program import NOTHING, Multiply, made_by
from tokenring.proof.slot_contents import Tokens, joined_tokens
from tokenring.sequence.mask import Full

PAIR_KINDS: tuple[Kind, Kind] = ("q", "kv")


class BeyondPairs(Exception):
    """A kernel call takes rows or columns that a rank's tensor of pairs does not have, or lacks a factor."""


class PairTokens:
    """The tokens of rows and columns of each rank's tensors of pairs."""

    def __init__(self, schedule: ScheduleData) -> None:
        self._schedule = schedule
        self._boxes: dict[int, PairBox] = {}

    def of(self, rank: int, call: Multiply) -> tuple[Tokens, Tokens]:
        """Return the tokens of the rows and columns from a call's corner on. Raises BeyondPairs."""
        if rank not in self._boxes:
            self._boxes[rank] = pair_box(self._schedule, rank)
        box = self._boxes[rank]
        for kind, span, at, limit in zip(PAIR_KINDS, (call.q, call.kv), call.corner, box.shape, strict=True):
            if at < 0 or at + span.rows > limit:
                raise BeyondPairs(f"takes {kind} {at} to {at + span.rows} of {limit} in its tensor of pairs")
        return self._side(box, "q", call.corner[0], call.q.rows), self._side(box, "kv", call.corner[1], call.kv.rows)

    def kinds(self, call: Multiply, direction: Pass) -> tuple[Kind, ...]:
        """Return the kinds of results of a call. Raises BeyondPairs unless it has the factors that these need."""
        operator = self._schedule.operator
        made = made_by(call, operator.home[direction])
        for kind, span in zip(PAIR_KINDS, (call.q, call.kv), strict=True):
            left_out = made != operator.home[direction] and PARTIAL_OF[kind] in made
            if (span.slot == NOTHING) == ((kind, direction) in operator.carries and not left_out):
                raise BeyondPairs(f"computes without {kind}, or with one that nothing carries")
        if other := {result.kind for result in call.results}.difference(made):
            raise BeyondPairs(f"makes {min(other)} without its factor")
        return made

    def _side(self, box: PairBox, kind: Kind, first: int, count: int) -> Tokens:
        return joined_tokens(box.tokens(kind, self._schedule.layout_of(kind), first, count))


def check_paired(schedule: ScheduleData) -> None:
    """Raise ScheduleError for what such an operator has no use for, and unless each rank computes one rectangle."""
    refused = {
        f"mask {schedule.mask}: use Full()": schedule.mask != Full(),
        f"{schedule.head_groups} head groups: it has no heads": schedule.head_groups > 1,
        f"keep={', '.join(sorted(schedule.keep))}: nothing is kept": bool(schedule.keep),
        "a striped layout: chunks must be neighbouring positions": not _has_whole_chunks(schedule),
    }
    for why, found in refused.items():
        if found:
            raise ScheduleError(f"{schedule.name}: operator {schedule.operator.name!r} does not take {why}")
    for rank in range(schedule.world_size):
        pair_box(schedule, rank)


def _has_whole_chunks(schedule: ScheduleData) -> bool:
    layouts = schedule.q_layout, schedule.kv_layout
    return all(chunk.step == 1 or len(chunk) < 2 for layout in layouts for chunk in layout.chunks)
