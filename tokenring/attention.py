"""The function that users call."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tokenring.context import ContextParallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.mask import Full, Mask
from tokenring.order import Order, in_order, out_in_order, warn_if_swapped
from tokenring.planner.plan import Plan
from tokenring.request import Request
from tokenring.runtime.autograd import AttentionFunction
from tokenring.runtime.compiled import traced_attention
from tokenring.runtime.derivatives import refuse_transforms
from tokenring.runtime.refusal import refusing
from tokenring.runtime.scaling import checked_scale
from tokenring.tensors import check_tensor
from tokenring.workload import Workload


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None = None,
    scale: float | None = None, return_lse: Literal[False] = False, *, dropout_p: float = 0.0, softcap: float = 0.0,
    sinks: object = None, bias: object = None, order: Order | None = None,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None = None,
    scale: float | None = None, *, return_lse: Literal[True], dropout_p: float = 0.0, softcap: float = 0.0,
    sinks: object = None, bias: object = None, order: Order | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...  # fmt: skip


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    *,
    dropout_p: float = 0.0,
    softcap: float = 0.0,
    sinks: object = None,
    bias: object = None,
    order: Order | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over the sequence that the ranks of `cp` hold together; differentiable.

    q: [B, T, Hq, D], this rank's part in cp's layout; k, v: [B, T', Hkv, D], Hq a multiple of Hkv.
    mask: Full() (the default), Causal(), SlidingWindow(...), Documents(...), or several joined by &.
    scale: of q·k, up to 2^24/D in size; default 1/√D. Every rank must call with the same sizes, mask and scale.
    order: "bthd" (the default), or "bhtd" for q, k, v and out as [B, H, T, D], as in scaled_dot_product_attention.

    Returns out [B, T, Hq, D] in q's dtype, and with return_lse also lse [B, Hq, T] (fp32, natural
    log; -inf and out 0 where a row sees nothing). No gradient flows through lse.

    Raises ConfigurationError (sizes that do not fit), UnsupportedError (dropout, softcap, sinks,
    bias, dtypes, derivatives but the first) and PeerLost (a rank that does not answer within
    cp.timeout_seconds). Warns once (TokenRingWarning) where no order is said and q looks like [B, H, T, D].
    """
    check_context(cp)
    unsupported = _unsupported({"dropout_p": dropout_p, "softcap": softcap, "sinks": sinks, "bias": bias})
    if unsupported is not None:
        if torch.compiler.is_compiling():
            raise UnsupportedError(unsupported)
        with refusing(cp, "forward", q, k, v):
            raise UnsupportedError(unsupported)
    q, k, v = ordered(q, k, v, cp, order)
    # Not whether these tensors want gradients: ranks may differ in that, and must choose the same schedule.
    out, lse = attend(q, k, v, cp, mask, scale, torch.is_grad_enabled())
    out = out_in_order(out, order)
    warn_if_swapped(q, k, order)
    return (out, lse) if return_lse else out


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None,
    scale: float | None,
    training: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of `attention`, for a caller that knows what gradients being off does not say.

    training: whether a backward pass follows; also in the forward pass of a checkpoint, which is done again with
    gradients on and should take the same schedule then.
    """
    if torch.compiler.is_compiling():
        check_context(cp)
        check_types(q, k, v)  # all that an operator cannot be given; the rest it refuses when it runs, on all ranks
        return traced_attention(_autocast(q), _autocast(k), _autocast(v), cp, mask, scale, training)
    q, k, v, request = prepared(q, k, v, cp, mask, scale, training)
    return attend_as(q, k, v, cp, request)


def prepared(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None,
    scale: float | None,
    training: bool | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Request]:
    """`call_inputs` and `make_request` of a call that all ranks make: what they raise on one, all hear."""
    check_context(cp)
    with refusing(cp, "forward", q, k, v):
        q, k, v = call_inputs(q, k, v, cp)
        refuse_transforms()
        return q, k, v, make_request(q, k, v, cp, mask, scale, training)


def attend_as(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a request that `make_request` made, of these `call_inputs`."""
    out, lse = AttentionFunction.apply(q, k, v, cp, request)  # type: ignore[no-untyped-call]
    return out, lse


def plan(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None = None, *,
    order: Order | None = None,
) -> Plan:  # fmt: skip
    """The schedule that `attention` takes for these tensors, with the reason and what else there was."""
    q, k, v = in_order(q, k, v, order)
    q, k, v = call_inputs(q, k, v, cp)
    found = cp.plan(make_request(q, k, v, cp, mask, None))
    warn_if_swapped(q, k, order)
    return found


def make_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None,
    scale: float | None,
    training: bool | None = None,
) -> Request:
    """What a call asks for; checks that everything fits together. training None: whether gradients are on."""
    training = torch.is_grad_enabled() if training is None else training
    differentiable = any(x.requires_grad for x in (q, k, v))
    return request_of(q, k, v, cp, mask, scale, training, differentiable)


def request_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cp: ContextParallel,
    mask: Mask | None,
    scale: float | None,
    training: bool,
    differentiable: bool,
) -> Request:
    """The same, where autograd's mode was another one when the call was made, as in a compiled graph."""
    mask = Full() if mask is None else mask
    workload = _workload(q, k, v, cp, mask)
    return Request(workload, mask, checked_scale(scale, q.shape[-1]), training, q.device, differentiable)


def ordered(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, order: Order | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lay out as [B, T, H, D] what a call gives in this order; an order that one rank refuses, all hear of."""
    if order is None:
        return q, k, v
    if torch.compiler.is_compiling():
        return in_order(q, k, v, order)
    with refusing(cp, "forward", q, k, v):
        return in_order(q, k, v, order)


def _unsupported(features: dict[str, object]) -> str | None:
    """What was asked for and is not computed here, and why."""
    advice = {
        "dropout_p": "its mask cannot be the same under every split; set it to 0",
        "softcap": "no kernel here computes it; use a model without logit soft-capping",
        "sinks": "no kernel here computes them",
        "bias": "only masks of positions are supported: Causal, SlidingWindow, Documents",
    }
    for name, value in features.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            return f"attention with {name} is not supported: {advice[name]}"
    return None


def call_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as they are computed with, under autocast too; checks that they and cp are what they should be."""
    check_context(cp)
    check_types(q, k, v)
    check_tensors(q, k, v)
    return _autocast(q), _autocast(k), _autocast(v)


def check_context(cp: object) -> None:
    """Raise ConfigurationError for what is no ContextParallel."""
    if not isinstance(cp, ContextParallel):
        raise ConfigurationError(
            f"cp is of type {type(cp).__name__}; make a ContextParallel, once, and give it to every call"
        )


def check_types(*qkv: object) -> None:
    """Raise ConfigurationError for what is no tensor."""
    found = [type(x).__name__ for x in qkv if not isinstance(x, torch.Tensor)]
    if found:
        raise ConfigurationError(f"q, k and v must be tensors [B, T, H, D]; one is of type {found[0]}")


def check_tensors(*qkv: torch.Tensor) -> None:
    """Raises UnsupportedError for tensors that have no dense data to compute with."""
    for x in qkv:
        check_tensor("attention", x)
    if sparse := [x.layout for x in qkv if x.layout != torch.strided]:
        raise UnsupportedError(f"attention of {sparse[0]} tensors is not supported; make q, k and v dense and padded")


def _autocast(x: torch.Tensor) -> torch.Tensor:
    """What scaled_dot_product_attention does under autocast."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(kind))


def _workload(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask) -> Workload:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4:
        raise ConfigurationError(f"attention wants q, k and v as [B, T, H, D]; got {shapes}")
    if not q.shape[3] == k.shape[3] == v.shape[3]:
        raise UnsupportedError(f"q, k and v must have one head dimension; got {shapes}")
    if k.shape != v.shape or q.shape[0] != k.shape[0]:
        raise ConfigurationError(f"k and v must have one shape, and q the same batch; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ConfigurationError(
            f"q, k and v must share dtype and device; got {q.dtype}/{k.dtype}/{v.dtype} "
            f"on {q.device}/{k.device}/{v.device}"
        )
    if min(q.shape[1], k.shape[1]) == 0:
        raise ConfigurationError(f"a rank with an empty shard cannot take part: {shapes}; pad the sequence")
    if not isinstance(mask, Mask):
        raise ConfigurationError(
            f"mask is of type {type(mask).__name__}; use Full(), Causal(), SlidingWindow or Documents"
        )
    q_length, kv_length = q.shape[1] * cp.world_size, k.shape[1] * cp.world_size
    if q_length != kv_length and mask.needs_equal_lengths:
        raise UnsupportedError(
            f"mask {mask} numbers one sequence, but q has {q_length} positions and kv {kv_length}: only Full takes both"
        )
    mask.check_length(q_length)
    return Workload(q.shape[0], q_length, kv_length, q.shape[2], k.shape[2], q.shape[3], q.dtype)
