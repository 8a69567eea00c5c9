"""Copies of a bound program that a device is asked for together (`lowering.copies`)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from tokenring.ir.schedule_data import Kind, TileOperator
from tokenring.lowering.copies import Copied, MemoryPlace, as_one, copy_runs
from tokenring.lowering.program import Instruction, Merge, Pack, Program, Result, Span
from tokenring.runtime.bound_kernel import Together
from tokenring.runtime.call import ActiveCall, Step
from tokenring.runtime.pool import Views, own_rows, rows_first
from tokenring.runtime.running import running_together

Fetch = Callable[[Any], torch.Tensor]  # of what a step is given: a tensor
MOST_KEPT = 8  # plans of one step, by how its operands lie


class BoundCopy(NamedTuple):
    """A copy: getters of both sides, of equal sizes, and which memory each is in."""

    source: Fetch
    into: Fetch
    homes: tuple[Hashable, Hashable]


class Copies:
    """Copies made as one where they can be. How their operands lie is looked at once for each way that callers have."""

    def __init__(self, copies: Sequence[BoundCopy]) -> None:
        self._copies = copies
        self._known: dict[Hashable, list[Copied]] = {}

    def __call__(self, given: Any, lie: Hashable) -> None:
        """Make all copies of what is given. lie: says how its tensors lie, as far as that may change."""
        plan = self._known.get(lie)
        if plan is None:
            plan = self._plan(given)
            if len(self._known) >= MOST_KEPT:
                self._known.clear()
            self._known[lie] = plan
        for each in plan:
            source, into = self._copies[each.first].source(given), self._copies[each.first].into(given)
            if len(each.shape) == into.dim() and each.shape == tuple(into.shape):
                into.copy_(source)
                continue
            source = source.as_strided(each.shape, each.source, source.storage_offset())
            into.as_strided(each.shape, each.into, into.storage_offset()).copy_(source)

    def _plan(self, given: Any) -> list[Copied]:
        found = []
        for source, into, homes in self._copies:
            found.append((MemoryPlace.of(source(given), homes[0]), MemoryPlace.of(into(given), homes[1])))
        return as_one(found)


# ---------- bound


class Binding(Protocol):
    """The part of a program's binder that copies need."""

    views: Views
    operator: TileOperator
    program: Program
    forward: bool

    @property
    def head_range(self) -> Callable[[Kind, int], tuple[int, int]]:
        """Return the heads of a head group, given a kind and the group."""

    def field(self, span: Span, name: str) -> Callable[[ActiveCall], torch.Tensor]:
        """Return a getter of a span's field."""

    def names(self, kind: Kind, *slots: int) -> tuple[str, ...]:
        """Return the fields of a result that all these slots have."""


def copied_together(binder: Binding, groups: Sequence[Together], steps: Sequence[Step]) -> list[Step]:
    """Return the steps of groups of instructions, some of which make the copies of others, or merge their results."""
    order = [each for group in groups for each in group]
    alone = [each if len(group) == 1 else None for group in groups for each in group]
    made = running_together(binder, order, alone, steps)
    encoded = binder.views.records.formats
    copies = [None if isinstance(each, Pack | Merge) and each.kind in encoded else each for each in alone]
    for at, positions in copy_runs(copies):
        run = [order[each] for each in positions]
        for each in positions:
            made[each] = _nothing
        made[at] = packing(binder, run) if isinstance(run[0], Pack) else merging(binder, run)
    return made


def _nothing(call: ActiveCall) -> None:
    """Do nothing, for copies that are made with others."""


def packing(binder: Binding, run: Sequence[Instruction]) -> Step:
    """Return the step that makes the copies of all these packs."""
    copies, names = [], set[str]()
    for pack in run:
        assert isinstance(pack, Pack)
        for each in binder.views.record(pack.into.slot).fields:
            names.add(each.name)
            source = _own(binder, each.name, pack.source, pack.kind)
            homes = each.name, _home(binder, pack.into, each.name)
            copies.append(BoundCopy(source, binder.field(pack.into, each.name), homes))
    made, used = Copies(copies), sorted(names)
    return lambda call: made(call, tuple(call.own[name].stride() for name in used))


def _own(binder: Binding, name: str, span: Span, kind: Kind) -> Callable[[ActiveCall], torch.Tensor]:
    heads = binder.head_range(kind, span.heads)
    return lambda call: own_rows(call.own[name], span, *heads)


def merging(binder: Binding, run: Sequence[Instruction]) -> Step:
    """Return the step that copies all these first results to where they belong."""
    copies = []
    for merge in run:
        assert isinstance(merge, Merge)
        for name in binder.names(merge.kind, merge.source.slot, merge.into.slot):
            homes = _home(binder, merge.source, name), _home(binder, merge.into, name)
            copies.append(BoundCopy(binder.field(merge.source, name), binder.field(merge.into, name), homes))
    made = Copies(copies)
    return lambda call: made(call, ())


def results_copied(binder: Binding, results: Sequence[Result]) -> Callable[[ActiveCall, Any], None]:
    """Return a function that copies these rows of what a kernel made to where they belong."""
    copies = []
    for result in results:
        first = 1 if result.kind == "kv_partial" and not binder.forward else 0
        for at, name in enumerate(binder.names(result.kind, result.into.slot), first):
            homes = at, _home(binder, result.into, name)
            copies.append(BoundCopy(_rows_of(at, result), _into(binder.field(result.into, name)), homes))
    together = Copies(copies)
    return lambda call, made: together((call, made), tuple(each.stride() for each in made))


def _rows_of(at: int, result: Result) -> Fetch:
    start, stop = result.start, result.start + result.into.rows
    return lambda given: rows_first(given[1][at][:, :, start:stop])


def _into(field: Callable[[ActiveCall], torch.Tensor]) -> Fetch:
    return lambda given: field(given[0])


def _home(binder: Binding, span: Span, name: str) -> Hashable:
    """Return which memory a field of a slot is in: that of a call, of an output, or the pool."""
    spec = binder.program.slots[span.slot]
    return (span.slot, name) if spec.output else "kept" if spec.kept else "pool"
