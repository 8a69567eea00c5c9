"""A gradient of lse, sinks and soft-capping: against float64, in all families, on one rank and on several."""

from __future__ import annotations

import random

import pytest
import torch
from cases import LAYOUTS, MASKS, Case
from ranks import RankPools
from sampling import FULL_GRID
from variants import Variant, check

from tokenring.schedule.families.registry import misfit
from tokenring.sequence.layout import make_layout

SCHEDULES = (
    "ring", "direct-kv", "direct-q", "tokenring", "bidirectional", "tiles/2x2", "ulysses", "usp/2", "all-gather-kv",
    "relay-q/2", "multi-ring-q", "ring/keep", "tokenring/late",
)  # fmt: skip
RANKS = (1, 2, 3, 4)
HEADS = ((4, 2), (4, 4), (4, 1))


def sampled(count: int, kinds: int) -> list[Variant]:
    """Every schedule on so many ranks, each with kinds of what else there is, by chance but always the same."""
    chosen, made = random.Random(count), []
    for name in SCHEDULES:
        for _ in range(kinds):
            mask = chosen.choice([each for each in MASKS if "kv" not in each])
            heads = (4, 4) if name.startswith(("ulysses", "usp")) and count > 2 else chosen.choice(HEADS)
            case = Case(count, name, chosen.choice(LAYOUTS), mask, *heads, 2, 8, torch.float32, None)
            layout = make_layout(case.layout, count, case.q_length)
            some = tuple(rank for rank in range(count) if chosen.random() < 0.5)
            others = chosen.choice([None, tuple(rank for rank in range(count) if rank not in some)])
            if others is not None and chosen.random() < 0.5:
                some, others = others, some
            softcap = chosen.choice((0.0, 0.0, 1.5))
            what = Variant(case, chosen.random() < 0.5, softcap, others, None if others is None else some)
            if misfit(name, count, case.workload, layout, layout) is None:
                made.append(what)
    return made


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", RANKS)
def test_all_families(count: int, ranks: RankPools) -> None:
    variants = sampled(count, 8 if FULL_GRID else 2)
    assert len(variants) > 3
    check(ranks, variants)
