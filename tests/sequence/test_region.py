"""Patches: cutting, counting, tidying and combining them never changes what is visible."""

from __future__ import annotations

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tokenring.sequence.layout import Positions
from tokenring.sequence.mask import Causal, Documents, Full, Mask, SlidingWindow
from tokenring.sequence.region import Patch, Region, combine, inside, tidy

STEADY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
bounds = st.none() | st.integers(-40, 40)
patches = st.builds(
    lambda row0, rows, col0, cols, low, high, row_step, col_step: Patch(
        row0, row0 + rows, col0, col0 + cols, low, high, row_step, col_step
    ),
    st.integers(0, 9), st.integers(1, 9), st.integers(0, 9), st.integers(1, 9),
    bounds, bounds, st.integers(1, 4), st.integers(1, 4),
)  # fmt: skip
unit_patches = patches.map(lambda patch: patch._replace(row_step=1, col_step=1))
Pairs = set[tuple[int, int]]


def visible(patch: Patch | None) -> Pairs:
    """From the definition."""
    if patch is None:
        return set()
    low = -(10**6) if patch.low is None else patch.low
    high = 10**6 if patch.high is None else patch.high
    return {
        (patch.row0 + i, patch.col0 + j)
        for i in range(patch.rows)
        for j in range(patch.cols)
        if low <= patch.col_step * j - patch.row_step * i <= high
    }


class TestPatch:
    @STEADY
    @given(patches)
    def test_columns_and_pairs(self, patch: Patch) -> None:
        rows = [(patch.row0 + i, patch.col0 + j) for i in range(patch.rows) for j in patch.columns_of(i)]
        assert set(rows) == visible(patch)
        assert patch.pairs() == len(rows) == len(visible(patch))

    @STEADY
    @given(patches)
    def test_tidy_keeps_what_is_visible(self, patch: Patch) -> None:
        tidied = tidy(patch)
        assert visible(tidied) == visible(patch)
        assert (tidied is None) == (not visible(patch))
        if tidied is not None:
            assert tidy(tidied) == tidied
            assert tidied.is_full == (len(visible(patch)) == tidied.rows * tidied.cols)

    @STEADY
    @given(unit_patches)
    def test_tidy_leaves_no_empty_row_or_column(self, patch: Patch) -> None:
        tidied = tidy(patch)
        if tidied is not None:
            assert {i for i, _ in visible(tidied)} == set(range(tidied.row0, tidied.row1))
            assert {j for _, j in visible(tidied)} == set(range(tidied.col0, tidied.col1))

    @STEADY
    @given(patches, st.integers(0, 20), st.integers(0, 20))
    def test_cut_rows(self, patch: Patch, row0: int, row1: int) -> None:
        wanted = {(i, j) for i, j in visible(patch) if row0 <= i < row1}
        assert visible(patch.cut_rows(row0, row1)) == wanted

    @STEADY
    @given(patches, st.integers(0, 5), st.integers(0, 5))
    def test_shifted(self, patch: Patch, rows: int, cols: int) -> None:
        assert visible(patch.shifted(rows, cols)) == {(i + rows, j + cols) for i, j in visible(patch)}

    @STEADY
    @given(patches)
    def test_is_causal_is_the_top_left_triangle(self, patch: Patch) -> None:
        if patch.is_causal:
            corner = (patch.row0, patch.col0)
            assert visible(patch) == {
                (corner[0] + i, corner[1] + j) for i in range(patch.rows) for j in range(min(i + 1, patch.cols))
            }


@STEADY
@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 50), st.integers(0, 50))
def test_inside(start: int, count: int, step: int, low: int, high: int) -> None:
    assume(low <= high)
    chunk = Positions(start, start + (count - 1) * step + 1, step)
    first, last = inside(chunk, low, high)
    assert list(range(*chunk))[first:last] == [p for p in range(*chunk) if low <= p < high]


masks = st.sampled_from(
    [
        Full(), Causal(), SlidingWindow(3), SlidingWindow(9, 2), SlidingWindow(-1, 4), Documents([0, 11, 30]),
        Causal() & Documents([0, 7, 11]), SlidingWindow(2) & Documents([0, 19, 40]),
    ]
)  # fmt: skip
parts = st.lists(
    st.builds(lambda start, count, step: Positions(start, start + (count - 1) * step + 1, step),
              st.integers(0, 30), st.integers(1, 4), st.sampled_from([1, 1, 1, 2])),
    min_size=1, max_size=3,
)  # fmt: skip


class TestCombine:
    @STEADY
    @given(masks, parts, parts)
    def test_says_what_the_mask_says(self, mask: Mask, q: list[Positions], kv: list[Positions]) -> None:
        """If the chunks, laid side by side, are one patch, it shows the same pairs."""
        grid = [[mask.region(a, b) for b in kv] for a in q]
        whole = combine(grid, [len(a) for a in q], [len(b) for b in kv])
        rows, cols = [p for a in q for p in range(*a)], [p for b in kv for p in range(*b)]
        wanted = {(i, j) for i, a in enumerate(rows) for j, b in enumerate(cols) if mask.allows(a, b)}
        assert whole is None or visible(whole) == wanted

    @STEADY
    @given(st.lists(st.lists(unit_patches | patches | st.none(), min_size=3, max_size=3), min_size=3, max_size=3))
    def test_says_what_any_grid_says(self, drawn: list[list[Patch | None]]) -> None:
        rows = [max((patch.row1 for patch in line if patch is not None), default=1) for line in drawn]
        cols = [max((line[j].row1 for line in drawn if line[j] is not None), default=1) for j in range(3)]  # type: ignore[union-attr]
        grid: list[list[Region]] = []
        wanted: Pairs = set()
        for i, line in enumerate(drawn):
            grid.append([])
            for j, patch in enumerate(line):
                cut = None if patch is None else tidy(patch._replace(col1=min(patch.col1, cols[j])))
                grid[i].append(() if cut is None else (cut,))
                wanted |= {(sum(rows[:i]) + a, sum(cols[:j]) + b) for a, b in visible(cut)}
        whole = combine(grid, rows, cols)
        assert whole is None or visible(whole) == wanted

    def test_finds_the_triangle_of_a_zigzag_rank(self) -> None:
        """Its two chunks lie apart in the sequence, and see each other as one triangle."""
        chunks = [Positions(0, 4), Positions(12, 16)]
        grid = [[Causal().region(a, b) for b in chunks] for a in chunks]
        whole = combine(grid, [4, 4], [4, 4])
        assert whole is not None and whole.is_causal and whole.rows == whole.cols == 8

    def test_finds_full_and_nothing(self) -> None:
        full: Region = (Patch(0, 2, 0, 3),)
        assert combine([[full, full]], [2], [3, 3]) == Patch(0, 2, 0, 6)
        assert combine([], [], [3]) is None
        assert combine([[full, ()]], [2], [3, 3]) is None
