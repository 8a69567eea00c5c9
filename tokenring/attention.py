"""The function that users call."""

from __future__ import annotations

from typing import Literal, overload

import torch

from tokenring.context import ContextParallel
from tokenring.errors import UnsupportedError
from tokenring.inputs import call_inputs, make_request
from tokenring.mask import Mask
from tokenring.planner.plan import Plan
from tokenring.request import Request
from tokenring.runtime.autograd import AttentionFunction
from tokenring.runtime.compiled import traced_attention


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None = None,
    scale: float | None = None, return_lse: Literal[False] = False, *, dropout_p: float = 0.0, softcap: float = 0.0,
    sinks: object = None, bias: object = None,
) -> torch.Tensor: ...  # fmt: skip


@overload
def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None = None,
    scale: float | None = None, *, return_lse: Literal[True], dropout_p: float = 0.0, softcap: float = 0.0,
    sinks: object = None, bias: object = None,
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
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over the sequence that the ranks of `cp` hold together; differentiable.

    q: [B, T, Hq, D], this rank's part in cp's layout; k, v: [B, T', Hkv, D], Hq a multiple of Hkv.
    mask: Full() (the default), Causal(), SlidingWindow(...), Documents(...), or several joined by &.
    scale: of q·k; default 1/√D. Every rank must call with the same sizes, mask and scale.

    Returns out [B, T, Hq, D] in q's dtype, and with return_lse also lse [B, Hq, T] (fp32, natural
    log; -inf and out 0 where a row sees nothing). No gradient flows through lse.

    Raises ConfigurationError (sizes that do not fit), UnsupportedError (dropout, softcap, sinks,
    bias, dtypes) and PeerLost (a rank that does not answer within cp.timeout_seconds).
    """
    _refuse({"dropout_p": dropout_p, "softcap": softcap, "sinks": sinks, "bias": bias})
    # Not whether these tensors want gradients: ranks may differ in that, and must choose the same schedule.
    out, lse = attend(q, k, v, cp, mask, scale, torch.is_grad_enabled())
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
    q, k, v = call_inputs(q, k, v, cp)
    if torch.compiler.is_compiling():
        return traced_attention(q, k, v, cp, mask, scale, training)
    return attend_as(q, k, v, cp, make_request(q, k, v, cp, mask, scale, training))


def attend_as(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, request: Request
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse of a request that `make_request` made, of these `call_inputs`."""
    out, lse = AttentionFunction.apply(q, k, v, cp, request)  # type: ignore[no-untyped-call]
    return out, lse


def plan(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None = None) -> Plan:
    """The schedule that `attention` takes for these tensors, with the reason and what else there was."""
    q, k, v = call_inputs(q, k, v, cp)
    return cp.plan(make_request(q, k, v, cp, mask, None))


def _refuse(features: dict[str, object]) -> None:
    advice = {
        "dropout_p": "its mask cannot be the same under every split; set it to 0",
        "softcap": "no kernel here computes it; use a model without logit soft-capping",
        "sinks": "no kernel here computes them",
        "bias": "only masks of positions are supported: Causal, SlidingWindow, Documents",
    }
    for name, value in features.items():
        if value is not None and not (isinstance(value, (int, float)) and value == 0):
            raise UnsupportedError(f"attention with {name} is not supported: {advice[name]}")
