"""Merging partial results: exact over any split, whatever rows have seen nothing so far; and merges that are not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from oracle import relative_error

from tokenring.runtime.merge import merge_

Merge = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
INF = math.inf
LSES = [  # of what is there, and of what comes
    (0.0, 0.0),
    (1.5, -2.0),
    (-2.0, 1.5),
    (-INF, 0.7),
    (0.7, -INF),
    (-INF, -INF),
    (9000.0, -9000.0),
    (-9000.0, 9000.0),
    (-9000.0, -9000.5),
    (9000.0, 9000.5),
    (1e30, -1e30),
    (-INF, 9000.0),
    (-INF, -9000.0),
]


def parts(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """out, lse, new_out, new_lse, one row for each of LSES; out is 0 where lse is -inf."""
    torch.manual_seed(0)
    made = []
    for which, kind in ((0, torch.float32), (1, dtype)):
        lse = torch.tensor([pair[which] for pair in LSES])
        out = torch.randn(len(LSES), 2, 8).to(kind)
        made += [out.masked_fill((lse == -INF)[:, None, None], 0.0), lse[:, None].repeat(1, 2)]
    return made


def wanted(out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor) -> list[torch.Tensor]:
    """From the definition in float64, each row shifted by its larger lse."""
    lses = torch.stack([lse, new_lse]).double()
    shift = lses.amax(dim=0).clamp_min(-1e300)
    weights = torch.exp(lses - shift)
    total = weights.sum(dim=0)
    both = (weights[..., None] * torch.stack([out, new_out]).double()).sum(dim=0)
    return [both / total.clamp_min(1e-300)[..., None], torch.log(total) + shift]


def check(merge: Merge, dtype: torch.dtype = torch.float32) -> None:
    out, lse, new_out, new_lse = parts(dtype)
    want_out, want_lse = wanted(out, lse, new_out, new_lse)
    scratch = torch.full((2, *lse.shape), math.nan)  # what is left there from before must not matter
    given = new_out.clone(), new_lse.clone()
    merge(out, lse, new_out, new_lse, scratch)
    assert torch.equal(new_out, given[0]) and torch.equal(new_lse, given[1])
    for row, pair in enumerate(LSES):
        errors = relative_error(out[row], want_out[row]), relative_error(lse[row], want_lse[row])
        # fp32 holds an lse of 9000 to 5e-4, and so weights, where both parts have any.
        spacing = 6e-8 * abs(pair[0]) if abs(pair[0] - pair[1]) < 100 else 0.0
        assert max(errors) < 1e-6 + spacing, f"lse {pair}: errors {errors}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merge(dtype: torch.dtype) -> None:
    check(merge_, dtype)


def test_what_comes_to_nothing_is_kept_to_the_bit() -> None:
    out, lse, new_out, new_lse = parts()
    before = out.clone(), lse.clone()
    merge_(out, lse, torch.zeros_like(new_out), torch.full_like(new_lse, -INF), torch.empty(2, *lse.shape))
    assert torch.equal(out, before[0]) and torch.equal(lse, before[1])


@pytest.mark.parametrize("count", [2, 3, 8])
def test_parts_of_a_softmax(count: int) -> None:
    """Attention over `count` parts of the keys, some of which a row does not see, is attention over all."""
    torch.manual_seed(count)
    scores, values = torch.randn(30, 8 * count) * 5, torch.randn(8 * count, 16)
    hidden = torch.rand(30, count).repeat_interleave(8, dim=1) < 0.4
    hidden[0] = True
    scores = scores.masked_fill(hidden, -INF)
    out, lse = torch.zeros(30, 16), torch.full((30,), -INF)
    for part in range(count):
        some = slice(8 * part, 8 * part + 8)
        part_lse = scores[:, some].logsumexp(dim=1)
        part_out = torch.exp(scores[:, some] - part_lse.clamp_min(-1e30)[:, None]) @ values[some]
        merge_(out, lse, part_out, part_lse, torch.empty(2, 30))
    weights = torch.softmax(scores.double(), dim=1).nan_to_num()
    assert relative_error(out, weights @ values.double()) < 1e-6
    assert relative_error(lse, scores.double().logsumexp(dim=1)) < 1e-6
    assert bool((out[0] == 0).all()) and float(lse[0]) == -INF


# ---------- mutants


def by_sigmoid(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """ring-flash-attention's form: NaN where the accumulated lse is -inf."""
    out -= torch.sigmoid(new_lse - lse)[..., None] * (out - new_out)
    lse -= torch.nn.functional.logsigmoid(lse - new_lse)


def by_exponentials(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """log(1 + exp(x)), which overflows."""
    total = lse + torch.log1p(torch.exp(new_lse - lse))
    out.mul_(torch.exp(lse - total)[..., None]).add_(torch.exp(new_lse - total)[..., None] * new_out)
    lse.copy_(total)


def without_clamp(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """-inf minus -inf where a row has seen nothing and nothing comes."""
    total = torch.logaddexp(lse, new_lse)
    out.mul_(torch.exp(lse - total)[..., None]).add_(torch.exp(new_lse - total)[..., None] * new_out)
    lse.copy_(total)


def in_bf16(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Statistics in the dtype of the inputs."""
    rounded = new_lse.bfloat16().float()
    merge_(out, lse, new_out, rounded, scratch)


def average(
    out: torch.Tensor, lse: torch.Tensor, new_out: torch.Tensor, new_lse: torch.Tensor, scratch: torch.Tensor
) -> None:
    """Weighs both alike."""
    out.add_(new_out).div_(2)
    lse.copy_(torch.logaddexp(lse, new_lse))


@pytest.mark.parametrize("mutant", [by_sigmoid, by_exponentials, without_clamp, in_bf16, average])
def test_mutants_fail(mutant: Merge) -> None:
    with pytest.raises(AssertionError):
        check(mutant)
