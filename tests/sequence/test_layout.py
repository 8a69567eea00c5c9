"""Layouts partition the sequence; what does not is refused with a text that says what to do."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tokenring.errors import ConfigurationError
from tokenring.sequence.layout import (
    LAYOUTS,
    Layout,
    Positions,
    check_partition,
    contiguous,
    join_chunks,
    make_layout,
    split_order,
    striped,
    zigzag,
)

STEADY = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)  # the machine may be busy
CHUNKS_A_RANK = {"contiguous": 1, "zigzag": 2, "striped": 1}
named = st.builds(
    lambda base, world, cuts, length: LAYOUTS[base](world, world * CHUNKS_A_RANK[base] * cuts * length, cuts),
    st.sampled_from(sorted(LAYOUTS)),
    st.integers(1, 8),
    st.integers(1, 3),
    st.integers(1, 5),
)
positions = st.builds(
    lambda start, count, step: Positions(start, start + (count - 1) * step + 1, step),
    st.integers(0, 20),
    st.integers(1, 12),
    st.integers(1, 5),
)


def tokens(chunk: Positions) -> list[int]:
    return list(range(*chunk))


class TestPositions:
    @STEADY
    @given(positions)
    def test_length_and_last(self, chunk: Positions) -> None:
        assert len(chunk) == len(tokens(chunk))
        assert chunk.last == tokens(chunk)[-1]

    @STEADY
    @given(positions, st.integers(1, 4), st.integers(1, 4))
    def test_parts_are_equal_neighbours(self, chunk: Positions, count: int, size: int) -> None:
        whole = Positions(chunk.start, chunk.start + (count * size - 1) * chunk.step + 1, chunk.step)
        parts = [whole.part(index, count) for index in range(count)]
        assert [len(part) for part in parts] == [size] * count
        assert [token for part in parts for token in tokens(part)] == tokens(whole)

    @STEADY
    @given(positions, positions)
    def test_join_is_concatenation_or_none(self, a: Positions, b: Positions) -> None:
        both = tokens(a) + tokens(b)
        gaps = {after - before for before, after in pairwise(both)}
        joined = a.join(b)
        assert (joined is not None) == (len(gaps) == 1 and min(gaps) > 0)
        if joined is not None:
            assert tokens(joined) == both

    @STEADY
    @given(st.lists(positions, max_size=6))
    def test_joined_chunks_hold_the_same_in_the_same_order(self, chunks: list[Positions]) -> None:
        joined = join_chunks(chunks)
        assert [t for chunk in joined for t in tokens(chunk)] == [t for chunk in chunks for t in tokens(chunk)]
        assert all(a.join(b) is None for a, b in pairwise(joined))

    @STEADY
    @given(positions, st.integers(1, 4))
    def test_parts_join_to_the_whole(self, chunk: Positions, count: int) -> None:
        whole = Positions(chunk.start, chunk.start + (count * len(chunk) - 1) * chunk.step + 1, chunk.step)
        assert join_chunks([whole.part(index, count) for index in range(count)]) == [whole]


class TestNamed:
    @STEADY
    @given(named)
    def test_partitions_the_sequence(self, layout: Layout) -> None:
        check_partition(layout)
        assert sorted(split_order(layout)) == list(range(layout.length))
        assert {len(chunk) for chunk in layout.chunks} == {layout.chunk_length}
        assert layout.local_length * layout.world_size == layout.length

    @STEADY
    @given(named)
    def test_local_order(self, layout: Layout) -> None:
        """A chunk's tokens lie at its local_start in its owner's tensor; chunks ascend."""
        for rank in range(layout.world_size):
            local = layout.positions(rank)
            assert len(local) == layout.local_length
            owned = layout.owned_by(rank)
            assert list(owned) == sorted(owned)
            for chunk in owned:
                assert layout.owners[chunk] == rank
                at = layout.local_start[chunk]
                assert local[at : at + layout.chunk_length] == tokens(layout.chunks[chunk])
        assert sorted(c for rank in range(layout.world_size) for c in layout.owned_by(rank)) == list(
            range(len(layout.chunks))
        )

    @STEADY
    @given(named)
    def test_name_makes_it_again(self, layout: Layout) -> None:
        assert make_layout(layout.name, layout.world_size, layout.length) == layout
        assert make_layout(layout, layout.world_size, layout.length) is layout

    def test_by_hand(self) -> None:
        assert [contiguous(3, 6).positions(rank) for rank in range(3)] == [[0, 1], [2, 3], [4, 5]]
        assert [zigzag(2, 8).positions(rank) for rank in range(2)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
        assert [striped(3, 6).positions(rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
        assert zigzag(2, 16, 2).owners == (0, 0, 1, 1, 1, 1, 0, 0)
        assert striped(2, 8, 2).chunks == ((0, 3, 2), (1, 4, 2), (4, 7, 2), (5, 8, 2))
        assert contiguous(2, 8, 2).name == "contiguous/2"


@pytest.mark.parametrize(
    ("name", "world_size", "length", "says"),
    [
        ("contiguous", 3, 0, "layout 'contiguous': length is 0; give a positive integer"),
        ("spiral", 2, 8, "unknown layout 'spiral'; choose one of contiguous, zigzag, striped, or cut one finer"),
        ("zigzag/0", 2, 8, "unknown layout 'zigzag/0'"),
        ("zigzag/x", 2, 8, "unknown layout 'zigzag/x'"),
        ("zigzag/-2", 2, 8, "unknown layout 'zigzag/-2'"),
        ("zigzag/", 2, 8, "unknown layout 'zigzag/'"),
        ("zigzag/²", 2, 8, "unknown layout 'zigzag/²'"),
        ("zigzag/2/2", 2, 8, "unknown layout 'zigzag/2/2'"),
        ("zigzag/9999999999", 2, 8, "unknown layout 'zigzag/9999999999'"),
        (None, 2, 8, "layout is of type NoneType; choose one of contiguous, zigzag, striped, or cut one finer, as in "
         "'zigzag/2', or give a Layout"),
        ("zigzag", 0, 8, "layout 'zigzag': world_size is 0; give a positive integer"),
        ("zigzag", 2.0, 8, "layout 'zigzag': world_size is 2.0; give a positive integer"),
        ("zigzag", 2, 8.0, "layout 'zigzag': length is 8.0; give a positive integer"),
        ("zigzag", 2, "8", "layout 'zigzag': length is '8'; give a positive integer"),
        ("zigzag", 2, -8, "layout 'zigzag': length is -8; give a positive integer"),
        (
            zigzag(2, 8), 4, 8,
            "layout 'zigzag' is for 2 ranks and 8 positions; the group has 4 ranks and the tensors 8 positions",
        ),
        (zigzag(2, 8), 2, 16, "the group has 2 ranks and the tensors 16 positions"),
    ],
)  # fmt: skip
def test_make_layout_refuses(name: Any, world_size: Any, length: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        make_layout(name, world_size, length)


@pytest.mark.parametrize("base", LAYOUTS)
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ((0, 8), "world_size is 0; give a positive integer"),
        ((-2, 8), "world_size is -2; give a positive integer"),
        ((2, 8, 0), "cuts is 0; give a positive integer"),
        ((2, 8, -1), "cuts is -1; give a positive integer"),
        ((2, 8, 1.5), "cuts is 1.5; give a positive integer"),
        ((True, 8), "world_size is True; give a positive integer"),
        ((2, None), "length is None; give a positive integer"),
    ],
)
def test_sizes_are_checked(base: str, sizes: Any, says: str) -> None:
    with pytest.raises(ConfigurationError) as refusal:
        LAYOUTS[base](*sizes)
    assert str(refusal.value) == f"layout {base!r}: {says}"


def test_sizes_of_numpy_become_integers() -> None:
    made = make_layout("striped", numpy.int64(2), numpy.int32(8))
    assert made == striped(2, 8)
    assert type(made.world_size) is type(made.length) is type(made.chunks[1].start) is int


FIRST, SECOND = Positions(0, 4), Positions(4, 8)
IN_FULL = "write Positions(start, stop, step) of integers with start from 0 on, stop above it and step from 1 on"


@pytest.mark.parametrize(
    ("length", "chunks", "owners", "says"),
    [
        (8, (FIRST, SECOND), (0,), "2 chunks for 1 owners"),
        (8, (), (), "0 chunks for 0 owners"),
        (8, (Positions(0, 3), Positions(3, 8)), (0, 1), "its chunks are not equal parts of 8 positions"),
        (9, (FIRST, SECOND), (0, 1), "its chunks are not equal parts of 9 positions"),
        (8, (SECOND, FIRST), (0, 1), "number the chunks by their first position"),
        (8, (FIRST, SECOND), (0, 0), "give each of the 2 ranks equally many chunks"),
        (8, (FIRST, SECOND), (0, 2), "give each of the 2 ranks equally many chunks"),
        (8, (FIRST, FIRST), (0, 1), "position 4 of 8 is in no chunk"),
        (8, (Positions(0, 7, 2), Positions(2, 9, 2)), (0, 1), "position 1 of 8 is in no chunk"),
        (8, (FIRST, Positions(5, 9)), (0, 1), "position 4 of 8 is in no chunk"),
        (8, (Positions(0, 7, 2), Positions(0, 7, 2)), (0, 1), "position 1 of 8 is in no chunk"),
        (2**25, (Positions(0, 2**25 - 1, 2), Positions(2, 2**25 + 1, 2)), (0, 1),
         f"layout 'mine' is not one of tokenring's; its {2**25} positions are too many to check (at most {2**24})"),
        (8, (FIRST, SECOND), (False, True), "give each of the 2 ranks equally many chunks"),
        (8, (FIRST, SECOND), (0, -1), "give each of the 2 ranks equally many chunks"),
        (0, (FIRST, SECOND), (0, 1), "layout 'mine': length is 0; give a positive integer"),
        (8.0, (FIRST, SECOND), (0, 1), "layout 'mine': length is 8.0; give a positive integer"),
        (8, [FIRST, SECOND], (0, 1), "give its chunks and owners as tuples"),
        (8, (FIRST, SECOND), [0, 1], "give its chunks and owners as tuples"),
        (8, (FIRST, Positions(4, 8, 0)), (0, 1), f"a chunk is {Positions(4, 8, 0)}; {IN_FULL}"),
        (8, (FIRST, Positions(7, 3, -1)), (0, 1), f"a chunk is {Positions(7, 3, -1)}; {IN_FULL}"),
        (8, (Positions(-4, 0), FIRST), (0, 1), f"a chunk is {Positions(-4, 0)}; {IN_FULL}"),
        (8, (FIRST, Positions(4, 4)), (0, 1), f"a chunk is {Positions(4, 4)}; {IN_FULL}"),
        (8, (FIRST, (4, 8)), (0, 1), f"a chunk is (4, 8); {IN_FULL}"),
        (8, (FIRST, Positions(4, 8.0)), (0, 1), "a chunk is Positions(start=4, stop=8.0, step=1); "),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_chunks_given_by_hand_are_checked(length: Any, chunks: Any, owners: Any, says: str) -> None:
    """As soon as they are given."""
    with pytest.raises(ConfigurationError, match=re.escape(says)):
        Layout("mine", 2, length, chunks, owners)


@pytest.mark.parametrize("name", [3, None, ""])
def test_a_layout_has_a_name(name: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"^layout {name!r}: give it a name, which its texts show$"):
        Layout(name, 2, 8, (FIRST, SECOND), (0, 1))


def test_chunks_given_by_hand_are_taken() -> None:
    mine = Layout("mine", 2, 8, (Positions(0, 7, 2), Positions(1, 8, 2)), (1, 0))
    assert make_layout(mine, 2, 8) is mine
    assert mine.positions(0) == [1, 3, 5, 7]


@STEADY
@given(st.permutations(range(12)), st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 3))
def test_partitions_are_told_from_others(order: list[int], size: int, step: int) -> None:
    """Whatever the chunks, they are taken if they hold every position once, and refused if not."""
    starts = sorted(order[: 12 // size])
    chunks = tuple(Positions(start, start + (size - 1) * step + 1, step) for start in starts)
    whole = sorted(token for chunk in chunks for token in tokens(chunk)) == list(range(12))
    try:
        Layout("mine", 1, 12, chunks, (0,) * len(chunks))
    except ConfigurationError as error:
        assert not whole and "is in no chunk" in str(error)
    else:
        assert whole


@pytest.mark.timeout(20)
def test_layouts_of_any_length_are_checked_without_their_tokens() -> None:
    for base in LAYOUTS:
        assert make_layout(f"{base}/2", 64, 2**50).length == 2**50
