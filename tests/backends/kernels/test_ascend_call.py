"""Rows that their owner prepares once a backward call (`npu_call`): as exact as what each tile made of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracle import relative_error
from ranks import Here

import tokenring as tr
from tokenring.api.autograd import OwnTensors
from tokenring.backends.kernels.delta import whole_out
from tokenring.backends.kernels.npu_call import RowsOfCall
from tokenring.backends.kernels.npu_fusion import NpuFusion, _both_in_layout
from tokenring.backends.kernels.npu_operator import statistics
from tokenring.runtime.agreement import _rows_text

HALF = (torch.bfloat16, torch.float16)


def rows(dtype: torch.dtype, size: float = 1.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random dout [1, T, H, D], delta [1, H, T] as some out gives it, and dout [1, H, T, D] in float64."""
    random = torch.Generator().manual_seed(0)
    dout, out = (torch.randn(1, 512, 2, 64, generator=random, dtype=torch.float64) for _ in range(2))
    dout = (dout * size).to(dtype)
    delta = (dout.double() * out).sum(dim=-1).transpose(1, 2)
    return dout, delta.float(), dout.double().transpose(1, 2)


def carried(dout: torch.Tensor, delta: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return RowsOfCall().out(dout.transpose(1, 2), RowsOfCall.prepared_delta(dout, delta), None, dtype)


@pytest.mark.parametrize("dtype", [*HALF, torch.float32])
def test_the_factor_carries_delta_as_the_stand_in_does(dtype: torch.dtype) -> None:
    dout, delta, exact = rows(dtype)

    def error(made: torch.Tensor) -> float:
        assert made.dtype == dtype
        return relative_error((exact * made.double()).sum(dim=-1), delta.double())

    before = error(whole_out(dout.transpose(1, 2), delta, None, dtype))
    assert error(carried(dout, delta, dtype)) < max(1.05 * before, 4e-7)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.bfloat16, 1e-30), (torch.bfloat16, 1e30), (torch.float32, 1e-30), (torch.float16, 1e-3),
        (torch.float16, 1e4),
    ],
)  # fmt: skip
def test_rows_of_any_size(dtype: torch.dtype, size: float) -> None:
    """Squares of dout are beyond fp32 here: the factor is not."""
    dout, delta, exact = rows(dtype, size)
    made = carried(dout, delta, dtype)
    assert made.isfinite().all()
    error = relative_error((exact * made.double()).sum(dim=-1), delta.double())
    assert error < 4 * torch.finfo(dtype).eps


def test_rows_of_zeros_and_rows_that_see_nothing() -> None:
    dout, delta, _ = rows(torch.bfloat16)
    dout[:, 3], delta[:, :, 3] = 0.0, 0.0
    assert (carried(dout, delta, torch.bfloat16)[:, :, 3] == 0).all()
    lse = torch.tensor([0.5, float("-inf"), torch.finfo(torch.float32).min, -20.0]).expand(1, 2, 4)
    prepared, rows_of_call = RowsOfCall.prepared_lse(lse), RowsOfCall()
    assert prepared[0, 0].tolist() == [0.5, 0.0, 0.0, -20.0]
    for name, wanted in statistics(lse).items():
        assert torch.equal(rows_of_call.statistics(prepared)[name], wanted)


def test_sums_are_made_once_for_each_shape() -> None:
    of_call = RowsOfCall()
    first, again, other = (of_call.statistics(torch.zeros(1, 2, rows))["softmax_sum"] for rows in (4, 4, 2))
    assert first is again and other.shape == (1, 2, 2, 8) and (first == 1).all()


class Prepares:
    """What a kernel might make of its rows."""

    def prepared_lse(self, lse: torch.Tensor) -> torch.Tensor:
        return lse + 1

    def prepared_delta(self, dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        return delta * 2


def test_own_tensors_are_prepared_where_a_kernel_wants_it() -> None:
    dout, _, _ = rows(torch.float32)
    found = []
    for preparing in (None, Prepares()):
        own: Any = OwnTensors(dout=dout, out=dout)
        own.rows_lse, own.preparing = torch.zeros(1, 2, 512), preparing
        found.append(own)
    plain, prepared = found
    assert torch.equal(prepared["lse"], plain["lse"] + 1) and torch.equal(prepared["delta"], plain["delta"] * 2)


class Asked:
    """Of a request, what decides its kernel."""

    softcap = 0.0

    @property
    def device(self) -> torch.device:
        return torch.device("npu")


def agreed(here: Here) -> list[dict[str, object]]:
    """What ranks tell each other of their rows in backward, by kernel."""
    from ascend.operators import register

    register("2.13.0")
    found, request = [], Asked()
    for kernel in ("npu-fusion", "reference"):
        cp: Any = tr.ContextParallel(kernel=kernel)
        assert _rows_text(cp, request, "forward") == {}  # type: ignore[arg-type]
        found.append(_rows_text(cp, request, "backward"))  # type: ignore[arg-type]
    return found


def test_ranks_with_other_kernels_hear_of_it(npus: Any) -> None:
    """What travels differs: a rank without such a kernel would take the factor for delta."""
    assert npus(1)(agreed) == [[{"rows prepared for kernel": NpuFusion.name}, {}]]


@pytest.mark.parametrize("layout", ["BSND", "BNSD"])
def test_operands_side_by_side_are_copied_together(layout: str) -> None:
    """As k and v lie in a slot: for each row both, one after the other."""
    rows = torch.randn(5, 2, 3, 2, 4)  # of k and v, each [batch, heads, head dim]
    k, v = (rows[:, which].permute(1, 2, 0, 3) for which in (0, 1))
    made = _both_in_layout(k, v, layout)
    for found, given in zip(made, (k, v), strict=True):
        assert found.is_contiguous()
        assert torch.equal(found if layout == "BNSD" else found.transpose(1, 2), given)
    assert made[0].untyped_storage().data_ptr() == made[1].untyped_storage().data_ptr()
    apart = _both_in_layout(v, k, layout)  # the other way round, and of two memories: two copies
    assert apart[0].untyped_storage().data_ptr() != apart[1].untyped_storage().data_ptr()
    assert torch.equal(apart[0], made[1]) and torch.equal(apart[1], made[0])
    own = torch.randn(2, 5, 2, 4).transpose(1, 2)  # as a caller's: nothing is copied
    assert _both_in_layout(own, own, "BSND")[0].data_ptr() == own.data_ptr()
