"""Where autograd meets the executor."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from tokenring.backends.kernels.reference import row_dot
from tokenring.context import ContextParallel, Request
from tokenring.errors import UnsupportedError
from tokenring.runtime.executor import Call


class AttentionFunction(torch.autograd.Function):
    """Forward and backward of one distributed attention call."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, request: Request
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out [B, T, Hq, D] in q's dtype and lse [B, Hq, T] fp32."""
        q, k, v = (_rows_packed(x) for x in (q, k, v))
        executor = cp.executor(request, "forward")
        call = Call({"q": q, "k": k, "v": v}, executor.new_kept(q.device))
        with torch.autocast(q.device.type, enabled=False):  # kernels and merges choose their precision themselves
            executor.run(call, cp.active_trace)
        out = _kept_by_caller(executor.result(call, "q_partial", "out"), q.dtype)
        lse = executor.result(call, "q_partial", "lse").clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, lse, *call.kept.values())
        ctx.cp, ctx.request = cp, request
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = grads
        if dlse is not None:
            raise UnsupportedError(
                "a gradient flows into the lse that tokenring.attention returned, which has none here: "
                "use lse.detach() in the loss"
            )
        if dout is None:
            return None, None, None, None, None
        q, k, v, out, lse, *kept = ctx.saved_tensors
        executor = ctx.cp.executor(ctx.request, "backward")
        own = OwnTensors({"q": q, "k": k, "v": v, "dout": _rows_packed(dout), "lse": lse, "out": out})
        call = Call(own, dict(zip(executor.kept_slots, kept, strict=True)))
        with torch.autocast(q.device.type, enabled=False):
            executor.run(call, ctx.cp.active_trace)
        dq = _kept_by_caller(executor.result(call, "q_partial", "dq"), q.dtype)
        dk, dv = (_kept_by_caller(executor.result(call, "kv_partial", name), k.dtype) for name in ("dk", "dv"))
        return dq, dk, dv, None, None


class OwnTensors(dict[str, torch.Tensor]):
    """The call's tensors; delta [B, H, T] is worked out when the first instruction asks for it."""

    def __missing__(self, name: str) -> torch.Tensor:
        if name != "delta":
            raise KeyError(name)
        self[name] = row_dot(self["dout"], self["out"]).transpose(1, 2)
        return self[name]


def _rows_packed(x: torch.Tensor) -> torch.Tensor:
    """Kernels take any strides, but want the elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _kept_by_caller(result: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[B, T, H, D] in the caller's dtype, contiguous, in memory of its own."""
    if result.dtype == dtype:
        return result.contiguous()
    return torch.empty_like(result, dtype=dtype, memory_format=torch.contiguous_format).copy_(result)
