"""The picture of a mask: each rank's colour covers the pairs that its queries see, and its bar says how many."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tokenring import Causal, Documents, Full, Mask, SlidingWindow
from tokenring.cli.main import main
from tokenring.cli.plan.mask_picture import SIDE, mask_svg, outline
from tokenring.planner.layouts.balanced import balanced_layout, pairs_by_rank
from tokenring.sequence.layout import Layout, contiguous, make_layout, zigzag
from tokenring.sequence.region import Patch

SVG = "{http://www.w3.org/2000/svg}"
LENGTH = 4096
PACK = Causal() & Documents((0, 500, 1200, 1201, 3000, LENGTH))
MASKS = [Causal(), Full(), SlidingWindow(300), PACK, PACK & SlidingWindow(200)]


def area(points: list[tuple[float, float]]) -> float:
    """Of a polygon, by the shoelace formula."""
    pairs = zip(points, points[1:] + points[:1], strict=True)
    return abs(sum(x0 * y1 - x1 * y0 for (x0, y0), (x1, y1) in pairs)) / 2


def covered(picture: str) -> dict[str, float]:
    """The area, in pairs, of each rank's polygons."""
    found: dict[str, float] = defaultdict(float)
    for each in ElementTree.fromstring(picture).iter(f"{SVG}polygon"):
        points = [tuple(map(float, point.split(","))) for point in each.attrib["points"].split()]
        found[each.attrib["class"]] += area([(x, y) for x, y in points]) * (LENGTH / SIDE) ** 2
    return found


LAYOUTS = [zigzag(4, LENGTH), contiguous(8, LENGTH), balanced_layout(PACK, LENGTH, 4)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_colours_cover_what_ranks_compute(mask: Mask, layout: Layout) -> None:
    """To the width of the diagonal's squares, and what rounding to a tenth of a unit loses at the edges."""
    found = covered(mask_svg(mask, layout, layout, "a mask", []))
    for rank, pairs in enumerate(pairs_by_rank(mask, layout, LENGTH)):
        assert found[f"r{rank}"] == pytest.approx(pairs, rel=0.06, abs=LENGTH * 2)


@pytest.mark.parametrize("low", [None, -3, 2])
@pytest.mark.parametrize("high", [None, 4, 0])
def test_outlines_hold_the_visible_squares(low: int | None, high: int | None) -> None:
    """The middle of a square lies inside just if its pair is visible."""
    patch = Patch(5, 12, 20, 31, low, high)
    corners = outline(patch)
    if len(corners) < 3:
        assert patch.pairs() == 0
        return
    for row in range(patch.rows):
        for col in range(patch.cols):
            at = patch.col0 + col + 0.5, patch.row0 + row + 0.5
            assert inside(at, corners) == (col in patch.columns_of(row)), (row, col)


def inside(at: tuple[float, float], corners: list[tuple[float, float]]) -> bool:
    """Of a convex polygon: the point is on the same side of each edge."""
    x, y = at
    sides = [
        (x1 - x0) * (y - y0) - (y1 - y0) * (x - x0)
        for (x0, y0), (x1, y1) in zip(corners, corners[1:] + corners[:1], strict=True)
    ]
    return all(side >= -1e-9 for side in sides) or all(side <= 1e-9 for side in sides)


def test_all_ranks_show_that_take_rows_in_turn() -> None:
    striped = make_layout("striped", 8, LENGTH)
    root = ElementTree.fromstring(mask_svg(Causal(), striped, striped, "a mask", []))
    classes = {each.attrib["class"] for each in root.iter(f"{SVG}rect") if float(each.attrib["width"]) > 12}
    assert {f"r{rank}" for rank in range(8)} <= classes


def test_says_how_even_the_work_is() -> None:
    cut = contiguous(4, LENGTH)
    texts = [each.text for each in ElementTree.fromstring(mask_svg(Causal(), cut, cut, "x", [])).iter(f"{SVG}text")]
    assert "work over the mean: rank 3 has 1.75 ×" in texts and {"0.25", "0.75", "1.25", "1.75"} <= set(texts)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drawn = tmp_path / "mask.svg"
    call = ["plan", "--topology", "preset:hgx-h100", "--ranks", "4", "--seq", "8k", "--mask", "causal", "--no-cache"]
    assert main([*call, "--schedules", "ring", "--mask-svg", str(drawn)]) == 0
    assert "zigzag" in drawn.read_text(encoding="utf-8")
    assert main([*call, "--mask-svg", str(tmp_path / "mask.png")]) == 2
    assert ".svg" in capsys.readouterr().err


@pytest.mark.parametrize("length", [1, 3, 5])
def test_ranks_without_tokens(length: int) -> None:
    layout = make_layout("zigzag", 4, length)
    assert any(not layout.positions(rank) for rank in range(4)) == (length < 4)
    picture = mask_svg(Causal(), layout, layout, "a mask", [])
    assert "nan" not in picture and len(list(ElementTree.fromstring(picture).iter(f"{SVG}polygon"))) >= 1
