"""What is wrong in one document stays there: NaN and infinity reach no row and no gradient of another."""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise, product

import pytest
import torch
from ascend.operators import register
from ascend.ranks import NpuPools
from ranks import Here, RankPools
from sampling import FULL_GRID
from test_ascend_runs import context
from test_scales import at_home

import tokenring as tr
from tokenring import ContextParallel, Documents, Full, Mask, SlidingWindow, attention
from tokenring.lowering.calls import _patches
from tokenring.sequence.layout import Layout, make_layout

LENGTH = 48
ALIGNED, UNEVEN = (0, 8, 16, 24, 40, 44), (0, 5, 12, 13, 24, 36, 44)  # with chunks of "zigzag/2" on 3 ranks; with none
WINDOWS: dict[str, Mask] = {
    "diagonal": SlidingWindow(0, 0), "full": Full(), "causal": tr.Causal(), "window": SlidingWindow(3, 1),
    "before": Mask(low=-9, high=-2), "after": Mask(low=1),
}  # fmt: skip
LAYOUTS = ("contiguous", "zigzag", "zigzag/2", "striped")
KERNELS = {"cpu-flash": torch.float32, "reference": torch.float32, "torch-efficient": torch.float32,
           "torch-flash": torch.bfloat16}  # fmt: skip
Tensors = list[torch.Tensor]


def results(cp: ContextParallel, mask: Mask, whole: Tensors, device: str) -> Tensors:
    """out, lse, dq, dk, dv of this rank, rows first; on NPUs two: their stand-in refuses statistics of NaN."""
    rows = torch.tensor(cp.layout_for(LENGTH).positions(cp.rank))
    q, k, v, dout = (x[:, rows].to(device) for x in whole)
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    out, lse = attention(q, k, v, cp, mask, return_lse=True)
    gradients = torch.autograd.grad(out, leaves, dout) if device == "cpu" else ()
    made = out.detach(), lse.transpose(1, 2), *gradients
    return [x.cpu().transpose(0, 1) for x in made]


def leaks(
    cp: ContextParallel, mask: Mask, dtype: torch.dtype, device: str = "cpu", turns: Sequence[int] = (0, 1)
) -> list[str]:
    """Where anything of another document changes when one holds no numbers; padding counts as one.

    turns: 0, every second document holds NaN and all others infinity, 1 the other way round.
    """
    return [each for turn in turns for each in _leaks(cp, mask, dtype, device, turn)]


def _leaks(cp: ContextParallel, mask: Mask, dtype: torch.dtype, device: str, turn: int) -> list[str]:
    """One call: each sequence of its batch has another document without numbers, the first has none."""
    assert mask.cu_seqlens is not None
    documents = list(pairwise((*mask.cu_seqlens, LENGTH)))
    values = [math.inf if (number + turn) % 2 else math.nan for number in range(len(documents))]
    generator = torch.Generator().manual_seed(1)
    whole = [torch.randn(1, LENGTH, heads, 8, generator=generator).to(dtype) for heads in (2, 1, 1, 2)]
    whole = [x.repeat(1 + len(documents), 1, 1, 1) for x in whole]
    for number, ((start, stop), value) in enumerate(zip(documents, values, strict=True), 1):
        for x in whole:
            x[number, start:stop] = value
    positions, found = torch.tensor(cp.layout_for(LENGTH).positions(cp.rank)), []
    made = results(cp, mask, whole, device)
    for number, ((start, stop), value) in enumerate(zip(documents, values, strict=True), 1):
        others = (positions < start) | (positions >= stop)
        for name, x in zip(("out", "lse", "dq", "dk", "dv"), made, strict=False):
            if not torch.equal(x[others, 0], x[others, number]):
                found.append(f"{value} in {start} to {stop} reaches {name}")
    return found


def on_ranks(here: Here, kernel: str, layout: str, schedule: str) -> list[str]:
    found = []
    with at_home(kernel) as name:
        cp = here.cp(kernel=name, layout=layout, schedule=schedule)
        for number, ((window, mask), bounds) in enumerate(product(WINDOWS.items(), (ALIGNED, UNEVEN))):
            # NaN and infinity in each document of each mask, or by turns.
            turns = (0, 1) if FULL_GRID else ((number // 2 + LAYOUTS.index(layout)) % 2,)
            said = leaks(cp, mask & Documents(bounds), KERNELS[kernel], turns=turns)
            found += [f"{window} & {bounds}: {each}" for each in said]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_three_ranks(kernel: str, layout: str, ranks: RankPools) -> None:
    for schedule in ("ring", "tokenring") if kernel == "cpu-flash" else ("tokenring",):
        assert ranks(3)(on_ranks, kernel, layout, schedule) == [[]] * 3


@pytest.mark.parametrize("schedule", ["ulysses", "direct-kv"])
def test_two_ranks(schedule: str, ranks: RankPools) -> None:
    """Where a rank computes chunks of several ranks in one call."""
    layout = "zigzag/2"
    heads = "direct-q" if schedule == "ulysses" else schedule  # one kv head here: Ulysses wants two
    assert ranks(2)(on_ranks, "cpu-flash", layout, heads) == [[]] * 2


def test_one_rank(ranks: RankPools) -> None:
    assert ranks(1)(on_ranks, "cpu-flash", "zigzag/2", "ring") == [[]]


def on_npus(here: Here) -> list[str]:
    register("2.13.0")
    cp = context(here, layout="zigzag/2", schedule="tokenring")
    return [
        f"{window}: {each}"
        for window in ("diagonal", "causal", "window")
        for each in leaks(cp, WINDOWS[window] & Documents(ALIGNED), torch.float32, "npu")
    ]


def test_packed_on_npus(npus: NpuPools) -> None:
    assert npus(3)(on_npus) == [[]] * 3


# ---------- kernel calls, without any


def documents_of(call_rows: list[int], bounds: tuple[int, ...]) -> set[int]:
    return {bisect_right(bounds, position) for position in call_rows}


def test_no_kernel_call_holds_two_documents() -> None:
    draw, seen = random.Random(1), 0
    for world_size, name in product((1, 2, 3, 4), (*LAYOUTS, "zigzag/3")):
        length = 24 * world_size
        layout = make_layout(name, world_size, length)
        for _ in range(40):
            bounds = tuple(sorted({0, length - draw.choice((0, 3)), *draw.sample(range(length - 4), 3)}))
            low, high = draw.choice((None, 0, -1, -3, 1)), draw.choice((None, 0, 1, 3, -1))
            for q, kv in product(*[[held(layout, rank) for rank in range(world_size)]] * 2):
                rows, cols = ([p for each in chunks for p in range(*each)] for chunks in (q, kv))
                for patch in _patches(Mask(low, high, bounds), q, kv):
                    inside = rows[patch.row0 : patch.row1] + cols[patch.col0 : patch.col1]
                    assert len(documents_of(inside, bounds)) == 1, (layout.name, low, high, bounds, patch)
                    seen += 1
    assert seen > 1000


def held(layout: Layout, rank: int) -> tuple[tr.Positions, ...]:
    return tuple(chunk for chunk, owner in zip(layout.chunks, layout.owners, strict=True) if owner == rank)


def test_one_document_still_shares_a_call() -> None:
    """A rank's two zigzag chunks in one document: one triangle, one diagonal."""
    q = held(make_layout("zigzag", 2, 48), 0)
    for window in (tr.Causal(), SlidingWindow(0, 0)):
        assert len(_patches(window & Documents([0, 48]), q, q)) == 1
    assert len(_patches(SlidingWindow(0, 0) & Documents([0, 20, 48]), q, q)) == 2
