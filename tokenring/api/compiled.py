"""Calls under torch.compile: two operators, tokenring::attention and its backward, that it does not look into.

Their arguments are tensors, numbers and the name of the context; masks travel as the numbers they consist of, so that
graphs stay right when these change; or, for `with_number`, as one number, so that how many they are may change too.
Eager calls do not come here.

What forward keeps for backward has a size that only the schedule says, and the schedule may be chosen when the ranks
first meet in the call. So the third output is a `ticket`: a tensor of one byte whose storage holds all kept bytes.
Autograd and activation checkpoints treat it like any other saved tensor, and what is kept goes when it goes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from tokenring.api.arguments import NO_LAYOUT
from tokenring.api.autograd import (
    SECOND,
    Changes,
    backward_pass,
    forward_pass,
    refuse_tangents,
    refuse_transforms,
)
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import CUT_BY, check_sinks, check_tensors, request_of, with_lengths, wrong_type
from tokenring.api.standing import context_of
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.agreement import refusing
from tokenring.runtime.bound_kernel import checked_softcap
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask import Mask, of_numbers
from tokenring.sequence.workload import Request

CALL = (
    "str context, SymInt? low, SymInt? high, SymInt[]? cu_seqlens, float? scale, bool training, bool differentiable, "
    "str? wrong=None, float softcap=0.0, SymInt[]? numbers=None, SymInt? layout=None, SymInt? mask=None"
)
FORWARD = f"(Tensor q, Tensor k, Tensor v, Tensor? sinks, {CALL}) -> (Tensor, Tensor, Tensor)"
BACKWARD = (
    "(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor out, Tensor lse, Tensor ticket, "
    f"{CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
)
# Ranks agree on each call over the host: no CUDA graph that inductor records by itself may hold one.
TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
MOST_MASKS = 1024
MOST_INTEGER = 2**63 - 1  # an operator takes no larger ones

# State of the process: a graph takes a number for a mask. A mask stays for as long as somebody holds it; of those that
# nobody holds the oldest go: calls of many batches ago have had their backward pass.
_numbers_of_masks = itertools.count(1)
_numbered: WeakValueDictionary[int, Mask] = WeakValueDictionary()
_last_numbered: deque[Mask] = deque()
NUMBER = "_number"  # attribute of a mask that has one

Bounds = tuple[int, ...] | None
Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]  # of q, k, v and the sinks


def traced_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    read: tuple[Mask | None, str | None],
    scale: float | None,
    training: bool,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (out, lse) of tokenring.attention, for torch.compile to trace: one operator, and no graph break.

    read: the mask, or what is wrong with it, which the operator refuses when it runs, on all ranks. layout: it travels
    as its number in this process, so that another one is no new graph.
    """
    refuse_transforms()
    mask, wrong = read
    if wrong_type(sinks) is not None:
        sinks, wrong = None, wrong_type(sinks)
    number = None
    if isinstance(layout, Layout):
        number = layout.number
    elif layout is not None:
        wrong = NO_LAYOUT.format(type(layout).__name__)
    try:
        cap = checked_softcap(softcap)
    except ConfigurationError as error:
        cap, wrong = 0.0, str(error)
    named = None if mask is None else getattr(mask, NUMBER, None)
    low, high, cu_seqlens, numbers = (None,) * 4 if mask is None or named is not None else _numbers(mask)
    if isinstance(scale, int) and not -MOST_INTEGER <= scale <= MOST_INTEGER:
        scale = math.inf  # which is refused as well
    differentiable = q.requires_grad or k.requires_grad or v.requires_grad
    if sinks is not None:
        differentiable = differentiable or sinks.requires_grad
    out, lse, _ = torch.ops.tokenring.attention(
        q, k, v, sinks, cp.handle, low, high, cu_seqlens, scale, training, differentiable, wrong, cap, numbers, number,
        named,
    )  # fmt: skip
    return out, lse


# ---------- forward


@torch.library.custom_op("tokenring::attention", mutates_args=(), schema=FORWARD, tags=TAGS)
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, context: str, *call: Any
) -> Tensors:
    cp = context_of(context)

    def forward() -> Tensors:
        with refusing(cp, "forward", q, k, v):
            refuse_tangents(q, k, v, *(() if sinks is None else (sinks,)))
            request = _request(q, k, v, sinks, cp, *call)
        out, lse, kept = forward_pass(cp, request, q, k, v, sinks)
        return out, lse, _ticket(kept, q.device)

    with cp.turn:
        return with_lengths(cp, forward)


@_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *others: Any) -> Tensors:
    shape = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (0, 0, 0)  # else refused when it runs, by all
    lse = q.new_empty(shape, dtype=torch.float32)
    out = q.new_empty((*q.shape[:-1], *v.shape[-1:]))  # as wide as v
    return out, lse, q.new_empty(1, dtype=torch.uint8)


# ---------- backward


@torch.library.custom_op("tokenring::attention_backward", mutates_args=(), schema=BACKWARD, tags=TAGS)
def _attention_backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    ticket: torch.Tensor,
    context: str,
    *call: Any,
) -> Gradients:
    cp = context_of(context)

    def backward() -> Gradients:
        with refusing(cp, "backward", dout):
            # Where lse leaves the graph, torch.compile gives a gradient for it in any case: zeros are none.
            given = None if dlse is None or not bool(dlse.any()) else dlse
            request = _request(q, k, v, sinks, cp, *call, again=True)
        found = backward_pass(cp, request, dout, given, q, k, v, out, lse, _kept(ticket))
        if sinks is None:
            return *found, out.new_empty(0)
        from tokenring.api.sinks import sinks_gradient

        return *found, sinks_gradient(sinks, dout, given, out, lse)

    with cp.turn:
        return with_lengths(cp, backward)


@_attention_backward.register_fake
def _(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    *others: Any,
) -> Gradients:
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
    q, k, v, sinks, *ctx.call = inputs
    ctx.changes, ctx.traced = Changes(*output[:2]), None
    if all(type(x) is torch.Tensor for x in output):
        output = output[0].data, output[1].data, output[2]  # whose changes in place are not those of what is saved
    else:  # the compiler's, which saves memory of its own choice: to be told what autograd saves, and no copy
        ctx.traced = (q, k, v, sinks), Changes(q, k, v)
    ctx.save_for_backward(q, k, v, sinks, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    dout, dlse, _ = grads
    nothing = (None,) * len(ctx.call)
    if dout is None and dlse is None:
        return None, None, None, None, *nothing
    q, k, v, sinks, out, lse, ticket = _whole(ctx)
    dout = torch.zeros_like(out) if dout is None else dout
    *made, dsinks = torch.ops.tokenring.attention_backward(
        dout, dlse, q, k, v, sinks, out, lse, ticket, *ctx.call
    )  # fmt: skip
    return *made, None if sinks is None else dsinks, *nothing


def _whole(ctx: Any) -> Sequence[Any]:
    """Return all that backward needs; out and lse are computed again where the caller has changed them in place."""
    if not ctx.changes.found() or (ctx.traced is not None and ctx.traced[1].found()):
        saved: tuple[Any, ...] = ctx.saved_tensors
        return saved
    q, k, v, sinks, *made = ctx.saved_tensors if ctx.traced is None else ctx.traced[0]
    with torch.no_grad():
        out, lse, ticket = torch.ops.tokenring.attention(q, k, v, sinks, *ctx.call)
    return q, k, v, sinks, out, lse, made[2] if made else ticket


def _no_second(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
    raise UnsupportedError(SECOND)


_attention.register_autograd(_gradients, setup_context=_setup)
_attention_backward.register_autograd(_no_second)


# ---------- what is behind their arguments


def _request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    cp: ContextParallel,
    low: int | None,
    high: int | None,
    cu_seqlens: Sequence[int] | None,
    scale: float | None,
    training: bool,
    differentiable: bool,
    wrong: str | None = None,
    softcap: float = 0.0,
    numbers: Sequence[int] | None = None,
    layout: int | None = None,
    mask_number: int | None = None,
    *,
    again: bool = False,
) -> Request:
    check_tensors(q, k, v)
    if wrong is not None:
        raise ConfigurationError(wrong)
    check_sinks(sinks, q)
    some, others = (None if each is None else tuple(each) for each in (cu_seqlens, numbers))
    mask = _mask(low, high, some, others) if mask_number is None else _mask_numbered(mask_number)
    cut = None if layout is None else cp.cuts.numbered(layout)
    return request_of(q, k, v, cp, mask, scale, training, differentiable, softcap, cut, again=again)


@lru_cache(maxsize=MOST_MASKS)
def _mask(low: int | None, high: int | None, cu_seqlens: Bounds, numbers: Bounds) -> Mask:
    return Mask(low, high, cu_seqlens) if numbers is None else of_numbers(numbers)


def with_number(mask: Mask, cut_by: Mask | None = None) -> Mask:
    """Return an equal mask that compiled graphs of this process take by a number of its own.

    So that one graph serves masks of any number of documents. Make it outside of the graph, for each batch; a graph
    knows those that somebody holds, and the last MOST_MASKS that were made. cut_by: the mask by which tensors of its
    calls are cut where layout is "auto"; None: by itself.
    """
    found, number = replace(mask), next(_numbers_of_masks)
    object.__setattr__(found, NUMBER, number)
    if cut_by is not None:
        object.__setattr__(found, CUT_BY, cut_by)
    _numbered[number] = found
    _last_numbered.append(found)
    while len(_last_numbered) > MOST_MASKS:
        _last_numbered.popleft()
    return found


def _mask_numbered(number: int) -> Mask:
    found = _numbered.get(number)
    if found is None:
        raise ConfigurationError(
            f"a compiled call has mask number {number} of this process, which is gone: {MOST_MASKS} masks were made "
            f"since, and nobody holds it; run the backward pass of a batch before so many others are cut"
        )
    return found


def _numbers(mask: Mask) -> tuple[int | None, int | None, Bounds, Bounds]:
    """Return what `_mask` makes the mask of again."""
    return (mask.low, mask.high, mask.cu_seqlens, None) if mask.numbers is None else (None, None, None, mask.numbers)


def _ticket(kept: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """Return a ticket, uint8 [1], whose storage holds the kept bytes behind its own."""
    return torch.empty(1, dtype=torch.uint8, device=device) if kept is None else kept[:1]


def _kept(ticket: torch.Tensor) -> torch.Tensor:
    """Return all bytes behind a ticket."""
    return ticket.as_strided((ticket.untyped_storage().nbytes(),), (1,))
