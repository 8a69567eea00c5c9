"""The autograd function of attention, the passes that it runs on the executor, and the derivatives that there are.

That is the first, backward. Others are refused where torch lets us detect them. With `create_graph=True` a backward
pass is recorded. It may be, for second derivatives of what else is in the model: only going through attention again is
refused, by a node that the pass leaves on its results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import forward_ad

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_tensor
from tokenring.backends.kernels.delta import row_dot
from tokenring.errors import UnsupportedError
from tokenring.runtime.agreement import beginning, refusing
from tokenring.runtime.call import ActiveCall
from tokenring.runtime.executor import Executor
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.runtime.trace import Trace

GRADIENT_OF_LSE = (
    "a gradient flows into the lse that tokenring.attention returned, which has none here: use lse.detach() in the loss"
)
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


class AttentionFunction(torch.autograd.Function):
    """Forward and backward of one distributed attention call."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, T, Hq, D] in q's dtype and lse [B, Hq, T] fp32; save what backward needs."""
        with cp.turn:
            with refusing(cp, "forward", q):
                q, k, v = (_rows_packed(x) for x in (q, k, v))
            out, lse, kept = run_forward(cp.executor(request, "forward"), cp.active_trace, q, k, v)
        given = out.data, lse.data  # of which autograd counts changes in place apart from those of what is saved
        ctx.save_for_backward(q, k, v, out, lse, kept)
        ctx.cp, ctx.request = cp, request
        ctx.changes = Changes(*given) if any(ctx.needs_input_grad) else None
        ctx.set_materialize_grads(False)
        return given

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk and dv. Raises UnsupportedError for a gradient of lse, and for several gradients at once."""
        dout, dlse = grads
        cp, request = ctx.cp, ctx.request
        with refusing(cp, "backward", dout, dlse):
            if dlse is not None:
                raise UnsupportedError(GRADIENT_OF_LSE)
            if dout is None:
                return None, None, None, None, None
            refuse_batched(dout)
            check_tensor("the backward of attention", dout)
            q, k, v, *made = ctx.saved_tensors  # may compute them anew, by calls of its own

        def compute() -> tuple[torch.Tensor, ...]:
            with cp.turn:
                if ctx.changes.found():  # out and lse are computed again, by all ranks: they make one call
                    made[:2] = run_forward(cp.executor(request, "forward"), cp.active_trace, q, k, v)[:2]
                return run_backward(cp.executor(request, "backward"), cp.active_trace, dout, q, k, v, *made)

        return *first(compute, dout, q, k, v), None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        """Raise UnsupportedError: forward mode is not computed here."""
        raise UnsupportedError(FORWARD_MODE)


def run_forward(
    executor: Executor, trace: Trace | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return out [B, T, Hq, D] in q's dtype, lse [B, Hq, T] fp32, and the bytes that backward wants besides, if any.

    All are memory of their own. Raises what the transport raises.
    """
    with beginning(executor.transport):
        kept = executor.views.new_kept(q.device)
        own = {"q": _rows_packed(q), "k": _rows_packed(k), "v": _rows_packed(v)}
        call = ActiveCall(own, executor.views.kept_slots_in(kept))
    with torch.autocast(q.device.type, enabled=False):  # kernels and merges choose their precision themselves
        executor.run(call, trace)
    out = _kept_by_caller(executor.result(call, "q_partial", "out"), q.dtype)
    lse = executor.result(call, "q_partial", "lse").clone(memory_format=torch.contiguous_format)
    return out, lse, kept


def run_backward(
    executor: Executor,
    trace: Trace | None,
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    kept: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk, dv like q, k and v, contiguous; out, lse and kept are what `run_forward` made."""
    with beginning(executor.transport):
        own = {"q": q, "k": k, "v": v, "dout": dout}
        given = OwnTensors({name: _rows_packed(x) for name, x in own.items()}, lse=lse, out=out)
        call = ActiveCall(given, executor.views.kept_slots_in(kept))
    with torch.autocast(q.device.type, enabled=False):
        executor.run(call, trace)
    dq = _kept_by_caller(executor.result(call, "q_partial", "dq"), q.dtype)
    dk, dv = (_kept_by_caller(executor.result(call, "kv_partial", name), k.dtype) for name in ("dk", "dv"))
    return dq, dk, dv


class OwnTensors(dict[str, torch.Tensor]):
    """The call's tensors; delta [B, H, T] is computed when the first instruction asks for it."""

    def __missing__(self, name: str) -> torch.Tensor:
        if name != "delta":
            raise KeyError(name)
        self[name] = row_dot(self["dout"], self["out"]).transpose(1, 2)
        return self[name]


def _rows_packed(x: torch.Tensor) -> torch.Tensor:
    """Return x, or a copy with the elements of each row side by side and their signs resolved, as kernels need them."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.resolve_neg() if x.is_neg() else x


def _kept_by_caller(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the result [B, T, H, D] in the caller's dtype, contiguous, in memory of its own.

    A view could not be changed in place.
    """
    if result.dtype == dtype:
        return result.contiguous().data
    return torch.empty_like(result, dtype=dtype, memory_format=torch.contiguous_format).copy_(result)


# ---------- derivatives


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


# ---------- changes in place


class Changes:
    """The version counts of results that a caller got, to detect changes in place. Holds none of their memory."""

    def __init__(self, *results: torch.Tensor) -> None:
        self._alike = [] if any(x.is_inference() for x in results) else [_alike(x) for x in results]
        self._versions = self._now()

    def found(self) -> bool:
        """Tell whether any of the results was changed in place since."""
        return self._now() != self._versions

    def _now(self) -> list[int]:
        return [x._version for x in self._alike]


def _alike(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor that counts the changes of x, its views included, with no memory behind it."""
    other = x.detach()  # shares the count
    if type(x) is torch.Tensor:  # else it stands for one while a graph is traced, and holds no memory
        other.data = x.new_empty(0)  # the count stays
    return other
