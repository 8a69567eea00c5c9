"""A captured call: launched again on new inputs, it gives what attention gives. On a fake device whose graphs record
the operators of a call on CPU tensors, and run them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

import pytest
import torch
from captured_world import act_again, several
from cases import Case
from patience import patient
from ranks import Here, RankPools
from torch.utils._python_dispatch import TorchDispatchMode

from tokenring import (
    CapturedAttention,
    Causal,
    ConfigurationError,
    ContextParallel,
    Mask,
    UnsupportedError,
    attention,
    capture,
)
from tokenring.backends.devices import Cpu, device_of

Tensors = tuple[torch.Tensor, ...]
module = import_module("tokenring.api.capture")


@dataclass
class Graph:
    """The operators that were launched while it was captured, in order."""

    operators: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)

    def replay(self) -> None:
        for each in self.operators:
            act_again(*each)


class _Capturing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, graph: Graph) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.name.startswith("aten::empty"):
            self.graph.operators.append((func, args, kwargs or {}, made))
        return made


class _Stream:
    def wait_stream(self, other: object) -> None:
        """Everything is done at once."""


@dataclass
class GraphDevice(Cpu):
    """A CPU with graphs."""

    graphs: list[Graph] = field(default_factory=list)
    capturing: bool = False

    def new_stream(self, high_priority: bool = False) -> Any:
        return _Stream()

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        self.graphs.append(Graph())
        self.capturing = True
        with _Capturing(self.graphs[-1]):
            yield self.graphs[-1]
        self.capturing = False


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> GraphDevice:
    made = GraphDevice()
    monkeypatch.setattr(module, "device_of", lambda where: made)
    return made


def inputs(seed: int, batch: int = 1) -> Tensors:
    random = torch.Generator().manual_seed(seed)
    q, k, v, dout = (torch.randn(batch, 48, heads, 16, generator=random) for heads in (4, 2, 2, 4))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def results(call: Any, given: Tensors) -> Tensors:
    *qkv, dout = given
    out, lse = call(*qkv)
    return tuple(x.detach().clone() for x in (out, lse, *torch.autograd.grad(out, qkv, dout)))


def captured(given: Tensors, cp: ContextParallel, mask: Mask | None = None) -> CapturedAttention:
    q, k, v, *_ = given
    return capture(q, k, v, cp, mask)


def plain(cp: ContextParallel, mask: Mask | None = None) -> Any:
    return lambda q, k, v: attention(q, k, v, cp, mask, return_lse=True)


def same(some: Tensors, others: Tensors) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def test_new_inputs_give_new_results(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    made = captured(inputs(0), cp, Causal())
    assert [len(graph.operators) > 0 for graph in device.graphs] == [True, True]
    for seed in (1, 2, 1):
        assert same(results(made, inputs(seed)), results(plain(cp, Causal()), inputs(seed)))
    assert not same(results(made, inputs(1)), results(made, inputs(2)))


def test_an_operator_that_is_left_out_is_found_out(device: GraphDevice) -> None:
    """Every one that makes something else of other inputs: what the host had computed would stay what it was."""
    cp = ContextParallel(schedule="ring")
    made = captured(inputs(0), cp, Causal())
    wanted = results(made, inputs(1))
    left_out = []
    for graph in device.graphs:
        for at, operator in enumerate(list(graph.operators)):
            results(made, inputs(1))
            before = tuple(x.clone() for x in several(operator[3]))
            results(made, inputs(2))
            if same(before, several(operator[3])):  # such as where rows see nothing: nowhere
                continue
            left_out.append(graph.operators.pop(at)[0]._schema.name)
            assert not same(results(made, inputs(1)), wanted), left_out[-1]
            graph.operators.insert(at, operator)
    assert len(left_out) > 3 and any("scaled_dot_product" in name for name in left_out)
    assert same(results(made, inputs(1)), wanted)


def test_two_places_of_a_model(device: GraphDevice) -> None:
    """Forward, forward, then their backwards: each capture keeps its own."""
    cp = ContextParallel(schedule="ring")
    one, two = (captured(inputs(0), cp, Causal()) for _ in range(2))
    q, k, v, dout = inputs(3)

    def model(first: Any, second: Any) -> Tensors:
        middle = first(q, k, v)[0]
        out = second(middle, k, v)[0]
        return tuple(x.clone() for x in torch.autograd.grad(out, (q, k, v), dout))

    assert same(model(one, two), model(plain(cp, Causal()), plain(cp, Causal())))


def test_without_gradients(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    q, k, v, _ = (x.detach() for x in inputs(0))
    made = capture(q, k, v, cp)
    assert len(device.graphs) == 1
    q, k, v, _ = (x.detach() for x in inputs(1))
    assert same(made(q, k, v), plain(cp)(q, k, v))


def trained(call: Any, steps: int) -> Tensors:
    """The gradients of some steps that nobody sets to zero, as a loop that accumulates them has them."""
    leaves = inputs(0)[:3]
    for seed in range(steps):
        out, _ = call(*leaves)
        torch.autograd.backward(out, inputs(seed)[3])
    return tuple(x.grad for x in leaves if x.grad is not None)


def test_gradients_accumulate(device: GraphDevice) -> None:
    """Leaves keep the first gradient that they get, and add the others to it: it must not lie in the capture."""
    cp = ContextParallel(schedule="ring")
    made, wanted = (trained(call, 3) for call in (captured(inputs(0), cp, Causal()), plain(cp, Causal())))
    assert len(made) == 3 and same(made, wanted)


def test_the_backward_of_an_older_launch_is_refused(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    made = captured(inputs(0), cp, Causal())
    one, two = inputs(1), inputs(2)
    first, second = made(*one[:3])[0], made(*two[:3])[0]
    with pytest.raises(ConfigurationError, match="backward of launch 1 of a captured call, which was launched 2 times"):
        torch.autograd.grad(first, one[:3], one[3])
    found = torch.autograd.grad(second, two[:3], two[3])
    assert same(found, results(plain(cp, Causal()), inputs(2))[2:])
    out = made(*one[:3])[0]
    with torch.no_grad():
        made(*two[:3])  # no gradients of its own, and the same memory
    with pytest.raises(ConfigurationError, match="backward of launch 3"):
        torch.autograd.grad(out, one[:3], one[3])


def test_gradients_that_were_not_captured_are_refused(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    q, k, v, _ = inputs(1)
    made = capture(q.detach(), k.detach(), v.detach(), cp)
    with pytest.raises(ConfigurationError, match=r"gradients of q, v are wanted.*under torch\.no_grad"):
        made(q, k.detach(), v)
    with torch.no_grad():
        assert same(made(q, k, v), plain(cp)(q, k, v))
    with torch.no_grad():
        made = capture(q, k, v, cp)
    with pytest.raises(ConfigurationError, match="gradients of q, k, v are wanted"):
        made(q, k, v)


def test_autocast(device: GraphDevice) -> None:
    """As attention does: in bf16, with gradients in fp32 for inputs in fp32."""
    cp = ContextParallel(schedule="ring")

    def half(call: Any) -> Tensors:
        *qkv, dout = inputs(1)
        with torch.autocast("cpu", torch.bfloat16):
            out, lse = call(*qkv)
        return out.detach().clone(), lse.detach().clone(), *torch.autograd.grad(out, qkv, dout.bfloat16())

    with torch.autocast("cpu", torch.bfloat16):
        made = captured(inputs(0), cp, Causal())
    found = half(made)
    assert [x.dtype for x in found] == [torch.bfloat16, *[torch.float32] * 4]
    assert same(found, half(plain(cp, Causal())))
    with pytest.raises(ConfigurationError, match=r"q is .*float32 .*; captured was .*bfloat16"):
        results(made, inputs(1))


def test_what_is_refused(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    q, k, v, _ = inputs(0)
    made = capture(q, k, v, cp)
    with pytest.raises(ConfigurationError, match=r"q is \[2, 48, 4, 16\] .*; captured was \[1, 48, 4, 16\]"):
        results(made, inputs(0, batch=2))
    with pytest.raises(ConfigurationError, match=r"k is .* torch\.bfloat16"):
        made(q, k.bfloat16(), v)
    out, lse = made(q, k, v)
    with pytest.raises(UnsupportedError, match=r"say capture\(\.\.\., lse_gradient=True\).*or use lse\.detach"):
        torch.autograd.grad(out.sum() + lse.sum(), q)
    cp.close()
    with pytest.raises(ConfigurationError, match="was closed"):
        made(q, k, v)


def test_devices_without_graphs_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="device cpu has no graphs"):
        captured(inputs(0), ContextParallel(schedule="ring"))


# ---------- with messages


def captured_with_messages(here: Here, case: Case, capturable: bool) -> Any:
    """What is said of a transport; or what it is asked while a graph is captured, and in all."""
    cp = ContextParallel(layout=case.layout, schedule=case.schedule, transport="gloo", timeout_seconds=patient(20.0))
    moved: Any = cp.transport
    if not capturable:
        try:
            captured(inputs(0), cp, Causal())
        except UnsupportedError as error:
            return str(error)
        return ""
    device, exchange, seen = GraphDevice(), moved.exchange, []
    moved.target = replace(moved.target, capturable=True)

    def watched(payload: bytes, what: str) -> list[bytes]:
        seen.append(device.capturing)
        result: list[bytes] = exchange(payload, what)
        return result

    moved.exchange = watched
    vars(module)["device_of"] = lambda where: device
    try:
        captured(inputs(0), cp, Causal())
    finally:
        vars(module)["device_of"] = device_of
    cp.close()
    return sum(seen), len(seen) > 0, len(device.graphs)


class FailingDevice(GraphDevice):
    """Its last graph cannot be made: known only when everything in it has been captured."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        with super().capture() as graph:
            yield graph
        if self.fails and len(self.graphs) == 2:
            raise MemoryError("no room for a graph")


def captured_on_some(here: Here, case: Case) -> tuple[str, str]:
    """What a rank says where the last one fails to capture, and of the call after that."""
    cp = ContextParallel(layout=case.layout, schedule=case.schedule, transport="gloo", timeout_seconds=patient(20.0))
    moved: Any = cp.transport
    moved.target = replace(moved.target, capturable=True)
    device, said = FailingDevice(here.rank == here.world_size - 1), []
    vars(module)["device_of"] = lambda where: device
    try:
        for call in (captured, results):
            try:
                call(inputs(0), cp, Causal()) if call is captured else results(plain(cp, Causal()), inputs(0))
                said.append("done")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    finally:
        vars(module)["device_of"] = device_of
    cp.close()
    return said[0], said[1]


def test_a_rank_that_cannot_capture_is_known_to_all(ranks: RankPools) -> None:
    """The graphs of the others would wait for it for ever."""
    case = Case(2, "ring", "zigzag", "causal", 4, 2, 1, 16, torch.float32, None)
    with ranks.expendable(2) as some:
        (other, then), (failed, _) = some(captured_on_some, case)
    assert failed == "MemoryError: no room for a graph"
    assert other.startswith("PeerLost: ") and "rank 1" in other and then.startswith("PeerLost: ")


def test_transports_that_need_the_host_are_refused(ranks: RankPools) -> None:
    case = Case(2, "ring", "zigzag", "causal", 4, 2, 1, 16, torch.float32, None)
    for said in ranks(2)(captured_with_messages, case, False):
        assert "messages of GlooTransport cannot be captured in a graph" in said


def test_ranks_agree_outside_of_the_graph(ranks: RankPools) -> None:
    case = Case(2, "ring", "zigzag", "causal", 4, 2, 1, 16, torch.float32, None)
    with ranks.expendable(2) as some:
        assert some(captured_with_messages, case, True) == [(0, True, 2)] * 2
