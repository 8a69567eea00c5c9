"""Kernel "mc2" on emulated NPUs: both layers and passes against float64, what it takes, and what all ranks refuse."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ascend import fused_linears, module
from ascend.fused_linears import GATHER, SCATTER
from ascend.hccl_ledger import ledger
from ascend.hccl_ranks import fresh
from ascend.ranks import NpuPools
from oracle import relative_error
from ranks import Here
from test_linear import Given, Sizes, given, joined, unsplit

import tokenring as tr

BF16 = torch.bfloat16
SEVERAL = (2, 4)


def sizes_of(world: int) -> Sizes:
    """Sums of products are as short as the operators take them: the width, and a rank's features."""
    return Sizes(2, 4 * world, 256 * world, 256)


def group_of(here: Here, name: str = "mc2") -> Any:
    """A group over HCCL, kept for all tests of these ranks."""
    if name not in here.memory:
        here.memory[name] = dist.new_group(backend="hccl")
    return here.memory[name]


@contextmanager
def parallel(here: Here, offer: str = "wheels", group: str = "mc2", **options: Any) -> Iterator[tr.TensorParallel]:
    """A TensorParallel with the kernel, over operators as this build has them."""
    fresh()
    fused_linears.install(offer)
    with tr.TensorParallel(group_of(here, group), **{"kernel": "mc2", **options}) as tp:
        yield tp


def part(x: torch.Tensor, tp: tr.TensorParallel, dim: int) -> torch.Tensor:
    return x.chunk(tp.world_size, dim)[tp.rank].contiguous().to("npu")


def called() -> list[str]:
    return [each.name for each in fused_linears.calls]


def gathers() -> int:
    """All-gathers of the group's own communicator beside the fused operators."""
    return sum(each.what == "all_gather_single" for each in ledger.collectives)


# ---------- exact


def layers(here: Here, sizes: Sizes, offer: str) -> tuple[dict[str, torch.Tensor], dict[str, list[str]], int]:
    """Both layers and passes at one rank: its parts of the results, the operators of each pass, and gatherings."""
    of, ran = given(sizes, BF16), {}
    with parallel(here, offer) as tp:
        x = part(of.x, tp, 1).requires_grad_()
        w1, w2 = part(of.w1, tp, 0).requires_grad_(), part(of.w2, tp, 1).requires_grad_()
        before = gathers()
        h = tr.column_linear(x, w1, tp)
        act = h * h.detach().sign()
        ran["column"] = called()
        fused_linears.calls.clear()
        y = tr.row_linear(act, w2, tp)
        ran["row"] = called()
        fused_linears.calls.clear()
        dh, dw2 = torch.autograd.grad(y, (h, w2), part(of.dy, tp, 1))
        ran["row backward"] = called()
        fused_linears.calls.clear()
        dx, dw1 = torch.autograd.grad(h, (x, w1), dh)
        ran["column backward"] = called()
        assert not ledger.messages  # no schedule of ours moved anything
        made = {"y": y.detach(), "dx": dx, "dw1": dw1, "dw2": dw2}
        return {name: each.cpu() for name, each in made.items()}, ran, gathers() - before


def summed_by_hccl(of: Given, world: int) -> dict[str, torch.Tensor]:
    """The two layers in bf16, whose parts of a sum over the ranks are rounded, and so is the sum at each of them."""
    w1, w2 = of.w1.chunk(world), of.w2.chunk(world, 1)
    h = torch.nn.functional.linear(of.x, of.w1)
    act, sign = h * h.sign(), h.sign()
    dh = of.dy @ of.w2 * sign

    def summed(parts: list[torch.Tensor]) -> torch.Tensor:
        total = parts[0].clone()
        for each in parts[1:]:
            total += each
        return total

    return {
        "y": summed([a @ w.t() for a, w in zip(act.chunk(world, 2), w2, strict=True)]),
        "dx": summed([a @ w for a, w in zip(dh.chunk(world, 2), w1, strict=True)]),
        **{name: each for name, each in unsplit(of, BF16).items() if name.startswith("dw")},
    }


@pytest.mark.parametrize("offer", fused_linears.OFFERS)
@pytest.mark.parametrize("world", SEVERAL)
def test_exact(npus: NpuPools, world: int, offer: str) -> None:
    """In bf16, at most 1.1 times the error that sums in bf16 have; and by one operator each, but for dw of a column."""
    sizes = sizes_of(world)
    of = given(sizes, BF16)
    wanted, least = unsplit(of, torch.float64), summed_by_hccl(of, world)
    parts = npus(world)(layers, sizes, offer)
    made = joined([each for each, _, _ in parts])
    found = {name: relative_error(each, wanted[name]) for name, each in made.items()}
    limits = {name: 1.1 * relative_error(least[name], wanted[name]) for name in made}
    assert not {name: (found[name], limits[name]) for name in found if not found[name] <= limits[name]}
    for _, ran, gathered in parts:
        assert ran == {"column": [GATHER], "row": [SCATTER], "row backward": [GATHER], "column backward": [SCATTER]}
        assert gathered == 1
