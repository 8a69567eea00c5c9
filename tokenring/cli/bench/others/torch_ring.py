"""torch's own ring attention (torch.distributed.tensor.experimental) on the CPU.

Its public interface, context_parallel(), dispatches kernels of CUDA only. The ring below it takes any
operator of the right signature, and is called here with torch's flash kernel for the CPU, or with a kernel that it
is given (`computing_with`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tokenring.backends.interfaces import AttentionKernel
from tokenring.sequence.region import Patch

Operator = Callable[..., tuple[torch.Tensor, ...]]

SEQUENCE_DIM = 2
_forward: Operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward: Operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@contextmanager
def computing_with(kernel: AttentionKernel) -> Iterator[None]:
    """Make the ring's operators compute with this kernel inside the block."""
    global _forward, _backward
    before = _forward, _backward

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool, **_: Any) -> Any:
        return kernel.forward(q, k, v, patch=_patch(q, k, is_causal), scale=q.shape[-1] ** -0.5)

    def backward(
        *, grad_out: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
        logsumexp: torch.Tensor, is_causal: bool, **_: Any,
    ) -> Any:  # fmt: skip
        patch, scale = _patch(query, key, is_causal), query.shape[-1] ** -0.5
        return kernel.backward(grad_out, query, key, value, logsumexp, None, out=out, patch=patch, scale=scale)

    _forward, _backward = forward, backward
    try:
        yield
    finally:
        _forward, _backward = before


def _patch(q_BHTD: torch.Tensor, k_BHSD: torch.Tensor, causal: bool) -> Patch:
    rows, cols = q_BHTD.shape[2], k_BHSD.shape[2]
    return Patch(0, rows, 0, cols, high=0) if causal else Patch(0, rows, 0, cols)


def _ring(causal: bool, rotate: str) -> Any:
    """Return torch's module, set to balance causal work over head and tail chunks and to rotate as asked."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    _attention._cp_options.enable_load_balance = causal
    _attention.set_rotate_method(rotate)
    return _attention


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Any, causal: bool, rotate: str
    ) -> torch.Tensor:
        out, lse = _ring(causal, rotate)._templated_ring_attention(
            group, SEQUENCE_DIM, _forward, q, k, v, is_causal=causal, dropout_p=0.0
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = group, causal, rotate
        result: torch.Tensor = out
        return result

    @staticmethod
    def backward(ctx: Any, *douts: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        group, causal, rotate = ctx.options
        gradients = _ring(causal, rotate)._templated_ring_attention_backward(
            group, SEQUENCE_DIM, _backward, douts[0].contiguous(), "grad_out", *ctx.saved_tensors,
            is_causal=causal, dropout_p=0.0,
        )  # fmt: skip
        return *gradients[:3], None, None, None


def attend(
    q_BHTD: torch.Tensor, k_BHTD: torch.Tensor, v_BHTD: torch.Tensor, group: Any, causal: bool, rotate: str
) -> torch.Tensor:
    """Return out [B, H, T, D] of this rank's tokens: head and tail chunks when causal, neighbours when not."""
    out: torch.Tensor = _Ring.apply(q_BHTD, k_BHTD, v_BHTD, group, causal, rotate)  # type: ignore[no-untyped-call]
    return out
