"""Kernel "mc2" on emulated NPUs: both layers and passes against float64, by the vendor's operators alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from ascend import fused_linears
from ascend.device import host_waits
from ascend.fused_linears import GATHER, SCATTER
from ascend.hccl_ledger import ledger
from ascend.hccl_ranks import fresh
from ascend.ranks import NpuPools
from oracle import relative_error
from ranks import Here
from test_linear import Given, Sizes, given, joined, unsplit

import tokenring as tr
from tokenring.api.fused import all_gather_matmul, matmul_reduce_scatter

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


# ---------- what a model asks for besides


class Asked(NamedTuple):
    """A layer, which of its two inputs want gradients, and what backward then runs, with how many gatherings."""

    layer: str
    x: bool
    w: bool
    runs: list[str]
    gathered: int


PARTLY = (
    Asked("column", True, False, [SCATTER], 0), Asked("column", False, True, [], 1),
    Asked("row", True, False, [GATHER], 0), Asked("row", False, True, [], 1),
)  # fmt: skip


def partly(here: Here, asked: Asked) -> dict[str, float]:
    """Errors of the gradients that are wanted, beside float64."""
    of = given(sizes_of(here.world_size), BF16)
    w = of.w1 if asked.layer == "column" else of.w2
    dim = 0 if asked.layer == "column" else 1
    with parallel(here) as tp:
        if asked.layer == "column":
            x, dout = of.x, torch.nn.functional.linear(of.x, of.w1)
            mine, dims = part(x, tp, 1), (1, 2)
        else:
            x, dout = torch.nn.functional.linear(of.x, of.w1), of.dy
            mine, dims = part(x, tp, 2), (2, 1)
        mine.requires_grad_(asked.x)
        own = part(w, tp, dim).requires_grad_(asked.w)
        out = (tr.column_linear if asked.layer == "column" else tr.row_linear)(mine, own, tp)
        fused_linears.calls.clear()
        before = gathers()
        torch.autograd.backward(out, part(dout, tp, dims[1]))
        assert (called(), gathers() - before) == (asked.runs, asked.gathered)
        flat_x, flat_d = x.double().flatten(0, 1), dout.double().flatten(0, 1)
        wanted = {"x": (flat_d @ w.double()).view_as(x), "w": flat_d.t() @ flat_x}
        found = {"x": (mine.grad, part(wanted["x"], tp, dims[0])), "w": (own.grad, part(wanted["w"], tp, dim))}
        assert [each is not None for each, _ in found.values()] == [asked.x, asked.w]
        return {name: relative_error(a.cpu(), b.cpu()) for name, (a, b) in found.items() if a is not None}


@pytest.mark.parametrize("asked", PARTLY, ids=lambda each: f"{each.layer}, {'x' if each.x else 'w'}")
def test_gradients_that_nobody_wants_cost_nothing(npus: NpuPools, asked: Asked) -> None:
    assert all(error <= 8e-3 for each in npus(2)(partly, asked) for error in each.values())


def into_main_grad(here: Here) -> float:
    of = given(sizes_of(here.world_size), BF16)
    with parallel(here) as tp:
        w = part(of.w1, tp, 0).requires_grad_()
        w.main_grad = torch.ones(w.shape, device="npu")  # type: ignore[attr-defined]
        out = tr.column_linear(part(of.x, tp, 1), w, tp)
        torch.autograd.backward(out, torch.ones_like(out))
        assert w.grad is None
        wanted = 1 + of.x.double().sum((0, 1)).expand(w.shape)
        return relative_error(w.main_grad.cpu(), wanted)  # type: ignore[attr-defined]


def test_gradients_of_weights_go_into_main_grad(npus: NpuPools) -> None:
    assert max(npus(2)(into_main_grad)) <= 4e-3


def waiting(here: Here) -> list[str]:
    """Return what the host waits for in both passes of both layers, once the ranks have met."""
    of = given(sizes_of(here.world_size), BF16)
    with parallel(here) as tp:
        x, w1, w2 = (part(each, tp, dim).requires_grad_() for each, dim in ((of.x, 1), (of.w1, 0), (of.w2, 1)))
        dy = part(of.dy, tp, 1)
        for _ in range(2):
            host_waits.clear()
            torch.autograd.backward(tr.row_linear(tr.column_linear(x, w1, tp), w2, tp), dy)
        return list(host_waits)


def test_the_host_waits_for_nothing(npus: NpuPools) -> None:
    assert npus(2)(waiting) == [[], []]


def expanded(here: Here) -> bool:
    """The gradient of a sum is one number in memory, and a weight may be any view."""
    of = given(sizes_of(here.world_size), BF16)
    with parallel(here) as tp:
        whole, x = part(of.w1, tp, 0), part(of.x, tp, 1).requires_grad_()
        odd = torch.stack((whole, whole), 2)[..., 1].requires_grad_()
        torch.autograd.backward(tr.row_linear(tr.column_linear(x, odd, tp), part(of.w2, tp, 1), tp).sum())
        return x.grad is not None and bool(x.grad.cpu().isfinite().all())


def test_tensors_of_any_strides(npus: NpuPools) -> None:
    assert all(npus(2)(expanded))


def compiled_operators(here: Here, keep: bool) -> tuple[list[str], list[float], bool]:
    """Call what compiled graphs do, for two weights at once: [D, N] of any strides."""
    of = given(sizes_of(here.world_size), BF16)
    with parallel(here) as tp:
        x, c = of.x.flatten(0, 1), torch.nn.functional.linear(of.x, of.w1).flatten(0, 1)
        right = part(of.w1, tp, 0).t()
        kept, made = all_gather_matmul(part(x, tp, 0), [right, right * 2], tp, keep)
        y = matmul_reduce_scatter(part(c, tp, 1), part(of.w2, tp, 1).t(), tp)
        wanted = x.double() @ right.cpu().double()
        errors = [relative_error(each.cpu(), wanted * by) for each, by in zip(made, (1, 2), strict=True)]
        errors.append(relative_error(y.cpu(), (c.double() @ of.w2.double().t()).chunk(tp.world_size)[tp.rank]))
        return called(), errors, kept is not None and torch.equal(kept.cpu(), x)


@pytest.mark.parametrize("keep", (True, False))
def test_operators_of_compiled_graphs(npus: NpuPools, keep: bool) -> None:
    for ran, errors, kept in npus(2)(compiled_operators, keep):
        assert ran == [GATHER, SCATTER] and kept is keep
        assert max(errors) <= 8e-3


def collectives(here: Here) -> list[str]:
    with parallel(here) as tp:
        total = tr.all_reduce(torch.ones(8, device="npu"), tp)
        assert total.cpu().equal(torch.full((8,), float(here.world_size)))
        return called()


def test_collectives_go_by_schedules(npus: NpuPools) -> None:
    assert npus(2)(collectives) == [[], []]
