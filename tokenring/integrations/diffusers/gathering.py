"""The whole output on every rank, from the parts that ranks hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tokenring.api.context import ContextParallel
from tokenring.api.sharding import finish


def gathered(x: torch.Tensor, cp: ContextParallel, parts: tuple[int, ...], factor: int) -> torch.Tensor:
    """Return [B, all tokens, C] of this rank's x [B, T, C]. parts: tokens by rank.

    Every rank computes the same loss of it, so a rank's gradient is that of its own tokens, times factor; nothing is
    sent for it.
    """
    whole: torch.Tensor = _Gathered.apply(x, cp, parts, factor)  # type: ignore[no-untyped-call]
    return whole


class _Gathered(torch.autograd.Function):
    """Each rank sends its part to all others as it is: parts differ in length, and are not filled up."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cp: ContextParallel, parts: tuple[int, ...], factor: int) -> torch.Tensor:
        ctx.start, ctx.length, ctx.factor = sum(parts[: cp.rank]), parts[cp.rank], factor
        if cp.world_size == 1:
            return x.clone()
        own = x.transpose(0, 1)
        sent = own.repeat(cp.world_size, 1, 1)
        whole = own.new_empty(sum(parts), *own.shape[1:])
        with cp.turn:
            work = dist.all_to_all_single(
                whole, sent, list(parts), [len(own)] * cp.world_size, group=cp.group, async_op=True
            )
            finish(work, cp, "putting the output together", x.device)
        return whole.transpose(0, 1).contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].narrow(1, ctx.start, ctx.length) * ctx.factor, None, None, None
