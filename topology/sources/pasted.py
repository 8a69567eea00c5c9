"""Dumps as they come back from mail, issues and wikis: what these added is taken off before a parser reads."""

from __future__ import annotations

import re

QUOTE = re.compile(r"^[ \t]{0,8}(?:>[ \t]?)+", re.MULTILINE)
BREAK = re.compile(r"<br ?/?>", re.IGNORECASE)  # lines in a cell of a Markdown table
MOSTLY = 0.5  # of the lines: a single line of XML may start with what ends a tag


def as_printed(text: str) -> str:
    """A text without the marks of a quotation, and with lines where HTML has breaks."""
    text = BREAK.sub("\n", text)
    if ">" not in text:
        return text
    lines = [line for line in text.splitlines() if line.strip()]
    quoted = sum(1 for line in lines if QUOTE.match(line))
    return QUOTE.sub("", text) if quoted > MOSTLY * len(lines) else text
