"""No text leaves its picture, and no page its window: light and dark, narrow and wide, in a real browser."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import BROWSER, DESK, PHONE, Look, overflows
from test_topology_picture import graph_of, hostile, machine, page

from tokenring import Causal, Documents, schedule
from tokenring.cli.plan.command import given_options
from tokenring.cli.plan.command import options_parser as plan_parser
from tokenring.cli.plan.layer import PlannedLayer, planned_layer
from tokenring.cli.plan.layer_picture import layer_svg
from tokenring.cli.plan.mask_picture import mask_svg
from tokenring.cli.plan.sweep import Point, sweep_svg
from tokenring.cli.trace.picture import Timeline
from tokenring.cli.trace.picture import to_svg as timeline_svg
from tokenring.cli.trace.record import Stretch
from tokenring.display.svg import heading, opening, wrapped
from tokenring.ir.picture import to_svg as schedule_svg
from tokenring.sequence.layout import contiguous
from tokenring.topology.model.graph import merge
from tokenring.topology.model.verdict import classify
from tokenring.topology.report.picture import to_svg as topology_svg

TESTS = Path(__file__).resolve().parents[1]
DRAWN = [*sorted((TESTS / "data").glob("*.svg")), *sorted((TESTS.parent / "docs").rglob("*.svg"))]
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


@cache
def planned() -> PlannedLayer:
    words = ("--layer", "llama3-8b", "--topology", "preset:a10-pix-4", "--tp", "2", "--cp", "2", "--seq", "4k")
    parser = plan_parser()
    return planned_layer(parser.parse_args(words), given_options(parser, words), {})


def layer(name: str) -> str:
    """The operators of a layer of a model so called, the first by a schedule whose name leaves no room."""
    found = planned()
    asked = replace(found.asked, model=replace(found.asked.model, name=name))
    first = found.plan.costs[0]._replace(schedule=name)
    return layer_svg(replace(found, asked=asked, plan=replace(found.plan, costs=(first, *found.plan.costs[1:]))))


def owners(ranks: int) -> str:
    """The picture of a mask."""
    mask, cut = Causal() & Documents((0, 500, 1200, 1201, 3000, 4096)), contiguous(ranks, 4096)
    return mask_svg(mask, cut, cut, LONG, [LONG])


PICTURES: dict[str, Callable[[], str]] = {
    "schedule": lambda: schedule_svg(schedule("direct-kv", 8, "zigzag", Causal(), length=128)),
    "schedule of uneven heads": lambda: schedule_svg(schedule("packed/6", 4, "zigzag", Causal(), length=128)),
    "topology": lambda: topology_svg(made := merge([machine(8, 18)]), classify(made)),
    "topology of two": lambda: topology_svg(
        made := merge([machine(8, 18, 4, "node0"), machine(8, 18, 4, "node1")]), classify(made)
    ),
    "topology of hostile names": lambda: topology_svg(made := merge([hostile()]), classify(made)),
    "sweep": lambda: swept(LONG, ["usp/2", "ulysses", "ring", "uneven/6/keep", "direct-kv", "mesh-kv/4x2", "tiles"]),
    "layer": lambda: layer("llama3-8b"),
    "layer of a long name": lambda: layer(LONG),
    "timeline": lambda: timeline_svg(timeline(LONG), timeline(LONG)),
    **{f"mask, {ranks} ranks": partial(owners, ranks) for ranks in (2, 32, 64)},
    **{f"{each.parent.name}/{each.name}": partial(each.read_text, encoding="utf-8") for each in DRAWN},
}
PAGES: dict[str, Callable[[], str]] = {
    "switch": lambda: page(graph_of("nvidia-switch.txt")),
    "many links": lambda: page(merge([machine(13, 4)])),
    "hostile": lambda: page(merge([hostile()])),
}


def broken() -> dict[str, str]:
    """Pictures and pages with a fault that must be found."""
    whole, made = PICTURES["sweep"](), page(merge([machine(2, 4)]))
    return {
        "too long": whole.replace(">tokens<", f">{LONG}<"),
        "as pale as the paper": re.sub(r"<text [^>]*>tokens<", '<text x="300" y="300" fill="#eeeeee">tokens<', whole),
        "unbroken": made.replace("</main>", f'<p style="white-space: nowrap">{LONG}</p></main>'),
    }


@pytest.fixture(scope="module")
def looked(tmp_path_factory: pytest.TempPathFactory) -> dict[Look, list[str]]:
    """Everything in one browser, on a phone and on a desk, by day and by night."""
    texts = {name: make() for name, make in {**PICTURES, **PAGES}.items()}
    return overflows(texts | broken(), tmp_path_factory.mktemp("browser"))


@BROWSER
class TestInABrowser:
    @pytest.mark.parametrize("colours", ["light", "dark"])
    @pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
    @pytest.mark.parametrize("name", [*PICTURES, *PAGES])
    def test_all_text_is_seen(self, name: str, width: int, colours: str, looked: dict[Look, list[str]]) -> None:
        assert looked[name, width, colours] == []

    @pytest.mark.parametrize("width", [PHONE, DESK], ids=["phone", "desk"])
    def test_check_can_fail(self, width: int, looked: dict[Look, list[str]]) -> None:
        assert f"text: {LONG}" in looked["too long", width, "light"]
        assert "page: wider than its window" in looked["unbroken", width, "dark"]
        assert looked["as pale as the paper", width, "light"] == ["faint: tokens"]


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
