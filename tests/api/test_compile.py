"""torch.compile of what calls attention(): one graph without a break, and the same results as without."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, Local, check_exact
from oracle import Attention, relative_error
from patience import patient
from ranks import Here, RankPools
from sampling import FULL_GRID
from torch.utils.checkpoint import checkpoint

import tokenring as tr
from tokenring import Causal, ContextParallel, Mask, attention, shard
from tokenring.api.standing import context_of

Tensors = tuple[torch.Tensor, ...]
KEEPING = "ulysses"  # its forward leaves bytes to its backward
SCHEDULES = ("ring", "tokenring", KEEPING, "direct-kv", "auto")
CALL_SECONDS = 110.0  # with the import of the compiler


def case_of(schedule: str = "tokenring", mask: str = "causal & documents", dtype: torch.dtype = torch.float32) -> Case:
    """GQA, zigzag, two ranks."""
    return Case(2, schedule, "zigzag", mask, 4, 2, 2, 16, dtype, None)


@contextmanager
def compiler(**settings: Any) -> Iterator[Any]:
    """torch._dynamo, as if nothing had been compiled before; with settings of its own inside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of its own parts
        import torch._dynamo as dynamo

        dynamo.reset()
        dynamo.utils.counters.clear()
        with dynamo.config.patch(**settings):
            yield dynamo
        dynamo.reset()


def given(here: Here, case: Case, **options: Any) -> tuple[ContextParallel, Tensors]:
    cp = here.cp(**{"layout": case.layout, "schedule": case.schedule} | options)
    q, k, v, dout = (shard(x, cp) for x in case.inputs())
    return cp, (q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def results(call: Callable[..., Tensors], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: Any) -> Tensors:
    """out, lse, dq, dk, dv, the gradients as a loop of training gets them."""
    for x in (q, k, v):
        x.grad = None
    out, lse = call(q, k, v)
    torch.autograd.backward(out, dout)
    gradients = tuple(x.grad for x in (q, k, v) if x.grad is not None)
    assert len(gradients) == 3
    return out.detach(), lse.detach(), *gradients


def equal(some: Tensors, others: Tensors) -> bool:
    return len(some) == len(others) and all(
        a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a, b)
        for a, b in zip(some, others, strict=True)
    )


def local(some: Tensors) -> Local:
    return Local(Attention(*some), {})


# ---------- the same results


def compiled(here: Here, case: Case, wrap: str) -> Local:
    """One graph, to the bit what eager gives; `wrap`: where checkpoints are."""
    cp, tensors = given(here, case)

    def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
        return attention(q, k, v, cp, case.mask, return_lse=True)

    expected = results(plain, *tensors)
    with compiler() as dynamo:
        call = wrapped(plain, wrap)
        made = results(call, *tensors)
        assert not dynamo.utils.counters["graph_break"], dynamo.utils.counters["graph_break"]
        assert equal(made, expected)
        assert equal(results(call, *tensors), expected)  # the graph again
        assert equal(results(plain, *tensors), expected)  # eager calls in between
    return local(made)


def wrapped(plain: Callable[..., Tensors], wrap: str) -> Callable[..., Tensors]:
    compile_: Any = partial(torch.compile, backend="aot_eager", fullgraph=True)
    reentrant = wrap.endswith("reentrant")

    def checkpointed(function: Callable[..., Tensors]) -> Callable[..., Tensors]:
        def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Tensors:
            made: Tensors = checkpoint(function, q, k, v, use_reentrant=reentrant)
            return made

        return whole

    where = wrap.partition(",")[0]
    made: Callable[..., Tensors] = compile_(checkpointed(plain) if where == "inside" else plain)
    return checkpointed(made) if where == "outside" else made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, ranks: RankPools) -> None:
    case = case_of(schedule)
    check_exact(case.whole(ranks(2).within(CALL_SECONDS, compiled, case, "")), case.reference())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("wrap", ["inside", "inside, reentrant", "outside", "outside, reentrant"])
@pytest.mark.parametrize("schedule", ["ring", KEEPING])
def test_activation_checkpointing(schedule: str, wrap: str, ranks: RankPools) -> None:
    case = case_of(schedule, "causal")
    check_exact(case.whole(ranks(2).within(CALL_SECONDS, compiled, case, wrap)), case.reference())


@pytest.mark.parametrize("mask", ["full, longer kv", "window to both sides", "documents"])
def test_masks(mask: str, ranks: RankPools) -> None:
    case = case_of("ring", mask)
    check_exact(case.whole(ranks(2).within(CALL_SECONDS, compiled, case, "")), case.reference())


# ---------- no graph break


def graphs(here: Here, case: Case, broken: bool) -> tuple[int, int]:
    """Graphs and breaks of a model that calls tr.attention between its own operators."""
    cp, (q, k, v, _) = given(here, case)

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q * 2
        if broken:
            torch._dynamo.graph_break()
        return tr.attention(q, k.relu(), v, cp, mask=Causal(), scale=0.3).sum() + v.sum()

    with compiler() as dynamo:
        found = dynamo.explain(model)(q, k, v)
        return found.graph_count, found.graph_break_count


def test_no_graph_break(ranks: RankPools) -> None:
    """And a break is seen where there is one."""
    assert ranks(2).within(CALL_SECONDS, graphs, case_of(), False) == [(1, 0)] * 2
    assert ranks(2).within(CALL_SECONDS, graphs, case_of(), True) == [(2, 1)] * 2


# ---------- graphs are of one context and any mask


def changing(here: Here, case: Case) -> list[float]:
    """Errors against eager of one compiled function, for other masks, scales, sizes and contexts in turn."""
    cp, tensors = given(here, case)
    other, _ = given(here, case, schedule="tokenring")
    half = tuple(x.detach()[:1].requires_grad_(x.requires_grad) for x in tensors)
    windows = (tr.SlidingWindow(7), tr.SlidingWindow(9))
    masks: list[Mask | None] = [None, case.mask, Causal(), *windows, tr.Documents((0, 5))]
    calls: list[tuple[ContextParallel, Tensors, Mask | None, float | None]] = [
        *((cp, tensors, mask, None) for mask in masks),
        (other, tensors, case.mask, None),
        *((cp, tensors, case.mask, scale) for scale in (0.5, 0.25, 0.125)),
        (cp, half, case.mask, None),
        (cp, tensors, case.mask, None),
    ]

    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cp: ContextParallel, mask: Mask | None, scale: float | None
    ) -> Tensors:
        return attention(q, k, v, cp, mask, scale, return_lse=True)

    found = []
    with compiler(cache_size_limit=32):
        made = torch.compile(function, backend="aot_eager", fullgraph=True)
        for some, given_, mask, scale in calls:
            how = (some, mask, scale)
            one, two = (results(lambda *x, f=f, how=how: f(*x, *how), *given_) for f in (made, function))
            seen = torch.isfinite(two[1])
            assert torch.equal(seen, torch.isfinite(one[1]))
            found += [relative_error(a, b) for a, b in zip((one[0], *one[2:]), (two[0], *two[2:]), strict=True)]
    return found


def test_masks_scales_and_contexts_may_change(ranks: RankPools) -> None:
    for found in ranks(2).within(CALL_SECONDS, changing, case_of("ring")):
        assert max(found) == 0.0


# ---------- without gradients, in other dtypes, where something is wrong


def modes(here: Here, case: Case) -> None:
    cp, (q, k, v, dout) = given(here, case)
    mask = case.mask

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, cp, mask)

    with compiler():
        made = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.no_grad():
            assert torch.equal(made(q, k, v), function(q, k, v))
        out = made(q, k, v)
        assert out.requires_grad and torch.equal(out, function(q, k, v))
        with torch.autocast("cpu", torch.bfloat16):
            halves, wanted = made(q, k, v), function(q, k, v)
        assert halves.dtype == torch.bfloat16 and torch.equal(halves, wanted)
        gradients = [torch.autograd.grad(x, (q, k, v), dout.bfloat16()) for x in (halves, wanted)]
        assert gradients[0][0].dtype == torch.float32 and equal(*gradients)
        frozen = tuple(x.detach() for x in (q, k, v))
        assert not made(*frozen).requires_grad


def test_modes(ranks: RankPools) -> None:
    ranks(2).within(CALL_SECONDS, modes, case_of(KEEPING))


def copied(here: Here, case: Case) -> str:
    """The ticket of what was kept, replaced by a copy."""
    cp, (q, k, v, dout) = given(here, case)
    mask = case.mask

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, cp, mask)

    with compiler():
        made = torch.compile(function, backend="aot_eager", fullgraph=True)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
            out = made(q, k, v)
        try:
            torch.autograd.backward(out, dout)
        except tr.UnsupportedError as error:
            return str(error)
    return ""


def test_copied_tickets_are_refused(ranks: RankPools) -> None:
    assert ranks(2).within(CALL_SECONDS, copied, case_of("ring", "causal")) == [""] * 2
    for said in ranks(2).within(CALL_SECONDS, copied, case_of(KEEPING, "causal")):
        assert "forward kept for backward are gone" in said


def gone(here: Here, case: Case) -> str:
    """A graph that outlives its context."""
    cp, (q, k, v, _) = given(here, case)
    handle = cp.handle
    assert context_of(handle) is cp
    del cp
    with pytest.raises(tr.ConfigurationError) as raised:
        torch.ops.tokenring.attention(q, k, v, None, handle, None, None, None, None, False, False)
    return str(raised.value)


def test_a_graph_holds_no_context(ranks: RankPools) -> None:
    assert all("which is gone" in said for said in ranks(2)(gone, case_of()))


# ---------- what is kept


def lifetimes(here: Here, case: Case) -> tuple[list[bool], list[bool]]:
    """Whether kept bytes are gone: while a backward may come, and after; and once it never will."""
    from torch.multiprocessing import reductions

    from tokenring.runtime.pool import Views

    cp, (q, k, v, dout) = given(here, case)
    mask, weak = case.mask, vars(reductions)["StorageWeakRef"]
    seen: list[Any] = []
    made_here = Views.new_kept

    def watched(self: Views, device: torch.device) -> torch.Tensor | None:
        made = made_here(self, device)
        assert made is not None
        seen.append(weak(made.untyped_storage()))
        return made

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, cp, mask)

    def expired() -> bool:
        return bool(seen.pop().expired())

    Views.new_kept = watched  # type: ignore[method-assign]
    try:
        with compiler():
            call = torch.compile(function, backend="aot_eager", fullgraph=True)
            out = call(q, k, v)
            before = seen[-1].expired()
            torch.autograd.backward(out, dout)
            used = [before, expired()]
            out = call(q, k, v)
            before = seen[-1].expired()
            del out
            dropped = [before, expired()]
            with torch.no_grad():
                call(q, k, v)
            dropped.append(expired())
    finally:
        Views.new_kept = made_here  # type: ignore[method-assign]
    return used, dropped


def test_kept_bytes_go_with_the_graph(ranks: RankPools) -> None:
    """After backward, without one, and without gradients."""
    for found in ranks(2).within(CALL_SECONDS, lifetimes, case_of(KEEPING, "causal")):
        assert found == ([False, True], [False, True, True])


# ---------- a model, with inductor


class Block(torch.nn.Module):
    """Attention with its projections, 64 wide."""

    def __init__(self, cp: ContextParallel) -> None:
        super().__init__()
        self.cp = cp
        self.project, self.back = torch.nn.Linear(64, 128), torch.nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).unflatten(-1, (8, 16)).split((4, 2, 2), dim=2)
        out = tr.attention(q, k, v, self.cp, mask=tr.Causal() & tr.SlidingWindow(40))
        return x + torch.nn.functional.silu(self.back(out.flatten(2)))


def trained(here: Here, folder: str, backend: str) -> list[float]:
    """Errors against eager: of the output, of the gradients of the input and of all parameters."""

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{here.rank}"
    # The ranks may be far apart while they compile.
    cp = ContextParallel(layout="zigzag", schedule=KEEPING, transport="gloo", timeout_seconds=patient(60.0))
    torch.manual_seed(0)
    model = torch.nn.Sequential(Block(cp), Block(cp))
    x = shard(torch.randn(2, 64, 64), cp).requires_grad_()
    leaves = [x, *model.parameters()]
    with compiler(), torch._inductor.config.patch(compile_threads=1):
        made = torch.compile(model, backend=backend, fullgraph=True)
        pairs = []
        for call in (made, model):
            out = call(x)
            pairs.append([out.detach(), *torch.autograd.grad(out.square().sum(), leaves)])
    cp.close()
    return [relative_error(a, b) for a, b in zip(*pairs, strict=True)]


def test_a_model(ranks: RankPools, tmp_path: Path) -> None:
    for found in ranks(2).within(CALL_SECONDS, trained, str(tmp_path), "aot_eager"):
        assert max(found) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor wants a C++ compiler")
@pytest.mark.skipif(not FULL_GRID, reason="takes half a minute: TOKENRING_FULL_GRID=1")
def test_a_model_with_inductor(ranks: RankPools, tmp_path: Path) -> None:
    for found in ranks(2).within(280.0, trained, str(tmp_path), "inductor"):
        assert max(found) < 1e-5
