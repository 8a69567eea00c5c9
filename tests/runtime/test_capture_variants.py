"""Captured calls with sinks, and with a gradient of lse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_capture import GraphDevice, inputs, same
from test_capture import device as device  # a fixture

from tokenring import Causal, ConfigurationError, ContextParallel, attention, capture
from tokenring.backends.kernels import delta

Tensors = tuple[torch.Tensor, ...]
DLSE = torch.linspace(-1.0, 1.0, 4 * 48).view(1, 4, 48)


def given(seed: int) -> tuple[Tensors, torch.Tensor]:
    *qkv, dout = inputs(seed)
    sinks = torch.randn(4, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    return (*qkv, sinks), dout


def results(call: Any, seed: int, of_out: bool, of_lse: bool) -> Tensors:
    leaves, dout = given(seed)
    out, lse = call(*leaves)
    made = [(out, dout)] * of_out + [(lse, DLSE)] * of_lse
    gradients = torch.autograd.grad([x for x, _ in made], leaves, [x for _, x in made])
    return tuple(x.detach().clone() for x in (out, lse, *gradients))


def plain(cp: ContextParallel) -> Any:
    return lambda q, k, v, s: attention(q, k, v, cp, Causal(), sinks=s, return_lse=True)


@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
def test_new_inputs(kernel: str, device: GraphDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "_nothing", lambda rest: False)  # as on devices with graphs, which do not look
    cp = ContextParallel(schedule="ring", kernel=kernel)
    (q, k, v, sinks), _ = given(0)
    made = capture(q, k, v, cp, Causal(), sinks=sinks, lse_gradient=True)
    for seed, of in ((1, (True, True)), (2, (False, True)), (1, (True, False))):
        found, right = results(made, seed, *of), results(plain(cp), seed, *of)
        assert all(torch.allclose(x, y, atol=1e-5) for x, y in zip(found, right, strict=True))
    assert same(results(made, 1, False, True), results(plain(cp), 1, False, True))


def test_sinks_as_they_were_captured(device: GraphDevice) -> None:
    cp = ContextParallel(schedule="ring")
    (q, k, v, sinks), _ = given(0)
    with pytest.raises(ConfigurationError, match="was captured with sinks, and is called without"):
        capture(q, k, v, cp, sinks=sinks)(q, k, v)
    with pytest.raises(ConfigurationError, match="was captured without sinks, and is called with some"):
        capture(q, k, v, cp)(q, k, v, sinks)
    made = capture(q, k, v, cp, sinks=sinks)
    with pytest.raises(ConfigurationError, match=r"sinks are \[3\], and q has 4 heads"):
        made(q, k, v, sinks[:3])
    with pytest.raises(ConfigurationError, match=r"sinks is \[4\] torch.bfloat16"):
        made(q, k, v, sinks.bfloat16())
    assert same(results(made, 1, True, False), results(plain_of(cp), 1, True, False))


def plain_of(cp: ContextParallel) -> Any:
    return lambda q, k, v, s: attention(q, k, v, cp, sinks=s, return_lse=True)
