"""Sinks: their dtypes, rows that see nothing else, who wants gradients, what ranks agree on, and mutants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from cases import Case
from oracle import Attention, allowed, relative_error, variant64
from ranks import Here, RankPools
from test_refusals import ODD, opened, said, works
from variants import Found, Variant, compute, errors, wanted_of

import tokenring as tr
from tokenring import ContextParallel, attention
from tokenring.api import autograd
from tokenring.api import sinks as maths
from tokenring.backends.kernels.delta import rows_delta

LIMIT = 5e-6
WORSE = 1.1  # than a plain call, in bf16


def small(dtype: torch.dtype = torch.float32, mask: str = "causal & documents") -> Case:
    return Case(1, "ring", "contiguous", mask, 4, 2, 2, 16, dtype, None)


def alone(what: Variant) -> Found:
    here: Any = type("Here", (), {"rank": 0})
    return compute(here, what, ContextParallel())


def qkv(tokens: int = 8) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(1, tokens, heads, 8, generator=random).requires_grad_() for heads in (4, 2, 2)]


# ---------- numbers


def test_rows_that_see_nothing_see_the_sink() -> None:
    """Tokens behind the last document: out 0, lse the sink, whose gradient is that of their lse alone."""
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    out, lse = attention(q, k, v, ContextParallel(), tr.Documents([0, 5]), sinks=sinks, return_lse=True)
    assert torch.equal(out[:, 5:], torch.zeros(1, 3, 4, 8)) and torch.equal(lse[0, :, 5:], sinks[:, None].expand(4, 3))
    (of_out,) = torch.autograd.grad(out[:, 5:].sum(), sinks, retain_graph=True)
    assert torch.equal(of_out, torch.zeros(4))
    (of_lse,) = torch.autograd.grad(lse[:, :, 5:].sum(), sinks, retain_graph=True)
    assert torch.equal(of_lse, torch.full((4,), 3.0))
    dq, dk, dv = torch.autograd.grad(out[:, 5:].sum() + lse[:, :, 5:].sum(), (q, k, v))
    assert not dq.any() and not dk.any() and not dv.any()


@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
def test_rows_that_see_nothing_have_no_gradient_of_lse(kernel: str) -> None:
    """Whatever a loss makes of -inf."""
    q, k, v = qkv()
    out, lse = attention(q, k, v, ContextParallel(kernel=kernel), tr.Documents([0, 5]), return_lse=True)
    seen = torch.where(lse == -math.inf, 0.0, lse)
    direct = torch.autograd.grad(out.sum() + (seen**2).mean(), (q, k, v), retain_graph=True)
    made = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), 2 * lse / lse.numel()))
    visible = allowed(tr.Documents([0, 5]), 8, 8)
    dlse = 2 * seen.detach() / lse.numel()
    want = variant64(q, k, v, torch.ones_like(out), dlse, visible)[0]
    for some in (direct, made):
        assert all(relative_error(x, y) <= LIMIT for x, y in zip(some, (want.dq, want.dk, want.dv), strict=True))
    assert not made[0][:, 5:].any()


def test_a_sink_of_minus_infinity_is_none() -> None:
    q, k, v = qkv()
    mask = tr.Documents([0, 5])
    sinks = torch.full((4,), -math.inf, requires_grad=True)
    plain, plain_lse = attention(q, k, v, ContextParallel(), mask, return_lse=True)
    out, lse = attention(q, k, v, ContextParallel(), mask, sinks=sinks, return_lse=True)
    assert torch.equal(out, plain) and torch.equal(lse, plain_lse)
    made = torch.autograd.grad(out.sum(), (q, k, v, sinks))
    assert torch.equal(made[3], torch.zeros(4)) and all(x.isfinite().all() for x in made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """As exact as without sinks, beside what one process makes of it."""
    for mask in ("causal", "full", "window to the left"):
        case = small(dtype, mask)
        ratios = []
        for sinks in (False, True):
            what = Variant(case, sinks=sinks, of_lse=())
            made, (exact, _) = alone(what), wanted_of(what)
            found, right = (x._replace(lse=torch.empty(0)) for x in (made.results, exact))  # in fp32, as ever
            ratios.append([relative_error(*pair) for pair in zip(found, right, strict=True)])
        assert all(with_ <= WORSE * without for without, with_ in zip(*ratios, strict=True)), (mask, ratios)


def test_sinks_in_half_precision() -> None:
    q, k, v = qkv()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    half = sinks.detach().bfloat16().requires_grad_()
    made = [attention(q, k, v, ContextParallel(), sinks=each) for each in (sinks, half)]
    assert torch.equal(*made)
    (exact,), (rounded,) = (torch.autograd.grad(x.sum(), each) for x, each in zip(made, (sinks, half), strict=True))
    assert rounded.dtype == torch.bfloat16 and torch.equal(rounded, exact.bfloat16())


def test_who_wants_gradients() -> None:
    cp, (q, k, v) = ContextParallel(), qkv()
    sinks = torch.zeros(4)
    with torch.no_grad():
        frozen = attention(q, k, v, cp, sinks=sinks)
    out = attention(q.detach(), k.detach(), v.detach(), cp, sinks=sinks.requires_grad_())
    assert torch.equal(out, frozen) and out.requires_grad
    (of_sinks,) = torch.autograd.grad(out.sum(), sinks)
    out = attention(q, k, v, cp, sinks=sinks.detach())
    *_, again = torch.autograd.grad(attention(q, k, v, cp, sinks=sinks).sum(), (q, sinks))
    assert torch.equal(again, of_sinks) and all(x.any() for x in torch.autograd.grad(out.sum(), (q, k, v)))


def test_autocast_and_order() -> None:
    cp, (q, k, v) = ContextParallel(), qkv()
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, cp, sinks=sinks)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), cp, sinks=sinks))
    turned = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), cp, sinks=sinks, order="bhtd")
    assert torch.equal(turned.transpose(1, 2), attention(q, k, v, cp, sinks=sinks))


# ---------- ranks


def given_by_one(here: Here) -> tuple[str, str]:
    cp = ContextParallel(schedule="tokenring", transport=opened(here, "shm"))
    x = torch.ones(1, 8, 4, 16)
    found = said(lambda: attention(x, x, x, cp, sinks=torch.zeros(4) if here.rank == ODD else None))
    works(cp)
    return found


def test_all_ranks_give_sinks_or_none_does(ranks: RankPools) -> None:
    for kind, text in ranks(3)(given_by_one):
        assert kind == "Disagreement" and "sinks: ranks 0, 2: nothing; rank 1: given." in text, text


def z_loss(here: Here) -> tuple[Attention, torch.Tensor]:
    """A loss as models have it: the mean of the squares of lse beside the task's."""
    what = Variant(Case(2, "tokenring", "zigzag", "causal", 4, 2, 1, 8, torch.float32, None), sinks=True)
    cp = here.cp(layout="zigzag", schedule="tokenring")
    q, k, v, dout = (tr.shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(what.case.inputs()))
    sinks = what.given()[1].requires_grad_()
    out, lse = attention(q, k, v, cp, tr.Causal(), sinks=sinks, return_lse=True)
    loss = (out * dout).sum() + 100.0 * (lse**2).mean()
    dq, dk, dv, dsinks = torch.autograd.grad(loss, (q, k, v, sinks))
    return Attention(out.detach(), lse.detach(), dq, dk, dv), dsinks


def test_z_loss(ranks: RankPools) -> None:
    """Of each rank's own mean, as data-parallel losses are."""
    what = Variant(Case(2, "tokenring", "zigzag", "causal", 4, 2, 1, 8, torch.float32, None), sinks=True)
    parts = ranks(2)(z_loss)
    given = what.given

    class Wanted(Variant):
        def given(self) -> tuple[torch.Tensor, torch.Tensor]:
            lse = wanted_of(what)[0].lse.transpose(1, 2)
            return 2 * 100.0 * lse / (lse.numel() / 2), given()[1]

    found = errors(Wanted(what.case, sinks=True), [Found(*each) for each in parts])
    assert max(found.values()) < LIMIT, found


# ---------- mutants


def twice(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Any:
    return with_sinks(*with_sinks(out, lse, sinks), sinks)


def scaled(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Any:
    return with_sinks(out, lse, sinks / 4.0)


def without_out(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> Any:
    return out, with_sinks(out, lse, sinks)[1]


with_sinks, sinks_gradient = maths.with_sinks, maths.sinks_gradient
MUTANTS: dict[str, tuple[str, Any]] = {
    "added twice": ("with_sinks", twice),
    "scaled": ("with_sinks", scaled),
    "out as without": ("with_sinks", without_out),
    "gradient of the other sign": ("sinks_gradient", lambda *given: -sinks_gradient(*given)),
    "gradient without that of lse": (
        "sinks_gradient", lambda sinks, dout, dlse, *made: sinks_gradient(sinks, dout, None, *made)
    ),
    "dlse added to delta": (
        "rows_delta",
        lambda dout, out, lse, dlse: rows_delta(dout, out, lse, None if dlse is None else -dlse),
    ),
    "dlse left out": ("rows_delta", lambda dout, out, lse, dlse: rows_delta(dout, out, lse, None)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    what = Variant(small(), sinks=True)
    assert max(errors(what, [alone(what)]).values()) < LIMIT
    replaced, mutant = MUTANTS[name]
    for module in (autograd, maths):
        if hasattr(module, replaced):
            monkeypatch.setattr(module, replaced, mutant)
    assert max(errors(what, [alone(what)]).values()) > 1e-3
