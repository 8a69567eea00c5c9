"""tr.choose_layout: the layout of a pack together with its schedule, by simulation, the same on all ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from exchanged import counted_texts
from oracle import allowed, attention64, relative_error
from ranks import Here, RankPools

import tokenring as tr
from tokenring.errors import ConfigurationError
from tokenring.planner.interconnects.interconnect import full_mesh
from tokenring.planner.layouts.balanced import EVEN, EVENED, NAME, balanced_layout, imbalance
from tokenring.planner.machines.machine import CPU_MESSAGES
from tokenring.runtime.agreement import Disagreement
from tokenring.sequence.layout import make_layout
from tokenring.tables.rates import Machine, constant

LENGTH, DIM = 1024, 16


def pack(*ends: int) -> tr.Mask:
    return tr.Causal() & tr.Documents([0, *ends, LENGTH])


UNEVEN = [pack(153, 263, 398, 577, 626 + last) for last in range(3)]  # all are when dealt, as far as they may
ALIKE = [pack(20, 350, 380, 450, 950), pack(21, 350, 380, 450, 951), pack(22, 350, 381, 450, 950)]


class Choice(NamedTuple):
    name: str
    told: int  # how often the ranks told each other of a plan, to choose
    later: int  # and for the call in this layout
    error: float
    by_hand: dict[str, float]  # seconds of the fastest schedule in each layout, as plans say


def choices(here: Here, schedule: str, heads: int, gbs: float) -> list[Choice]:
    """For packs of one shape, one after another."""
    cp = here.cp(schedule=schedule, layout="auto", topology=full_mesh(here.world_size, gbs))
    found = []
    torch.manual_seed(3)
    q, dout = torch.randn(1, LENGTH, heads, DIM), torch.randn(1, LENGTH, heads, DIM)
    size = tr.Workload(1, LENGTH, LENGTH, heads, heads, DIM)
    with counted_texts(cp) as exchanged:
        for mask in ALIKE:
            exchanged.clear()
            layout = tr.choose_layout(cp, size, mask)
            first = len(exchanged)
            part = tr.shard(q, cp, layout=layout).requires_grad_()
            out = tr.attention(part, part, part, cp, mask, layout=layout)
            torch.autograd.backward(out, tr.shard(dout, cp, layout=layout))
            later = exchanged.count("the plan") - first
            want = attention64(q, q, q, dout, allowed(mask, LENGTH, LENGTH))
            gradient = tr.shard(want.dq + want.dk + want.dv, cp, layout=layout)
            assert part.grad is not None
            error = max(
                relative_error(out, tr.shard(want.out, cp, layout=layout)), relative_error(part.grad, gradient)
            )
            by_hand = {}
            for each in (*(make_layout(name, cp.world_size, LENGTH) for name in ("zigzag", "contiguous")),
                         cp.layout_for(LENGTH, mask), cp.cuts.even(LENGTH, mask)):  # fmt: skip
                one = tr.shard(q, cp, layout=each)
                tr.attention(one, one, one, cp, mask, layout=each)
                best = tr.plan(one, one, one, cp, mask, layout=each).candidates[0]
                by_hand[each.name] = best.predicted_seconds or 0.0
            found.append(Choice(layout.name, first, later, error, by_hand))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("heads", "gbs", "schedule"), [(1, 0.001, "auto"), (4, 1000.0, "auto:ring,direct-kv"), (4, 0.01, "auto:ulysses")]
)
def test_the_fastest_of_all_plans(heads: int, gbs: float, schedule: str, ranks: RankPools) -> None:
    """By the plans themselves; for packs like the first nothing is exchanged, neither to choose nor for the call."""
    found = ranks(2)(choices, schedule, heads, gbs)
    assert [each.name for each in found[0]] == [each.name for each in found[1]]
    for each in found:
        first, *like = each
        assert first.told > 0 == first.later
        assert first.by_hand[first.name] == min(first.by_hand.values()), first
        assert {one.name for one in like} == {first.name}
        assert [one.told for one in like] == [0, 0] and max(one.error for one in each) < 5e-6


LONG = 16 * LENGTH
LONG_SIZE = tr.Workload(1, LONG, LONG, 8, 8, 128)


def longer(mask: tr.Mask) -> tr.Mask:
    return tr.Causal() & tr.Documents([16 * end for end in mask.cu_seqlens or ()])


def busy_kernels(here: Here, schedule: str) -> tr.ContextParallel:
    """Return a context of ranks that compute for much longer than rows travel."""
    net = replace(full_mesh(here.world_size, 100.0), machine=Machine(constant(1.0, "one TFLOP/s"), CPU_MESSAGES))
    return here.cp(schedule=schedule, topology=net)


def names(here: Here) -> list[str]:
    """What is chosen where kernels decide, and where Ulysses has even work in any layout."""
    mask = longer(ALIKE[0])
    schedules = "auto:direct-kv", "auto:ulysses", "ring"
    return [tr.choose_layout(busy_kernels(here, each), LONG_SIZE, mask).name for each in schedules]


def test_what_the_schedule_makes_of_a_pack(ranks: RankPools) -> None:
    """A named schedule leaves nothing to choose by: its layout is that of auto."""
    for work, heads, named in ranks(2)(names):
        assert work == EVEN and heads in ("zigzag", "contiguous") and named == NAME


def evened(here: Here) -> list[tuple[str, float, float, int]]:
    """Return for packs of one shape, where kernels decide: the choice, its imbalance, that of auto, what was told."""
    cp, found = busy_kernels(here, "auto:direct-kv"), []
    with counted_texts(cp) as exchanged:
        for mask in map(longer, UNEVEN):
            exchanged.clear()
            layout = tr.choose_layout(cp, LONG_SIZE, mask)
            balanced = balanced_layout(mask, LONG, cp.world_size)
            found.append((layout.name, imbalance(mask, layout), imbalance(mask, balanced), len(exchanged)))
    return found


def test_where_kernels_decide_work_is_evener(ranks: RankPools) -> None:
    """It is for all packs of the shape, and for a later one nothing is exchanged."""
    found = ranks(2)(evened)
    assert found[0] == found[1]
    for name, uneven, before, _ in found[0]:
        assert name == EVEN and uneven <= EVENED < before
    assert found[0][0][-1] > 0 and [told for *_, told in found[0][1:]] == [0, 0]


def told(here: Here) -> list[tuple[int, int]]:
    """Count plans told to choose a layout, and for the call in it, where nothing is trained."""
    cp, size, found = here.cp(schedule="auto:ulysses,ring"), tr.Workload(1, LENGTH, LENGTH, 4, 4, DIM), []
    q = torch.randn(1, LENGTH, 4, DIM)
    with torch.no_grad(), counted_texts(cp) as exchanged:
        for mask in (tr.Causal(), ALIKE[0]):
            exchanged.clear()
            layout = tr.choose_layout(cp, size, mask)
            first, part = exchanged.count("the plan"), tr.shard(q, cp, layout=layout)
            tr.attention(part, part, part, cp, mask, layout=layout)
            found.append((first, exchanged.count("the plan") - first))
    return found


def test_a_call_that_trains_nothing_takes_the_plan_too(ranks: RankPools) -> None:
    for found in ranks(2)(told):
        assert all(first > 0 == later for first, later in found), found


def refused(here: Here) -> list[str]:
    cp, said = here.cp(schedule="auto"), []
    size = tr.Workload(1, LENGTH, LENGTH, 2, 2, DIM)
    mine: list[tuple[Any, ...]] = [
        (size if here.rank else 7, ALIKE[0]),
        (tr.Workload(1, LENGTH, 64, 2, 2, DIM), ALIKE[0]),
        (size, tr.Documents([0, 2000])),
        (size, ALIKE[0], "nowhere"),
        (size, ALIKE[here.rank]),
    ]
    for each in mine:
        with pytest.raises((ConfigurationError, Disagreement)) as caught:
            tr.choose_layout(cp, *each)
        said.append(str(caught.value))
    assert tr.choose_layout(cp, size, ALIKE[0]).length == LENGTH
    return said


def test_refusals_reach_all_ranks(ranks: RankPools) -> None:
    for of_type, of_lengths, of_mask, of_device, of_masks in ranks(2)(refused):
        assert "wants a Workload as size; got one of type int" in of_type
        assert "is for q and kv of one sequence" in of_lengths
        assert "Documents end at 2000" in of_mask
        assert "there is no device 'nowhere' here" in of_device
        assert "mask: rank 0: causal&documents(0,20" in of_masks


def test_one_rank() -> None:
    cp = tr.ContextParallel("self")
    assert tr.choose_layout(cp, tr.Workload(1, 64, 64, 2, 2, 8)).world_size == 1
