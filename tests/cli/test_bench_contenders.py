"""Which schedules race where nobody says."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from tokenring.cli.bench.contenders import MOST, contenders
from tokenring.cli.bench.results import RaceCase
from tokenring.emulate.shapes import Shape
from tokenring.planner.choosing import auto
from tokenring.schedule.families.registry import FAMILIES, parse
from tokenring.schedule.names import SCHEMES

CASE = RaceCase(
    seq_len=1024, heads=8, kv_heads=8, head_dim=64, dtype="float32", mask="full", batch=1, backward=False,
    layout="contiguous", transport="gloo", pieces=None, schedules=[], peers=[], rounds=2,
    emulate=Shape("switch", 4, 0.1), compute_tflops=0.05,
)  # fmt: skip


def families(names: list[str]) -> list[str]:
    return [parse(name).family.name for name in names if name != "auto"]


def test_the_best_of_each_family_and_auto() -> None:
    """Behind a switch heads are best divided; what is raced is what the planner thinks best of each family."""
    names = contenders(CASE, 4)
    assert names[-1] == "auto" and {"ulysses", "usp", "tiles", "ring"} <= set(families(names))
    assert max(Counter(families(names)).values()) == 1 and len(names) <= MOST + 1
    order = [*FAMILIES]
    assert families(names) == sorted(families(names), key=order.index)
    assert names == contenders(CASE, 4)


def test_heads_that_ranks_do_not_divide() -> None:
    assert "packed" in families(contenders(replace(CASE, heads=6, kv_heads=6), 4))
    assert "ulysses" not in families(contenders(replace(CASE, heads=6, kv_heads=6), 4))


def test_links_of_one_machine() -> None:
    """Nothing is emulated: two ranks that share a memory, where most families do the same as another."""
    here = replace(CASE, emulate=None, compute_tflops=None, mask="causal", layout="zigzag", backward=True)
    names = contenders(here, 2)
    assert names[-1] == "auto" and "ulysses" in families(names)


@pytest.mark.parametrize("pieces", [2, 4])
def test_pieces_that_are_asked_for(pieces: int) -> None:
    """Names that say how many themselves, and auto, cannot be told."""
    names = contenders(replace(CASE, pieces=pieces), 4)
    assert "auto" not in names and "ring" in families(names)
    assert all(parse(name).pieces is None for name in names)


def test_where_nothing_fits_some_say_why() -> None:
    """Three pieces divide no chunk of 256 tokens."""
    assert contenders(replace(CASE, pieces=3), 4) == [*SCHEMES]


@pytest.mark.parametrize("ranks", [1, 32])
def test_worlds_that_are_not_planned_for(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has nothing to choose, and planning for many takes longer than a default may."""
    monkeypatch.setattr(auto, "judge", None)  # whoever plans fails
    names = contenders(replace(CASE, emulate=None, compute_tflops=None, heads=32, kv_heads=32), ranks)
    assert {*SCHEMES, "ulysses", "auto"} <= set(names)
