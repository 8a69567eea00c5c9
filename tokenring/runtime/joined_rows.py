"""Many runs of rows in one go: results of packed documents, of which a tile has one patch each, lie in many places.

A kernel computes such patches in one call (`bound_kernel.together`); what it makes of all of them is copied, merged or
added here by one operator, not by one for each document. SlotRows with gaps between them go by their numbers. What is
computed of each row stays as lowering has said it, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from tokenring.backends.merging.choice import merger_for
from tokenring.lowering.program import Attend, Fill, Merge, Result, Span
from tokenring.runtime.bound_kernel import Together, spanned
from tokenring.runtime.pool import rows_first

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Kind
    from tokenring.runtime.call import ActiveCall, Step
    from tokenring.runtime.pool import Views

MANY = 3  # from so many on rows go together: numbers of rows cost four operators, too
Made = tuple[torch.Tensor, ...]
News = list[torch.Tensor]


class SlotRows(NamedTuple):
    """Rows of one slot: all of a span, or if there are gaps in it those of `numbers`, int64, counted from its first."""

    span: Span
    numbers: torch.Tensor | None

    @staticmethod
    def of(spans: Sequence[Span], device: torch.device) -> SlotRows:
        """Return the rows of spans, each beyond the one before."""
        whole = spanned(spans[0], spans[-1])
        if all(a.stop == b.start for a, b in pairwise(spans)):
            return SlotRows(whole, None)
        found = [row - whole.start for each in spans for row in range(each.start, each.stop)]
        return SlotRows(whole, torch.tensor(found, device=device))

    def taken(self, x: torch.Tensor) -> torch.Tensor:
        """Return these rows of the span's: a view, or where there are gaps a copy."""
        return x if self.numbers is None else x.index_select(0, self.numbers)

    def copy_(self, x: torch.Tensor, new: torch.Tensor) -> None:
        """Write these rows of the span's."""
        if self.numbers is None:
            x.copy_(new)
        else:
            x.index_copy_(0, self.numbers, new.to(x.dtype))

    def add_(self, x: torch.Tensor, new: torch.Tensor) -> None:
        """Add to these rows of the span's, each once."""
        if self.numbers is None:
            x.add_(new)
        else:
            x.index_add_(0, self.numbers, new.to(x.dtype))


def with_runs(groups: Iterable[Together]) -> Iterator[Together]:
    """Yield groups of instructions, in order, with merges and fills of a run as one if kernel calls are of packs."""
    found = list(groups)
    if not any(len(group) >= MANY for group in found):
        yield from found
        return
    for _, alike in groupby(enumerate(found), lambda each: _alike(*each)):
        members = [group for _, group in alike]
        yield from members if len(members) < MANY else _beyond_each_other([group[0] for group in members])


def _alike(number: int, group: Together) -> object:
    """Return what neighbours have in common that go together; the number of any other."""
    match group:
        case (Merge(kind, source, into),):
            return Merge, kind, _place(source), _place(into)
        case (Fill(kind, into),):
            return Fill, kind, _place(into)
    return number


def _place(span: Span) -> tuple[int, int]:
    return span.slot, span.heads


def _beyond_each_other(alike: list[Any]) -> Iterator[Together]:
    """Yield instructions in runs, in which each reads and writes beyond the rows of the one before."""
    run: list[Any] = []
    for each in (*alike, None):
        if run and (each is None or not _is_beyond(run[-1], each)):
            yield from [tuple(run)] if len(run) >= MANY else [(one,) for one in run]
            run = []
        run.append(each)


def _is_beyond(before: Any, each: Any) -> bool:
    spans = [(a, b) for a, b in zip(before, each, strict=True) if isinstance(a, Span)]
    return all(b.start >= a.stop for a, b in spans)


class BindsRows(Protocol):
    """The part of the executor's binder that knows where a program's rows lie."""

    views: Views
    operator: Any
    forward: bool

    def field(self, span: Span, name: str) -> Callable[[ActiveCall], torch.Tensor]:
        """Return a getter of a span's field: [rows, B, heads, D], or [rows, B, heads]."""

    def names(self, kind: Kind, *slots: int) -> tuple[str, ...]:
        """Return the fields of a result that all these slots have."""

    def sink(self, attend: Attend, result: Result) -> Callable[[ActiveCall, Made], None]:
        """Return a function that writes rows of a kernel's result to where they belong."""


class JoinedBinder:
    """Makes steps of several instructions, or of several results of one kernel call, for the executor's binder."""

    runs = staticmethod(with_runs)

    def __init__(self, binder: BindsRows) -> None:
        self.binder, self.device = binder, binder.views.base.device

    def merging(self, merges: Sequence[Merge]) -> Step:
        """Return the step of merges of a run: those that are the first in their rows, and the others."""
        both = ([each for each in merges if each.first is first] for first in (True, False))
        steps = [self._merging_alike(alike) for alike in both if alike]

        def merge(call: ActiveCall) -> None:
            for step in steps:
                step(call)

        return merge

    def _merging_alike(self, merges: Sequence[Merge]) -> Step:
        first = merges[0]
        names = self.binder.names(first.kind, first.source.slot, first.into.slot)
        source = SlotRows.of([each.source for each in merges], self.device)
        accept = self._accepting(names, SlotRows.of([each.into for each in merges], self.device), first.first)
        fields = [self.binder.field(source.span, name) for name in names]
        return lambda call: accept(call, [source.taken(field(call)) for field in fields])

    def filling(self, fills: Sequence[Fill]) -> Step:
        """Return the step of fills of a run."""
        rows = SlotRows.of([each.into for each in fills], self.device)
        names = self.binder.names(fills[0].kind, fills[0].into.slot)
        empty = ((name, float("-inf") if name == "lse" else 0.0) for name in names)
        targets = [(self.binder.field(rows.span, name), value) for name, value in empty]

        def clear(call: ActiveCall) -> None:
            for target, value in targets:
                if rows.numbers is None:
                    target(call).fill_(value)
                else:
                    target(call).index_fill_(0, rows.numbers, value)

        return clear

    def results(self, attends: Sequence[Attend]) -> Callable[[ActiveCall, Sequence[Made]], None]:
        """Return what takes what a kernel made of several patches of a tile to where it belongs."""
        lanes: dict[object, list[tuple[int, Result]]] = {}
        for number, each in enumerate(attends):
            for result in each.results:
                lanes.setdefault((result.kind, result.first, _place(result.into)), []).append((number, result))
        sinks = [self._lane(attends, lane) for lane in lanes.values()]

        def take(call: ActiveCall, made: Sequence[Made]) -> None:
            for sink in sinks:
                sink(call, made)

        return take

    def _lane(
        self, attends: Sequence[Attend], lane: list[tuple[int, Result]]
    ) -> Callable[[ActiveCall, Sequence[Made]], None]:
        """Return what takes results to one slot: in one go if they are many, and each beyond the one before."""
        if len(lane) < MANY or any(b.into.start < a.into.stop for (_, a), (_, b) in pairwise(lane)):
            alone = [(number, self.binder.sink(attends[number], result)) for number, result in lane]

            def one_by_one(call: ActiveCall, made: Sequence[Made]) -> None:
                for number, sink in alone:
                    sink(call, made[number])

            return one_by_one
        first = lane[0][1]
        names, at = self.binder.names(first.kind, first.into.slot), int(first.kind == "kv_partial")
        which = slice(at, at + len(names))
        parts = [(number, slice(each.start, each.start + each.into.rows)) for number, each in lane]
        rows = SlotRows.of([each.into for _, each in lane], self.device)
        accept = self._accepting(names, rows, first.first)

        def together(call: ActiveCall, made: Sequence[Made]) -> None:
            fields = zip(*(made[number][which] for number, _ in parts), strict=True)
            news = [_joined([x[:, :, part] for x, (_, part) in zip(each, parts, strict=True)]) for each in fields]
            accept(call, [rows_first(each) for each in news])

        return together

    def _accepting(self, names: Sequence[str], rows: SlotRows, first: bool) -> Callable[[ActiveCall, News], None]:
        """Return what copies, merges or adds these fields [rows, B, heads, ...] to those that there are."""
        targets = [self.binder.field(rows.span, name) for name in names]
        if self.binder.forward and self.binder.operator.merge == "log-sum-exp" and not first:
            return self._merging(rows, *targets)
        act = rows.copy_ if first else rows.add_

        def accept(call: ActiveCall, news: News) -> None:
            for target, new in zip(targets, news, strict=True):
                act(target(call), new)

        return accept

    def _merging(self, rows: SlotRows, out: Any, lse: Any) -> Callable[[ActiveCall, News], None]:
        merger = merger_for(self.device, self.binder.views.workload.value_dim)

        def merge(call: ActiveCall, news: News) -> None:
            wholes = out(call), lse(call)
            (outs, lses), (new_out, new_lse) = (rows.taken(each) for each in wholes), news
            merger.merge_(outs, lses, new_out, new_lse, lses.new_empty(2, *lses.shape))
            if rows.numbers is not None:
                for whole, merged in zip(wholes, (outs, lses), strict=True):
                    rows.copy_(whole, merged)

        return merge


def _joined(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return [B, H, rows, ...] of parts one after another: a view where they lie so, else a copy."""
    first, rows = parts[0], 0
    lies = True
    for each in parts:
        lies = lies and each.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        lies = lies and each.stride() == first.stride()
        lies = lies and each.data_ptr() == first.data_ptr() + rows * first.stride(2) * first.element_size()
        rows += each.shape[2]
    if not lies:
        return torch.cat(list(parts), dim=2)
    return first.as_strided((*first.shape[:2], rows, *first.shape[3:]), first.stride())
