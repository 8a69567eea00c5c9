"""The kernel of one program: the masks that it holds, the calls that it makes together, the scale that it is given.

Calls of one tile go together where the kernel computes several patches in one call: packed documents leave a tile with
one patch for each document, and on accelerators so many small calls cost more than their arithmetic. What is computed,
where it goes, and what of the same rows goes before what, stays as lowering has said it.

Kernels are given positive scales only. Those that take the maximum of a row before they scale it (flash attention's
do), or hide a pair by -inf before, are wrong for others. So a negative one is folded into q, and one that is zero in
fp32 makes q zero: (-q)·k·|scale| and 0·k·1 are what q·k·scale is, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from numbers import Real
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from tokenring.backends.interfaces import AttentionKernel, MaskingKernel, PackingKernel, Tiles
from tokenring.errors import ConfigurationError
from tokenring.lowering.program import OWN, Attend, Instruction, Program, Span
from tokenring.runtime.call import ActiveCall
from tokenring.sequence.region import Patch
from tokenring.sequence.workload import Workload

if TYPE_CHECKING:
    from tokenring.ir.schedule_data import Kind

Operands = Callable[[ActiveCall], tuple[tuple[Any, ...], dict[str, torch.Tensor]]]  # by position, by name
Together = tuple[Instruction, ...]
MANY_RUNS = 8  # of neighbours, from which on calls of a tile go in chains
MOST_TOGETHER = 512  # whose operands, lists of lengths and results one call is to hold
LEAST, LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max  # what kernels compute with in fp32
WHOLE = 2**24  # from here on neighbours in fp32 are whole numbers apart


def holding(kernel: AttentionKernel, program: Program, workload: Workload, device: torch.device) -> AttentionKernel:
    """Return a kernel that holds the masks of all tiles of a program, if it uses any; they live as long as it does."""
    patches = dict.fromkeys(each.patch for each in program.instructions if isinstance(each, Attend))
    head_dim, value_dim = workload.head_dim, workload.value_dim
    return held(kernel, Tiles(tuple(patches), program.direction, head_dim, workload.dtype, device, value_dim))


def held(kernel: AttentionKernel, tiles: Tiles) -> AttentionKernel:
    """Return a kernel that holds the masks of these tiles, if it uses any; they live as long as it does."""
    return kernel.holding(tiles) if isinstance(kernel, MaskingKernel) else kernel


# ---------- operands


class BindsOperands(Protocol):
    """The part of the executor's binder that knows where operands lie."""

    forward: bool

    def operand(self, span: Span, name: str, kind: Kind) -> Callable[[ActiveCall], torch.Tensor]:
        """Return a getter of a kernel operand: [B, H, S, D], or [B, H, S] for a statistic."""


def operands_of(binder: BindsOperands, first: Attend, last: Attend) -> Operands:
    """Return the getter of a kernel's operands: the rows and columns from one call to another of the same tile."""
    q_span, kv_span = spanned(first.q, last.q), spanned(first.kv, last.kv)
    kept_q = spanned(first.kept_q, last.kept_q) if first.kept_q and last.kept_q else q_span
    q = binder.operand(kept_q, "q", "q")
    k, v = binder.operand(kv_span, "k", "kv"), binder.operand(kv_span, "v", "kv")
    if binder.forward:
        return lambda call: ((q(call), k(call), v(call)), {})
    dout, lse = binder.operand(q_span, "dout", "q"), binder.operand(q_span, "lse", "q")
    delta = binder.operand(q_span, "delta", "q")

    def by_delta(call: ActiveCall) -> tuple[tuple[Any, ...], dict[str, torch.Tensor]]:
        return (dout(call), q(call), k(call), v(call), lse(call), delta(call)), {}

    if q_span.slot != OWN:  # delta came with q
        return by_delta
    out = binder.operand(q_span, "out", "q")

    def by_out(call: ActiveCall) -> tuple[tuple[Any, ...], dict[str, torch.Tensor]]:
        if "dlse" in call.own:  # which delta holds, and out does not
            return by_delta(call)
        return (dout(call), q(call), k(call), v(call), lse(call), None), {"out": out(call)}

    return by_out


# ---------- calls that go together


def together(instructions: Iterable[Instruction], kernel: AttentionKernel) -> Iterator[Together]:
    """Yield the instructions in order, in tuples: kernel calls that go together in one, all others alone."""
    run: list[Attend] = []  # of one tile
    packs = isinstance(kernel, PackingKernel)  # asked once: it takes longer than all the rest
    for instruction in instructions:
        if packs and isinstance(instruction, Attend):
            if run and not _of_one_tile(run[-1], instruction):
                yield from _of_tile(run, kernel)
                run = []
            run.append(instruction)
            continue
        yield from _of_tile(run, kernel)
        run = []
        yield (instruction,)
    yield from _of_tile(run, kernel)


def _of_tile(calls: list[Attend], kernel: AttentionKernel) -> Iterator[Together]:
    """Yield the calls of a tile in parts that the kernel takes: neighbours, or where these are many parts, chains."""
    runs: list[list[Attend]] = []
    for each in calls:
        if runs and _follows(runs[-1][-1], each):
            runs[-1].append(each)
        else:
            runs.append([each])
    if len(runs) >= MANY_RUNS:
        from tokenring.runtime.chains import chained  # which few programs need

        runs = list(chained(calls, _follows))
    for run in runs:
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


def _of_one_tile(before: Attend, attend: Attend) -> bool:
    kept = (before.kept_q and before.kept_q.slot) == (attend.kept_q and attend.kept_q.slot)
    alike = all((a.slot, a.heads) == (b.slot, b.heads) for a, b in ((before.q, attend.q), (before.kv, attend.kv)))
    return kept and alike and before.step == attend.step


def _follows(before: Attend, attend: Attend) -> bool:
    """Tell whether all rows and columns of a call lie beyond those of another of its tile."""
    return attend.q.start >= before.q.stop and attend.kv.start >= before.kv.stop


# ---------- the scale


def checked_scale(given: object, head_dim: int) -> float:
    """Return the scale as a number; None is 1/√D. Raises ConfigurationError if it is not a finite number, or too large.

    q and k of ordinary size (1 in each of D dimensions) have q·k up to D. The largest scale is where such scores reach
    2²⁴: beyond, rounding them in fp32 changes probabilities by a factor of e, and gradients, which compute them again,
    grow without bound.
    """
    if given is None:
        return 1 / math.sqrt(head_dim)
    if not isinstance(given, Real) or isinstance(given, bool):
        shown = "a Tensor, which would get no gradient" if isinstance(given, torch.Tensor) else repr(given)
        raise ConfigurationError(f"scale is {shown}; give a finite number, or None for 1/√D")
    try:
        scale = float(given)
    except OverflowError:  # an integer or a fraction, of any number of digits
        raise ConfigurationError(
            f"scale is of type {type(given).__name__} and beyond what a float holds; {_largest(head_dim)}"
        ) from None
    if not math.isfinite(scale):
        raise ConfigurationError(f"scale is {given!r}; give a finite number, or None for 1/√D")
    if abs(scale) > WHOLE / max(head_dim, 1):
        raise ConfigurationError(f"scale is {given!r}, and fp32 does not hold scores so large; {_largest(head_dim)}")
    return scale


def checked_softcap(given: object) -> float:
    """Return the soft cap as a number; None and 0 are none. Raises ConfigurationError unless it is positive."""
    if given is None:
        return 0.0
    number = isinstance(given, Real) and not isinstance(given, bool)
    if not number or ((cap := cast(float, given)) != 0 and not LEAST <= cap <= LARGEST):
        shown = f"of type {type(given).__name__}" if not number else repr(given)
        raise ConfigurationError(f"softcap is {shown}; give a positive number, such as 50.0, or 0 for none")
    return float(cap)


def _largest(head_dim: int) -> str:
    return (
        f"give a number up to 2^24/D in size, which is {WHOLE / max(head_dim, 1):.9g} for head dim {head_dim}, "
        f"or None for 1/√D; what is larger belongs in q and k, whose values decide what can be computed"
    )


def folded(kernel: Any, scale: float) -> tuple[Any, float]:
    """Return a kernel that computes with this scale, and the positive scale to give it."""
    if scale >= LEAST:
        return kernel, scale
    sign = -1.0 if scale <= -LEAST else 0.0
    return _Folded(kernel, sign), -scale if sign else 1.0


def of_call(kernel: Any, scale: float) -> tuple[Callable[[ActiveCall], Any], float]:
    """Return a getter of the kernel that computes a call with this scale, and the positive scale to give it."""
    plain, positive = folded(kernel, scale)

    def taken(call: ActiveCall) -> Any:
        if call.kernel is not None:
            return folded(call.kernel, scale)[0]
        return plain if call.kernel_of is None else folded(call.kernel_of(kernel), scale)[0]

    return taken, positive


class _Folded:
    """A kernel that is given q times a sign."""

    def __init__(self, kernel: Any, sign: float) -> None:
        self._kernel, self._sign = kernel, sign

    def forward(self, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        return self._kernel.forward(q * self._sign, *others, **options)

    def forward_packed(self, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        return self._kernel.forward_packed(q * self._sign, *others, **options)

    def backward(self, dout: torch.Tensor, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        made = self._kernel.backward(dout, q * self._sign, *others, **options)
        made[0].mul_(self._sign)
        return made

    def backward_packed(self, dout: torch.Tensor, q: torch.Tensor, *others: Any, **options: Any) -> Any:
        made = self._kernel.backward_packed(dout, q * self._sign, *others, **options)
        for each in made:
            each[0].mul_(self._sign)
        return made
