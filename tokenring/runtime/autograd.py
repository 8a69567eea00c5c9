"""Where autograd meets the executor."""

from __future__ import annotations

from typing import Any

import torch

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
        executor = cp.executor(request, "forward")
        call = Call({"q": q, "k": k, "v": v}, executor.new_kept(q.device))
        executor.run(call, cp.active_trace)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        out.copy_(executor.result("q_partial", "out").transpose(0, 1))
        lse = executor.result("q_partial", "lse").permute(1, 2, 0).clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, lse, *call.kept.values())
        ctx.cp, ctx.request = cp, request
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
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
        own = {"q": q, "k": k, "v": v, "dout": dout, "lse": lse, "delta": row_dot(dout, out)}
        executor.run(Call(own, dict(zip(executor.kept_slots, kept, strict=True))), ctx.cp.active_trace)
        dq = torch.empty_like(q, memory_format=torch.contiguous_format)
        dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (k, v))
        dq.copy_(executor.result("q_partial", "dq").transpose(0, 1))
        dk.copy_(executor.result("kv_partial", "dk").transpose(0, 1))
        dv.copy_(executor.result("kv_partial", "dv").transpose(0, 1))
        return dq, dk, dv, None, None


def row_dot(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """delta = rowsum(dout · out) in fp32: [B, T, H, D] → [B, H, T] (FlashAttention-2, §3.1.2)."""
    return (dout.float() * out.float()).sum(dim=-1).transpose(1, 2)
