"""What attention gives may be changed in place, with gradients on: they are those of float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring import ConfigurationError, attention, shard, unshard
from tokenring.api.autograd import Changes
from tokenring.runtime.trace import Agree
from tokenring.sequence.layout import zigzag

LENGTH, HEADS, DIM = 48, (4, 2), 16
LIMITS = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
Change = Callable[[torch.Tensor], torch.Tensor]


def added(out: torch.Tensor) -> torch.Tensor:
    out += 1
    return out


def multiplied(out: torch.Tensor) -> torch.Tensor:
    return out.mul_(2)


def by_itself(out: torch.Tensor) -> torch.Tensor:
    return out.mul_(out.clone())


def a_part(out: torch.Tensor) -> torch.Tensor:
    out[:, 1:3] *= 3
    return out


def through_a_view(out: torch.Tensor) -> torch.Tensor:
    rows = out.flatten(0, 1)
    del out
    rows.mul_(3)
    return rows.view(1, -1, HEADS[0], DIM)


CHANGES: dict[str, Change] = {
    each.__name__: each for each in (added, multiplied, by_itself, a_part, through_a_view)
}

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def inputs(here: Here, cp: tr.ContextParallel, dtype: torch.dtype) -> tuple[list[torch.Tensor], torch.Tensor, Three]:
    """q, k, v, dout of the whole sequence; the rows of this rank; its q, k and v."""
    random = torch.Generator().manual_seed(1)
    counts = HEADS[0], HEADS[1], HEADS[1], HEADS[0]
    whole = [torch.randn(1, LENGTH, count, DIM, generator=random).to(dtype) for count in counts]
    rows = torch.tensor(cp.layout_for(LENGTH).positions(here.rank))
    q, k, v = (x[:, rows].requires_grad_() for x in whole[:3])
    return whole, rows, (q, k, v)


def errors(here: Here, change: str, dtype: torch.dtype, with_lse: bool, backend: str | None) -> list[float]:
    """Of out and the gradients. out takes part in a loss that wants its changed value for backward."""
    cp = here.cp(layout="zigzag", schedule="tokenring")
    whole, rows, leaves = inputs(here, cp, dtype)
    weight, how = whole[3][:, rows], CHANGES[change]

    def changed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not with_lse:
            return how(attention(q, k, v, cp, tr.Causal()))
        out, lse = attention(q, k, v, cp, tr.Causal(), return_lse=True)
        lse += 1
        return how(out)

    with warnings.catch_warnings():
        warnings.simplefilter("error" if backend is None else "ignore")
        if backend:
            torch._dynamo.reset()
        out = (torch.compile(changed, backend=backend, fullgraph=True) if backend else changed)(*leaves)
        made = torch.autograd.grad((out.float().square() * weight).sum(), leaves)
    right_out, *right = changed64(whole, CHANGES[change], rows)
    return [relative_error(x, y) for x, y in zip((out.detach(), *made), (right_out, *right), strict=True)]


def changed64(whole: list[torch.Tensor], how: Change, rows: torch.Tensor) -> list[torch.Tensor]:
    """This rank's rows of the changed out and of the gradients, where every rank's part is changed alike."""
    world_size = LENGTH // len(rows)
    visible = allowed(tr.Causal(), LENGTH, LENGTH)
    q, k, v, weight = whole
    plain = attention64(q, k, v, weight, visible).out.requires_grad_()
    layout = zigzag(world_size, LENGTH)
    changed = torch.empty_like(plain)
    for each in (torch.tensor(layout.positions(rank)) for rank in range(world_size)):
        changed = changed.index_copy(1, each, how(plain[:, each]))
    (dout,) = torch.autograd.grad((changed.square() * weight.double()).sum(), plain)
    right = attention64(q, k, v, dout, visible)
    return [x.detach()[:, rows] for x in (changed, right.dq, right.dk, right.dv)]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_are_right(world_size: int, change: str, ranks: RankPools) -> None:
    for dtype, limit in LIMITS.items():
        for with_lse in (False, True):
            for found in ranks(world_size)(errors, change, dtype, with_lse, None):
                assert max(found) < limit, (dtype, with_lse, found)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_compiled(world_size: int, backend: str, ranks: RankPools) -> None:
    for change in ("added", "by_itself", "through_a_view"):
        for found in ranks(world_size).within(110.0, errors, change, torch.float32, True, backend):
            assert max(found) < LIMITS[torch.float32], (change, found)


# ---------- where not all ranks do


def on_one_rank(here: Here) -> tuple[str, bool]:
    cp = here.cp(layout="zigzag", schedule="ring")
    q, k, v = leaves = inputs(here, cp, torch.float32)[2]
    out = attention(q, k, v, cp)
    if here.rank == 0:
        out += 1
    try:
        said = str(torch.autograd.grad(out.sum(), leaves))
    except ConfigurationError as error:
        said = str(error)
    return said, bool(attention(q, k, v, cp).isfinite().all())


def test_a_change_on_one_rank_is_heard_by_all(ranks: RankPools) -> None:
    """What backward needs is computed again by all together, or not at all."""
    for said, goes_on in ranks(3)(on_one_rank):
        assert said.startswith("the ranks disagree, so the call was not made. ")
        assert "pass: ranks 1, 2: backward; rank 0: forward" in said
        assert goes_on


# ---------- what it costs


def passes(here: Here, change: str | None) -> list[str]:
    """The passes that the ranks agree on for a call and its backward."""
    cp = here.cp(layout="zigzag", schedule="ring")
    q, k, v = leaves = inputs(here, cp, torch.float32)[2]
    with cp.trace() as trace:
        out = attention(q, k, v, cp)
        out = CHANGES[change](out) if change else out * 2
        torch.autograd.grad(out.sum(), leaves)
    return [event.direction for event in trace.events if isinstance(event.instruction, Agree)]


def test_only_a_change_costs_a_pass(ranks: RankPools) -> None:
    assert ranks(2)(passes, None) == [["forward", "backward"]] * 2
    assert ranks(2)(passes, "added") == [["forward", "forward", "backward"]] * 2


def test_what_watches_holds_nothing() -> None:
    x = torch.randn(2, 3)
    changes = Changes(x)
    x + 1
    assert not changes.found()
    x.view(-1)[0].add_(1)
    assert changes.found()
    assert [each.untyped_storage().nbytes() for each in changes._alike] == [0]


# ---------- the other functions of the package


def parts(here: Here) -> bool:
    cp = here.cp(layout="zigzag")
    whole = torch.randn(1, 24, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    part = shard(whole, cp)
    part *= 2
    back = unshard(part, cp)
    back += 1
    (made,) = torch.autograd.grad(back.square().sum(), whole)
    right = here.world_size * 2 * (2 * (2 * whole + 1))
    return torch.allclose(shard(made, cp), shard(right, cp)) and torch.allclose(back, 2 * whole + 1)


@pytest.mark.parametrize("world_size", [1, 3])
def test_shard_and_unshard(world_size: int, ranks: RankPools) -> None:
    assert all(ranks(world_size)(parts))


def under_inference(here: Here) -> bool:
    cp = here.cp(layout="zigzag", schedule="ring")
    q, k, v = inputs(here, cp, torch.float32)[2]
    with torch.inference_mode():
        out = attention(q, k, v, cp)
        out += 1
    return bool(out.isfinite().all())


def test_inference_mode(ranks: RankPools) -> None:
    assert ranks(2)(under_inference) == [True] * 2
