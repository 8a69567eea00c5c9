"""attention() as models call it: autograd's modes, strides, partial gradients, reruns and choices."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from cases import SCHEDULES, Case, Local, check_exact, run, run_on
from oracle import Attention, error_of_terms, relative_error
from ranks import Here, RankPools
from torch.utils.checkpoint import checkpoint

from tokenring import ContextParallel, attention, plan, shard
from tokenring.schedule.names import FAMILIES, SCHEMES

Tensors = tuple[torch.Tensor, ...]


def small(schedule: str = "tokenring", ranks: int = 3, dtype: torch.dtype = torch.float32) -> Case:
    """GQA, causal, zigzag: each rank's rows and columns all differ."""
    return Case(ranks, schedule, "zigzag", "causal", 4, 2, 2, 16, dtype, None)


def given(here: Here, case: Case, **options: object) -> tuple[ContextParallel, Tensors]:
    """A context of its own, and this rank's q, k, v, dout; the first three want gradients."""
    cp = here.cp(**case.options | options)
    q, k, v, dout = (shard(x, cp) for x in case.inputs())
    return cp, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def plain(here: Here, case: Case, **options: object) -> Tensors:
    """out, lse, dq, dk, dv."""
    cp, (q, k, v, dout) = given(here, case, **options)
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)


def equal(some: Tensors, others: Tensors) -> bool:
    """To the bit, in the same dtypes."""
    return len(some) == len(others) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )


# ---------- autograd's modes


def without_gradients(here: Here, case: Case, mode: Callable[[], AbstractContextManager[object]]) -> bool:
    """The same bits, nothing to differentiate; and what was made so does not spoil training after, or before."""
    expected = plain(here, case)
    cp, (q, k, v, dout) = given(here, case)
    results = []
    for _ in range(2):
        with mode():
            out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
        assert not out.requires_grad and not lse.requires_grad
        results.append(equal((out, lse), expected[:2]))
        out = attention(q, k, v, cp, case.mask)
        results.append(equal((out.detach(), *torch.autograd.grad(out, (q, k, v), dout)), (expected[0], *expected[2:])))
    return all(results)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients(schedule: str, mode: Callable[[], AbstractContextManager[object]], ranks: RankPools) -> None:
    assert all(ranks(3)(without_gradients, small(schedule), mode))


def under_autocast(here: Here, case: Case, kernel: str, backward_too: bool) -> None:
    """fp32 tensors give what bf16 tensors give without autocast, and fp32 gradients."""
    half = Case(**{**case.__dict__, "dtype": torch.bfloat16})
    expected = plain(here, half, kernel=kernel)
    cp, (q, k, v, dout) = given(here, case, kernel=kernel)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
        assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16) if backward_too else nullcontext():
        gradients = torch.autograd.grad(out, (q, k, v), dout.bfloat16())
    assert equal((out.detach(), lse.detach()), expected[:2])
    assert equal(gradients, tuple(x.float() for x in expected[2:]))


@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
@pytest.mark.parametrize("backward_too", [False, True])
def test_autocast(kernel: str, backward_too: bool, ranks: RankPools) -> None:
    for schedule in ("ring", "tokenring"):
        ranks(3)(under_autocast, small(schedule), kernel, backward_too)


def checkpointed(here: Here, case: Case, reentrant: bool, schedule: str | None) -> bool:
    options = {} if schedule is None else {"schedule": schedule}
    expected = plain(here, case, **options)
    cp, (q, k, v, dout) = given(here, case, **options)
    out = checkpoint(attention, q, k, v, cp, case.mask, use_reentrant=reentrant)
    torch.autograd.backward(out, dout)  # reentrant checkpoints refuse torch.autograd.grad
    gradients = tuple(x.grad for x in (q, k, v) if x.grad is not None)
    return equal((out.detach(), *gradients), (expected[0], *expected[2:]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("schedule", [None, "auto"])
def test_activation_checkpointing(reentrant: bool, schedule: str | None, ranks: RankPools) -> None:
    assert all(ranks(3)(checkpointed, small(), reentrant, schedule))


# ---------- inputs


def one_input(here: Here, case: Case) -> bool:
    """attention(x, x, x): the three gradients add up."""
    cp, (x, *_, dout) = given(here, case)
    a, b, c = (x.detach().clone().requires_grad_() for _ in range(3))
    parts = torch.autograd.grad(attention(a, b, c, cp, case.mask), (a, b, c), dout)
    (whole,) = torch.autograd.grad(attention(x, x, x, cp, case.mask), x, dout)
    stacked = torch.stack(parts).double()
    return error_of_terms(whole, stacked.sum(dim=0), stacked.abs().sum(dim=0)) <= 1e-6


def test_one_tensor_for_all_three(ranks: RankPools) -> None:
    case = Case(3, "ring", "zigzag", "causal", 4, 4, 2, 16, torch.float32, None)
    assert all(ranks(3)(one_input, case))


def strided(here: Here, case: Case, which: str) -> bool:
    """The same values at other places give the same bits."""
    expected = plain(here, case)
    cp, (q, k, v, dout) = given(here, case)
    x, y, z, w = ((_restride(which, each.detach())) for each in (q, k, v, dout))
    assert which == "batch" or not any(each.is_contiguous() for each in (x, y, z, w))
    for each in (x, y, z):
        each.requires_grad_()
    out = attention(x, y, z, cp, case.mask)
    assert out.is_contiguous()
    return equal((out.detach(), *torch.autograd.grad(out, (x, y, z), w)), (expected[0], *expected[2:]))


def _restride(which: str, x: torch.Tensor) -> torch.Tensor:
    if which == "heads first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if which == "packed":
        return torch.stack([x, x, x], dim=2)[:, :, 1]
    if which == "every second element":
        return x.repeat_interleave(2, dim=-1)[..., ::2]
    if which == "elements first":
        return x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    return x.flip(0).clone().flip(0) if which == "batch" else x


@pytest.mark.parametrize("which", ["heads first", "packed", "every second element", "elements first", "batch"])
def test_strides_do_not_matter(which: str, ranks: RankPools) -> None:
    for schedule in SCHEDULES:
        assert all(ranks(3)(strided, small(schedule), which))


def expanded(here: Here, case: Case) -> bool:
    """out.sum() hands backward a gradient that is one number; k and v may be one batch, seen twice."""
    cp, (q, k, v, _) = given(here, case)
    once = [x.detach()[:1] for x in (k, v)]
    twice = [x.expand(2, -1, -1, -1).requires_grad_() for x in once]
    copies = [x.repeat(2, 1, 1, 1).requires_grad_() for x in once]
    results = []
    for key, value in (twice, copies):
        out = attention(q, key, value, cp, case.mask)
        loss = out.sum() if key is twice[0] else (out * torch.ones_like(out)).sum()
        results.append((out.detach(), *torch.autograd.grad(loss, (q, key, value))))
    return equal(*results)


def test_expanded_inputs_and_gradients(ranks: RankPools) -> None:
    for schedule in SCHEDULES:
        assert all(ranks(3)(expanded, small(schedule)))


# ---------- gradients


def some_gradients(here: Here, case: Case, wanted: tuple[int, ...]) -> bool:
    expected = plain(here, case)[2:]
    cp, (*qkv, dout) = given(here, case)
    leaves = [x.detach().requires_grad_(index in wanted) for index, x in enumerate(qkv)]
    attention(*leaves, cp, case.mask).backward(dout)  # type: ignore[call-overload]
    assert [x.grad is not None for x in leaves] == [index in wanted for index in range(3)]
    return all(torch.equal(x.grad, y) for x, y in zip(leaves, expected, strict=True) if x.grad is not None)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_for_some_inputs(wanted: tuple[int, ...], ranks: RankPools) -> None:
    for schedule in ("ring", "tokenring"):
        assert all(ranks(3)(some_gradients, small(schedule), wanted))


def through_lse(here: Here, case: Case) -> bool:
    """A detached lse is no gradient: the bits of a call without."""
    cp, (q, k, v, dout) = given(here, case)
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    assert (lse.shape, lse.dtype) == ((q.shape[0], q.shape[2], q.shape[1]), torch.float32)
    (gradient,) = torch.autograd.grad((out * dout).sum() + lse.detach().sum(), q)
    return torch.equal(gradient, plain(here, case)[2])


def test_lse_that_is_detached(ranks: RankPools) -> None:
    assert all(ranks(3)(through_lse, small()))


def second_order(here: Here, case: Case, kernel: str) -> str:
    cp, (q, k, v, _) = given(here, case, kernel=kernel)
    out = attention(q, k, v, cp, case.mask)
    (dq,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    try:
        torch.autograd.backward(dq.square().sum())
    except RuntimeError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize("kernel", ["cpu-flash", "reference"])
def test_second_derivatives_are_refused(kernel: str, ranks: RankPools) -> None:
    """Not silently wrong."""
    for said in ranks(3)(second_order, small(), kernel):
        assert "a second derivative of tokenring.attention was requested" in said


# ---------- reruns


def interleaved(here: Here, case: Case) -> bool:
    """Forwards of several sizes before any backward, on one pool that grows meanwhile; backward twice."""
    cp, first = given(here, case)
    calls = []
    for batch in (1, 2, 5):
        parts = [x.detach()[:1].repeat(batch, 1, 1, 1) for x in first]
        q, k, v = (x.requires_grad_() for x in parts[:3])
        calls.append((attention(q, k, v, cp, case.mask), q, k, v, parts[3]))
    seen = []
    for out, q, k, v, dout in (calls[2], calls[0], calls[1], calls[0]):
        made = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        seen.append((out.detach()[:1].clone(), *(x[:1] for x in made)))
    # Batches of other sizes are rounded otherwise, where vectors of numbers end elsewhere.
    close = all(relative_error(a, b) < 1e-6 for each in seen for a, b in zip(each, seen[1], strict=True))
    return close and equal(seen[1], seen[3])


def test_calls_may_interleave(ranks: RankPools) -> None:
    for schedule in SCHEDULES:
        assert all(ranks(3)(interleaved, small(schedule)))


def twice(here: Here, case: Case) -> bool:
    cp, (q, k, v, dout) = given(here, case)
    made = []
    for _ in range(2):
        out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
        made.append((out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)))
    return equal(*made) and equal(made[0], plain(here, case))


@pytest.mark.sampled(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_runs_give_the_same_bits(schedule: str, dtype: torch.dtype, ranks: RankPools) -> None:
    assert all(ranks(4)(twice, small(schedule, 4, dtype)))


# ---------- choices


def test_scale(ranks: RankPools) -> None:
    for schedule in ("ring", "tokenring"):
        check_exact(run_on(ranks, small(schedule), scale=0.7), small(schedule).reference(0.7))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_kernels_agree(schedule: str, ranks: RankPools) -> None:
    case = Case(3, schedule, "striped", "causal & window & documents", 8, 2, 2, 24, torch.float32, None)
    some, other = (run_on(ranks, case, kernel) for kernel in ("cpu-flash", "reference"))
    check_exact(some, other)


def planned(here: Here, case: Case, schedule: str, training: bool) -> str:
    """The name of the schedule that is taken."""
    cp, (q, k, v, _) = given(here, case, schedule=schedule)
    with nullcontext() if training else torch.no_grad():
        return plan(q, k, v, cp, case.mask).name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("choice", ["auto", "auto:ring,tokenring", "auto:direct-q"])
@pytest.mark.parametrize("heads", [(4, 1), (4, 4)])
def test_auto(choice: str, heads: tuple[int, int], ranks: RankPools) -> None:
    case = Case(4, "ring", "zigzag", "causal & documents", *heads, 2, 16, torch.float32, None)
    check_exact(case.whole(ranks(4)(run, case, choice)), case.reference())
    families = set(choice.partition(":")[2].split(",")) if ":" in choice else set(FAMILIES)
    for training in (True, False):
        names = set(ranks(4)(planned, case, choice, training))
        assert len(names) == 1 and {name.partition("/")[0] for name in names} <= families


def by_scheme(here: Here, case: Case) -> Local:
    return run(here, case, SCHEMES["tokenring"](-1, 2))


def test_a_scheme_is_built_for_each_call(ranks: RankPools) -> None:
    check_exact(small().whole(ranks(3)(by_scheme, small())), small().reference())


def test_one_rank_without_torch_distributed() -> None:
    """The same code on one device."""
    case = small(ranks=1)
    cp = ContextParallel(layout=case.layout)
    q, k, v, dout = (shard(x, cp).requires_grad_() for x in case.inputs())
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    gradients = torch.autograd.grad(out, (q, k, v), dout)
    check_exact(Attention(out, lse, *gradients), case.reference())
