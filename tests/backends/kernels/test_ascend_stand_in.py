"""The checks of test_ascend_real.py over a stand-in for the wheel: where no wheel is, they would go stale unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from ascend.wheel import StandInPools
from ranks import Here
from test_ascend_kernel import BY_NAME
from test_ascend_packed import CASES
from test_ascend_real import (
    MUTANTS,
    OPTIONS,
    bad_calls,
    conforms,
    mutated,
    packed,
    trials,
    whole_on_meta,
    wrong_shapes,
)

from tokenring.backends.kernels import npu_trials


@pytest.fixture(scope="module")
def stand_in() -> Iterator[StandInPools]:
    pools = StandInPools()
    try:
        yield pools
    finally:
        pools.close()


ROWS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((conforms, (tile, version)) for tile in BY_NAME for version in (1, 2)),
    *((packed, (name, OPTIONS[each], version)) for name in CASES for each in OPTIONS for version in (1, 2)),
]
ALWAYS: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
    *((check, (version,)) for check in (trials, whole_on_meta) for version in (1, 2)),
    *((conforms, (f"values {which} than keys", version)) for which in ("narrower", "wider") for version in (1, 2)),
    *((packed, ("two documents", OPTIONS[each], 1)) for each in ("fp32", "narrower values")),
    *((mutated, (name,)) for name in MUTANTS),
    (wrong_shapes, ()),
    (bad_calls, ()),
]


def name_of(value: object) -> str:
    """Return what a row's name says of a check or of what it is given."""
    return str(getattr(value, "__name__", value))


@pytest.mark.sampled(8)
@pytest.mark.parametrize(("check", "given"), ROWS, ids=name_of)
def test_a_sample(stand_in: StandInPools, check: Callable[..., None], given: tuple[Any, ...]) -> None:
    stand_in(1)(check, *given)


@pytest.mark.parametrize(("check", "given"), ALWAYS, ids=name_of)
def test_always(stand_in: StandInPools, check: Callable[..., None], given: tuple[Any, ...]) -> None:
    stand_in(1)(check, *given)


@pytest.mark.parametrize("version", [1, 2])
def test_calls_of_trials_are_not_counted(stand_in: StandInPools, version: int) -> None:
    stand_in(1)(packed_first, version)


def packed_first(here: Here, version: int) -> None:
    """In a process that has tried nothing yet, as a pool's is after a failure."""
    npu_trials._refused.cache_clear()
    packed(here, "windows", {"dtype": torch.bfloat16}, version)
