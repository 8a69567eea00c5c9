"""Which kernel calls go together: those of one tile, where the kernel computes several patches in one call.

Packed documents leave a tile with one patch for each document; on accelerators so many small calls cost more than
their arithmetic. What is computed, and where it goes, stays as lowering has said it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenring.backends.base import AttentionKernel, PackingKernel
from tokenring.region import Patch
from tokenring.schedule.program import Attend, Instruction, Span

Together = tuple[Instruction, ...]


def together(instructions: Iterable[Instruction], kernel: AttentionKernel) -> Iterator[Together]:
    """The instructions in their order: kernel calls that go together in one tuple, others in one each."""
    waiting: tuple[Attend, ...] = ()
    for instruction in instructions:
        if isinstance(instruction, Attend) and isinstance(kernel, PackingKernel):
            if waiting and _follows(waiting[-1], instruction) and kernel.packs(patches((*waiting, instruction))):
                waiting = (*waiting, instruction)
                continue
            if waiting:
                yield waiting
            waiting = (instruction,)
            continue
        if waiting:
            yield waiting
        waiting = ()
        yield (instruction,)
    if waiting:
        yield waiting


def patches(attends: tuple[Attend, ...]) -> tuple[Patch, ...]:
    """Their patches, from the corner of the first."""
    first = attends[0]
    return tuple(
        each.patch.shifted(each.q.start - first.q.start, each.kv.start - first.kv.start) for each in attends
    )


def spanned(first: Span, last: Span) -> Span:
    """From the first row of one to the last of the other."""
    return first._replace(stop=last.stop)


def _follows(before: Attend, attend: Attend) -> bool:
    """Of the same tile, with rows and columns that all lie beyond those of the one before."""
    kept = (before.kept_q and before.kept_q.slot) == (attend.kept_q and attend.kept_q.slot)
    return (
        kept
        and before.step == attend.step
        and _beyond(before.q, attend.q)
        and _beyond(before.kv, attend.kv)
    )  # fmt: skip


def _beyond(before: Span, span: Span) -> bool:
    return (before.slot, before.heads) == (span.slot, span.heads) and span.start >= before.stop
