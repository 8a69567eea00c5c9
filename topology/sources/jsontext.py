"""JSON as tools write it and as documentation prints it: comments, elisions, a comma too many or too few.

Strict JSON goes through the standard library. What that refuses is read again here, with a note for each liberty,
or refused with line and column.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tokenring.errors import TopologyError
from tokenring.topology.model.facts import Note, single_number

MAX_STRICT = 8 << 20  # characters
MAX_LENIENT = 1 << 19  # our own reader is some 20 times slower
MAX_DEPTH = 64
MAX_HEAD = 500  # of prose before the first brace
MAX_WORD = 120

TOKEN = re.compile(
    r'(?P<skip>\s+|//[^\n]*|/\*.*?\*/|`{3}\w*)|(?P<more>\.{3,}|…)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<mark>[{}\[\]:,])'
    r"|(?P<number>-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?)|(?P<word>true|false|null)",
    re.DOTALL | re.ASCII,
)
WORDS = {"true": True, "false": False, "null": None}


@dataclass
class Document:
    """A JSON text and the object that it holds. `notes` are the liberties that were taken with it."""

    text: str
    root: dict[str, Any]
    notes: list[Note] = field(default_factory=list)

    def fail(self, message: str, key: str) -> TopologyError:
        """Make a TopologyError at the first place where the key stands."""
        return TopologyError(message, *place(self.text, max(self.text.find(f'"{key}"'), 0)))

    def objects(self, parent: dict[str, Any], key: str) -> list[dict[str, Any]]:
        """Return the objects listed under a key; none where there is no such key.

        Those that an elision left empty are skipped. Raises TopologyError if it is not a list of objects.
        """
        value = parent.get(key, [])
        if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
            raise self.fail(f"{key!r} is not a list of objects", key)
        return [each for each in value if each]


def number(value: object) -> int | None:
    """Return the number that `3` and `"3"` are; None for anything else."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if 0 <= value < 1_000_000_000 else None
    return single_number(value) if isinstance(value, str) else None


def word(value: object) -> str | None:
    """Return a name; None where there is none.

    Halves of characters, which JSON can spell, become question marks.
    """
    text = str(value) if isinstance(value, (str, int)) and not isinstance(value, bool) else ""
    text = text.encode("utf-8", "replace").decode()
    return " ".join(text.split())[:MAX_WORD] or None


def place(text: str, at: int) -> tuple[int, int]:
    """Return the line and column of a position."""
    return text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)


def load(text: str) -> Document:
    """Read the object that a text holds. Raises TopologyError with line and column."""
    if len(text) > MAX_STRICT:
        raise TopologyError(f"a JSON text of {len(text)} characters is too long; at most {MAX_STRICT}", 1, 1)
    try:
        root = json.loads(text, object_pairs_hook=_unique)
    except RecursionError:
        if len(text) > MAX_LENIENT:
            raise TopologyError("JSON nested too deep", 1, 1) from None
    except json.JSONDecodeError as error:
        if len(text) > MAX_LENIENT:
            raise TopologyError(f"broken JSON: {error.msg}", error.lineno, error.colno) from None
    except ValueError as error:  # a key twice: the reader below says where; or a number of thousands of digits
        if len(text) > MAX_LENIENT:
            raise TopologyError(f"broken JSON: {str(error)[:100]}", 1, 1) from None
    else:
        if not isinstance(root, dict):
            raise TopologyError("expected a JSON object", 1, 1)
        return Document(text, root)
    return _Reader(text).read()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice in one object")
    return made


class _Reader:
    """One pass over the tokens, with a stack instead of recursion."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.notes: dict[str, Note] = {}  # one for each kind of liberty: the first
        self.stack: list[dict[str, Any] | list[Any]] = []
        self.key: list[str | None] = []  # of the innermost object, what its next value is for
        self.state = "value"  # "value", "key", "colon", "comma" (before the next one), "end"
        self.after_comma = False  # nothing has come since
        self.root: Any = None

    def read(self) -> Document:
        for match in self._tokens():
            kind, token, at = str(match.lastgroup), match[0], match.start()
            if kind == "more":
                self._note("parts are left out (...): what they said is unknown", at)
            elif self.state == "end":
                raise self._error(f"after the end: {token[:20]!r}", at)
            elif kind == "mark":
                self._mark(token, at)
            else:
                self._scalar(kind, token, at)
        if self.state != "end":
            raise self._error("the text ends before its object does", len(self.text))
        if not isinstance(self.root, dict):
            raise self._error("expected a JSON object", 0)
        return Document(self.text, self.root, list(self.notes.values()))

    def _tokens(self) -> Iterable[re.Match[str]]:
        at = self.text.find("{")
        if not 0 <= at <= MAX_HEAD:
            raise self._error("broken JSON: no object in it", 0)
        if self.text[:at].strip("\ufeff \t\r\n`"):
            self._note("what stands before the JSON is not read", 0)
        while at < len(self.text):
            match = TOKEN.match(self.text, at)
            if match is None:
                raise self._error(f"broken JSON at {self.text[at : at + 20]!r}", at)
            if match.lastgroup != "skip":
                yield match
            elif match[0].startswith("/"):
                self._note("comments, which JSON does not have", at)
            at = match.end()

    def _mark(self, token: str, at: int) -> None:
        if token in "{[":
            self._want_value(at)
            if len(self.stack) >= MAX_DEPTH:
                raise self._error(f"JSON nested deeper than {MAX_DEPTH}", at)
            made: dict[str, Any] | list[Any] = {} if token == "{" else []
            self._put(made)
            self.stack.append(made)
            self.after_comma = False
            self.key.append(None)
            self.state = "key" if token == "{" else "value"
        elif token in "}]":
            if not self.stack or isinstance(self.stack[-1], dict) != (token == "}") or self.state == "colon":
                raise self._error(f"broken JSON at {token!r}", at)
            if self.key[-1] is not None:
                raise self._error(f"no value for {self.key[-1]!r}", at)
            if self.state != "comma" and self.after_comma:
                self._note("a comma too many", at)
            self.stack.pop()
            self.key.pop()
            self.state = "comma" if self.stack else "end"
        elif token == ":":
            if self.state != "colon":
                raise self._error("broken JSON at ':'", at)
            self.state = "value"
        else:
            if self.state == "colon" or not self.stack or self.key[-1] is not None:
                raise self._error("broken JSON at ','", at)
            if self.state != "comma":
                self._note("a comma too many", at)
            self._next()

    def _scalar(self, kind: str, token: str, at: int) -> None:
        self._missing_comma(at)
        if self.state == "key":
            if kind != "text":
                raise self._error(f"a key is wanted, not {token[:20]!r}", at)
            key = self._text(token, at)
            inside = self.stack[-1]
            if isinstance(inside, dict) and key in inside:
                raise self._error(f"{key[:40]!r} stands twice in one object", at)
            self.key[-1] = key
            self.after_comma = False
            self.state = "colon"
            return
        self._want_value(at)
        if kind == "text":
            self._put(self._text(token, at))
        elif kind == "word":
            self._put(WORDS[token])
        else:
            whole = token.lstrip("-").isdigit() and len(token) <= 15
            self._put(int(token) if whole else float(token))
        self.state = "comma" if self.stack else "end"

    def _want_value(self, at: int) -> None:
        self._missing_comma(at)
        if self.state != "value":
            raise self._error("broken JSON: no value can stand here", at)

    def _missing_comma(self, at: int) -> None:
        if self.state == "comma":
            self._note("a comma too few", at)
            self._next()

    def _next(self) -> None:
        self.after_comma = True
        self.state = "key" if isinstance(self.stack[-1], dict) else "value"

    def _put(self, value: Any) -> None:
        if not self.stack:
            self.root = value
            return
        inside, key = self.stack[-1], self.key[-1]
        if isinstance(inside, list):
            inside.append(value)
        elif key is not None:
            inside[key] = value
            self.key[-1] = None

    def _text(self, token: str, at: int) -> str:
        try:
            return str(json.loads(token, strict=False))
        except ValueError:
            raise self._error(f"broken JSON text {token[:20]!r}", at) from None

    def _note(self, text: str, at: int) -> None:
        self.notes.setdefault(text, Note(f"no strict JSON: {text}", *place(self.text, at)))

    def _error(self, message: str, at: int) -> TopologyError:
        return TopologyError(message, *place(self.text, at))
