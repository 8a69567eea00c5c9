"""One attention call as two graphs of the device, forward and backward, launched again for new inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch

from tokenring.api.attention import ordered, prepared
from tokenring.api.autograd import (
    FORWARD_MODE,
    refuse_recorded,
    refuse_transforms,
    run_backward,
    run_forward,
)
from tokenring.api.context import ContextParallel
from tokenring.api.inputs import (
    Order,
    call_inputs,
    check_context,
    check_sinks,
    in_order,
    out_in_order,
    warn_if_swapped,
    with_lengths,
)
from tokenring.backends.devices import NO_GRAPHS, DeviceRuntime, device_of
from tokenring.backends.interfaces import Transport
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.runtime.agreement import LSE_GRADIENT, SINKS, refusing
from tokenring.runtime.executor import Executor
from tokenring.sequence.layout import Layout
from tokenring.sequence.mask_words import MaskLike
from tokenring.sequence.workload import Request

if TYPE_CHECKING:
    from tokenring.runtime.streams import Streams

GRADIENT_OF_LSE = (
    "a gradient flows into the lse of a captured call, which was captured without: say capture(..., lse_gradient=True) "
    "on all ranks, or use lse.detach() in the loss"
)
WARM_UP_CALLS = 3  # kernels load, tune and allocate in their first calls, which a graph must not hold

Tensors = tuple[torch.Tensor, ...]
NAMES = ("q", "k", "v", "sinks")


class _Graph(NamedTuple):
    """A graph with the memory that it reads and writes, and the streams of the pool that it uses too."""

    graph: Any
    inputs: Tensors
    outputs: Tensors
    streams: Streams | None


def capture(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: MaskLike = None,
    scale: float | None = None, *, order: Order | None = None, is_causal: bool | None = None,
    sinks: torch.Tensor | None = None, lse_gradient: bool = False, softcap: float = 0.0, layout: Layout | None = None,
) -> CapturedAttention:  # fmt: skip
    """Capture tokenring.attention for inputs like these: a call then costs the launch of a graph.

    q, k, v, sinks, softcap and layout as in `attention`; the values of tensors do not matter. Where one of them
    requires a gradient and gradients are enabled, backward is captured too, with a gradient of lse if lse_gradient says
    so, on all ranks alike. All ranks capture together: they agree on the call here, and not again when it is launched.
    Each place in a model that calls attention needs a capture of its own, since backward finds in it what forward left.
    As with torch.cuda.make_graphed_callables, results lie in memory of the capture until its next call; gradients are
    the caller's.

    Raises UnsupportedError where the device has no graphs or the transport cannot be captured; PeerLost where another
    rank fails to capture; what attention raises.
    """
    check_context(cp)
    made = CapturedAttention(
        *ordered(q, k, v, cp, order), cp, mask, scale, order, is_causal, sinks, lse_gradient, softcap, layout
    )
    warn_if_swapped(q, k, order)
    return made


class CapturedAttention:
    """A captured call: called with q, k and v, and sinks if it has some, it returns (out, lse)."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: MaskLike,
        scale: float | None, order: Order | None = None, is_causal: bool | None = None,
        sinks: torch.Tensor | None = None, lse_gradient: bool = False, softcap: float = 0.0,
        layout: Layout | None = None,
    ) -> None:  # fmt: skip
        check_context(cp)
        self._order, self._lse_gradient = order, lse_gradient
        with_lengths(cp, lambda: self._make(q, k, v, cp, mask, scale, is_causal, sinks, softcap, layout))

    def _make(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: MaskLike,
        scale: float | None, is_causal: bool | None, sinks: torch.Tensor | None, softcap: float,
        layout: Layout | None,
    ) -> None:  # fmt: skip
        q, k, v, request = prepared(
            q, k, v, cp, mask, scale, is_causal=is_causal, sinks=sinks, softcap=softcap, layout=layout
        )
        transport = cp.transport_for(q.device, request.workload)
        with refusing(cp, "forward", q):
            _check_capturable(device_of(q), transport)
        with cp.turn:
            if transport is not None:
                cp.agreed_plan(request)  # what another rank refuses is heard before the trial
                transport.try_capture()
            self._capture((q, k, v) if sinks is None else (q, k, v, sinks), cp, request, transport)

    def _capture(self, given: Tensors, cp: ContextParallel, request: Request, transport: Transport | None) -> None:
        device = device_of(given[0])
        passes: tuple[Pass, ...] = PASSES if request.training and request.differentiable else PASSES[:1]
        notes: dict[Pass, tuple[str, ...]] = {
            "forward": (SINKS,) if len(given) > 3 else (),
            "backward": (LSE_GRADIENT,) if self._lse_gradient else (),
        }
        for _ in range(2):  # bound again on the memory that the pool has grown to for the other pass
            executors = {direction: cp.executor(request, direction, *notes[direction]) for direction in passes}
        inputs = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x.detach()) for x in given)
        self._cp, self._executors = cp, executors  # with the memory that the graphs use
        self._launches, self._backward = 0, None
        try:
            with torch.no_grad():
                self._forward, kept = _forward(device, executors["forward"], inputs)
                if len(passes) > 1:
                    self._backward = _backward(
                        device, executors["backward"], self._forward, kept, self._lse_gradient
                    )
            if transport is not None:  # a graph waits for ever for a rank that has none
                transport.exchange(b"", "the capture")
        except BaseException as error:
            for executor in executors.values():
                _forget(executor)
            if transport is not None:
                transport.fail(error)
            raise

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out [B, T, Hq, D] and lse [B, Hq, T], in the capture's memory until the next call; differentiable.

        Raises ConfigurationError for tensors of other sizes, dtypes or devices, for gradients that were not captured,
        or when the context was closed; in backward, where the capture was called again since.
        """
        self._cp.check_open()
        refuse_transforms()
        q, k, v = call_inputs(*in_order(q, k, v, self._order), self._cp)
        check_sinks(sinks, q)
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        if len(inputs) != len(self._forward.inputs):
            how = ("without sinks, and is called with some", "with sinks, and is called without")[sinks is None]
            raise ConfigurationError(f"this call was captured {how}: capture one for each")
        for name, given, held in zip(NAMES, inputs, self._forward.inputs, strict=False):
            if (given.shape, given.dtype, given.device) != (held.shape, held.dtype, held.device):
                raise ConfigurationError(
                    f"{name} is {list(given.shape)} {given.dtype} on {given.device}; captured was {list(held.shape)} "
                    f"{held.dtype} on {held.device}: capture a call for each size"
                )
        if self._backward is None:
            wanting = [name for name, x in zip(NAMES, inputs, strict=False) if x.requires_grad]
            if wanting and torch.is_grad_enabled():
                raise ConfigurationError(
                    f"gradients of {', '.join(wanting)} are wanted, and this capture has no backward: capture with "
                    f"inputs that require gradients while these are enabled, or call it under torch.no_grad()"
                )
            out, lse = self.launch_forward(inputs)[0]
        else:
            out, lse = _Launched.apply(self, *inputs)  # type: ignore[no-untyped-call]
        return out_in_order(out, self._order), lse

    @staticmethod
    def _launch(which: _Graph, given: Tensors) -> Tensors:
        if which.streams is not None:  # behind what used the pool, or this graph, on another stream
            which.streams.begin()
        for held, new in zip(which.inputs, given, strict=True):
            held.copy_(new.detach())
        which.graph.replay()
        return tuple(x.detach() for x in which.outputs)

    def launch_forward(self, given: Tensors) -> tuple[Tensors, int]:
        """Launch the forward graph; return (out, lse), and the number of the launch."""
        with self._cp.turn:
            self._launches += 1
            return self._launch(self._forward, given), self._launches

    def launch_backward(self, launch: int, dout: torch.Tensor | None, dlse: torch.Tensor | None) -> Tensors:
        """Return dq, dk, dv of a forward, and of the sinks if it has some, the caller's to keep and add to.

        Raises ConfigurationError for an old one, UnsupportedError for a gradient of lse that was not captured.
        """
        if dlse is not None and not self._lse_gradient:
            raise UnsupportedError(GRADIENT_OF_LSE)
        assert self._backward is not None  # only calls that were captured with it are differentiable
        if launch != self._launches:
            raise ConfigurationError(
                f"this is the backward of launch {launch} of a captured call, which was launched {self._launches} "
                f"times: the last one has overwritten what it needs; capture the call for each place in the model, "
                f"and run backward before the next forward"
            )
        given = [held.new_zeros(()).expand(held.shape) if new is None else new
                 for held, new in zip(self._backward.inputs, (dout, dlse), strict=False)]  # fmt: skip
        with self._cp.turn:
            return tuple(x.clone() for x in self._launch(self._backward, tuple(given)))


class _Launched(torch.autograd.Function):
    """Both graphs, for autograd."""

    @staticmethod
    def forward(ctx: Any, captured: CapturedAttention, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.captured, ctx.count = captured, len(inputs)
        ctx.set_materialize_grads(False)
        (out, lse), ctx.launch = captured.launch_forward(inputs)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        dout, dlse = grads
        refuse_recorded()
        if dout is None and dlse is None:
            nothing: tuple[None, ...] = (None,) * (1 + ctx.count)
            return nothing
        captured: CapturedAttention = ctx.captured
        return None, *captured.launch_backward(ctx.launch, dout, dlse)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise UnsupportedError(FORWARD_MODE)


def _check_capturable(device: DeviceRuntime, transport: Transport | None) -> None:
    if transport is not None and not transport.target.capturable:
        raise UnsupportedError(
            f"messages of {type(transport).__name__} cannot be captured in a graph: the host takes part in them; "
            f"call attention without a capture, or choose a transport whose messages the device moves alone"
        )
    if device.new_stream() is None:
        raise UnsupportedError(NO_GRAPHS.format(device.type))


def _forward(device: DeviceRuntime, executor: Executor, inputs: Tensors) -> tuple[_Graph, torch.Tensor | None]:
    """Capture a forward pass; return its graph, and the bytes that backward wants besides its results."""
    _warm_up(device, executor, lambda: run_forward(executor, None, *inputs))
    with device.capture() as graph:
        out, lse, kept = run_forward(executor, None, *inputs)
    _forget(executor)
    return _Graph(graph, inputs, (out, lse), executor.streams), kept


def _backward(
    device: DeviceRuntime, executor: Executor, forward: _Graph, kept: torch.Tensor | None, lse_gradient: bool = False
) -> _Graph:
    from tokenring.api.sinks import sinks_gradient

    out, lse = forward.outputs
    q, k, v, *sinks = forward.inputs
    dout, dlse = torch.zeros_like(out), torch.zeros_like(lse) if lse_gradient else None

    def run() -> Tensors:
        made = run_backward(executor, None, dout, q, k, v, out, lse, kept, dlse, lse_gradient)
        return *made, *(sinks_gradient(each, dout, dlse, out, lse) for each in sinks)

    _warm_up(device, executor, run)
    with device.capture() as graph:
        made = run()
    _forget(executor)
    return _Graph(graph, (dout,) if dlse is None else (dout, dlse), made, executor.streams)


def _warm_up(device: DeviceRuntime, executor: Executor, call: Any) -> None:
    """Make some calls on a new stream, as torch asks of what is then captured."""
    stream = device.new_stream()
    stream.wait_stream(device.current_stream())
    with device.on(stream):
        for _ in range(WARM_UP_CALLS):
            call()
    device.synchronize()
    _forget(executor)


def _forget(executor: Executor) -> None:
    """Forget the last call's stream: outside no call waits for a capture's stream, nor a capture for one outside."""
    if executor.streams is not None:
        executor.streams.forget()
