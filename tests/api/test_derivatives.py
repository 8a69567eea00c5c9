"""Derivatives but the first, and forward-mode ones: refused with words wherever they are asked for, never left out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import Here, RankPools
from test_attention import small
from test_capture import GraphDevice, captured, inputs
from test_capture import device as device  # a fixture
from torch.autograd import forward_ad

import tokenring as tr
from tokenring import ContextParallel, UnsupportedError, attention, shard, unshard
from tokenring.api.autograd import BATCHED, FORWARD_MODE, RECORDED, SECOND, TRANSFORM

functional: Any = torch.autograd.functional  # untyped
WRAPPED = "torch.func cannot look into a call of several ranks"  # of the operands that its transforms make
CALL_SECONDS = 110.0  # with the import of the compiler
Attend = Callable[[torch.Tensor], torch.Tensor]


def total(attend: Attend) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: attend(x).sum()


def penalty(attend: Attend, x: torch.Tensor, there: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Of the gradient's size, as WGAN-GP has it. `there`: what is done with what attention gives."""
    x.requires_grad_()
    (dx,) = torch.autograd.grad(there(attend(x)).sum(), x, create_graph=True)
    torch.autograd.backward(dx.square().sum())


def dual(attend: Attend, x: torch.Tensor) -> None:
    with forward_ad.dual_level():
        forward: Any = forward_ad  # untyped
        assert forward.unpack_dual(attend(forward.make_dual(x, torch.ones_like(x)))).tangent is not None


ASKED: dict[str, tuple[Callable[[Attend, torch.Tensor], Any], str]] = {
    "a penalty": (lambda attend, x: penalty(attend, x, torch.sin), SECOND),
    "a penalty of a sum": (lambda attend, x: penalty(attend, x, lambda out: out), SECOND),  # dout wants no gradient
    "hessian": (lambda attend, x: functional.hessian(total(attend), x), SECOND),
    "hvp": (lambda attend, x: functional.hvp(total(attend), x, x), SECOND),
    "vhp": (lambda attend, x: functional.vhp(total(attend), x, x), SECOND),
    "functional.jvp": (lambda attend, x: functional.jvp(attend, x, x), SECOND),
    "dual numbers": (dual, FORWARD_MODE),
    "dual numbers, no gradients": (lambda attend, x: torch.no_grad()(dual)(attend, x), FORWARD_MODE),
    "func.jvp": (lambda attend, x: torch.func.jvp(attend, (x,), (x,)), WRAPPED),
    "func.jacfwd": (lambda attend, x: torch.func.jacfwd(attend)(x), WRAPPED),
    "func.hessian": (lambda attend, x: torch.func.hessian(total(attend))(x), WRAPPED),
    "func.grad": (lambda attend, x: torch.func.grad(total(attend))(x), WRAPPED),
    "func.linearize": (lambda attend, x: torch.func.linearize(attend, x), FORWARD_MODE),
    "vmap": (lambda attend, x: torch.vmap(attend)(x[None]), WRAPPED),
}
BATCHES = {"jacobian": lambda attend, x: functional.jacobian(lambda y: attend(y)[0, 0, 0, :2], x, vectorize=True)}
COMPILED = {  # what reaches us, and what torch refuses first
    "eager": {name: says for name, (_, says) in ASKED.items() if says != WRAPPED and name != "func.linearize"},
    "aot_eager": {
        **dict.fromkeys(("a penalty", "a penalty of a sum", "hvp", "vhp", "functional.jvp"), "double backward"),
        "dual numbers": FORWARD_MODE,
        "dual numbers, no gradients": FORWARD_MODE,
    },
}


def said_by(ask: Callable[[Attend, torch.Tensor], Any], attend: Attend, x: torch.Tensor) -> str:
    """By UnsupportedError, or by torch, under the name of the error."""
    try:
        ask(attend, x.clone())
    except UnsupportedError as error:
        return str(error)
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def attending(cp: ContextParallel) -> Attend:
    return lambda x: attention(x, x, x, cp, tr.Causal())


def all_asked(here: Here, asked: list[str], backend: str | None) -> tuple[dict[str, str], bool]:
    """What each said, and whether ranks went on as before after each."""
    cp, x = here.cp(schedule="tokenring"), torch.randn(1, 8, 2, 4, generator=torch.Generator().manual_seed(here.rank))
    attend = attending(cp)
    right, said, goes_on = attend(x), {}, True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        if backend:
            torch._dynamo.reset()
            attend = torch.compile(attend, backend=backend, fullgraph=True)
        for name in asked:
            said[name] = said_by((ASKED.get(name) or (BATCHES[name], ""))[0], attend, x)
            goes_on = goes_on and torch.equal(attend(x), right)
    return said, goes_on


def is_told(says: str, text: str) -> bool:
    """A tangent is seen at the operands, before the call is made."""
    return says in text or (says == FORWARD_MODE and "a tensor with a tangent is not supported" in text)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_rank_is_told(world_size: int, ranks: RankPools) -> None:
    wanted = {name: says for name, (_, says) in ASKED.items()} | {"jacobian": BATCHED}
    for said, goes_on in ranks(world_size)(all_asked, list(wanted), None):
        assert said.keys() == wanted.keys() and all(is_told(says, said[name]) for name, says in wanted.items()), said
        assert goes_on


@pytest.mark.sampled(3)
@pytest.mark.parametrize("backend", COMPILED)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_compiled(world_size: int, backend: str, ranks: RankPools) -> None:
    """AOTAutograd records no backward pass: its own error comes before anyone could ask us."""
    wanted = COMPILED[backend]
    for said, goes_on in ranks(world_size).within(CALL_SECONDS, all_asked, list(wanted), backend):
        assert all(says in said[name] for name, says in wanted.items()), said
        assert goes_on


def with_graph_breaks(here: Here) -> dict[str, str]:
    """Where torch may leave what it cannot trace to eager calls."""
    cp, x = here.cp(), torch.randn(1, 8, 2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._dynamo.reset()
        attend = torch.compile(attending(cp), backend="aot_eager")
        return {name: said_by(ask, attend, x) for name, (ask, says) in ASKED.items() if says == WRAPPED}


def test_transforms_of_what_is_compiled(ranks: RankPools) -> None:
    (said,) = ranks(1).within(CALL_SECONDS, with_graph_breaks)
    assert {"func.jvp", "func.hessian", "func.grad", "vmap"} <= set(said)
    assert all(says == TRANSFORM or WRAPPED in says or "functorch" in says for says in said.values()), said


# ---------- what is allowed


def recorded(here: Here, backend: str | None) -> bool:
    """create_graph=True where the second derivative does not go through attention: the first one is as ever."""
    case = small()
    cp = here.cp(layout="zigzag", schedule="tokenring")
    q, k, v, dout = (shard(x, cp) for x in case.inputs())
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, cp, case.mask)

    plain = torch.autograd.grad(attend(*leaves), leaves, dout)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if backend:
            torch._dynamo.reset()
        call = torch.compile(attend, backend=backend, fullgraph=True) if backend else attend
        weight = torch.tensor(3.0, requires_grad=True)
        out = call(*leaves)
        made = torch.autograd.grad(out, leaves, dout, create_graph=True)
        # of the rest of the model: beside what went through attention
        (slope,) = torch.autograd.grad(weight**3 + (out.detach() * weight).sum(), weight, create_graph=True)
        (curvature,) = torch.autograd.grad(slope, weight)
    same = all(torch.equal(a, b) for a, b in zip(plain, made, strict=True))
    return same and all(x.requires_grad for x in made) and float(curvature) == 18.0


@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
def test_recording_alone_is_allowed(backend: str | None, ranks: RankPools) -> None:
    assert ranks(3).within(CALL_SECONDS, recorded, backend) == [True] * 3


def test_captured_calls(device: GraphDevice) -> None:
    given = inputs(1)
    call = captured(given, ContextParallel())
    q, k, v, dout = inputs(2)
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    for create_graph in (True, False):
        out, _ = call(*leaves)
        if create_graph:
            with pytest.raises(UnsupportedError) as caught:
                torch.autograd.grad(out, leaves, dout, create_graph=True)
            assert str(caught.value) == RECORDED
        else:
            assert len(torch.autograd.grad(out, leaves, dout)) == 3
    with pytest.raises(UnsupportedError) as caught:
        torch.func.grad(lambda x: call(x, k, v)[0].sum())(q.detach())
    assert str(caught.value) == TRANSFORM


def through_unshard(here: Here) -> tuple[torch.Tensor, torch.Tensor]:
    """The derivative of a gradient's square through unshard, and the same with all in one place."""
    cp, whole = here.cp(), torch.arange(12, dtype=torch.float64).view(1, 12, 1) / 7
    x = shard(whole, cp).requires_grad_()
    (dx,) = torch.autograd.grad(unshard(x, cp).pow(3).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(dx.square().sum(), x)
    y = whole.requires_grad_()
    (dy,) = torch.autograd.grad(here.world_size * y.pow(3).sum(), y, create_graph=True)
    (right,) = torch.autograd.grad(dy.square().sum(), y)
    return twice, shard(right, cp)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unshard_has_derivatives_of_any_order(world_size: int, ranks: RankPools) -> None:
    for twice, right in ranks(world_size)(through_unshard):
        torch.testing.assert_close(twice, right)
