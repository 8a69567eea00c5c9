"""Fixtures broken at random: an answer, or our own error with line and column; quickly; never anything else."""

from __future__ import annotations

import random
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tokenring.errors import TopologyError
from tokenring.topology.graph import merge
from tokenring.topology.picture import to_svg
from tokenring.topology.report import report
from tokenring.topology.schema import from_json, is_document, to_json
from tokenring.topology.sources import read, recognise
from tokenring.topology.verdict import CLASSES, classify

DATA = Path(__file__).parent / "data" / "topology"
SPLICES = (
    "\t",
    " ",
    "\n",
    "X",
    "NV18",
    "GPU0",
    "NIC",
    "|",
    "<",
    ">",
    "&x;",
    '"',
    "\x00",
    "\x1b[4m",
    "汉",
    "…",
    "{",
    "[",
    "9" * 30,
)


def broken(text: str, chance: random.Random) -> str:
    """A text with one to eight cuts, copies, insertions and exchanges."""
    for _ in range(chance.randint(1, 8)):
        at, end = sorted(chance.randint(0, len(text)) for _ in range(2))
        end = min(end, at + chance.choice((1, 3, 20, 400)))
        what = chance.randrange(6)
        if what == 0:
            text = text[:at] + text[end:]
        elif what == 1:
            text = text[:end] + text[at:]
        elif what == 2:
            text = text[:at]
        elif what == 3:
            text = text[:at] + chance.choice(SPLICES) + text[end:]
        elif what == 4:
            text = text[:at] + text[at:end].swapcase() + text[end:]
        else:
            text = text[:at] + "".join(chance.sample(text[at:end], len(text[at:end]))) + text[end:]
    return text


def answer(text: str) -> str:
    """The class of whatever a text is, all the way to the report; or "refused"."""
    formats = recognise(text)
    try:
        facts = from_json(text) if is_document(text) else [read(text)]
    except TopologyError as error:
        assert formats is None or error.line is not None
        return "refused"
    graph = merge(facts)
    verdict = classify(graph)
    assert report(graph, verdict)
    ElementTree.fromstring(to_svg(graph, verdict))
    assert from_json(to_json(facts)) == facts
    return verdict.name


@pytest.mark.parametrize("seed", range(8))
def test_broken_fixtures(seed: int) -> None:
    """2,000 in all."""
    chance = random.Random(seed)
    texts = [path.read_text(encoding="utf-8") for path in sorted(DATA.iterdir())]
    texts += [to_json([read(text)]) for text in texts[:5]]
    assert len(texts) > 30
    for _ in range(250):
        text = broken(chance.choice(texts), chance)
        began = time.process_time()
        assert answer(text) in {*CLASSES, "refused"}
        assert time.process_time() - began < 1


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "text",
    [
        "GPU0 " * 200_000,
        "\tGPU0\n" + "GPU0\tX\n" * 100_000,
        "NV" * 1_000_000 + "\nGPU0 CPU Affinity\n",
        "GPU0\t" + "NODE" * 500_000,
        "<system>" + "<pci>" * 100_000,
        "<system>" + '<pci busid="0000:00:00.0" class="0x030200"/>' * 20_000 + "</system>",
        "\t" + "\t".join(f"GPU{i}" for i in range(2000)),
        "|GPU0|" * 100_000,
        "mlx" + "a_" * 500_000 + " GPU0 CPU Affinity",
        "Link Type between two GPUs\n" + " ".join(f"GPU{i}" for i in range(9000)),
        "Link Type between two GPUs\nGPU0 GPU1\n" + "GPU0 0 XGMI\n" * 100_000,
        "LINK METRIC TABLE:\n" + "".join(f"GPU{i} 0000:{i:02x}:00.0 32 Gb/s 512 Gb/s XGMI\n" for i in range(256)) * 99,
        "GPU 0: x (UUID: y)\n" + " " * 1_000_000 + "GPU",
        "GPU 0: " + " " * 1_000_000 + "x\n\t Link 0: 25 GB/s",
        "GPU 0: x (UUID: y)\n" + "\t Link 0: Remote Device 00000000:07:00.0: Link 0\n" * 50_000,
        "NVSMI LOG\n" + "GPU 00000000:07:00.0\n" * 50_000,
        "-[0000:00]-+-00.0\n" + " " * 500_000 + "\\-01.0-[01]-" + "-00.0-[02]-" * 50_000,
        "-[0000:00]-+-00.0\n"
        + "".join(f"  \\-{i % 256:02x}.{i // 256}  NVIDIA Corporation GA100\n" for i in range(2000)),
        "<graphs>"
        + '<graph speedintra="9" typeintra="SYS"><channel><gpu dev="0"/><gpu dev="1"/></channel></graph>' * 9000,
        "<topology>" + '<object type="Bridge" bridge_pci="0000:[00-01]">' * 250,
        '<topology><object type="PCIDev" pci_busid="0000:00:00.0" pci_type="0302 [10de:1]"/>' + "<object/>" * 100_000,
        '{"matrix": [' + "[" * 500_000,
        '{"ids": ["0"], "matrix": [["' + "X" * 1_000_000 + '"]]}',
    ],
    ids=lambda text: text[:20].strip(),
)
def test_big_ones_are_quick(text: str) -> None:
    began = time.process_time()
    answer(text)
    assert time.process_time() - began < 2
