"""Linear layers over the ranks of a TensorParallel: column (all-gather, then matmul) and row (matmul, then reduce)."""

from __future__ import annotations

from typing import Any

import torch

from tokenring.api.autograd import first, refuse_batched, refuse_transforms
from tokenring.api.tensor_parallel import DTYPES, LinearRequest, TensorParallel
from tokenring.errors import ConfigurationError, UnsupportedError


def column_linear(x: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Multiply tokens that are split over the ranks by a weight whose output features are; differentiable.

    x: [B, T/P, D], this rank's tokens. weight: [N/P, D], this rank's features, as of nn.Linear.
    Returns [B, T, N/P] in x's dtype where weights stay; where tokens stay [B, T/P, N]; of tiles/AxB [B, A·T/P, B·N/P].
    The gradient of the weight is added to weight.main_grad, if it has one.

    Raises ConfigurationError (sizes that do not fit, ranks that differ), UnsupportedError (dtypes but fp32 and bf16)
    and PeerLost.
    """
    with tp.refusing("forward", x, weight):
        refuse_transforms()
        _check(x, weight, True, "column_linear", "x [B, T/P, D] and weight [N/P, D]")
        ranks = tp.world_size
        sizes = x.shape[0] * x.shape[1] * ranks, weight.shape[0] * ranks, x.shape[2]
        request = LinearRequest("column", *sizes, x.dtype, x.device)
        tp.schedule_of(request)
    made: torch.Tensor = _Column.apply(x, weight, tp, request)  # type: ignore[no-untyped-call]
    return made


def row_linear(h: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Multiply what `column_linear` leaves by a weight whose input features are split; differentiable.

    h: [B, T, N/P] (shaped as column_linear returns it). weight: [D, N/P], as of nn.Linear.
    Returns [B, T/P, D] in h's dtype: this rank's tokens, summed over all features.
    The gradient of the weight is added to weight.main_grad, if it has one.

    Raises ConfigurationError (sizes that do not fit, ranks that differ), UnsupportedError (dtypes but fp32 and bf16)
    and PeerLost.
    """
    with tp.refusing("forward", h, weight):
        refuse_transforms()
        _check(h, weight, False, "row_linear", "h [B, T, N/P] and weight [D, N/P]")
        request = _row_request(h, weight, tp)
    made: torch.Tensor = _Row.apply(h, weight, tp, request)  # type: ignore[no-untyped-call]
    return made


# ---------- checks


def _check(x: torch.Tensor, weight: torch.Tensor, wide: bool, name: str, shapes: str) -> None:
    for each in (x, weight):
        if not isinstance(each, torch.Tensor):
            raise ConfigurationError(f"{name} was given a {type(each).__name__}: give tensors, {shapes}")
    if x.dim() != 3 or weight.dim() != 2 or 0 in (*x.shape, *weight.shape) or (wide and weight.shape[1] != x.shape[2]):
        raise ConfigurationError(f"{name} was given {list(x.shape)} and {list(weight.shape)}: give {shapes}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ConfigurationError(
            f"{name} was given {x.dtype} on {x.device} and a weight of {weight.dtype} on {weight.device}: "
            f"give both in one dtype on one device"
        )
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"{name} in {x.dtype} is not supported; use float32 or bfloat16")


def _row_request(h: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> LinearRequest:
    """Return the request of a row layer: how many tokens there are follows from the place of h."""
    ranks, features = tp.world_size, weight.shape[1] * tp.world_size
    rows = h.shape[0] * h.shape[1]
    if h.shape[2] * ranks % features or features % h.shape[2]:
        raise ConfigurationError(
            f"row_linear was given h with {h.shape[2]} features and a weight with {weight.shape[1]}: h has the "
            f"weight's features, or those of several ranks, as column_linear leaves it"
        )
    share = features // h.shape[2]  # ranks among which the features of some tokens are split
    if h.shape[1] % share:
        raise ConfigurationError(
            f"row_linear was given {h.shape[1]} tokens, which do not divide by {share} ranks: pad the sequence"
        )
    tokens = rows // share * ranks
    request = LinearRequest("row", tokens, features, weight.shape[0], h.dtype, h.device)
    if (shape := tp.box(request).shape) != (rows, h.shape[2]):
        name = tp.schedule_of(request).name
        raise ConfigurationError(
            f"row_linear was given h of {rows} tokens and {h.shape[2]} features, but schedule {name!r} has "
            f"{shape[0]} and {shape[1]} on a rank: compute the column layer before it by the same schedule, or say "
            f"which stays: TensorParallel(stays=...)"
        )
    return request


# ---------- tensors of pairs: rows are rank after rank, in each batch after batch


def _as_batches(c: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Return a tensor of pairs [ranks · B · T/P, N] as [B, ranks · T/P, N]."""
    if batch == 1:
        return c[None]
    ranks = c.shape[0] // (batch * tokens)
    return c.view(ranks, batch, tokens, -1).transpose(0, 1).reshape(batch, ranks * tokens, -1)


def _as_rows(h: torch.Tensor, tokens: int) -> torch.Tensor:
    """Return [B, ranks · T/P, N] as a tensor of pairs [ranks · B · T/P, N], contiguous."""
    if h.shape[0] == 1:
        return h[0].contiguous()
    batch, rows, features = h.shape
    return h.reshape(batch, rows // tokens, tokens, features).transpose(0, 1).reshape(batch * rows, features)


def _own(x: torch.Tensor) -> torch.Tensor:
    """Return rows [n, D] as the executor knows a rank's own tensor: [1, n, 1, D]."""
    return x[None, :, None, :]


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _to_main_grad(weight: torch.Tensor, dw: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a weight; where it has a main_grad, add it there, in that dtype, and return what it wants.

    Megatron's hooks want a gradient that nobody reads, where it says grad_added_to_main_grad.
    """
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, torch.Tensor):
        return dw.to(weight.dtype)
    main_grad.add_(dw)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    return torch.zeros_like(weight)


# ---------- passes


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tp: TensorParallel, request: LinearRequest
    ) -> torch.Tensor:
        c = x.new_empty(tp.box(request).shape)
        tp.call(request, "forward", {"x": _own(_rows(x)), "w": _own(weight), "c": c})
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.request = tp, request
        return _as_batches(c, x.shape[0], x.shape[1])

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.tp.refusing("backward", dout):
            refuse_batched(dout)
            x, weight = ctx.saved_tensors

        def compute() -> tuple[torch.Tensor, ...]:
            dc = _as_rows(dout, x.shape[1])
            own = {"x": _own(_rows(x)), "w": _own(weight), "dc": dc}
            executor, call = ctx.tp.call(ctx.request, "backward", own)
            dx = executor.result(call, "q_partial", "dx")[0, :, 0].to(x.dtype, copy=x.dtype != torch.float32)
            dw = executor.result(call, "kv_partial", "dw")[0, :, 0]
            return dx.reshape(x.shape), *_given(_to_main_grad(weight, dw))

        dx, *dw = first(compute, dout, x, weight)
        return dx, dw[0] if dw else None, None, None


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: torch.Tensor, weight: torch.Tensor, tp: TensorParallel, request: LinearRequest
    ) -> torch.Tensor:
        ctx.tokens = request.tokens // tp.world_size // h.shape[0]
        executor, call = tp.call(request, "forward", {"w": _own(weight.t()), "c": _as_rows(h, ctx.tokens)})
        y = executor.result(call, "q_partial", "y")[0, :, 0].to(h.dtype, copy=h.dtype != torch.float32)
        ctx.save_for_backward(h, weight)
        ctx.tp, ctx.request = tp, request
        return y.reshape(h.shape[0], ctx.tokens, -1)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        with ctx.tp.refusing("backward", dout):
            refuse_batched(dout)
            h, weight = ctx.saved_tensors

        def compute() -> tuple[torch.Tensor, ...]:
            c = _as_rows(h, ctx.tokens)
            dc = torch.empty_like(c)
            own = {"dy": _own(_rows(dout)), "w": _own(weight.t()), "c": c, "dc": dc}
            executor, call = ctx.tp.call(ctx.request, "backward", own)
            dw = executor.result(call, "kv_partial", "dw")[0, :, 0].t()
            return _as_batches(dc, h.shape[0], ctx.tokens), *_given(_to_main_grad(weight, dw))

        dh, *dw = first(compute, dout, h, weight)
        return dh, dw[0] if dw else None, None, None


def _given(dw: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    return () if dw is None else (dw,)
