"""Limits of tests are stretched by how busy the machine is, alike in all processes of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import measured_stretch, patient, set_stretch, stretch
from ranks import Here, RankPools


@pytest.fixture
def stretched() -> Iterator[None]:
    before = stretch()
    set_stretch(3.5)
    yield
    set_stretch(before)


@pytest.mark.parametrize(
    ("text", "cores", "wanted"),
    [
        ("0.10 0.08 0.02 1/94 5907", 2, 1.0),
        ("0.10 0.08 0.02 4/94 5907", 2, 1.0),
        ("9.10 8.08 7.02 36/94 5907", 2, 6.0),
        ("9.10 8.08 7.02 36/94 5907", 64, 1.0),
        ("nonsense", 2, 1.0),
    ],
)
def test_it_is_what_the_kernel_counts(text: str, cores: int, wanted: float, tmp_path: Path) -> None:
    (tmp_path / "loadavg").write_text(text)
    assert measured_stretch(tmp_path / "loadavg", tmp_path / "none", cores) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("30000000 60000000 17", 4.0), ("30000000 10000000 17", 1.5), ("11000000 60000000 17", 1.0), ("x", 1.0)],
)
def test_or_how_long_this_process_waited(text: str, wanted: float, tmp_path: Path) -> None:
    """Since it was asked before; after less than two milliseconds nothing is known."""
    (tmp_path / "schedstat").write_text(text)
    found = measured_stretch(tmp_path / "none", tmp_path / "schedstat", since=(10_000_000, 0))
    assert found == wanted


def test_it_is_1_where_nobody_counts(tmp_path: Path) -> None:
    assert measured_stretch(tmp_path / "none", tmp_path / "none") == 1.0


def limit_of(here: Here) -> float:
    return patient(2.0)


def test_ranks_have_the_limits_of_their_test(ranks: RankPools, stretched: None) -> None:
    """Also a pool that was started before."""
    assert ranks(2)(limit_of) == [7.0, 7.0]
    set_stretch(1.0)
    assert ranks(2)(limit_of) == [2.0, 2.0]


def test_pytests_own_limit_is_stretched(request: pytest.FixtureRequest) -> None:
    marker = request.node.get_closest_marker("timeout")
    assert marker is not None and marker.args[0] >= 120
