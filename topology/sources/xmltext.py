"""XML as a tree with places, by expat: no entities, nothing from outside, bounded."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from xml.parsers import expat

from tokenring.errors import TopologyError

MAX_DEPTH = 256
MAX_ELEMENTS = 200_000
START = re.compile(r"^[ \t\ufeff]*<[A-Za-z?!]", re.MULTILINE)
ROOT = re.compile(r"<([A-Za-z_][\w.-]{0,80})")


@dataclass
class Element:
    """An element with its attributes, its place in the text, its children and its words."""

    tag: str
    attributes: dict[str, str]
    line: int
    column: int
    children: list[Element] = field(default_factory=list)
    words: list[str] = field(default_factory=list)  # its text, in pieces

    @property
    def text(self) -> str:
        """The text of the element."""
        return "".join(self.words)

    def get(self, name: str) -> str | None:
        """Return an attribute; None if there is none."""
        return self.attributes.get(name)


class _Builder:
    def __init__(self) -> None:
        self.parser = expat.ParserCreate("utf-8")  # whatever the declaration names: it is text by now
        self.root: Element | None = None
        self.open: list[Element] = []
        self.count = 0
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._words
        self.parser.StartDoctypeDeclHandler = self._doctype
        self.parser.EntityDeclHandler = self._entity

    def _fail(self, message: str) -> TopologyError:
        return TopologyError(message, self.parser.CurrentLineNumber, self.parser.CurrentColumnNumber + 1)

    def _start(self, tag: str, attributes: dict[str, str]) -> None:
        self.count += 1
        if self.count > MAX_ELEMENTS or len(self.open) >= MAX_DEPTH:
            raise self._fail(f"more than {MAX_ELEMENTS} elements, or deeper than {MAX_DEPTH}")
        element = Element(tag, attributes, self.parser.CurrentLineNumber, self.parser.CurrentColumnNumber + 1)
        if self.open:
            self.open[-1].children.append(element)
        else:
            self.root = element
        self.open.append(element)

    def _end(self, tag: str) -> None:
        self.open.pop()

    def _words(self, words: str) -> None:
        if words.strip():
            self.open[-1].words.append(words)

    def _doctype(self, name: str, system: str | None, public: str | None, internal: bool) -> None:
        if internal:  # a mere name of a DTD, as hwloc writes, is never looked up
            raise self._fail("a document type with declarations of its own is refused")

    def _entity(self, *declared: object) -> None:
        raise self._fail("entities are refused")


def _without_prose(text: str) -> str:
    """Turn what a page says before its XML into blank lines, and cut what follows: places stay what they are."""
    start = START.search(text)
    if start is None:
        return text
    above = "\n" * text.count("\n", 0, start.start()) if text[: start.start()].strip() else ""
    root = ROOT.search(text, start.start())
    closing = text.rfind(f"</{root[1]}>") if root else -1
    end = len(text) if closing < 0 or root is None else closing + len(root[1]) + 3
    return above + text[start.start() : end] if above else text[:end]


def parse_xml(text: str) -> Element:
    """Parse a text into its root element. Raises TopologyError with line and column, also for entities."""
    builder = _Builder()
    try:
        builder.parser.Parse(_without_prose(text).encode("utf-8", "replace"), True)
    except expat.ExpatError as error:
        raise TopologyError(f"broken XML: {expat.ErrorString(error.code)}", error.lineno, error.offset + 1) from None
    if builder.root is None:
        raise TopologyError("no element in it", 1, 1)
    return builder.root
