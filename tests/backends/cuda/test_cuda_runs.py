"""Whole calls with the kernels for CUDA, over operators that stand in: schedules and masks, against float64.

Tensors lie on the CPU, so that shared memory moves them; the kernels are told that this is their home.
"""

from __future__ import annotations

import math

import pytest
import torch
from cuda_ops.aten import calls, operators
from oracle import allowed, attention64
from ranks import Here, RankPools

from tokenring import Causal, Documents, Full, Mask, SlidingWindow, attention
from tokenring.backends import registry

LENGTH, HEADS, DIM = 96, (4, 2), 32
RATIO = 1.5  # × the error of one call of the same kernel
MASKS = {
    "full": Full(),
    "causal": Causal(),
    "window": SlidingWindow(17),
    "causal documents": Documents([0, 11, 40, 41, 90]) & Causal(),
}
KERNELS = ("torch-flash", "torch-cudnn", "torch-efficient")
NAMES = ("out", "dq", "dk", "dv")


def runs(
    here: Here, kernel: str, schedule: str, layout: str, mask: Mask, dtype: torch.dtype
) -> tuple[dict[str, float], int]:
    """The squared error of this rank's part of each result beside the size of the whole, and how often it called."""
    with pytest.MonkeyPatch.context() as patched, operators():
        patched.setitem(registry.HOMES, kernel, "cpu")
        cp = here.cp(schedule=schedule, layout=layout, kernel=kernel)
        random = torch.Generator().manual_seed(1)
        shapes = {"q": HEADS[0], "k": HEADS[1], "v": HEADS[1], "dout": HEADS[0]}
        whole = {name: torch.randn(2, LENGTH, count, DIM, generator=random).to(dtype) for name, count in shapes.items()}
        rows = torch.tensor(cp.layout_for(LENGTH).positions(here.rank))
        q, k, v, dout = (whole[name][:, rows].requires_grad_(name != "dout") for name in shapes)
        out = attention(q, k, v, cp=cp, mask=mask)
        torch.autograd.backward(out, dout)
        operands = whole["q"], whole["k"], whole["v"], whole["dout"]
        right = attention64(*operands, allowed(mask, LENGTH, LENGTH), 1 / math.sqrt(DIM))
        made = dict(zip(NAMES, (out.detach(), q.grad, k.grad, v.grad), strict=True))
        errors = {}
        for name, x in made.items():
            assert x is not None and x.dtype == dtype
            wanted = getattr(right, name)
            errors[name] = float((x.double() - wanted[:, rows]).norm() / wanted.norm()) ** 2
        return errors, len(calls)


def total(found: list[tuple[dict[str, float], int]]) -> dict[str, float]:
    assert all(count > 0 for _, count in found), "another kernel computed it"
    return {name: math.sqrt(sum(errors[name] for errors, _ in found)) for name in NAMES}


@pytest.mark.sampled(24)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("world_size", "schedule", "layout"),
    [(2, "tokenring", "zigzag"), (4, "ring", "zigzag"), (4, "direct-kv", "striped"), (4, "usp/2", "contiguous")],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_exact(ranks: RankPools, kernel: str, world_size: int, schedule: str, layout: str, mask: str) -> None:
    """bf16 over several ranks: at most 1.5 times the error of one rank."""
    alone = total(ranks(1)(runs, kernel, "ring", "contiguous", MASKS[mask], torch.bfloat16))
    found = total(ranks(world_size)(runs, kernel, schedule, layout, MASKS[mask], torch.bfloat16))
    assert max(alone.values()) < 6e-3, alone
    for name in NAMES:
        assert found[name] < RATIO * alone[name], name


def test_fp32(ranks: RankPools) -> None:
    found = total(ranks(4)(runs, "torch-efficient", "tokenring", "zigzag", MASKS["causal"], torch.float32))
    assert max(found.values()) < 2e-6, found


def refused(here: Here) -> str:
    with pytest.MonkeyPatch.context() as patched, operators():
        patched.setitem(registry.HOMES, "torch-flash", "cpu")
        x = torch.zeros(1, 8, 2, 320, dtype=torch.bfloat16)
        try:
            attention(x, x, x, cp=here.cp(kernel="torch-flash", schedule="ring"))
        except NotImplementedError as error:
            return str(error)
    return "nothing was refused"


def test_an_unsupported_head_dim_is_a_clear_error(ranks: RankPools) -> None:
    said, _ = ranks(2)(refused)
    assert said.startswith("kernel 'torch-flash' cannot compute this call: torch-flash takes head dimensions up to 256")
    assert "choose another" in said
