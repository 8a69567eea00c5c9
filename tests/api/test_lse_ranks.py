"""A gradient of lse on some ranks only: one call all the same, over every way to agree, and nothing is left of it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from cases import Case
from machines import APART
from ranks import Here, RankPools
from test_refusals import opened, said, works
from torch.utils.checkpoint import checkpoint
from variants import Found, Variant, compute, errors

from tokenring import ContextParallel, Mask, attention, shard
from tokenring.api.autograd import BATCHED, SECOND
from tokenring.runtime.agreement import LSE_GRADIENT

Tensors = tuple[torch.Tensor, ...]
CALL_SECONDS = 110.0  # with the import of the compiler
LIMIT = 5e-6


def small(schedule: str = "tokenring", ranks: int = 3) -> Case:
    return Case(ranks, schedule, "zigzag", "causal & documents", 4, 2, 1, 8, torch.float32, None)


def on_some(here: Here, name: str, what: Variant) -> tuple[Found, bool, int]:
    """Twice, with a plain call between that has the bits of one before; and the exchanges of the second."""
    cp = ContextParallel(layout="zigzag", schedule=what.case.name, transport=opened(here, name))
    plain = Variant(what.case, of_lse=())
    before = compute(here, plain, cp)
    compute(here, what, cp)
    after = compute(here, plain, cp)
    same = all(torch.equal(a, b) for a, b in zip(before.results, after.results, strict=True))
    passes: list[tuple[Any, ...]] = []
    begin = cp._begin
    cp._begin = lambda *given: (passes.append(given[1:]), begin(*given))[1]  # type: ignore[func-returns-value,method-assign]
    return compute(here, what, cp), same, len(passes)


@pytest.mark.parametrize("name", ["gloo", APART, "shm"])
def test_on_some_ranks(name: str, ranks: RankPools) -> None:
    for some, agreed in (((1,), 3), ((0, 2), 3), ((0, 1, 2), 2)):
        what = Variant(small(), of_lse=some, of_out=(0, 1, 2))
        parts = ranks(3)(on_some, name, what)
        assert all(same and count == agreed for _, same, count in parts), "ranks speak again only where they differ"
        found = errors(what, [part for part, *_ in parts])
        assert max(found.values()) < LIMIT, found


def test_no_other_difference_is_passed_over(ranks: RankPools) -> None:
    for text in ranks(3)(another_layer):
        assert "scale: ranks 0, 2: 0.5; rank 1: 0.25" in text and f"{LSE_GRADIENT}: ranks 0, 2: nothing" in text


def another_layer(here: Here) -> str:
    """One rank does backward of another call than the rest."""
    cp = here.cp(schedule="ring")
    x = torch.ones(1, 8, 2, 8, requires_grad=True)
    made = {scale: attention(x, x, x, cp, scale=scale, return_lse=True) for scale in (0.5, 0.25)}
    out, lse = made[0.25 if here.rank == 1 else 0.5]
    try:
        torch.autograd.backward(out.sum() + lse.sum() if here.rank == 1 else out.sum())
    except ValueError as error:
        return str(error)
    return ""


def leaves_of(here: Here, cp: ContextParallel, what: Variant) -> tuple[Tensors, Tensors]:
    """q, k, v and the sinks; dout and dlse."""
    q, k, v, dout = (shard(x, cp).requires_grad_(index < 3) for index, x in enumerate(what.case.inputs()))
    dlse, sinks = what.given()
    return (q, k, v, sinks.requires_grad_()), (dout, shard(dlse, cp).transpose(1, 2))


def differently(here: Here, how: str, what: Variant, schedules: list[str]) -> bool:
    """The gradients of a call that is compiled or checkpointed are those of a plain one, to the bit."""
    same = True
    for schedule in schedules:
        cp = here.cp(layout="zigzag", schedule=schedule)
        leaves, wanted = leaves_of(here, cp, what)
        mask = what.case.mask

        call = calling(cp, mask)

        def loss(made: Tensors, wanted: Tensors = wanted) -> torch.Tensor:
            some = (made[1] * wanted[1]).sum()
            return some if here.rank == 1 else some + (made[0] * wanted[0]).sum()

        right = torch.autograd.grad(loss(call(*leaves)), leaves)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says of its own parts
            made = altered(how, call, loss)(*leaves)
            found = torch.autograd.grad(made, leaves) if not how.startswith("reentrant") else backward(made, leaves)
        same = same and all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    return same


def calling(cp: ContextParallel, mask: Mask) -> Any:
    return lambda q, k, v, s: attention(q, k, v, cp, mask, sinks=s, return_lse=True)


def altered(how: str, call: Any, loss: Any) -> Any:
    if how == "compiled":
        torch._dynamo.reset()
        inside: Any = torch.compile(lambda *x: loss(call(*x)), backend="aot_eager", fullgraph=True)
        return inside
    if how == "compiled, lse leaves":
        torch._dynamo.reset()
        made: Any = torch.compile(call, backend="aot_eager", fullgraph=True)
        return lambda *x: loss(made(*x))
    return lambda *x: loss(checkpoint(call, *x, use_reentrant=how == "reentrant"))


def backward(made: torch.Tensor, leaves: Tensors) -> Tensors:
    torch.autograd.backward(made)
    return tuple(x.grad for x in leaves if x.grad is not None)


@pytest.mark.parametrize("how", ["compiled", "compiled, lse leaves", "reentrant", "not reentrant"])
def test_the_same_gradients(how: str, ranks: RankPools) -> None:
    what = Variant(small(ranks=2), sinks=True)
    assert all(ranks(2).within(CALL_SECONDS, differently, how, what, ["ring", "direct-q", "ulysses"]))


def asked_through_lse(here: Here) -> tuple[list[str], bool]:
    """A second derivative, a batch of gradients; and an lse that was changed in place."""
    cp, what = here.cp(layout="zigzag", schedule="tokenring"), Variant(small(ranks=here.world_size), sinks=True)
    (*leaves, sinks), (dout, dlse) = leaves_of(here, cp, what)
    call = calling(cp, what.case.mask)
    right = torch.autograd.grad(call(*leaves, sinks), (*leaves, sinks), (dout, dlse))
    (dq,) = torch.autograd.grad(call(*leaves, sinks)[1].square().sum(), leaves[0], create_graph=True)
    texts = [said(lambda: torch.autograd.backward(dq.sum()))[1]]
    out, lse = call(*leaves, sinks)
    batch = torch.stack([dlse, dlse])
    texts.append(said(lambda: torch.autograd.grad(lse, leaves, batch, is_grads_batched=True))[1])
    out, lse = call(*leaves, sinks)
    lse.mul_(2.0)
    out.add_(1.0)
    found = torch.autograd.grad((out, lse), (*leaves, sinks), (dout, dlse / 2))
    return texts, all(torch.allclose(x, y, atol=1e-6) for x, y in zip(found, right, strict=True))


@pytest.mark.parametrize("world_size", [1, 3])
def test_what_is_refused_and_what_is_changed_in_place(world_size: int, ranks: RankPools) -> None:
    for texts, same in ranks(world_size)(asked_through_lse):
        assert texts == [SECOND, BATCHED] and same


def several_differ(here: Here) -> tuple[str, str]:
    """Sinks on one, and no kernel on another."""
    cp = here.cp(schedule="ring", kernel="cpu-flash" if here.rank == 1 else "auto")
    x = torch.ones(1, 8, 4, 8)
    found = said(lambda: attention(x, x, x, cp, softcap=2.0, sinks=torch.zeros(4) if here.rank == 0 else None))
    works(cp)
    return found


def test_several_differences_are_all_said(ranks: RankPools) -> None:
    for kind, text in ranks(3)(several_differ):
        assert kind == "Disagreement" and "sinks: ranks 1, 2: nothing; rank 0: given" in text
        assert "kernel 'cpu-flash' does not compute soft-capping" in text
