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
from cases import Case
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
module = import_module("tokenring.capture")  # tokenring.capture is the function


@dataclass
class Graph:
    """The operators that were launched while it was captured, in order."""

    operators: list[tuple[Any, Any, Any, Any]] = field(default_factory=list)

    def replay(self) -> None:
        for func, args, kwargs, made in self.operators:
            again = func(*args, **kwargs)
            for old, new in zip(_several(made), _several(again), strict=True):
                if old is not new:
                    old.copy_(new)


def _several(made: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in (made if isinstance(made, (tuple, list)) else (made,)) if isinstance(x, torch.Tensor))


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
            before = tuple(x.clone() for x in _several(operator[3]))
            results(made, inputs(2))
            if same(before, _several(operator[3])):  # such as where rows see nothing: nowhere
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


def test_what_is_refused(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    q, k, v, _ = inputs(0)
    made = capture(q, k, v, cp)
    with pytest.raises(ConfigurationError, match=r"q is \[2, 48, 4, 16\] .*; captured was \[1, 48, 4, 16\]"):
        results(made, inputs(0, batch=2))
    with pytest.raises(ConfigurationError, match=r"k is .* torch\.bfloat16"):
        made(q, k.bfloat16(), v)
    out, lse = made(q, k, v)
    with pytest.raises(UnsupportedError, match=r"use lse\.detach"):
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
    cp = ContextParallel(layout=case.layout, schedule=case.schedule, transport="gloo", timeout_seconds=20.0)
    moved: Any = cp.transport
    if not capturable:
        try:
            captured(inputs(0), cp, Causal())
        except UnsupportedError as error:
            return str(error)
        return ""
    device, exchange, seen = GraphDevice(), moved.exchange, []
    moved.capabilities = replace(moved.capabilities, capturable=True)

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


def test_transports_that_need_the_host_are_refused(ranks: RankPools) -> None:
    case = Case(2, "ring", "zigzag", "causal", 4, 2, 1, 16, torch.float32, None)
    for said in ranks(2)(captured_with_messages, case, False):
        assert "messages of GlooTransport cannot be captured in a graph" in said


def test_ranks_agree_outside_of_the_graph(ranks: RankPools) -> None:
    case = Case(2, "ring", "zigzag", "causal", 4, 2, 1, 16, torch.float32, None)
    with ranks.expendable(2) as some:
        assert some(captured_with_messages, case, True) == [(0, True, 2)] * 2
