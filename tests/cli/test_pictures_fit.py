"""No text leaves its picture, and no page its window: light and dark, narrow and wide, in a real browser."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import BROWSER, overflows
from test_topology_picture import graph_of, hostile, machine, page

from tokenring import Causal, schedule
from tokenring.cli.plan.sweep import Point, sweep_svg
from tokenring.cli.trace.picture import Timeline
from tokenring.cli.trace.picture import to_svg as timeline_svg
from tokenring.cli.trace.record import Stretch
from tokenring.display.svg import heading, opening, wrapped
from tokenring.ir.picture import to_svg as schedule_svg
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.report.picture import to_svg as topology_svg

TESTS = Path(__file__).resolve().parents[1]
LONG = "a rather long name of a machine that somebody chose, /with/a/path/" + "that-nothing-breaks-" * 8
SVG = "{http://www.w3.org/2000/svg}"


def swept(name: str, winners: list[str]) -> str:
    """A sweep in which each of these wins at one length."""
    names = dict.fromkeys([*winners, "ring"])
    points = [
        Point(1024 << at, {winner: 1.0} | {each: 1.3 for each in names if each != winner}, 0.9)
        for at, winner in enumerate(winners)
    ]
    options = Namespace(
        topology=name, ranks=8, heads=32, kv_heads=8, dim=128, value_dim=None, dtype="bf16", mask="causal",
        passes="training",
    )  # fmt: skip
    return sweep_svg(points, options)


def timeline(text: str) -> Timeline:
    return Timeline(text, [text, "two cores"], 2, [Stretch(rank, "forward", 0.0, 1e-3) for rank in range(2)], [], [])


PICTURES = {
    "schedule": lambda: schedule_svg(schedule("direct-kv", 8, "zigzag", Causal(), length=128)),
    "topology": lambda: topology_svg(made := merge([machine(8, 18)]), classify(made)),
    "topology of hostile names": lambda: topology_svg(made := merge([hostile()]), classify(made)),
    "sweep": lambda: swept(LONG, ["usp/2", "ulysses", "ring", "uneven/6/keep", "direct-kv", "mesh-kv/4x2", "tiles"]),
    "timeline": lambda: timeline_svg(timeline(LONG), timeline(LONG)),
    "bench": lambda: (TESTS / "data" / "bench.svg").read_text(encoding="utf-8"),
    "trace": lambda: (TESTS / "data" / "trace.svg").read_text(encoding="utf-8"),
}
PAGES = {
    "switch": lambda: page(graph_of("nvidia-switch.txt")),
    "many links": lambda: page(merge([machine(13, 4)])),
    "hostile": lambda: page(merge([hostile()])),
}


@BROWSER
@pytest.mark.slow
class TestInABrowser:
    @pytest.mark.parametrize("name", PICTURES)
    def test_pictures(self, name: str, tmp_path: Path) -> None:
        """They scale with their page, so one width stands for all; colours change no width."""
        assert [each for each in overflows(PICTURES[name](), tmp_path, 1200) if each.startswith("text:")] == []

    @pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
    @pytest.mark.parametrize("width", [500, 1200], ids=["phone", "desk"])
    @pytest.mark.parametrize("name", PAGES)
    def test_pages(self, name: str, width: int, dark: bool, tmp_path: Path) -> None:
        assert overflows(PAGES[name](), tmp_path, width, dark) == []

    def test_check_can_fail(self, tmp_path: Path) -> None:
        whole = PICTURES["sweep"]()
        assert overflows(whole.replace(">tokens<", f">{LONG}<"), tmp_path, 1200) == [f"text: {LONG}"]
        wide = page(merge([machine(2, 4)])).replace("</main>", '<p style="white-space: nowrap">' + LONG + "</p></main>")
        assert "page: wider than its window" in overflows(wide, tmp_path, 500)


class TestWrapping:
    def test_keeps_all_words(self) -> None:
        text = "one two  three\nfour"
        assert wrapped(text, 60, 12) == ["one two", "three", "four"]
        assert wrapped("", 60, 12) == []

    def test_breaks_what_is_wider_than_a_line(self) -> None:
        lines = wrapped("x" * 100, 100, 10)
        assert len(lines) > 5 and "".join(lines) == "x" * 100

    def test_lines_are_below_each_other(self) -> None:
        elements, below = heading(28, 40, 200, "a title of some words that take two lines", 20, ["small", "smaller"])
        found = ElementTree.fromstring("".join([*opening(100, 100, "x"), *elements, "</svg>"])).iter(f"{SVG}text")
        heights = [float(each.attrib["y"]) for each in found]
        assert heights == sorted(set(heights)) and heights[0] == 40 and heights[-1] == below


class TestSweep:
    def test_says_times_over_the_fastest(self) -> None:
        found = [each.text for each in ElementTree.fromstring(swept("x", ["usp/2", "ulysses"])).iter(f"{SVG}text")]
        assert {"1 ×", "1.3 ×", "1k", "2k", "tokens", "fastest", "ring"} <= set(found)
        assert found.count("usp/2") == 2  # its curve, and the column that it wins

    def test_the_band_is_of_the_winners(self) -> None:
        root = ElementTree.fromstring(swept("x", ["usp/2", "usp/2", "ulysses"]))
        band = [each for each in root.iter(f"{SVG}rect") if each.attrib.get("class", "").startswith("w")]
        assert [each.attrib["class"] for each in band] == ["w0", "w1"]
        assert float(band[0].attrib["width"]) == pytest.approx(2 * float(band[1].attrib["width"]), rel=1e-2)
