"""Topology fixtures broken at random, and what our reading makes of them; for a test and benchmarks/mutations.py."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import NamedTuple, get_args
from xml.etree import ElementTree

from tokenring.errors import TopologyError
from tokenring.topology.model.graph import merge
from tokenring.topology.model.schema import from_json, is_document, to_json
from tokenring.topology.model.verdict import Class, classify
from tokenring.topology.report.picture import to_svg
from tokenring.topology.report.text import report
from tokenring.topology.sources import read, recognise

DATA = Path(__file__).resolve().parents[1] / "data" / "topology"
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
    """A text with one to eight cuts, copies, insertions and exchanges; half get one, to come past the door."""
    for _ in range(chance.choice((1, 1, 2, 8))):
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


def fixtures() -> list[str]:
    """Every fixture, and a few of them as saved documents."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(DATA.iterdir())]
    return texts + [to_json([read(text)]) for text in texts[:5]]


class Broken(NamedTuple):
    """What came of one broken text."""

    answer: str  # a class, or "refused"
    seconds: float  # of processor time
    text: str


def mutate(texts: list[str], chance: random.Random) -> Broken:
    """Breaks one text; raises AssertionError, or whatever escapes, where the answer is not as it must be."""
    text = broken(chance.choice(texts), chance)
    began = time.process_time()
    found = answer(text)
    assert found in {*get_args(Class), "refused"}
    return Broken(found, time.process_time() - began, text)
