"""Collectives over the ranks of a TensorParallel, as schedules: all-reduce in two steps, reduce-scatter, all-gather.

They are the two passes of operator "reduce": its forward brings the sum of each row home, its backward gathers rows. An
all-reduce runs both: what is gathered is born whole, since its pass begins when the owner has merged every part.
"""

from __future__ import annotations

import torch

from tokenring.api.autograd import refuse_transforms
from tokenring.api.tensor_parallel import DTYPES, LinearRequest, TensorParallel
from tokenring.errors import ConfigurationError, UnsupportedError


def all_reduce(t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return the sum of the ranks' tensors of one shape, on every rank; t is left as it is.

    Sums are in fp32, rounded once. Raises ConfigurationError (ranks that differ), UnsupportedError (dtypes but fp32 and
    bf16, tensors that want gradients) and PeerLost.
    """
    with tp.refusing("forward", t):
        _check(t, "all_reduce")
        request = _request(t, t.numel(), tp)
        rows = _padded(t, request)
    with tp.turn:
        summed = _reduce(rows, request, tp)
        made = _gather(summed, request, tp, agreed=True)
    return made.flatten()[: t.numel()].view(t.shape)


def reduce_scatter(t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return this rank's part [n, ...] of the sum of the ranks' tensors t [P·n, ...].

    Raises ConfigurationError (a first dimension that the ranks do not divide, ranks that differ), UnsupportedError and
    PeerLost, as all_reduce.
    """
    with tp.refusing("forward", t):
        _check(t, "reduce_scatter")
        if t.dim() == 0 or t.shape[0] % tp.world_size:
            raise ConfigurationError(
                f"reduce_scatter was given {list(t.shape)}: its first dimension does not divide by {tp.world_size} "
                f"ranks; pad it"
            )
        request = _request(t, t.numel(), tp, exact=True)
        rows = _padded(t, request)
    return _reduce(rows, request, tp).view(t.shape[0] // tp.world_size, *t.shape[1:])


def all_gather(t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return the ranks' tensors t [n, ...], one after another: [P·n, ...].

    Raises ConfigurationError (ranks that differ), UnsupportedError and PeerLost, as all_reduce.
    """
    with tp.refusing("backward", t):
        _check(t, "all_gather")
        if t.dim() == 0:
            raise ConfigurationError("all_gather was given a tensor without dimensions: give [n, ...]")
        request = _request(t, t.numel() * tp.world_size, tp, exact=True)
        own = t.detach().contiguous().view(request.tokens // tp.world_size, request.width)
    return _gather(own, request, tp).view(t.shape[0] * tp.world_size, *t.shape[1:])


def _check(t: torch.Tensor, name: str) -> None:
    refuse_transforms()
    if not isinstance(t, torch.Tensor):
        raise ConfigurationError(f"{name} was given a {type(t).__name__}: give a tensor")
    if t.dtype not in DTYPES:
        raise UnsupportedError(f"{name} in {t.dtype} is not supported; use float32 or bfloat16")
    if t.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(f"{name} has no derivative: call it under torch.no_grad(), or on t.detach()")
    if not t.numel():
        raise ConfigurationError(f"{name} was given {list(t.shape)}, which has no elements")


def _request(t: torch.Tensor, elements: int, tp: TensorParallel, exact: bool = False) -> LinearRequest:
    """Return the request for so many elements: rows as pieces want them, each as wide as it must be.

    exact: elements divide by the ranks, and are not padded: one row a rank where pieces do not divide them.
    """
    pieces = tp.pieces_of(elements * t.dtype.itemsize)
    rows = tp.world_size * pieces
    if exact and elements % rows:
        rows = tp.world_size
    return LinearRequest("reduce", rows, tp.world_size, -(-elements // rows), t.dtype, t.device)


def _padded(t: torch.Tensor, request: LinearRequest) -> torch.Tensor:
    flat, size = t.detach().contiguous().flatten(), request.tokens * request.width
    if flat.numel() < size:
        flat = torch.nn.functional.pad(flat, (0, size - flat.numel()))
    return flat.view(request.tokens, request.width)


def _reduce(rows: torch.Tensor, request: LinearRequest, tp: TensorParallel) -> torch.Tensor:
    """Return this rank's rows of the sum."""
    executor, call = tp.call(request, "forward", {"a": rows})
    return executor.result(call, "q_partial", "y")[0, :, 0].to(rows.dtype, copy=rows.dtype != torch.float32)


def _gather(own: torch.Tensor, request: LinearRequest, tp: TensorParallel, agreed: bool = False) -> torch.Tensor:
    made = own.new_empty(request.tokens, request.width)
    tp.call(request, "backward", {"dy": own[None, :, None, :], "da": made}, agreed)
    return made
