"""The autograd function of attention, and the passes that it runs on the executor."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from tokenring.api.context import ContextParallel
from tokenring.api.tensor_checks import check_tensor
from tokenring.backends.kernels.reference import row_dot
from tokenring.errors import UnsupportedError
from tokenring.runtime.agreement import beginning
from tokenring.runtime.call import ActiveCall
from tokenring.runtime.derivatives import FORWARD_MODE, first, refuse_batched
from tokenring.runtime.executor import Executor
from tokenring.runtime.refusal import refusing
from tokenring.runtime.results import Changes
from tokenring.runtime.trace import Trace
from tokenring.sequence.request import Request

GRADIENT_OF_LSE = (
    "a gradient flows into the lse that tokenring.attention returned, which has none here: use lse.detach() in the loss"
)


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
