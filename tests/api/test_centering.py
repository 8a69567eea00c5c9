"""Keys less their mean: attention is the same, and in a wire format its error is that of keys without a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from key_means import NAMES, Errors, errors
from oracle import relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.backends.interfaces import Transport

SHAPES = {"q": (2, 45, 4, 32), "k": (2, 45, 2, 32), "v": (2, 45, 2, 32)}  # which ranks do not divide


def transport_of(here: Here) -> Transport:
    assert here.base.transport is not None
    return here.base.transport


def whole() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(*shape, generator=random) for shape in SHAPES.values())
    return [q, k + 5 * torch.randn(2, 1, 2, 32, generator=random), v]


def with_and_without(here: Here) -> tuple[dict[str, float], torch.Tensor]:
    """Differences of all results, lse moved back; and the mean of this rank's keys once centered, times their number.

    All means add up to none.
    """
    with here.cp(schedule="ring") as cp:
        found: dict[bool, list[torch.Tensor]] = {}
        mean = whole()[1].double().mean(1, keepdim=True)
        for center in (False, True):
            q, k, v = of = [tr.shard(each, cp, dim=1).detach().requires_grad_() for each in whole()]
            keys = tr.centered(k, cp) if center else k
            out, lse = tr.attention(q, keys, v, cp, is_causal=True, return_lse=True)
            grads = torch.autograd.grad(out, of, torch.ones_like(out).cumsum(1))
            if center:
                shift = (q.double() * mean.repeat_interleave(2, 2)).sum(-1) / 32**0.5
                lse = lse + shift.transpose(1, 2)
            found[center] = [out.detach(), lse.detach(), *grads]
        pairs = zip(("out", "lse", "dq", "dk", "dv"), found[True], found[False], strict=True)
        return {name: relative_error(a, b) for name, a, b in pairs}, keys.detach().sum(1)


@pytest.mark.parametrize("world", (1, 2, 3))
def test_attention_is_the_same(ranks: RankPools, world: int) -> None:
    """Over lengths that ranks do not divide, with fewer heads of k, both passes."""
    parts = ranks(world)(with_and_without)
    for differences, _ in parts:
        assert max(differences.values()) < 3e-5, differences
    left = torch.stack([each for _, each in parts]).sum(0) / SHAPES["k"][1]
    assert left.abs().max() < 1e-5


def compiled(here: Here, backend: str) -> bool:
    """Return whether a compiled call, both passes, gives the bits of an eager one."""
    torch.compiler.reset()
    with here.cp(schedule="ring") as cp:

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            return tr.attention(q, tr.centered(k, cp), v, cp, is_causal=True)

        of = [tr.shard(each, cp, dim=1).detach().requires_grad_() for each in whole()]
        found = []
        for call in (attend, torch.compile(attend, backend=backend, fullgraph=True)):
            out = call(*of)
            found.append([out.detach(), *torch.autograd.grad(out, of, torch.ones_like(out).cumsum(1))])
        with pytest.raises(tr.ConfigurationError, match=r"was given \[3, 4\]: give keys"):
            torch.compile(lambda k: tr.centered(k, cp), backend=backend, fullgraph=True)(torch.ones(3, 4))
        return all(map(torch.equal, *found))


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
def test_compiled_without_a_graph_break(ranks: RankPools, backend: str) -> None:
    assert all(ranks(2)(compiled, backend))


def closed(here: Here) -> bool:
    """Return whether what adds up over the ranks is made once, and closed with the context."""
    with here.cp(schedule="ring") as cp:
        for _ in range(2):
            tr.centered(torch.ones(1, 4, 1, 8), cp)
        (adder,) = cp.adders.values()
    with pytest.raises(tr.ConfigurationError, match="was closed"):
        tr.all_reduce(torch.ones(2), adder)
    return True


def test_what_adds_up_is_closed_with_the_context(ranks: RankPools) -> None:
    assert all(ranks(2)(closed))


def errors_of(here: Here, mean: float, center: bool) -> Errors:
    return errors(mean, torch.bfloat16, transport_of(here), "direct-kv", "mxfp8", center)


def test_a_mean_adds_no_error_in_a_wire_format(ranks: RankPools) -> None:
    plain, beside, centered = (ranks(2)(errors_of, *of)[0] for of in ((0.0, False), (16.0, False), (16.0, True)))
    for name in NAMES:
        assert centered[name] <= 1.05 * plain[name], name
        assert beside[name] >= 5 * plain[name], name


REFUSED: dict[str, Callable[[tr.ContextParallel], Any]] = {
    "was given a list: give keys": lambda cp: tr.centered([1.0], cp),  # type: ignore[arg-type]
    "was given [3, 4]: give keys": lambda cp: tr.centered(torch.ones(3, 4), cp),
    "was given [1, 4, 0, 2]: give keys": lambda cp: tr.centered(torch.ones(1, 4, 0, 2), cp),
    "centered in torch.int64 is not supported": lambda cp: tr.centered(torch.ones(1, 1, 1, 1).long(), cp),
    "cp is of type": lambda cp: tr.centered(torch.ones(1, 1, 1, 1), "cp"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("says", REFUSED)
def test_refused(says: str) -> None:
    with tr.ContextParallel("self") as cp, pytest.raises(tr.TokenRingError) as caught:
        REFUSED[says](cp)
    assert says in str(caught.value)


def test_a_closed_context_is_refused() -> None:
    cp = tr.ContextParallel("self")
    cp.close()
    with pytest.raises(tr.ConfigurationError, match="was closed"):
        tr.centered(torch.ones(1, 1, 1, 1), cp)


def other_shape(here: Here) -> str:
    with here.cp(schedule="ring") as cp:
        with pytest.raises(tr.TokenRingError) as caught:
            tr.centered(torch.ones(1, 4, 2 if here.rank else 1, 8), cp)
        assert tr.centered(torch.ones(1, 4, 1, 8), cp).eq(0).all()
        return str(caught.value)


def refused_by_one(here: Here) -> str:
    with here.cp(schedule="ring") as cp:
        with pytest.raises(tr.TokenRingError) as caught:
            tr.centered(torch.ones(1, 4, 1, 8)[0] if here.rank else torch.ones(1, 4, 1, 8), cp)
        assert tr.centered(torch.ones(1, 4, 1, 8), cp).eq(0).all()
        return str(caught.value)


def test_ranks_that_differ(ranks: RankPools) -> None:
    assert all("shape: rank 0: [9]; rank 1: [17]" in text for text in ranks(2)(other_shape))
    first, second = ranks(2)(refused_by_one)
    assert "rank 1 refused: centered was given [4, 1, 8]" in first and "centered was given [4, 1, 8]" in second
