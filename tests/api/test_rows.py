"""Rows at the edges of what softmax can do: those that see nothing, and those with very large scores."""

from __future__ import annotations

import math

import pytest
import torch
from cases import SCHEDULES, Case, Local, check_exact, run_on
from oracle import Attention, allowed, attention64, relative_error
from ranks import Here, RankPools

from tokenring import Causal, Documents, Mask, SlidingWindow, attention, shard

LENGTH = 96  # 4 ranks, whose chunks can be halved in any layout
KERNELS = ("cpu-flash", "reference")
MASKS = {  # in a contiguous layout of 4 ranks, the first holds positions up to 24
    "long padding": Documents([0, 5, 19]),
    "long padding, causal": Causal() & Documents([0, 5, 35]),
    "nothing but padding": Documents([0, 0]),
    "two rows": Documents([0, 2]),
    "window and padding": SlidingWindow(3, 2) & Documents([0, 30, 31, 60]),
}


def case_of(schedule: str, layout: str, mask: Mask, dtype: torch.dtype = torch.float32) -> Case:
    return Case(4, schedule, layout, "", 4, 2, 2, 16, dtype, None, mask, LENGTH)


@pytest.mark.sampled(18)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_see_nothing(schedule: str, kernel: str, name: str, ranks: RankPools) -> None:
    """out 0, lse -inf, gradients 0, to the bit, and no NaN: also where whole ranks see nothing."""
    for layout in ("contiguous", "zigzag", "striped"):
        case = case_of(schedule, layout, MASKS[name])
        made = run_on(ranks, case, kernel)
        check_exact(made, case.reference())
        check_empty(case, made)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rows_that_see_nothing_in_bf16(schedule: str, ranks: RankPools) -> None:
    case = case_of(schedule, "zigzag", MASKS["window and padding"], torch.bfloat16)
    check_empty(case, run_on(ranks, case))


def check_empty(case: Case, made: Attention) -> None:
    shown = allowed(case.mask, LENGTH, LENGTH)
    rows, columns = ~shown.any(dim=1), ~shown.any(dim=0)
    assert bool(rows.any()) and bool(columns.any())
    assert bool((made.lse[:, :, rows] == -math.inf).all()) and bool(made.lse[:, :, ~rows].isfinite().all())
    for x, hidden in ((made.out, rows), (made.dq, rows), (made.dk, columns), (made.dv, columns)):
        assert bool((x[:, hidden] == 0).all()) and bool(x.isfinite().all())


# ---------- large scores


def large_inputs(case: Case, sign: float) -> list[torch.Tensor]:
    """Scores of about sign · 10⁴, from the first element of each head."""
    q, k, v, dout = case.inputs()
    q[..., 0] = 200
    k[..., 0] = 200 * sign
    return [q, k, v, dout]


def with_large_scores(here: Here, case: Case, kernel: str, sign: float) -> Local:
    cp = here.cp(**case.options, kernel=kernel)
    q, k, v, dout = (shard(x, cp).requires_grad_(i < 3) for i, x in enumerate(large_inputs(case, sign)))
    out, lse = attention(q, k, v, cp, case.mask, return_lse=True)
    return Local(Attention(out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout)), {})


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_large_scores(kernel: str, sign: float, dtype: torch.dtype, ranks: RankPools) -> None:
    """No NaN or infinity, and as exact as scores of that size are in fp32: they are 10⁻³ apart there."""
    for schedule in SCHEDULES:
        case = case_of(schedule, "zigzag", Causal(), dtype)
        q, k, v, dout = large_inputs(case, sign)
        wanted = attention64(q, k, v, dout, allowed(case.mask, LENGTH, LENGTH))
        assert 9e3 < float(wanted.lse.abs().mean()) < 1.1e4
        made = case.whole(ranks(4)(with_large_scores, case, kernel, sign))
        assert all(bool(x.isfinite().all()) for x in made)
        assert relative_error(made.lse, wanted.lse) < 2e-6
        # Gradients of the first elements are sums of large numbers that should cancel out.
        errors = {
            n: relative_error(getattr(made, n)[..., 1:], x[..., 1:]) for n, x in wanted._asdict().items() if n != "lse"
        }
        assert max(errors.values()) < (2e-3 if dtype == torch.float32 else 1e-2), errors
