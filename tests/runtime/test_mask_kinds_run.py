"""Attention under each kind of mask: exact in both passes, on every family, layout and number of ranks, by turns.

TOKENRING_FULL_GRID=1 runs every kind with every family on 2 to 8 ranks.
"""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from cases import Case, check_exact, run_on
from families import Point, length_of, points
from mask_kinds import KINDS, kind
from ranks import RankPools
from sampling import FULL_GRID

import tokenring as tr
from tokenring.errors import ConfigurationError, UnsupportedError
from tokenring.schedule.families import parse

CHUNKS = {"contiguous": 1, "zigzag": 2, "striped": 1, "zigzag/2": 4}
LEAST_TOKENS = 12  # of a chunk
UNEQUAL = {"cross-attention": 2, "later start": 2}  # kv is so many times as long


def grid() -> list[Case]:
    """Each family twice, with kinds, layouts and heads by turns; or on each number of ranks with every kind."""
    random = Random(25)
    every = points(range(2, 9 if FULL_GRID else 5))
    random.shuffle(every)
    met = Counter[tuple[str, int]]()
    cases = [case_of("ring", 1, (4, 2), each, number, random) for number, each in enumerate(KINDS)]
    for point in every:
        key = (parse(point.name).family.name, point.ranks if FULL_GRID else 0)
        met[key] += 1
        if met[key] <= (1 if FULL_GRID else 2):
            for each in KINDS if FULL_GRID else (KINDS[len(cases) % len(KINDS)],):
                cases.append(case_of(point.name, point.ranks, point.heads, each, len(cases), random, point))
    return cases


def case_of(
    name: str, ranks: int, heads: tuple[int, int], each: str, seed: int, random: Random, point: Point | None = None
) -> Case:
    layout = random.choice(sorted(CHUNKS))
    length = 96 if point is None else length_of(point, CHUNKS[layout], None, LEAST_TOKENS)
    made = kind(each, length, seed, length * UNEQUAL.get(each, 1))
    return Case(
        ranks, name, layout, each, *heads, 1, 40, torch.float32, None,
        given_mask=made.mask, given_length=length, given_kv_length=made.kv_length,
    )  # fmt: skip


GRID = grid()


@pytest.mark.sampled(32)
@pytest.mark.parametrize("case", GRID, ids=str)
def test_exact(case: Case, ranks: RankPools) -> None:
    """In fp32, with the bytes that the schedule says."""
    check_exact(run_on(ranks, case), case.reference())


def test_the_grid_has_every_kind_and_several_ranks() -> None:
    assert {case.mask_name for case in GRID} == set(KINDS)
    assert {case.mask_name for case in GRID if case.ranks > 1} == set(KINDS)
    assert {case.ranks for case in GRID} >= {1, 2, 3, 4}


def test_what_sees_nothing_is_padding(ranks: RankPools) -> None:
    """Out 0, lse -inf, and no gradient, of rows that no slice has."""
    mask = tr.Slices([(0, 10, 4, 12), (20, 26, 0, 3)])
    case = Case(
        2,
        "direct-q",
        "zigzag",
        "slices",
        2,
        1,
        1,
        40,
        torch.float32,
        None,
        given_mask=mask,
        given_length=32,
        given_kv_length=16,
    )
    made = run_on(ranks, case)
    check_exact(made, case.reference())
    empty = torch.tensor([not (i < 10 or 20 <= i < 26) for i in range(32)])
    assert bool((made.out[:, empty] == 0).all() and (made.dq[:, empty] == 0).all())
    assert bool((made.lse[..., empty] == -torch.inf).all())
    unseen = torch.tensor([j == 3 or j >= 12 for j in range(16)])
    assert bool((made.dk[:, unseen] == 0).all() and (made.dv[:, unseen] == 0).all())


def test_calls_whose_lengths_do_not_fit() -> None:
    cp = tr.ContextParallel()
    q, k = torch.randn(1, 8, 1, 8), torch.randn(1, 16, 1, 8)
    with pytest.raises(UnsupportedError, match=r"or say where q begins among kv, as Causal\(q_start=\.\.\.\)"):
        tr.attention(q, k, k, cp, tr.Causal())
    assert tr.attention(q, k, k, cp, tr.Causal(q_start=8)).shape == q.shape
    with pytest.raises(ConfigurationError, match="ends beyond the positions of kv, which end at 16"):
        tr.attention(q, k, k, cp, tr.Slices([(0, 8, 4, 17)]))
    with pytest.raises(ConfigurationError, match="ends beyond the positions of q, which end at 8"):
        tr.attention(q, k, k, cp, tr.Slices([(0, 9, 4, 16)]))
    with pytest.raises(ConfigurationError, match="Documents end at 17, but the sequence has 16 positions"):
        tr.attention(q, k, k, cp, tr.Documents([0, 17], q_start=8))
