"""The picture: well-formed, complete, self-contained, escaped."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from test_interchange import CUSTOM, LAYOUTS, MASKS, named, relayed, ulysses, uneven

from tokenring.ir.picture import PARTIAL, REQUEST, to_svg
from tokenring.ir.schedule_data import PASSES, Pass
from tokenring.schedule.by_name import schedule
from tokenring.schedule.names import SCHEMES
from tokenring.schedule.schedule import Schedule
from tokenring.sequence.layout import zigzag
from tokenring.sequence.mask import Causal, Documents

SVG = "{http://www.w3.org/2000/svg}"


def drawn(made: Schedule, direction: Pass = "forward") -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(made, direction))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def arrows(root: ElementTree.Element, colour: str) -> list[ElementTree.Element]:
    """Those of the schedule; the legend's are in a group of their own."""
    return [path for path in root.findall(f"{SVG}path") if path.get("stroke") == colour]


class TestContent:
    def test_says_what_it_shows(self) -> None:
        root = drawn(schedule("tokenring", ranks=4, mask=Causal()), "backward")
        assert root.findtext(f"{SVG}title") == "tokenring: 4 ranks, causal mask, zigzag layout, backward pass"
        assert texts(root)[:2] == ["tokenring", "4 ranks · causal mask · zigzag layout · backward pass"]
        assert {"rank 0", "holds 0,7", "rank 3", "step 0", "step 3"} <= set(texts(root))

    def test_every_tile_is_there(self) -> None:
        made = schedule("tokenring", ranks=4, mask=Causal())
        found = texts(drawn(made))
        shown = [(found[i - 2], found[i - 1]) for i, text in enumerate(found) if text == "×"]
        assert len(shown) == len(made.tiles)
        assert shown.count(("q0,7", "kv0,7")) == 1
        assert shown.count(("q7", "kv1,6")) == 1

    def test_every_move_is_there(self) -> None:
        """One arrow for each pair of ranks in a step; a label for all blocks of it."""
        made = schedule("tokenring", ranks=4, mask=Causal())
        root = drawn(made)
        for colour, channel in ((REQUEST, "requests"), (PARTIAL, "partials")):
            pairs = {(move.step, move.src, move.dst) for move in made.moves if move.channel == channel}
            assert len(arrows(root, colour)) == len(pairs) == 12
        assert {"q3,4 → 1", "o3,4 → 3", "q7 → 3"} <= set(texts(root))

    def test_arrows_lead_from_the_sender_to_the_receiver(self) -> None:
        """In the first gap of a ring towards rank - 1, every arrow but one climbs by one row."""
        made = schedule("ring", ranks=4, layout="contiguous", direction=-1)
        climbs = []
        for path in arrows(drawn(made), REQUEST)[:4]:
            numbers = [float(number) for number in re.findall(r"[-\d.]+", path.get("d", ""))]
            assert numbers[0] < numbers[-2]
            climbs.append(numbers[1] - numbers[-1])
        row = max(climbs)
        assert row > 0
        assert sorted(climbs) == [-3 * row, row, row, row]

    def test_passes_differ(self) -> None:
        """Gradients of kv travel in backward only, dashed where they are added to."""
        made = schedule("ring", ranks=4, mask=Causal())
        assert arrows(drawn(made, "forward"), PARTIAL) == []
        backward = arrows(drawn(made, "backward"), PARTIAL)
        assert len(backward) == 12
        assert sum(path.get("stroke-dasharray") is not None for path in backward[:8]) == 8
        assert "dkv1,6 → 3 +" in texts(drawn(made, "backward"))

    def test_partials_of_q_are_called_by_their_pass(self) -> None:
        made = schedule("direct-q", ranks=2)
        assert "o0,3 → 0" in texts(drawn(made, "forward"))
        assert "dq0,3 → 0" in texts(drawn(made, "backward"))

    def test_kept_blocks_do_not_move_in_backward(self) -> None:
        made = schedule("direct-kv", ranks=3).replace(keep=frozenset({"kv"}))
        assert len(arrows(drawn(made, "forward"), REQUEST)) == 6
        assert arrows(drawn(made, "backward"), REQUEST) == []

    def test_last_column_is_where_the_last_partials_arrive(self) -> None:
        assert texts(drawn(schedule("tokenring", ranks=3))).count("out") == 3
        assert texts(drawn(schedule("tokenring", ranks=3), "backward")).count("dq, dk, dv") == 3
        assert "out" not in texts(drawn(schedule("ring", ranks=3)))  # in forward nothing comes home

    def test_colours_are_the_owners(self) -> None:
        """The tiles of one step under a ring show each rank's colour twice: as q's, and as kv's."""
        root = drawn(schedule("ring", ranks=4, layout="contiguous"))
        fills = [box.get("fill") for box in root.iter(f"{SVG}rect")]
        swatches = [box.get("fill") for box in root.iter(f"{SVG}rect") if box.get("width") == "6.0"]
        assert len(set(swatches)) == 4
        # a swatch, and in each of four steps q once and kv once
        assert [fills.count(swatch) for swatch in swatches] == [9] * 4

    def test_tile_with_blocks_of_several_owners(self) -> None:
        made = schedule("bidirectional", ranks=3, layout="contiguous")
        fills = [box.get("fill") for box in drawn(made).iter(f"{SVG}rect")]
        assert fills.count("none") == 2 * len(made.tiles)  # a border round every half
        assert len(fills) > 4 * len(made.tiles)


class TestForm:
    @pytest.mark.parametrize("direction", PASSES)
    @pytest.mark.parametrize("name", SCHEMES)
    def test_of_every_named_schedule(self, name: str, direction: Pass) -> None:
        for ranks in (1, 2, 8):
            for layout in LAYOUTS:
                for mask in MASKS:
                    root = drawn(named(name, ranks, layout, mask), direction)
                    assert root.tag == f"{SVG}svg"

    @pytest.mark.parametrize("direction", PASSES)
    @pytest.mark.parametrize("made", CUSTOM, ids=lambda made: made.name)
    def test_of_others(self, made: Schedule, direction: Pass) -> None:
        assert len(texts(drawn(made, direction))) > 10

    def test_nothing_is_fetched(self) -> None:
        """No image, font, style sheet or script from elsewhere; and nothing but the namespace names an address."""
        svg = to_svg(schedule("tokenring", ranks=4))
        assert re.findall(r"\w+://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]
        assert not re.search(r"<(image|script|style|foreignObject|use)\b|href", svg)

    def test_text_is_escaped(self) -> None:
        nasty = "</svg><script>&\"'\x00"
        root = drawn(uneven(nasty))
        assert texts(root)[0] == "</svg><script>&\"'?"
        assert root.find(f".//{SVG}script") is None

    def test_long_masks_are_cut(self) -> None:
        root = drawn(schedule("ring", ranks=2, mask=Documents(range(0, 200, 2))))
        assert max(map(len, texts(root)[1].split(" · "))) == 60

    @pytest.mark.parametrize(
        "made",
        [schedule("direct-q", ranks=8, mask=Causal()), ulysses(4, zigzag(4, 64), Causal()), relayed()],
        ids=lambda made: made.name,
    )
    def test_everything_lies_inside(self, made: Schedule) -> None:
        root = drawn(made, "backward")
        width, height = float(root.get("width", 0)), float(root.get("height", 0))
        for box in root.iter(f"{SVG}rect"):
            assert 0 <= float(box.get("x", 0)) <= width - float(box.get("width", 0)) + 0.1
            assert 0 <= float(box.get("y", 0)) <= height - float(box.get("height", 0)) + 0.1
        for text in root.iter(f"{SVG}text"):
            assert 0 < float(text.get("y", 0)) < height
            assert 0 < float(text.get("x", 0)) < width

    def test_tiles_do_not_overlap(self) -> None:
        made = ulysses(4, zigzag(4, 64), Causal())
        corners = [(b.get("x"), b.get("y")) for b in drawn(made).iter(f"{SVG}rect") if b.get("fill") == "none"]
        assert len(corners) == len(set(corners)) == 2 * len(made.tiles)

    def test_is_the_same_each_time(self) -> None:
        first, second = (to_svg(schedule("bidirectional", ranks=4)) for _ in range(2))
        assert first == second
