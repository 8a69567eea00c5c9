"""The picture and the page: what is in them, that dumps stay text in them, and that a browser likes them."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
from browser import BROWSER, browse

from tokenring.cli.main import main
from tokenring.display.safe_text import plain
from tokenring.topology.model.facts import Device, Facts, Link, Note, SourceOrigin
from tokenring.topology.model.graph import Graph, merge
from tokenring.topology.model.nesting import Box, boxes
from tokenring.topology.model.verdict import classify
from tokenring.topology.report.page import to_html
from tokenring.topology.report.picture import LINKS, to_svg
from tokenring.topology.report.text import Table, blocks, report
from tokenring.topology.sources import read

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
FILES = sorted(path.name for path in DATA.iterdir())
SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = (
    "<script>alert(1)</script>",
    "\"&'",
    "\x1b[31mred\x1b[0m",
    "\u202egnp.exe",
    "x" * 3000,
    "汉字" * 50,
    "\0\x01\ufffe\ud800",
    "&lt;]]>--></title></style>",
    "a\nb\u2028c",
)


def graph_of(name: str) -> Graph:
    return merge([read((DATA / name).read_text(encoding="utf-8"), name)])


def machine(count: int, links: int, nics: int = 0, host: str | None = None) -> Facts:
    """Accelerators that all have so many links to each other."""
    devices = [Device(f"GPU{i}", "accelerator", i, model="NVIDIA B200", numa_node=2 * i // count) for i in range(count)]
    devices += [Device(f"NIC{i}", "nic", name=f"mlx5_{i}", gbs=50.0) for i in range(nics)]
    found = [Link(f"GPU{i}", f"GPU{j}", "nvlink", links) for i in range(count) for j in range(i)]
    found += [Link(f"GPU{i}", f"NIC{i * nics // count}", "pix") for i in range(count if nics else 0)]
    return Facts("links", tuple(devices), tuple(found), origin=SourceOrigin("made", host=host))


def hostile() -> Facts:
    """Every text of a dump that can hold anything, holding the worst."""
    devices = [
        Device(text, "accelerator", i, text, model=text, vendor=text, name=text, numa_affinity=text, cpu_affinity=text)
        for i, text in enumerate(HOSTILE)
    ]
    nics = [Device(f"nic {text}", "nic", name=text) for text in HOSTILE]
    links = [Link(a, b, "nvlink", 4, label=a) for a in HOSTILE for b in HOSTILE if a < b]
    links += [Link(text, f"nic {text}", "pix") for text in HOSTILE]
    return Facts("links", (*devices, *nics), tuple(links), notes=tuple(map(Note, HOSTILE)), origin=SourceOrigin("made"))


def on_host(facts: Facts, host: str) -> Facts:
    return replace(facts, origin=SourceOrigin("made", host=host))


def drawn(graph: Graph) -> ElementTree.Element:
    return ElementTree.fromstring(to_svg(graph, classify(graph)))


def page(graph: Graph) -> str:
    return to_html(graph, classify(graph))


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(element.itertext()) for element in root.iter(f"{SVG}text")]


def links(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [path for path in root.iter(f"{SVG}path") if "link " in f"{path.get('class')} " and path.get("data-a")]


def tips(found: list[ElementTree.Element]) -> set[str]:
    return {each.findtext(f"{SVG}title", "") for each in found}


def nodes(root: ElementTree.Element) -> list[ElementTree.Element]:
    return [group for group in root.iter(f"{SVG}g") if group.get("class") == "node"]


class TestContent:
    def test_every_link_of_a_mesh(self) -> None:
        root = drawn(graph_of("npu-910b.txt"))
        assert len(links(root)) == 28
        assert "NPU0 – NPU7: HCCS, 28 GB/s one way (published)" in tips(links(root))

    def test_a_switch_that_no_source_names_is_in_the_middle(self) -> None:
        """72 devices have 2,556 pairs, and 72 ways to the switch."""
        root = drawn(merge([machine(72, 18)]))
        assert len(links(root)) == 72
        assert any(tip.startswith("GPU71: NVLink × 18, 900 GB/s") and "71 peers" in tip for tip in tips(links(root)))
        assert "a switch that no source names" in tips(nodes(root))

    def test_switches_that_a_source_names(self) -> None:
        graph = graph_of("nccl-switch.xml")
        switches = [device.id for device in graph.of_kind("switch")]
        root = drawn(graph)
        assert len(links(root)) == 8
        assert {plain(name) for name in switches} <= {tip.partition("\n")[0] for tip in tips(nodes(root))}

    def test_dies_of_a_package_keep_their_own_link(self) -> None:
        root = drawn(graph_of("npu-a3.txt"))
        assert sum(": SIO" in tip for tip in tips(links(root))) == 8
        assert sum(": HCCS" in tip for tip in tips(links(root))) == 16

    def test_wider_links_are_wider(self) -> None:
        root = drawn(graph_of("rccl-ladder.xml"))
        widths = {
            match[1]: float(each.get("stroke-width", ""))
            for each in links(root)
            if (match := re.search(r"xGMI × (\d)", each.findtext(f"{SVG}title", "")))
        }
        assert widths["1"] < widths["2"] < widths["4"]

    def test_nics_and_numa_nodes_are_boxes(self) -> None:
        graph = merge([machine(8, 18, 8)])
        found = texts(drawn(graph))
        assert {"NUMA 0", "NUMA 1", "mlx5_0", "mlx5_7"} <= set(found)

    def test_all_hosts_are_there(self) -> None:
        root = drawn(merge([machine(2, 4, 1, f"node{i}") for i in range(5)]))
        found = texts(root)
        assert all(found.count(f"node{i}") == 1 for i in range(5))
        assert sum(text.startswith("node3: 2 × NVIDIA B200") for text in found) == 1
        assert "network: not looked at" in found

    def test_one_number_for_one_device(self) -> None:
        """What the page lights up together: circles, boxes and links of one device share a number."""
        root = drawn(merge([machine(4, 4, 2)]))
        numbers = [group.get("data-n") for group in nodes(root)]
        assert sorted(numbers.count(each) for each in set(numbers)) == [1, 1, 2, 2, 2, 2]
        assert {each.get("data-a") for each in links(root)} < set(numbers)

    @pytest.mark.parametrize("file", FILES)
    def test_every_fixture(self, file: str) -> None:
        graph = graph_of(file)
        root = drawn(graph)
        for device in graph.accelerators:
            assert any(tip.partition("\n")[0] == device.id for tip in tips(nodes(root))), device.id

    def test_no_devices_at_all(self) -> None:
        assert texts(drawn(merge([])))[0] == "no accelerators found"

    def test_more_hosts_than_anyone_looks_at(self) -> None:
        found = texts(drawn(merge([machine(1, 1, 0, f"n{i}") for i in range(40)])))
        assert "and 8 more hosts, not drawn" in found

    @pytest.mark.parametrize("count", [1, 2, 4, 8, 16, 72])
    def test_nothing_lies_outside_or_over_something_else(self, count: int) -> None:
        root = drawn(merge([machine(count, 2, min(count, 8))]))
        width, height = (float(root.get(name, "")) for name in ("width", "height"))
        places = []
        for group in nodes(root):
            rect = group.find(f"{SVG}rect")
            if rect is not None:
                x, y, w, h = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
                assert x >= 0 and x + w <= width and y >= 0 and y + h <= height
                places.append((x, y, x + w, y + h))
        for i, a in enumerate(places):
            for b in places[:i]:
                assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]


def shape(box: Box) -> object:
    return box.label if box.is_leaf else (box.label, [shape(each) for each in box.inside])


class TestNesting:
    def test_from_ways(self) -> None:
        names = ("a", "b", "c", "d")
        ways = {("a", "b"): "pix", ("a", "c"): "node", ("b", "c"): "node"}
        kinds = [Link(*pair, ways.get(pair, "sys")) for pair in ((x, y) for x in names for y in names if x < y)]
        devices = tuple(Device(name, "accelerator", numa_node=1 if name == "d" else 0) for name in names)
        found = boxes(merge([Facts("links", devices, tuple(kinds))]))
        assert [shape(box) for box in found] == [
            ("NUMA 0", [("PCIe switch", ["a", "b"]), "c"]),
            ("NUMA 1", ["d"]),
        ]

    def test_from_parents(self) -> None:
        """Bridges that lead to one thing only are left out."""
        chain = [Device("NUMA0", "numa", numa_node=0), Device("pci0000:00", "host-bridge", parent="NUMA0")]
        chain += [Device("up", "pcie-switch", parent="pci0000:00"), Device("port", "pcie-switch", parent="up")]
        chain += [Device("g0", "accelerator", parent="port"), Device("n0", "nic", parent="up")]
        found = boxes(merge([Facts("pcie", tuple(chain))]))
        assert [shape(box) for box in found] == [
            ("NUMA 0", [("host bridge pci0000:00", [("PCIe switch up", ["g0", "n0"])])])
        ]

    def test_nics_of_an_accelerator_s_own(self) -> None:
        devices = (Device("d0", "accelerator"), Device("n0", "nic", parent="d0"))
        found = boxes(merge([Facts("devices", devices)]))
        assert [shape(box) for box in found] == [("d0 and its own", ["d0", "n0"])]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("GPU0 · 汉字", "GPU0 · 汉字"),
        ("\x1b[31m", "␛[31m"),
        ("a\u202eb", "a[U+202E]b"),
        ("\ud800\ufffe\x85", "[U+D800][U+FFFE]�"),
        ("x" * 50, "x" * 17 + "…"),
    ],
)
def test_plain(text: str, shown: str) -> None:
    assert plain(text, 18) == shown


class Elements(HTMLParser):
    """Tags with their attributes, and all text that is not inside a script or style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


class Cells(HTMLParser):
    """The rows of the tables of a page: texts of cells, and the class of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[tuple[str, str | None]]] = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        self.inside = tag in ("th", "td")
        if self.inside:
            self.rows[-1].append(("", dict(attrs).get("class")))

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] = data, self.rows[-1][-1][1]


class TestMatrix:
    """The page's matrix says what the report's does, in the colours of the links."""

    def test_texts_and_kinds(self) -> None:
        graph = graph_of("npu-a3.txt")
        (matrix,) = [each for each in blocks(graph, classify(graph)) if isinstance(each, Table) and each.kinds]
        kinds = {kind for row in matrix.kinds for kind in row}
        assert {"sio", "hccs"} <= kinds
        found = Cells(page(graph)).rows[: len(matrix.rows)]
        assert [[text for text, _ in row] for row in found] == [list(row) for row in matrix.rows]
        shown = [[kind for _, kind in row[1:]] for row in found[1:]]
        assert shown == [[kind if kind in LINKS else "other" if kind else None for kind in row] for row in matrix.kinds]

    def test_check_can_fail(self) -> None:
        whole = page(graph_of("npu-a3.txt"))
        assert Cells(whole.replace('class="sio"', 'class="hccs"')).rows != Cells(whole).rows
        assert Cells(whole.replace("<th>", "<td>", 1).replace("</th>", "x</td>", 1)).rows != Cells(whole).rows


class TestHostileNames:
    def graphs(self) -> list[Graph]:
        several = [on_host(hostile(), text) for text in HOSTILE]
        return [merge([hostile()]), merge(several)]

    def test_they_stay_text(self) -> None:
        for graph in self.graphs():
            root = drawn(graph)  # well-formed, with no character that XML forbids
            assert not list(root.iter(f"{SVG}script"))
            elements = Elements(page(graph)).found
            assert [tag for tag, _ in elements].count("script") == 1
            assert {tag for tag, _ in elements} <= {
                *("html", "head", "meta", "title", "style", "body", "main", "section", "pre", "script"),
                *("div", "table", "caption", "tr", "th", "td"),
                *("svg", "g", "path", "rect", "circle", "text"),
            }
            assert not [name for _, given in elements for name in given if name.startswith("on") or name == "href"]

    def test_no_invisible_character_gets_through(self) -> None:
        for graph in self.graphs():
            for text in (page(graph), to_svg(graph, classify(graph)), report(graph, classify(graph))):
                assert not re.search(
                    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]", text
                )

    def test_long_ones_are_cut(self) -> None:
        for graph in self.graphs():
            assert max(len(text) for text in texts(drawn(graph))) < 400

    def test_they_are_told(self) -> None:
        shown = "\n".join(texts(drawn(merge([hostile()]))))
        assert "<script" in shown and "[U+202E]" in shown and "␛[31m" in shown


def test_nothing_is_loaded_from_elsewhere() -> None:
    for file in FILES:
        text = page(graph_of(file))
        assert set(re.findall(r"\w+://[^\s\"'<]*", text)) == {"http://www.w3.org/2000/svg"}
        assert "default-src 'none'" in text
        assert not re.search(r"url\(|@import|<link|<img|<iframe|\bsrc=", text)


def test_command_writes_both(tmp_path: Path) -> None:
    out, err = StringIO(), StringIO()
    svg, html = tmp_path / "a.svg", tmp_path / "a.html"
    source = str(DATA / "npu-910b.txt")
    argv = ["topology", "--from", source, "--svg", str(svg), "--html", str(html)]
    assert (main(argv, out, err, StringIO()), out.getvalue(), err.getvalue()) == (0, "", "")
    assert svg.read_text(encoding="utf-8") in html.read_text(encoding="utf-8")
    nowhere = str(tmp_path / "no" / "a.svg")
    assert main(["topology", "--from", source, "--svg", nowhere], out, err, StringIO()) == 2
    assert err.getvalue() == f"tokenring: cannot write {nowhere!r}: No such file or directory\n"


@BROWSER
class TestBrowser:
    def test_no_complaint(self, tmp_path: Path) -> None:
        facts = {
            "mesh": [machine(8, 2, 4)],
            "hosts": [machine(8, 18, 4, "node0"), machine(8, 18, 4, "node1")],
            "hostile": [hostile()],
        }
        complaints, shot = browse({name: page(merge(each)) for name, each in facts.items()}, tmp_path)
        assert complaints == []
        assert shot.startswith(b"\x89PNG") and len(shot) > 20_000

    def test_check_can_fail(self, tmp_path: Path) -> None:
        whole = page(merge([machine(2, 4)]))
        broken = whole.replace("const all", "nothing(); const all")
        assert any("nothing is not defined" in line for line in browse({"a": whole, "b": broken}, tmp_path)[0])
