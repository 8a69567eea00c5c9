"""Linear layers over the ranks of a TensorParallel: column (all-gather, then matmul) and row (matmul, then reduce)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch

from tokenring.api.autograd import Refused, first, refuse_batched, refuse_transforms, refused
from tokenring.api.inputs import check_tensor
from tokenring.api.standing import outside_graphs
from tokenring.api.tensor_parallel import DTYPES, Given, Stays, TensorParallel, check_parallel
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.runtime.call import taken
from tokenring.sequence.workload import LinearRequest

INSTEAD = "compute what needs another one with torch.nn.functional.linear, of tensors that are gathered"
COLUMN, ROW = (refused(f"tokenring.{name}_linear", INSTEAD) for name in ("column", "row"))
# By whether the input wants a gradient, and the weight.
BACKWARD = {
    "column": {(True, True): "column", (True, False): "column-dx", (False, True): "column-dw"},
    "row": {(True, True): "row", (True, False): "row-dc", (False, True): "row-dw"},
}


Gradients = dict[str, torch.Tensor]  # of "x", the input, and "w"; what is not there has none


class Layer(NamedTuple):
    """One call of a layer, as both of its passes need it.

    given: what the ranks agree on. tokens: of one rank and batch. wanted: gradients of the input and of the weight.
    """

    tp: TensorParallel
    request: LinearRequest
    given: Given
    tokens: int
    wanted: tuple[bool, bool]

    @property
    def backward(self) -> LinearRequest:
        """The request of a backward pass that makes the gradients that are wanted."""
        return self.request._replace(operator=BACKWARD[self.request.operator][self.wanted])

    def check_kernel(self) -> None:
        """Raise UnsupportedError, before forward, for a backward pass that a kernel by name will not take."""
        if any(self.wanted):
            self.tp.check_kernel(self.backward, "backward")


@outside_graphs
def column_linear(x: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Multiply tokens that are split over the ranks by a weight whose output features are; differentiable.

    x: [B, T/P, D], this rank's tokens. weight: [N/P, D], this rank's features, as of nn.Linear.
    Returns [B, T, N/P] in x's dtype where weights stay; where tokens stay [B, T/P, N]; of tiles/AxB [B, A·T/P, B·N/P].
    The gradient of the weight is added to weight.main_grad, if it has one.

    Raises ConfigurationError (sizes that do not fit, ranks that differ), UnsupportedError (dtypes but fp32 and bf16)
    and PeerLost.
    """
    check_parallel(tp)
    with tp.refusing("forward", x, weight):
        refuse_transforms(COLUMN.transform)
        _check(x, weight, True, "column_linear", "x [B, T/P, D] and weight [N/P, D]")
        ranks = tp.world_size
        request = tp.request("column", (x.shape[0] * x.shape[1] * ranks, weight.shape[0] * ranks, x.shape[2]), x)
        layer = Layer(tp, request, _given("column_linear", x=x, weight=weight), x.shape[1], _wanted(x, weight))
        layer.check_kernel()
        made = tp.pairs(request, x)
    result: torch.Tensor = _Column.apply(x, weight, made, layer)  # type: ignore[no-untyped-call]
    return result


@outside_graphs
def row_linear(h: torch.Tensor, weight: torch.Tensor, tp: TensorParallel) -> torch.Tensor:
    """Multiply what `column_linear` leaves by a weight whose input features are split; differentiable.

    h: [B, T, N/P] (shaped as column_linear returns it). weight: [D, N/P], as of nn.Linear.
    Returns [B, T/P, D] in h's dtype: this rank's tokens, summed over all features.
    The gradient of the weight is added to weight.main_grad, if it has one.

    Raises ConfigurationError (sizes that do not fit, ranks that differ), UnsupportedError (dtypes but fp32 and bf16)
    and PeerLost.
    """
    check_parallel(tp)
    with tp.refusing("forward", h, weight):
        refuse_transforms(ROW.transform)
        _check(h, weight, False, "row_linear", "h [B, T, N/P] and weight [D, N/P]")
        request = _row_request(h, weight, tp)
        tokens = request.tokens // tp.world_size // h.shape[0]
        layer = Layer(tp, request, _given("row_linear", h=h, weight=weight), tokens, _wanted(h, weight))
        layer.check_kernel()
        c = _as_rows(h.detach(), tokens)
    result: torch.Tensor = _Row.apply(h, weight, c, layer)  # type: ignore[no-untyped-call]
    return result


# ---------- checks


def _check(x: torch.Tensor, weight: torch.Tensor, wide: bool, name: str, shapes: str) -> None:
    for each in (x, weight):
        if not isinstance(each, torch.Tensor):
            raise ConfigurationError(f"{name} was given a {type(each).__name__}: give tensors, {shapes}")
        check_tensor(name, each)
    if x.dim() != 3 or weight.dim() != 2 or 0 in (*x.shape, *weight.shape) or (wide and weight.shape[1] != x.shape[2]):
        raise ConfigurationError(f"{name} was given {list(x.shape)} and {list(weight.shape)}: give {shapes}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ConfigurationError(
            f"{name} was given {x.dtype} on {x.device} and a weight of {weight.dtype} on {weight.device}: "
            f"give both in one dtype on one device"
        )
    if x.dtype not in DTYPES:
        raise UnsupportedError(f"{name} in {x.dtype} is not supported; use float32 or bfloat16")


def _wanted(x: torch.Tensor, weight: torch.Tensor) -> tuple[bool, bool]:
    """Return whether backward makes gradients of an input, and of a weight."""
    recorded = torch.is_grad_enabled()
    return recorded and x.requires_grad, recorded and weight.requires_grad


def _given(name: str, **tensors: torch.Tensor) -> Given:
    """Return what the ranks have to give alike: a rank that records nothing would miss in backward."""
    recorded = torch.is_grad_enabled()
    wanted = " and ".join(each for each, x in tensors.items() if recorded and x.requires_grad)
    shapes = {each: list(x.shape) for each, x in tensors.items()}
    return {"call": name, **shapes, "gradients of": wanted or "none"}


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
    stays: Stays | None = None
    if tp.stays == "either":
        stays = "weights" if share == ranks else "tokens"
    request = tp.request("row", (tokens, features, weight.shape[0]), h, stays)
    if (shape := tp.box(request).shape) != (rows, h.shape[2]):
        if tp.kernel == "auto":
            what, name, advice = "schedule", request.schedule, ", or say which stays: TensorParallel(stays=...)"
        else:  # such a kernel takes what lies between the layers in one place only
            what, name, advice = "kernel", tp.kernel, ""
        raise ConfigurationError(
            f"row_linear was given h of {rows} tokens and {h.shape[2]} features, but {what} {name!r} has "
            f"{shape[0]} and {shape[1]} on a rank: compute the column layer before it by the same {what}{advice}"
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


def _parameter(weight: torch.Tensor, layer: Layer) -> torch.Tensor | None:
    """Return a weight if its main_grad is to be added to: to save it may give back another tensor, without one.

    A leaf lives as long as its module.
    """
    return weight if layer.wanted[1] and (weight.is_leaf or hasattr(weight, "main_grad")) else None


def _of_weight(parameter: torch.Tensor | None, dtype: torch.dtype, dw: torch.Tensor) -> Gradients:
    """Return the gradient of a weight for autograd; where it has a main_grad, add it there, and return what it wants.

    Megatron's hooks want a gradient that nobody reads, where it says grad_added_to_main_grad.
    """
    main_grad = getattr(parameter, "main_grad", None)
    if parameter is None or not isinstance(main_grad, torch.Tensor):
        return {"w": taken(dw, dtype).contiguous().data}
    main_grad.add_(dw)
    if not hasattr(parameter, "grad_added_to_main_grad"):
        return {}
    parameter.grad_added_to_main_grad = True
    return {"w": torch.zeros_like(parameter)}


# ---------- passes
#
# Results are `.data`: in-place operations on a view that a function of autograd returns are refused.


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, c: torch.Tensor, layer: Layer) -> torch.Tensor:
        with layer.tp.turn:
            own = {"x": _own(_rows(x)), "w": _own(weight), "c": c}
            layer.tp.call(layer.request, "forward", layer.given, own)
        ctx.save_for_backward(x if layer.wanted[1] else None, weight if layer.wanted[0] else None)
        ctx.layer, ctx.parameter = layer, _parameter(weight, layer)
        return _as_batches(own["c"], x.shape[0], x.shape[1]).data

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Layer = ctx.layer
        with layer.tp.refusing("backward", dout):
            refuse_batched(dout, COLUMN)
            x, weight = ctx.saved_tensors
            own = {"dc": _as_rows(dout.detach(), layer.tokens)}
            if x is not None:
                own["x"] = _own(_rows(x))
            if weight is not None:
                own["w"] = _own(weight)

        def compute() -> Gradients:
            made: Gradients = {}
            with layer.tp.turn:
                executor, call = layer.tp.call(layer.backward, "backward", layer.given, own)
                if layer.wanted[0]:
                    dx = taken(executor.result(call, "q_partial", "dx")[0, :, 0], dout.dtype)
                    made["x"] = dx.view(dout.shape[0], layer.tokens, -1).data
                if layer.wanted[1]:
                    made |= _of_weight(ctx.parameter, dout.dtype, executor.result(call, "kv_partial", "dw")[0, :, 0])
            return made

        return _gradients(compute, COLUMN, dout, x, weight)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(COLUMN.forward_mode)


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, weight: torch.Tensor, c: torch.Tensor, layer: Layer) -> torch.Tensor:
        with layer.tp.turn:
            own = {"w": _own(weight.t()), "c": c}
            executor, call = layer.tp.call(layer.request, "forward", layer.given, own)
            y = taken(executor.result(call, "q_partial", "y")[0, :, 0], h.dtype)
        ctx.save_for_backward(h if layer.wanted[1] else None, weight if layer.wanted[0] else None)
        ctx.layer, ctx.parameter = layer, _parameter(weight, layer)
        return y.reshape(h.shape[0], layer.tokens, -1).data

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        layer: Layer = ctx.layer
        with layer.tp.refusing("backward", dout):
            refuse_batched(dout, ROW)
            h, weight = ctx.saved_tensors
            own = {"dy": _own(_rows(dout.detach()))}
            if h is not None:
                own["c"] = _as_rows(h, layer.tokens)
            if weight is not None:
                own |= {"w": _own(weight.t()), "dc": layer.tp.pairs(layer.request, dout)}

        def compute() -> Gradients:
            made: Gradients = {}
            with layer.tp.turn:
                executor, call = layer.tp.call(layer.backward, "backward", layer.given, own)
                if layer.wanted[1]:
                    made = _of_weight(ctx.parameter, dout.dtype, executor.result(call, "kv_partial", "dw")[0, :, 0].t())
            if layer.wanted[0]:
                made["x"] = _as_batches(own["dc"], dout.shape[0], layer.tokens).data
            return made

        return _gradients(compute, ROW, dout, h, weight)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(ROW.forward_mode)


def _gradients(
    compute: Callable[[], Gradients], of: Refused, *depends: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of input and weight, and of what has none, with a node that refuses a second derivative."""
    names: list[str] = []

    def listed() -> tuple[torch.Tensor, ...]:
        made = compute()
        names.extend(made)
        return tuple(made.values())

    found = first(listed, *(each for each in depends if each is not None), of=of)
    made = dict(zip(names, found, strict=True))
    return made.get("x"), made.get("w"), None, None
