"""Tiles that go into the same rows one after another, whose results a kernel keeps and merges by itself.

Where nothing else touches these rows in between, only the last of such tiles puts a result into them: that of all. A
tile alone goes this way, too, unless its result is the first there: all its rows see something, so that merging it
takes fewer operators. Only where accumulators are wider than results: in half precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from tokenring.backends.interfaces import RunningKernel
from tokenring.backends.merging.choice import merger_for
from tokenring.backends.merging.torch_merger import AcceptOut, accepting_by
from tokenring.lowering.program import Attend, Fill, Instruction, Merge, Recv, Send, Span
from tokenring.runtime.bound_kernel import folded, operands_of
from tokenring.runtime.call import ActiveCall, Step
from tokenring.runtime.pool import rows_first


def running_together(
    binder: Any, instructions: Sequence[Instruction], single: Sequence[Instruction | None], steps: Sequence[Step]
) -> list[Step]:
    """Return the steps, where tiles of a run are merged by the kernel, if it does that.

    binder: of the program. single: the same instructions, None for those that were bound with others.
    """
    made = list(steps)
    if not binder.forward or binder.operator.merge != "log-sum-exp" or not isinstance(binder.kernel, RunningKernel):
        return made
    full_precision = binder.views.workload.dtype == torch.float32  # whose results are the caller's own memory
    if full_precision or folded(binder.kernel, binder.scale)[0] is not binder.kernel:
        return made
    alone = {id(each) for each in single if isinstance(each, Attend)}
    alone -= {id(each) for each in instructions if isinstance(each, Attend) and _is_adopted(binder, each)}
    for run in runs(instructions, alone):
        tiles = [each for at in run if isinstance(each := instructions[at], Attend)]
        if binder.kernel.runs([each.patch for each in tiles]):
            for at, tile in zip(run, tiles, strict=True):
                made[at] = _tile(binder, run[0], tile, tiles[0].results[0].first, at == run[-1])
    return made


def _is_adopted(binder: Any, attend: Attend) -> bool:
    """Tell whether the caller gets a result of the tile as the kernel made it."""
    return any(binder.adopts(attend, result) for result in attend.results)


def runs(instructions: Sequence[Instruction], alone: set[int]) -> list[list[int]]:
    """Return the positions of tiles that go into the same rows, of runs in which nothing else touches their slot.

    alone: the identities of kernel calls that go with no others.
    """
    found: list[list[int]] = []
    run: list[int] = []
    into: Span | None = None
    for at, each in enumerate(instructions):
        here = _into(each) if id(each) in alone else None
        if here is not None and isinstance(each, Attend):
            if here != into or each.results[0].first:
                found.append(run)
                run, into = [], here
            run.append(at)
        elif into is not None and into.slot in _touched(each):
            found.append(run)
            run, into = [], None
    return [each for each in [*found, run] if len(each) > 1 or (each and not _first(instructions[each[0]]))]


def _first(each: Instruction) -> bool:
    """Tell whether a tile's result is the first in its rows: that one is copied as it is, unless others follow."""
    return isinstance(each, Attend) and each.results[0].first


def _into(each: Instruction) -> Span | None:
    """Return where the whole result of a tile goes, if it goes there alone."""
    if not isinstance(each, Attend) or len(each.results) != 1:
        return None
    result = each.results[0]
    return result.into if result.start == 0 and result.into.rows == each.q.rows else None


def _touched(each: Instruction) -> set[int]:
    """Return the slots of results that an instruction reads or writes."""
    match each:
        case Send() | Recv():
            return {each.span.slot}
        case Merge():
            return {each.source.slot, each.into.slot}
        case Fill():
            return {each.into.slot}
        case Attend():
            return {result.into.slot for result in each.results}
    return set()


def _tile(binder: Any, run: int, attend: Attend, first: bool, last: bool) -> Step:
    kernel, scale, patch = binder.kernel, binder.scale, attend.patch
    operands, into = operands_of(binder, attend, attend), attend.results[0].into
    accept = binder.accept_out(into, True) if first else _accepting(binder, into)

    def attend_tile(call: ActiveCall) -> None:
        given, _ = operands(call)
        found = kernel.forward_running(call.running.pop(run, None), *given, patch=patch, scale=scale)
        if last:
            accept(call, *(rows_first(each) for each in kernel.results(found)))
        else:
            call.running[run] = found

    return attend_tile


def _accepting(binder: Any, into: Span) -> AcceptOut:
    """Return a function that merges what a run has made, whose rows have all seen something, into these rows."""
    low, high = binder.head_range("q_partial", into.heads)
    merger = merger_for(binder.views.base.device, binder.views.workload.value_dim)
    merge = getattr(merger, "merge_seen_", merger.merge_)
    return accepting_by(merge, binder.field(into, "out"), binder.field(into, "lse"),
                        binder.views.scratch(into.rows, high - low))  # fmt: skip
