"""What peers compute with: a stand-in for flash_attn, and the operator that torch's ring is given."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from oracle import allowed, attention64

import tokenring as tr
from tokenring.backends.kernels.cpu_flash import CpuFlash
from tokenring.cli.bench.others import flash_attn_cpu, torch_ring
from tokenring.cli.bench.peers import sleeping_instead
from tokenring.cli.bench.sleeping import Sleeping


def test_stand_in_computes_attention() -> None:
    """Bottom-right causal, grouped heads, results into slices of buffers."""
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 24, 4, 16), torch.randn(2, 40, 2, 16), torch.randn(2, 40, 2, 16)
    dout = torch.randn_like(q)
    for causal in (False, True):
        visible = torch.ones(24, 40, dtype=torch.bool).tril(16 if causal else 40)
        want = attention64(q, k, v, dout, visible)
        out, lse = flash_attn_cpu._flash_attn_forward(q, k, v, 0.0, 0.25, causal)[:2]
        buffers = [torch.full((2, 50, heads, 16), 7.0) for heads in (4, 2, 2)]
        results = [buffer[:, :length] for buffer, length in zip(buffers, (24, 40, 40), strict=True)]
        dq, dk, dv = results
        flash_attn_cpu._flash_attn_backward(dout, q, k, v, out, lse, dq, dk, dv, 0.0, 0.25, causal)
        for found, wanted in zip((out, lse, *results), (want.out, want.lse, want.dq, want.dk, want.dv), strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        assert all(bool((buffer[:, 40:] == 7).all()) for buffer in buffers)


def test_stand_in_computes_packed_sequences() -> None:
    torch.manual_seed(2)
    q, k, v = (torch.randn(30, 4, 16) for _ in range(3))
    bounds = torch.tensor([0, 12, 30], dtype=torch.int32)
    out, lse = flash_attn_cpu._flash_attn_varlen_forward(q, k, v, bounds, bounds, 18, 18, 0.0, 0.25, True)[:2]
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    flash_attn_cpu._flash_attn_varlen_backward(
        q, q, k, v, out, lse, dq, dk, dv, bounds, bounds, 18, 18, 0.0, 0.25, True
    )
    visible = allowed(tr.Causal() & tr.Documents([0, 12, 30]), 30, 30)
    want = attention64(q[None], k[None], v[None], q[None], visible)
    for found, wanted in zip((out, dq, dk, dv), (want.out, want.dq, want.dk, want.dv), strict=True):
        torch.testing.assert_close(found.double(), wanted[0], rtol=1e-5, atol=1e-5)


def test_peers_kernels_sleep_as_ours_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways in which peers reach a kernel take the time of what is visible, and give results of the right sizes."""
    real = ModuleType("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    slept: list[float] = []
    monkeypatch.setattr(Sleeping, "_sleep", lambda self, began, flops: slept.append(flops))
    q, k = torch.randn(1, 24, 4, 16), torch.randn(1, 40, 2, 16)
    with sleeping_instead(0.05):
        assert sys.modules["flash_attn"].is_stand_in, "also where the real one is installed"
        out, lse = flash_attn_cpu._flash_attn_forward(q, k, k, 0.0, 0.25, True)[:2]
        assert (out.shape, lse.shape) == (q.shape, (1, 4, 24))
        assert sum(slept) == 4 * 4 * 16 * (24 * 25 // 2 + 24 * 16)
        slept.clear()
        own = q.transpose(1, 2)
        out, lse = torch_ring._forward(own, own, own, is_causal=True, dropout_p=0.0)
        given = {"grad_out": own, "query": own, "key": own, "value": own, "out": out, "logsumexp": lse}
        torch_ring._backward(**given, is_causal=True, dropout_p=0.0)
        assert slept == [4 * 4 * 16 * 24 * 25 // 2, 10 * 4 * 16 * 24 * 25 // 2]
        slept.clear()
    assert [name for name in sys.modules if name.partition(".")[0] == "flash_attn"] == ["flash_attn"]
    assert sys.modules["flash_attn"] is real
    flash_attn_cpu._flash_attn_forward(q, k, k, 0.0, 0.25, True)
    assert not slept, "afterwards they compute again"


def test_torch_ring_takes_a_kernel_of_ours() -> None:
    q, k, v, dout = (torch.randn(2, 24, 4, 16) for _ in range(4))
    want = attention64(q, k, v, dout, torch.ones(24, 24, dtype=torch.bool).tril())
    heads_first = [x.transpose(1, 2) for x in (q, k, v, dout)]
    with torch_ring.computing_with(CpuFlash()):
        out, lse = torch_ring._forward(*heads_first[:3], is_causal=True, dropout_p=0.0)
        given = dict(zip(("query", "key", "value", "grad_out"), heads_first, strict=True))
        made = torch_ring._backward(**given, out=out, logsumexp=lse, is_causal=True, dropout_p=0.0)
    for found, wanted in zip((out, *made), (want.out, want.dq, want.dk, want.dv), strict=True):
        torch.testing.assert_close(found.transpose(1, 2).double(), wanted, rtol=1e-5, atol=1e-5)


def test_stand_in_refuses_what_it_has_not() -> None:
    q = torch.randn(1, 8, 2, 16)
    for options in ({"dropout_p": 0.1}, {"window_size": (4, 0)}, {"softcap": 1.0}):
        with pytest.raises(NotImplementedError, match="the stand-in flash_attn has no"):
            flash_attn_cpu.flash_attn_func(q, q, q, **options)


def test_stand_in_leaves_a_real_package_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = type(sys)("flash_attn")
    monkeypatch.setitem(sys.modules, "flash_attn", real)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", type(sys)("flash_attn.flash_attn_interface"))
    assert flash_attn_cpu.install() is False
    assert sys.modules["flash_attn"] is real
