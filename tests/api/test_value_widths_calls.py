"""Values of another width than keys, under torch.compile, in captured calls, and in every form of a call."""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module

import pytest
import torch
from cases import LIMITS, NAMES, Case
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools
from test_capture import GraphDevice, results, same
from test_compile import CALL_SECONDS, compiled

from tokenring import Causal, ContextParallel, Plan, attention, capture, plan, shard

MLA = Case(2, "ring", "zigzag", "causal & documents", 4, 2, 2, 24, torch.float32, None, value_dim=16)


@pytest.mark.parametrize("schedule", ["ring", "ulysses"])
def test_compiled_calls(ranks: RankPools, schedule: str) -> None:
    """One graph, to the bit what eager gives, and exact; the second leaves bytes to its backward."""
    case = replace(MLA, schedule=schedule)
    made, wanted = case.whole(ranks(2).within(CALL_SECONDS, compiled, case, "")), case.reference()
    errors = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    assert all(error <= LIMITS[name] for name, error in errors.items()), errors


def test_fake_tensors_are_as_wide_as_real_ones() -> None:
    cp = ContextParallel(schedule="ring")
    q, k, v = (torch.randn(1, 16, heads, dim) for heads, dim in ((4, 24), (2, 24), (2, 40)))
    call = (q, k, v, None, cp.handle, None, 0, None, None, False, False)
    torch.library.opcheck(torch.ops.tokenring.attention.default, call, test_utils=("test_schema", "test_faketensor"))


def inputs(seed: int) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(seed)
    shapes = (4, 24), (2, 24), (2, 16), (4, 16)
    q, k, v, dout = (torch.randn(1, 48, *shape, generator=made) for shape in shapes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout


def test_captured_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    device = GraphDevice()
    monkeypatch.setattr(import_module("tokenring.api.capture"), "device_of", lambda where: device)
    cp = ContextParallel(schedule="ring")
    q, k, v, _ = inputs(0)
    made = capture(q, k, v, cp, Causal())
    for seed in (1, 2):
        plain = results(lambda q, k, v: attention(q, k, v, cp, Causal(), return_lse=True), inputs(seed))
        assert plain[0].shape == (1, 48, 4, 16) and same(results(made, inputs(seed)), plain)


def test_forms_of_a_call() -> None:
    """Heads before tokens, a scale, autocast; rows that are strided; and the plan."""
    cp = ContextParallel()
    q, k, v, dout = inputs(3)
    wanted = attention64(q, k, v, dout, allowed(Causal(), 48, 48), 0.3)
    turned_q, turned_k, turned_v = (x.detach().transpose(1, 2) for x in (q, k, v))
    out = attention(turned_q, turned_k, turned_v, cp, Causal(), 0.3, order="bhtd")
    assert relative_error(out.transpose(1, 2), wanted.out) <= LIMITS["out"]
    wide = torch.randn(1, 48, 2, 32)
    assert torch.equal(attention(q, k, wide[..., ::2], cp), attention(q, k, wide[..., ::2].contiguous(), cp))
    with torch.autocast("cpu", torch.bfloat16):
        half = attention(q, k, v, cp)
    assert half.dtype == torch.bfloat16 and half.shape == (1, 48, 4, 16)
    found = plan(q, k, v, cp)
    assert (found.workload.head_dim, found.workload.value_dim) == (24, 16)
    again = Plan.from_json(found.to_json())
    assert again.workload == found.workload and '"value_dim": 16' in found.to_json()
    assert '"value_dim"' not in plan(q, k, k, cp).to_json()


def several(here: Here) -> list[tuple[int, ...]]:
    """Calls of one context with values of several widths in turn, whose programs share a pool."""
    cp = here.cp(layout="zigzag", schedule="tokenring")
    found = []
    for dim in (16, 24, 40, 16):
        case = replace(MLA, value_dim=dim)
        q, k, v, dout = (shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(case.inputs()))
        out = attention(q, k, v, cp, case.mask)
        torch.autograd.backward(out, dout)
        wanted = case.reference()
        rows = torch.tensor(cp.layout_for(case.q_length).positions(here.rank))
        for got, want in ((out, wanted.out), (q.grad, wanted.dq), (k.grad, wanted.dk), (v.grad, wanted.dv)):
            assert got is not None and relative_error(got, want[:, rows]) <= LIMITS["dq"]
        found.append(tuple(out.shape))
    return found


def test_several_widths_in_one_context(ranks: RankPools) -> None:
    (found, _) = ranks(2)(several)
    assert [shape[-1] for shape in found] == [16, 24, 40, 16]
