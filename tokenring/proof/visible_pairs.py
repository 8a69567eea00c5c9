"""Token pairs that kernel calls compute, against those that the mask shows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch

from tokenring.ir.schedule_data import Block, Kind, ScheduleData
from tokenring.proof.slot_contents import ContentRun, Rows, Tokens, add
from tokenring.sequence.region import Patch, Region, tidy
from tokenring.sequence.workload import Workload

Kinds = tuple[Kind, ...] | None  # of results; None: all of the pass
Cell = tuple[tuple[int, int], Patch]  # (q unit, kv unit), and what is computed of it, in rows and columns of the units


def proof_workload(schedule: ScheduleData) -> Workload:
    """Return the sizes for which programs are proved: as narrow as the schedule's wire formats allow."""
    width = 1
    if schedule.codecs:
        from tokenring.proof.encodings import width_of

        width = width_of(schedule)
    heads = schedule.head_groups
    return Workload(1, schedule.q_layout.length, schedule.kv_layout.length, heads, heads, width, torch.bfloat16)


class Pairs:
    """The tokens of a schedule, cut into units, and what the mask shows of each pair of units."""

    def __init__(self, schedule: ScheduleData) -> None:
        self.schedule = schedule
        q, kv = schedule.unit_positions["q"], schedule.unit_positions["k"]
        region = schedule.mask.region
        self.goal: dict[tuple[int, int], Region] = {
            (i, j): seen
            for i, a in enumerate(q)
            for j, b in enumerate(kv)
            if len(a) and len(b) and (seen := region(a, b))
        }
        self._cells: dict[tuple[Tokens, Tokens, Patch], list[Cell]] = {}

    def cells(self, q: Tokens, kv: Tokens, patch: Patch) -> list[Cell]:
        """Return what a kernel call computes, for each pair of units."""
        key = (q, kv, patch)
        found = self._cells.get(key)
        if found is None:
            found = self._cells[key] = list(self._cut(q, kv, patch))
        return found

    def _cut(self, q: Tokens, kv: Tokens, patch: Patch) -> Iterator[Cell]:
        low, high, row_step, col_step = patch.low, patch.high, patch.row_step, patch.col_step
        columns = list(self._units("kv", kv))
        for row, rows, a, a0 in self._units("q", q):
            for col, cols, b, b0 in columns:
                by = row_step * row - col_step * col
                part = tidy(
                    Patch(
                        a0,
                        a0 + rows,
                        b0,
                        b0 + cols,
                        None if low is None else low + by,
                        None if high is None else high + by,
                        row_step,
                        col_step,
                    )
                )
                if part is not None:
                    yield (a, b), part

    def _units(self, kind: Kind, tokens: Tokens) -> Iterator[tuple[int, int, int, int]]:
        """Yield the tokens unit by unit: (place among them, how many, unit, place in the unit)."""
        chunk_length, length = self.schedule.layout_of(kind).chunk_length, self.schedule.unit_length(kind)
        pieces, at = self.schedule.pieces_of(kind), 0
        for count, owner, row in tokens:
            owned = self.schedule.layout_of(kind).owned_by(owner)
            end = row + count
            while row < end:
                index, of_chunk = divmod(row, chunk_length)
                piece, inside = divmod(of_chunk, length)
                part = min(length - inside, chunk_length - of_chunk, end - row)
                yield at, part, owned[index] * pieces + piece, inside
                row, at = row + part, at + part

    def block(self, kind: Kind, owner: int, row: int, heads: int = 0, made_at: int | None = None) -> Block:
        """Return the unit in which a rank's own row lies."""
        layout = self.schedule.layout_of(kind)
        index, of_chunk = divmod(row, layout.chunk_length)
        return Block(kind, layout.owned_by(owner)[index], heads, of_chunk // self.schedule.unit_length(kind), made_at)


class CoveredCall(NamedTuple):
    """A kernel call that was made, for results of these kinds."""

    rank: int
    step: int
    heads: int
    cells: list[Cell]
    kinds: Kinds = None


class Tally:
    """A tally of what the kernel calls of one pass compute, and of what has to come home for it."""

    def __init__(self, pairs: Pairs, kinds: tuple[Kind, ...]) -> None:
        self.pairs, self.schedule = pairs, (schedule := pairs.schedule)
        self.calls: list[CoveredCall] = []
        # (kind, owner, head group) → for each own row the calls that make a result for it
        self.due: dict[tuple[Kind, int, int], Rows] = {
            (kind, rank, heads): {0: ContentRun(0, length, rank, 0)} if length else {}
            for kind in kinds
            for rank, length in enumerate(schedule.layout_of(kind).local_lengths)
            for heads in range(self.schedule.head_groups)
        }
        self._sides: tuple[tuple[Kind, int], ...] = tuple((kind, 0 if kind[0] == "q" else 1) for kind in kinds)

    def call(
        self,
        rank: int,
        step: int,
        heads: int,
        q: Tokens,
        kv: Tokens,
        patch: Patch,
        kinds: Kinds = None,
    ) -> int:
        """Note a kernel call, for results of these kinds (None: all), and return the bit that stands for it."""
        made = 1 << len(self.calls)
        kinds = None if kinds is not None and len(kinds) == len(self._sides) else kinds
        self.calls.append(CoveredCall(rank, step, heads, self.pairs.cells(q, kv, patch), kinds))
        for kind, side in self._sides:
            if kinds is not None and kind not in kinds:
                continue
            for count, owner, row in (q, kv)[side]:
                add(self.due[kind, owner, heads], ContentRun(row, row + count, owner, row, made))
        return made

    def first(self, made: int) -> CoveredCall:
        """Return the first of these calls."""
        return self.calls[(made & -made).bit_length() - 1]

    def check(self) -> tuple[int, int, str] | None:
        """Return what is not computed exactly once, for each kind of results: (rank, step, in words); None: nothing."""
        if all(call.kinds is None for call in self.calls):
            return self._check(self.calls)
        of_kinds = ([call for call in self.calls if kind in (call.kinds or (kind,))] for kind, _ in self._sides)
        return next((wrong for calls in of_kinds if (wrong := self._check(calls)) is not None), None)

    def _check(self, calls: list[CoveredCall]) -> tuple[int, int, str] | None:
        computed: list[dict[tuple[int, int], Region]] = [{} for _ in range(self.schedule.head_groups)]
        for call in calls:
            of = computed[call.heads]
            for units, patch in call.cells:
                before = of.get(units)
                of[units] = (patch,) if before is None else (*before, patch)
        for heads, found in enumerate(computed):
            if found != self.pairs.goal:
                for units in sorted({*found, *self.pairs.goal}):
                    if wrong := self._wrong(units, found.get(units, ())):
                        return self._name(heads, units, wrong)
        return None

    def _wrong(self, units: tuple[int, int], found: Region) -> str:
        """Return what is wrong with a pair of units, "" if nothing: it may be cut otherwise, or have other bounds."""
        goal = self.pairs.goal.get(units, ())
        if sorted(found, key=_corner) == sorted(goal, key=_corner):
            return ""
        if not found:
            return "never computes {} with {}"
        for row in range(self.schedule.unit_length("q")):
            computed, wanted = _columns(found, row), _columns(goal, row)
            if any(a.stop > b.start for a, b in pairwise(computed)):
                return "computes {} with {} a second time"
            if _joined(computed) != _joined(wanted):
                return "computes {} with {} otherwise than the mask lets them see each other"
        return ""

    def _name(self, heads: int, units: tuple[int, int], wrong: str) -> tuple[int, int, str]:
        """Return rank and step of the last call that computes anything of these units, and what is wrong with it."""
        pieces = self.schedule.q_pieces, self.schedule.kv_pieces
        (q, q_piece), (kv, kv_piece) = (divmod(unit, by) for unit, by in zip(units, pieces, strict=True))
        blocks = Block("q", q, heads, q_piece), Block("kv", kv, heads, kv_piece)
        calls = [call for call in self.calls if call.heads == heads and units in dict(call.cells)]
        rank = calls[-1].rank if calls else self.schedule.owner(blocks[0])
        return rank, (calls or self.calls)[-1].step if self.calls else 0, wrong.format(*blocks)


def _corner(patch: Patch) -> tuple[int, int, int, int]:
    return patch[:4]


def _columns(region: Region, row: int) -> list[range]:
    """Return what a row sees, patch by patch."""
    found = []
    for patch in region:
        if patch.row0 <= row < patch.row1 and (columns := patch.columns_of(row - patch.row0)):
            found.append(range(columns.start + patch.col0, columns.stop + patch.col0))
    return sorted(found, key=lambda columns: columns.start)


def _joined(columns: list[range]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for each in columns:
        if joined and joined[-1][1] == each.start:
            joined[-1] = (joined[-1][0], each.stop)
        else:
            joined.append((each.start, each.stop))
    return joined
