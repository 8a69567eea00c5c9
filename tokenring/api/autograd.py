"""The autograd function of attention, the passes that it runs on the executor, and the derivatives that there are.

That is the first, backward. Others are refused where torch lets us detect them. With `create_graph=True` a backward
pass is recorded. It may be, for second derivatives of what else is in the model: only going through attention again is
refused, by a node that the pass leaves on its results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad

from tokenring.api.context import ContextParallel
from tokenring.api.inputs import check_tensor
from tokenring.backends.kernels.delta import AnyDelta, rows_delta
from tokenring.errors import UnsupportedError
from tokenring.runtime.agreement import LSE_GRADIENT, SINKS, UNWANTED, Disagreement, beginning, refusing
from tokenring.runtime.call import ActiveCall
from tokenring.runtime.executor import Executor
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.backends.interfaces import PreparesRows
    from tokenring.runtime.latent_kernel import Expansion, Weights
    from tokenring.runtime.trace import Trace


class Refused(NamedTuple):
    """Texts of errors about the derivatives and transforms that a call does not have."""

    second: str
    forward_mode: str
    transform: str
    batched: str


def refused(name: str, instead: str) -> Refused:
    """Return what errors say of a function. instead: what to do where another derivative than the first is wanted."""
    instead = f"it has the first derivative only, by backward() or torch.autograd.grad: {instead}"
    return Refused(
        f"a second derivative of {name} was requested, as gradient penalties, Hessians and "
        f"torch.autograd.functional.jvp do: {instead}",
        f"a forward-mode derivative of {name} was requested: {instead}",
        in_transform(name, instead),
        f"gradients of {name} were requested in a batch, as is_grads_batched and vectorize=True do, and the "
        f"exchange between ranks is for one at a time: ask for one after another",
    )


def in_transform(name: str, instead: str) -> str:
    """Return what an error says of a function inside a transform of torch.func."""
    return (
        f"{name} was called inside a transform of torch.func (jvp, jacfwd, hessian, grad, vmap), which cannot "
        f"look into an exchange between ranks: {instead}"
    )


ATTENTION = refused(
    "tokenring.attention",
    "leave attention out of that term, or compute it there with attention that torch can differentiate twice "
    "(sdpa_kernel(SDPBackend.MATH))",
)
SECOND, FORWARD_MODE, TRANSFORM, BATCHED = ATTENTION
RECORDED = (
    "backward with create_graph=True goes through a captured call, whose derivative is not recorded: call "
    "tokenring.attention without a capture, which has the first derivative, or leave out create_graph"
)

Gradients = tuple[torch.Tensor, ...]


class AttentionFunction(torch.autograd.Function):
    """Forward and backward of one distributed attention call."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        sinks: torch.Tensor | None,
        cp: ContextParallel,
        request: Request,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, T, Hq, D] in q's dtype and lse [B, Hq, T] fp32; save what backward needs."""
        with cp.turn:
            with refusing(cp, "forward", q):
                q, k, v = (rows_packed(x) for x in (q, k, v))
            out, lse, kept = forward_pass(cp, request, q, k, v, sinks)
        ctx.cp, ctx.request = cp, request
        return saved_for_backward(ctx, q, k, v, sinks, out, lse, kept)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Return dq, dk, dv and the gradient of the sinks. Raises UnsupportedError for several gradients at once."""
        dout, dlse = grads
        cp, request = ctx.cp, ctx.request
        with refusing(cp, "backward", dout, dlse):
            if dout is None and dlse is None:
                return (None,) * 6
            check_gradients("attention", dout, dlse)
            q, k, v, sinks, *made = ctx.saved_tensors  # may compute them anew, by calls of its own
            dout = torch.zeros_like(made[0]) if dout is None else dout
        wanted = sinks is not None and ctx.needs_input_grad[3]

        def compute() -> tuple[torch.Tensor, ...]:
            with cp.turn:
                if ctx.changes.found():  # out and lse are computed again, by all ranks: they make one call
                    made[:2] = forward_pass(cp, request, q, k, v, sinks)[:2]
                found = backward_pass(cp, request, dout, dlse, q, k, v, *made)
                if not wanted:
                    return found
                from tokenring.api.sinks import sinks_gradient

                return *found, sinks_gradient(sinks, dout, dlse, *made[:2])

        depends = [x for x in (dout, dlse, q, k, v, sinks) if x is not None]
        dq, dk, dv, *dsinks = first(compute, *depends)
        return dq, dk, dv, dsinks[0] if dsinks else None, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        """Raise UnsupportedError: forward mode is not computed here."""
        raise UnsupportedError(FORWARD_MODE)


def saved_for_backward(ctx: Any, *saved: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Save what backward needs, and return out and lse as the caller gets them.

    saved: inputs, then what forward made: out, lse and the bytes that were kept, if any.
    """
    *_, out, lse, _ = saved
    assert out is not None and lse is not None
    given = out.data, lse.data  # of which autograd counts changes in place apart from those of what is saved
    ctx.save_for_backward(*saved)
    ctx.changes = Changes(*given) if any(ctx.needs_input_grad) else None
    ctx.set_materialize_grads(False)
    return given


def check_gradients(name: str, *grads: torch.Tensor | None) -> None:
    """Raise UnsupportedError or ConfigurationError for gradients that the backward pass of a function cannot take."""
    for each in grads:
        if each is not None:
            refuse_batched(each)
            check_tensor(f"the backward of {name}", each)


def forward_pass(
    cp: ContextParallel,
    request: Request,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    expansion: Weights | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Agree on a forward pass and run it, again with lse if only some ranks want it; return what `run_forward` does."""
    notes = (() if sinks is None else (SINKS,)) if expansion is None else (expansion.said,)

    def run(asked: Request) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return run_forward(cp.executor(asked, "forward", *notes), cp.active_trace, q, k, v, sinks, expansion=expansion)

    try:
        return run(request)
    except Disagreement as found:  # where transports defer, while it runs
        if found.fields != {UNWANTED}:  # such as of a rank that refuses, which would not make it again
            raise
    return run(replace(request, wants_lse=True))


def backward_pass(
    cp: ContextParallel, request: Request, dout: torch.Tensor, dlse: torch.Tensor | None, *saved: Any,
    expansion: Expansion | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Agree on a backward pass with all ranks and run it; return what `run_backward` does.

    Ranks may differ in whether a gradient flows into lse. Then all make the call again, as one where some does.
    saved: q, k, v, and what forward made. expansion: of latents, which are in the place of k.
    """
    always = () if expansion is None else (expansion.said,)

    def run(*notes: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        executor = cp.executor(request, "backward", *notes, *always)
        q, k, v, out, lse, kept = saved
        return run_backward(executor, cp.active_trace, dout, q, k, v, out, lse, kept, dlse, bool(notes), expansion)

    try:
        return run(*(() if dlse is None else (LSE_GRADIENT,)))
    except Disagreement as found:
        if found.fields != {LSE_GRADIENT}:
            raise
    return run(LSE_GRADIENT)


def run_forward(
    executor: Executor,
    trace: Trace | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None = None,
    *,
    expansion: Weights | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return out [B, T, Hq, D] in q's dtype, lse [B, Hq, T] fp32, and the bytes that backward wants besides, if any.

    All are memory of their own; lse is [0] where the schedule leaves it out. Raises what the transport raises.
    """
    with beginning(executor.transport):
        kept = executor.views.new_kept(q.device)
        own = {"q": executor.views.as_read(rows_packed(q)), "k": rows_packed(k), "v": rows_packed(v)}
        kernel_of = None if expansion is None else _expanding(expansion)
        call = ActiveCall(own, executor.views.kept_slots_in(kept), kernel_of=kernel_of)
    with torch.autocast(q.device.type, enabled=False):  # kernels and merges choose their precision themselves
        executor.run(call, trace)
    out = executor.result(call, "q_partial", "out")
    if executor.views.operator.left_out:
        lse = out.new_empty(0)
    else:
        lse = executor.result(call, "q_partial", "lse").clone(memory_format=torch.contiguous_format)
    if sinks is not None:
        from tokenring.api.sinks import with_sinks

        out, lse = with_sinks(out, lse, sinks)
    return _kept_by_caller(out, q.dtype), lse, kept


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
    dlse: torch.Tensor | None = None,
    lse_gradient: bool = False,
    expansion: Expansion | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk, dv like q, k and v, contiguous; out, lse and kept are what `run_forward` made.

    dlse: the gradient of lse; None: none. lse_gradient: whether there is one on any rank.
    """
    with beginning(executor.transport):
        own = {"q": q, "k": k, "v": v, "dout": dout}
        preparing = None if lse_gradient else executor.preparing
        given = OwnTensors({name: rows_packed(x) for name, x in own.items()}, out=out)
        if executor.views.q_format is not None:
            given.update({name: executor.views.as_read(given[name]) for name in ("q", "dout")})
        given.rows_lse, given.preparing = lse, preparing
        if dlse is not None:
            given["dlse"] = dlse
        any_delta = AnyDelta if lse_gradient else None
        kernel_of = any_delta if expansion is None else _expanding(expansion, any_delta)
        call = ActiveCall(given, executor.views.kept_slots_in(kept), kernel_of=kernel_of)
        call.kernel = None if preparing is None else preparing.for_call()
    with torch.autocast(q.device.type, enabled=False):
        executor.run(call, trace)
    dq = _kept_by_caller(executor.result(call, "q_partial", "dq"), q.dtype)
    dk, dv = (_kept_by_caller(executor.result(call, "kv_partial", name), k.dtype) for name in ("dk", "dv"))
    return dq, dk, dv


def _expanding(expansion: Weights, any_delta: Callable[[Any], Any] | None = None) -> Callable[[Any], Any]:
    """Return what makes of a program's kernel of latents that of a call with these weights."""
    return lambda kernel: kernel.of(expansion, any_delta)


class OwnTensors(dict[str, torch.Tensor]):
    """The call's tensors; lse and delta [B, H, T] are made when the first instruction asks for them.

    rows_lse: lse as forward left it. preparing: the kernel for which both are prepared, if it wants that.
    """

    rows_lse: torch.Tensor | None = None
    preparing: PreparesRows | None = None

    def __missing__(self, name: str) -> torch.Tensor:
        if name == "lse" and self.rows_lse is not None:
            self[name] = self.rows_lse if self.preparing is None else self.preparing.prepared_lse(self.rows_lse)
        elif name == "delta":
            lse = self["lse"] if self.rows_lse is None else self.rows_lse
            found = rows_delta(self["dout"], self["out"], lse, self.get("dlse"))
            self[name] = found if self.preparing is None else self.preparing.prepared_delta(self["dout"], found)
        else:
            raise KeyError(name)
        return self[name]


def rows_packed(x: torch.Tensor) -> torch.Tensor:
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
    def forward(ctx: Any, compute: Callable[[], Gradients], of: Refused, *depends: torch.Tensor) -> Gradients:
        ctx.of = of
        return compute()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(ctx.of.second)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(ctx.of.forward_mode)


def first(compute: Callable[[], Gradients], *depends: torch.Tensor, of: Refused = ATTENTION) -> Gradients:
    """Return what `compute` gives in a backward pass; a node refuses a second derivative by `depends`, as `of` says."""
    if not torch.is_grad_enabled():  # this pass is not recorded
        return compute()
    made: Gradients = _First.apply(compute, of, *depends)  # type: ignore[no-untyped-call]
    return made


def refuse_batched(dout: torch.Tensor, of: Refused = ATTENTION) -> None:
    """Raise UnsupportedError in a backward pass for several gradients at once."""
    refuse_transforms(of.transform)
    if torch._C._functorch.is_legacy_batchedtensor(dout):
        raise UnsupportedError(of.batched)


def refuse_recorded() -> None:
    """Raise UnsupportedError in a backward pass that is recorded, where nothing is held that could refuse later."""
    refuse_transforms()
    if torch.is_grad_enabled():
        raise UnsupportedError(RECORDED)


def refuse_transforms(text: str = TRANSFORM) -> None:
    """Raise UnsupportedError inside torch.func's transforms, whose tensors are wrappers, before any exchange."""
    if torch._C._are_functorch_transforms_active():  # what autograd.Function.apply asks
        raise UnsupportedError(text)


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
