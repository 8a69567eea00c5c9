"""Dumps as they come back from mail, issues and wikis: what these added is taken off before a parser reads."""

from __future__ import annotations

import re

QUOTE = re.compile(r"^[ \t]{0,8}(?:>[ \t]?)+", re.MULTILINE)
BREAK = re.compile(r"<br ?/?>", re.IGNORECASE)  # lines in a cell of a Markdown table
ESCAPES = {"\\t": "\t", "\\n": "\n", "\\x1b": "\x1b", "\\u001b": "\x1b", "\\033": "\x1b"}
MOSTLY = 0.5  # of the lines: a single line of XML may start with what ends a tag


def _unescaped(text: str) -> str:
    """Restore an output that a program or a log holds as a string: tabs and line ends are two characters each."""
    if text.count("\\t") <= text.count("\n") or text.lstrip().startswith(("{", "<")):
        return text
    for escape, meant in ESCAPES.items():
        text = text.replace(escape, meant)
    return text


def as_printed(text: str) -> str:
    """Return a text without the marks of a quotation, and with lines where HTML or a string has breaks."""
    text = _unescaped(BREAK.sub("\n", text))
    if ">" not in text:
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    quoted = sum(1 for line in lines if QUOTE.match(line))
    return QUOTE.sub("", text) if quoted > MOSTLY * len(lines) else text
