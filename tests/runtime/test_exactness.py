"""Every schedule computes what float64 computes, forward and backward, over a grid of all pairs of circumstances.

fp32: the error against float64 is bounded. bf16: it is compared with that of torch's kernel over the
whole sequence in one process, on the same inputs. The bytes on every link are those of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations, product
from typing import Any

import pytest
import torch
from cases import LAYOUTS, LIMITS, MASKS, NAMES, SCHEDULES, Case, Local, check_bytes, run_on
from oracle import Attention, relative_error
from pairwise import sample
from ranks import RankPools
from sampling import FULL_GRID

FACTORS: dict[str, tuple[Any, ...]] = {
    "ranks": (1, 2, 3, 4, 5, 6, 7, 8),
    "schedule": SCHEDULES,
    "layout": LAYOUTS,
    "mask": MASKS,
    "heads": ((8, 8), (4, 1), (8, 1), (8, 2), (8, 4), (4, 4), (1, 1)),
    "batch": (1, 2),
    "head_dim": (40, 64, 128),
    "dtype": (torch.float32, torch.bfloat16),
    "pieces": (None, 2, 4),
}
THIRDS = ("ranks", "schedule", "layout", "mask", "pieces")  # with TOKENRING_FULL_GRID=1: triples, as 240 cases hold
BF16_RATIO = 1.15
BF16_AT_MOST = 0.02  # beyond, the kernel that we compare with would itself be wrong


Largest = dict[str, tuple[float, str]]


def grid(rows: int) -> list[Case]:
    """All pairs; up to so many rows also as many triples of THIRDS as fit."""
    return [Case(*row[:4], *row[4], *row[5:]) for row in sample(FACTORS, rows, THIRDS)]


CASES = grid(240 if FULL_GRID else 0)


@pytest.fixture(scope="module")
def largest() -> Iterator[Largest]:
    """The largest error or ratio of each result; shown with -s."""
    seen: Largest = {}
    yield seen
    print("\n" + "\n".join(f"largest {name}: {value:.3g} ({case})" for name, (value, case) in sorted(seen.items())))


@pytest.mark.sampled(30)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.slow if n % 6 else ()) for n, case in enumerate(CASES)], ids=str
)
def test_exact(case: Case, ranks: RankPools, largest: Largest) -> None:
    made, wanted = run_on(ranks, case), case.reference()
    errors = {name: relative_error(getattr(made, name), getattr(wanted, name)) for name in NAMES}
    assert (made.out.dtype, made.lse.dtype) == (case.dtype, torch.float32)
    if case.dtype == torch.float32:
        limits, kind = LIMITS, "error"
    else:
        limits, kind = bf16_limits(case, wanted), "ratio"
    for name, error in errors.items():
        found = error if kind == "error" or name == "lse" else error / limits[name] * BF16_RATIO
        key = f"{'error' if name == 'lse' else kind} of {name}"
        largest[key] = max(largest.get(key, (0.0, "")), (found, str(case)))
    over = {name: f"{error:.3g} > {limits[name]:.3g}" for name, error in errors.items() if not error <= limits[name]}
    assert not over, over


def bf16_limits(case: Case, wanted: Attention) -> dict[str, float]:
    """From the error of one process; lse is computed and kept in fp32 whatever the inputs."""
    theirs = case.one_process()
    errors = {name: relative_error(getattr(theirs, name), getattr(wanted, name)) for name in NAMES if name != "lse"}
    assert max(errors.values()) < BF16_AT_MOST, errors
    return {"lse": LIMITS["lse"]} | {name: BF16_RATIO * error for name, error in errors.items()}


class TestTheGrid:
    def test_covers_all_pairs(self) -> None:
        rows = sample(FACTORS, 0)
        values = list(FACTORS.values())
        for i, j in combinations(range(len(values)), 2):
            met = {(row[i], row[j]) for row in rows}
            assert met == set(product(values[i], values[j]))
        assert len(CASES) == len(set(CASES)) >= len(rows)
        assert grid(0) == grid(0)
        assert {Case(*row[:4], *row[4], *row[5:]) for row in rows} <= set(CASES) <= set(grid(240))

    def test_covers_bands_that_kernels_refuse(self) -> None:
        """Some chunks hold more rows than a band may have in one kernel call."""
        assert any(case.q_length // case.ranks > 128 and "window" in case.mask_name for case in CASES)

    def test_covers_ranks_that_see_nothing(self) -> None:
        empty = [
            case
            for case in CASES
            if (ends := case.mask.cu_seqlens) is not None
            and any(min(case.layout_of(case.q_length).positions(rank)) >= ends[-1] for rank in range(case.ranks))
        ]
        assert empty


class TestTheChecks:
    """A result that is a little wrong does not pass."""

    CASE = Case(2, "ring+", "zigzag", "causal", 4, 1, 1, 40, torch.float32, None)

    def test_bytes(self) -> None:
        schedule = self.CASE.make_schedule()
        links = {direction: schedule.link_bytes(self.CASE.workload, direction) for direction in ("forward", "backward")}
        empty = Attention(*[torch.empty(0)] * 5)

        def parts(change: int) -> list[Local]:
            sent = [
                {way: {dst: n + change for (src, dst), n in links[way].items() if src == rank} for way in links}
                for rank in range(2)
            ]
            return [Local(empty, each) for each in sent]

        check_bytes(self.CASE, schedule, parts(0))
        with pytest.raises(AssertionError):
            check_bytes(self.CASE, schedule, parts(4))

    @pytest.mark.parametrize("name", NAMES)
    def test_errors(self, name: str) -> None:
        wanted = self.CASE.reference()
        part = getattr(wanted, name)
        assert relative_error(part * (1 + 1e-7), part) < LIMITS[name]
        assert relative_error(part * (1 + 1e-5), part) > LIMITS[name]
        assert relative_error(part.flip(1), part) > LIMITS[name]
        assert relative_error(part * math.nan, part) == math.inf
