"""The functions that users call: attention, and the plan of a call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch

from tokenring.api.autograd import AttentionFunction, refuse_transforms
from tokenring.api.compiled import traced_attention
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import (
    Order,
    call_inputs,
    check_context,
    check_types,
    in_order,
    make_request,
    out_in_order,
    under_autocast,
    warn_if_swapped,
    with_lengths,
)
from tokenring.errors import UnsupportedError
from tokenring.runtime.agreement import refusing
from tokenring.sequence.mask_words import MaskLike, read_mask
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.planner.choosing.plan import Plan
    from tokenring.sequence.layout import Layout


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: MaskLike = None,
    scale: float | None = None, return_lse: Literal[False] = False, *, is_causal: bool | None = None,
    dropout_p: float = 0.0, softcap: float = 0.0, sinks: torch.Tensor | None = None, bias: object = None,
    order: Order | None = None, layout: Layout | None = None,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: MaskLike = None,
    scale: float | None = None, *, return_lse: Literal[True], is_causal: bool | None = None,
    dropout_p: float = 0.0, softcap: float = 0.0, sinks: torch.Tensor | None = None, bias: object = None,
    order: Order | None = None, layout: Layout | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: MaskLike = None,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    is_causal: bool | None = None,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    bias: object = None,
    order: Order | None = None,
    layout: Layout | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Compute exact attention over the sequence that the ranks of `cp` hold together; differentiable.

    q: [B, T, Hq, D], this rank's part in cp's layout; k: [B, T', Hkv, D], Hq a multiple of Hkv; v: [B, T', Hkv, Dv],
    where Dv may be another than D (multi-latent attention: 192 and 128). Nothing is padded on its way.
    T and T' are as `shard` gives them: they differ by rank where the length does not divide, and may be 0.
    mask: Full() (the default), Causal(), SlidingWindow(...), Documents(...) or another (docs/masks.md), several joined
    by & and |, or its text, as "causal". is_causal: True for Causal(), as in scaled_dot_product_attention.
    scale: of q·k, up to 2^24/D in size; default 1/√D. Every rank must call with the same sizes, mask and scale.
    softcap: c; scores s = scale · q·k become c · tanh(s / c), before sinks; 0: as they are. Computed by the kernels
    reference, flex, flash-attn and flash-attn-3: "auto" takes one of them, on a CPU the first.
    sinks: [Hq], learned or not: the logit of one more column that every row of a head sees, without a value; `scale`
    does not apply to it, nor does the mask. The same on every rank, as a parameter is. Its gradient is of this rank's
    tokens: what adds up gradients of replicated parameters over the ranks adds up these.
    layout: by which q, k and v are cut, where that is not the layout of cp (cp.layout_for(length, mask) of "auto").
    order: "bthd" (the default), or "bhtd" for q, k, v and out as [B, H, T, D], as in scaled_dot_product_attention.

    Returns out [B, T, Hq, Dv] in q's dtype, and with return_lse also lse [B, Hq, T] (fp32, natural
    log, with the sink; out 0 where a row sees nothing, and lse -inf or the sink). Both are differentiable.

    Raises ConfigurationError (sizes that do not fit), UnsupportedError (dropout, bias, dtypes, a kernel without
    soft-capping, derivatives but the first) and PeerLost (a rank that does not answer within
    cp.timeout_seconds). Warns once (TokenRingWarning) where no order is said and q looks like [B, H, T, D].
    """
    check_context(cp)
    unsupported = _unsupported({"dropout_p": dropout_p, "bias": bias})
    if unsupported is not None:
        if torch.compiler.is_compiling():
            raise UnsupportedError(unsupported)
        with refusing(cp, "forward", q, k, v):
            raise UnsupportedError(unsupported)
    q, k, v = ordered(q, k, v, cp, order)
    # Not whether these tensors want gradients: ranks may differ in that, and must choose the same schedule.
    training = torch.is_grad_enabled()
    out, lse = attend(q, k, v, cp, mask, scale, training, is_causal, sinks, softcap, layout, wants_lse=return_lse)
    out = out_in_order(out, order)
    warn_if_swapped(q, k, order)
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: MaskLike,
    scale: float | None,
    training: bool,
    is_causal: bool | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse of `attention`, for a caller that knows what gradients being off does not say.

    training: whether a backward pass follows; also in the forward pass of a checkpoint, which is done again with
    gradients on and should take the same schedule then. wants_lse: where nothing does, lse may be an empty tensor.
    """
    if torch.compiler.is_compiling():
        check_context(cp)
        check_types(q, k, v)  # all that an operator cannot be given; the rest it refuses when it runs, on all ranks
        q, k, v = under_autocast(q), under_autocast(k), under_autocast(v)
        return traced_attention(q, k, v, cp, read_mask(mask, is_causal), scale, training, sinks, softcap, layout)

    def call() -> tuple[torch.Tensor, torch.Tensor]:
        given_q, given_k, given_v, request = prepared(
            q, k, v, cp, mask, scale, training, is_causal, sinks, softcap, layout, wants_lse
        )
        return attend_as(given_q, given_k, given_v, cp, request, sinks)

    return with_lengths(cp, call)


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: MaskLike,
    scale: float | None,
    training: bool | None = None,
    is_causal: bool | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    layout: Layout | None = None,
    wants_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Request]:
    """Return the `call_inputs` and the `make_request` of a call that all ranks make; their errors reach all ranks."""
    check_context(cp)
    with refusing(cp, "forward", q, k, v):
        q, k, v = call_inputs(q, k, v, cp)
        refuse_transforms()
        request = make_request(q, k, v, cp, mask, scale, training, is_causal, sinks, softcap, layout, wants_lse)
        return q, k, v, request


def attend_as(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    request: Request,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse for a request that `make_request` made from these `call_inputs`."""
    out, lse = AttentionFunction.apply(q, k, v, sinks, cp, request)  # type: ignore[no-untyped-call]
    return out, lse


def plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: MaskLike = None, *,
    order: Order | None = None, is_causal: bool | None = None, layout: Layout | None = None,
) -> Plan:  # fmt: skip
    """Return the schedule that `attention` takes for these tensors, with the reason and the other candidates.

    For calls as they are now, with gradients or under torch.no_grad; without return_lse and sinks.
    """
    q, k, v = in_order(q, k, v, order)
    q, k, v = call_inputs(q, k, v, cp)
    found = cp.plan(make_request(q, k, v, cp, mask, None, is_causal=is_causal, layout=layout, wants_lse=False))
    warn_if_swapped(q, k, order)
    return found


def ordered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, order: Order | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out as [B, T, H, D] the inputs of a call in this order; the error for a wrong order reaches all ranks."""
    if order is None:
        return q, k, v
    if torch.compiler.is_compiling():
        return in_order(q, k, v, order)
    with refusing(cp, "forward", q, k, v):
        return in_order(q, k, v, order)


def _unsupported(features: dict[str, object]) -> str | None:
    """Return the sentence about a feature that was asked for and is not computed here, and why; None: there is none."""
    advice = {
        "dropout_p": "its mask cannot be the same under every split; set it to 0",
        "bias": "only masks of positions are supported: Causal, SlidingWindow, Documents",
    }
    for name, value in features.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            return f"attention with {name} is not supported: {advice[name]}"
    return None
