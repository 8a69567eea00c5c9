"""Collectives over the ranks of a TensorParallel, as schedules: all-reduce in two steps, reduce-scatter, all-gather.

They are the two passes of operator "reduce": its forward brings the sum of each row home, its backward gathers rows. An
all-reduce runs both: what is gathered is born whole, since its pass begins when the owner has merged every part.

And keys less the mean that they share, which is one such sum: attention is the same, and what a wire format rounds is
smaller.
"""

from __future__ import annotations

import torch

from tokenring.api.autograd import in_transform, refuse_transforms
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_context, check_tensor
from tokenring.api.standing import context_of, outside_graphs
from tokenring.api.tensor_parallel import DTYPES, Given, TensorParallel, check_parallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.agreement import beginning, refusing
from tokenring.runtime.call import BoundPass, run, taken
from tokenring.sequence.workload import DTYPES as KEY_DTYPES
from tokenring.sequence.workload import LinearRequest

TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))


@outside_graphs
def all_reduce(t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return the sum of the ranks' tensors of one shape, on every rank; t is left as it is.

    Sums are in fp32, rounded once. With a wire format parts are encoded on their way to the sum, and the sum on its way
    to all ranks: its owner takes it as the others read it, so that all have the same.
    Raises ConfigurationError (ranks that differ), UnsupportedError (dtypes but fp32 and bf16, tensors that want
    gradients) and PeerLost.
    """
    check_parallel(tp)
    with tp.refusing("forward", t):
        given = _checked(t, "all_reduce")
        request = tp.collective(t.numel(), t)
        rows = _rows(t.detach().reshape(1, -1), request.tokens * request.width, request)
        made = rows.new_empty(rows.shape)
    with tp.turn:
        reducing, gathering = tp.begin(request, given, "forward", "backward")
        summed = _reduced(reducing, rows)
        with beginning(gathering.transport):
            own = _as_own(taken(summed, t.dtype))
        run(gathering, {"dy": own, "da": made})
    return made.flatten()[: t.numel()].view(t.shape)


@outside_graphs
def reduce_scatter(t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return this rank's part [n, ...] of the sum of the ranks' tensors t [P·n, ...].

    Raises ConfigurationError (a first dimension that the ranks do not divide, ranks that differ), UnsupportedError and
    PeerLost, as all_reduce.
    """
    check_parallel(tp)
    ranks = tp.world_size
    with tp.refusing("forward", t):
        given = _checked(t, "reduce_scatter")
        if t.dim() == 0 or t.shape[0] % ranks:
            raise ConfigurationError(
                f"reduce_scatter was given {list(t.shape)}: its first dimension does not divide by {ranks} "
                f"ranks; pad it"
            )
        request, shape = tp.collective(t.numel(), t), (t.shape[0] // ranks, *t.shape[1:])
        rows = _rows(t.detach().reshape(ranks, -1), request.tokens * request.width // ranks, request)
    with tp.turn:
        (reducing,) = tp.begin(request, given, "forward")
        made = taken(_reduced(reducing, rows), t.dtype)
    return made.flatten()[: t.numel() // ranks].view(shape)


@outside_graphs
def all_gather(t: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Return the ranks' tensors t [n, ...], one after another: [P·n, ...].

    With a wire format all ranks have them as they are decoded, their owners too.
    Raises ConfigurationError (ranks that differ), UnsupportedError and PeerLost, as all_reduce.
    """
    check_parallel(tp)
    ranks = tp.world_size
    with tp.refusing("backward", t):
        given = _checked(t, "all_gather")
        if t.dim() == 0:
            raise ConfigurationError("all_gather was given a tensor without dimensions: give [n, ...]")
        request, shape = tp.collective(t.numel() * ranks, t), (t.shape[0] * ranks, *t.shape[1:])
        own = _rows(t.detach().reshape(1, -1), request.tokens * request.width // ranks, request)
        made = own.new_empty(request.tokens, request.width)
    with tp.turn:
        (gathering,) = tp.begin(request, given, "backward")
        run(gathering, {"dy": _as_own(own), "da": made})
    return made.view(ranks, -1)[:, : t.numel()].reshape(shape)


def centered(k: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """Return keys less their mean over all tokens of all ranks, one vector for each sample and head.

    k: [B, T, H, D], this rank's part. Scores of a query all change by the same then, so that `attention` gives the same
    out and gradients, which go to k unchanged; its lse is less by scale · q · mean. Not so with softcap or sinks.
    A wire format (ContextParallel(wire=...)) rounds keys by their size: without a mean, by what scores are made of.
    All ranks call it together: it costs a message of B · H · D numbers in fp32 to each, and a pass over k. Under
    torch.compile the mean is one operator. A key that is not finite makes all of its head NaN.

    Raises ConfigurationError (shapes, ranks that differ), UnsupportedError and PeerLost.
    """
    check_context(cp)
    if torch.compiler.is_compiling():
        if not isinstance(k, torch.Tensor):
            raise ConfigurationError(_no_tensor(k))
        mean: torch.Tensor = torch.ops.tokenring.key_mean(k.detach(), cp.handle)
    else:
        mean = _mean(k, cp)
    return (k.float() - mean).to(k.dtype)


def _checked(t: torch.Tensor, name: str) -> Given:
    """Return what the ranks have to give alike. Raises ConfigurationError and UnsupportedError."""
    refuse_transforms(in_transform(f"tokenring.{name}", "call it outside"))
    if not isinstance(t, torch.Tensor):
        raise ConfigurationError(f"{name} was given a {type(t).__name__}: give a tensor")
    check_tensor(name, t)
    if t.dtype not in DTYPES:
        raise UnsupportedError(f"{name} in {t.dtype} is not supported; use float32 or bfloat16")
    if t.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(f"{name} has no derivative: call it under torch.no_grad(), or on t.detach()")
    if not t.numel():
        raise ConfigurationError(f"{name} was given {list(t.shape)}, which has no elements")
    return {"call": name, "shape": list(t.shape)}


def _rows(parts: torch.Tensor, size: int, request: LinearRequest) -> torch.Tensor:
    """Return parts [k, n], each padded to so many elements, as rows of the request's width."""
    if size > parts.shape[1]:
        parts = torch.nn.functional.pad(parts, (0, size - parts.shape[1]))
    return parts.contiguous().view(-1, request.width)


def _reduced(executor: BoundPass, rows: torch.Tensor) -> torch.Tensor:
    """Return this rank's rows of the sum, in fp32: in memory of the pool, or of the call."""
    return executor.result(run(executor, {"a": rows}), "q_partial", "y")[0, :, 0]


def _as_own(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [n, width] as the executor knows a rank's own tensor: [1, n, 1, width]."""
    return rows[None, :, None, :]


# ---------- the mean of keys


def _mean(k: torch.Tensor, cp: ContextParallel) -> torch.Tensor:
    """Return the mean of all ranks' keys in fp32: [B, 1, H, D]."""
    with refusing(cp, "forward", k):
        cp.check_open()
        if not isinstance(k, torch.Tensor):
            raise ConfigurationError(_no_tensor(k))
        check_tensor("centered", k)
        if k.dim() != 4 or 0 in (k.shape[0], *k.shape[2:]):
            raise ConfigurationError(f"centered was given {list(k.shape)}: give keys [B, T, H, D]")
        if k.dtype not in KEY_DTYPES:
            raise UnsupportedError(f"centered in {k.dtype} is not supported; use float32, bfloat16 or float16")
    with torch.no_grad(), torch.autocast(k.device.type, enabled=False):
        own = k.detach().sum(1, dtype=torch.float32).flatten()
        both = torch.cat((own, own.new_tensor([float(k.shape[1])])))  # with how many they are: ranks may differ
        if cp.world_size > 1:
            both = all_reduce(both, _adder(cp, k.device))
        return (both[:-1] / both[-1].clamp(min=1.0)).view(k.shape[0], 1, *k.shape[2:])


@torch.library.custom_op("tokenring::key_mean", mutates_args=(), schema="(Tensor k, str context) -> Tensor", tags=TAGS)
def _key_mean(k: torch.Tensor, context: str) -> torch.Tensor:
    return _mean(k, context_of(context))


@_key_mean.register_fake
def _(k: torch.Tensor, context: str) -> torch.Tensor:
    shape = (k.shape[0], 1, *k.shape[2:]) if k.dim() == 4 else [1] * k.dim()  # else refused when it runs, by all
    return k.new_empty(shape, dtype=torch.float32)


def _no_tensor(k: object) -> str:
    return f"centered was given a {type(k).__name__}: give keys [B, T, H, D]"


def _adder(cp: ContextParallel, device: torch.device) -> TensorParallel:
    """Return what adds up over the ranks of a context, made at its first use of a transport; it is closed with it."""
    transport = cp.transport_for(device)
    assert transport is not None  # there are several ranks
    made = cp.adders.get(transport)
    if not isinstance(made, TensorParallel):
        made = TensorParallel(cp.group, "direct-q", transport, timeout_seconds=cp.timeout_seconds)
        cp.adders[transport] = made
    return made
