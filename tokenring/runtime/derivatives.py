"""Derivatives of attention: the first, backward. Others are refused where torch lets us detect them.

With `create_graph=True` a backward pass is recorded. It may be, for second derivatives of what else is in the model:
only going through attention again is refused, by a node that the pass leaves on its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch.autograd import forward_ad

from tokenring.errors import UnsupportedError

INSTEAD = (
    "it has the first derivative only, by backward() or torch.autograd.grad: leave attention out of that term, or "
    "compute it there with attention that torch can differentiate twice (sdpa_kernel(SDPBackend.MATH))"
)
SECOND = (
    "a second derivative of tokenring.attention was asked for, as gradient penalties, Hessians and "
    f"torch.autograd.functional.jvp do: {INSTEAD}"
)
RECORDED = (
    "backward with create_graph=True goes through a captured call, whose derivative is not recorded: call "
    "tokenring.attention without a capture, which has the first derivative, or leave out create_graph"
)
FORWARD_MODE = f"a forward-mode derivative of tokenring.attention was asked for: {INSTEAD}"
TRANSFORM = (
    "tokenring.attention was called inside a transform of torch.func (jvp, jacfwd, hessian, grad, vmap), which cannot "
    f"look into an exchange between ranks: {INSTEAD}"
)
BATCHED = (
    "gradients of tokenring.attention were asked for in a batch, as is_grads_batched and vectorize=True do, and the "
    "exchange between ranks is for one at a time: ask for one after another"
)

Gradients = tuple[torch.Tensor, ...]


class _First(torch.autograd.Function):
    """A backward pass as an autograd node, which refuses to be differentiated itself."""

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Gradients], *depends: torch.Tensor) -> Gradients:
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(SECOND)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(FORWARD_MODE)


def first(compute: Callable[[], Gradients], *depends: torch.Tensor) -> Gradients:
    """Return what `compute` gives in a backward pass; a node on it refuses a second derivative by `depends`."""
    if not torch.is_grad_enabled():  # this pass is not recorded
        return compute()
    made: Gradients = _First.apply(compute, *depends)  # type: ignore[no-untyped-call]
    return made


def refuse_batched(dout: torch.Tensor) -> None:
    """Raise UnsupportedError in a backward pass for several gradients at once."""
    refuse_transforms()
    if torch._C._functorch.is_legacy_batchedtensor(dout):
        raise UnsupportedError(BATCHED)


def refuse_recorded() -> None:
    """Raise UnsupportedError in a backward pass that is recorded, where nothing is held that could refuse later."""
    refuse_transforms()
    if torch.is_grad_enabled():
        raise UnsupportedError(RECORDED)


def refuse_transforms() -> None:
    """Raise UnsupportedError inside torch.func's transforms, whose tensors are wrappers, before any exchange."""
    if torch._C._are_functorch_transforms_active():  # what autograd.Function.apply asks
        raise UnsupportedError(TRANSFORM)


def refuse_tangents(*operands: torch.Tensor) -> None:
    """Raise UnsupportedError if an operand of a compiled call carries a forward-mode derivative, or may carry one.

    Below autograd, where graphs that need no gradients are run, tangents are hidden: any call in a `dual_level` raises.
    """
    try:
        duals = [forward_ad.unpack_dual(x) for x in operands]  # type: ignore[no-untyped-call]
        found = any(each.tangent is not None for each in duals)
    except RuntimeError:
        found = True
    if found:
        raise UnsupportedError(FORWARD_MODE)
