"""Grouping of kernel calls: those of one tile go together, where the kernel computes several patches in one call.

Packed documents leave a tile with one patch for each document; on accelerators so many small calls cost more than
their arithmetic. What is computed, and where it goes, stays as lowering has said it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tokenring.backends.interfaces import AttentionKernel, PackingKernel
from tokenring.lowering.program import Attend, Instruction, Span
from tokenring.sequence.region import Patch

Together = tuple[Instruction, ...]
MOST_TOGETHER = 512  # whose operands, lists of lengths and results one call is to hold


def together(instructions: Iterable[Instruction], kernel: AttentionKernel) -> Iterator[Together]:
    """Yield the instructions in order, in tuples: kernel calls that go together in one, all others alone."""
    run: list[Attend] = []  # of one tile, each beyond the one before
    for instruction in instructions:
        if isinstance(instruction, Attend) and isinstance(kernel, PackingKernel):
            if run and not _follows(run[-1], instruction):
                yield from _packed(run, kernel)
                run = []
            run.append(instruction)
            continue
        yield from _packed(run, kernel)
        run = []
        yield (instruction,)
    yield from _packed(run, kernel)


def _packed(run: list[Attend], kernel: AttentionKernel) -> Iterator[Together]:
    """Yield a run in parts that the kernel takes, in order."""
    at = 0
    while at < len(run):
        count = _most(run[at : at + MOST_TOGETHER], kernel)
        yield tuple(run[at : at + count])
        at += count


def _most(run: list[Attend], kernel: AttentionKernel) -> int:
    """Return the number of patches, from the first on, that the kernel takes in one call.

    Searches by doubling, then by halving: of what a kernel takes it takes fewer, too.
    """
    if not isinstance(kernel, PackingKernel):
        return 1

    def packs(count: int) -> bool:
        return kernel.packs(patches(tuple(run[:count])))

    taken, refused = 1, len(run) + 1
    while taken < len(run) and refused > len(run):
        tried = min(2 * taken, len(run))
        taken, refused = (tried, refused) if packs(tried) else (taken, tried)
    while refused - taken > 1 and refused <= len(run):
        tried = (taken + refused) // 2
        taken, refused = (tried, refused) if packs(tried) else (taken, tried)
    return taken


def patches(attends: tuple[Attend, ...]) -> tuple[Patch, ...]:
    """Return the patches of kernel calls, shifted to start at the corner of the first."""
    first = attends[0]
    return tuple(
        each.patch.shifted(each.q.start - first.q.start, each.kv.start - first.kv.start) for each in attends
    )


def spanned(first: Span, last: Span) -> Span:
    """Return the span from the first row of one span to the last of the other."""
    return first._replace(stop=last.stop)


def _follows(before: Attend, attend: Attend) -> bool:
    """Tell whether a call is of the same tile, with all its rows and columns beyond those of the one before."""
    kept = (before.kept_q and before.kept_q.slot) == (attend.kept_q and attend.kept_q.slot)
    return (
        kept
        and before.step == attend.step
        and _beyond(before.q, attend.q)
        and _beyond(before.kv, attend.kv)
    )  # fmt: skip


def _beyond(before: Span, span: Span) -> bool:
    return (before.slot, before.heads) == (span.slot, span.heads) and span.start >= before.stop
