"""Names from dumps as text that is safe to show: nothing in them moves a cursor, turns a line round or fills a page."""

from __future__ import annotations

import unicodedata

SHOWN_AS_CODE = ("Cf", "Zl", "Zp", "Cs", "Cn", "Co")  # right-to-left marks, line separators, what is no character


def plain(text: str, most: int | None = None) -> str:
    """Return the text with invisible characters made visible, cut to `most` characters."""
    cut = _cut(text, most)
    return cut if cut.isascii() and cut.isprintable() else _cut("".join(map(_shown, cut)), most)


def plain_lines(text: str) -> str:
    """Return a text of several lines with each line as plain makes it."""
    return "\n".join(map(plain, text.split("\n")))


def cells_wide(text: str) -> int:
    """Return roughly how many columns of a terminal the text takes: East Asian characters are twice as wide."""
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text)


def _cut(text: str, most: int | None) -> str:
    return text if most is None or len(text) <= most else text[: most - 1] + "…"


def _shown(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if code < 0x20:
        return chr(0x2400 + code)  # ␛ for escape
    if category == "Cc":
        return "�"
    return f"[U+{code:04X}]" if category in SHOWN_AS_CODE else character
