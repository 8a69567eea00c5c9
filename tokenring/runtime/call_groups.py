"""Which kernel calls go together: those of one tile, where the kernel computes several patches in one call.

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
    """The instructions in their order: kernel calls that go together in one tuple, others in one each."""
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
    """A run, cut where the kernel takes no more."""
    at = 0
    while at < len(run):
        count = _most(run[at : at + MOST_TOGETHER], kernel)
        yield tuple(run[at : at + count])
        at += count


def _most(run: list[Attend], kernel: AttentionKernel) -> int:
    """How many from the first on the kernel takes. By doubling, then halving: what it takes, it takes fewer of."""
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
