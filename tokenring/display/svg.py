"""Parts that all pictures share: SVG that loads nothing, in colours for light and for dark surroundings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from html import escape

FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
Colours = Mapping[str, tuple[str, str]]  # class: (light, dark)


def opening(width: float, height: float, title: str) -> Iterator[str]:
    """Yield the first lines of an SVG of so many SVG units; `</svg>`, the last, is the caller's to write."""
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="{FONT}" role="img">'
    )
    yield f"<title>{escape(title)}</title>"


def style(fills: Colours, strokes: Colours, more: Iterable[str] = ()) -> Iterator[str]:
    """Yield a style sheet: classes that fill, classes that only stroke, and other rules."""
    yield "<style>"
    for column, (before, after) in enumerate((("", ""), ("@media (prefers-color-scheme: dark) { ", " }"))):
        rules = [f".{name} {{ fill: {colours[column]} }}" for name, colours in fills.items()]
        rules += [f".{name} {{ stroke: {colours[column]}; fill: none }}" for name, colours in strokes.items()]
        yield before + " ".join(rules) + after
    yield from more
    yield "</style>"


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Return a rectangle of class `kind`; x and y are of its upper left corner, all lengths in SVG units."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def text_at(
    x: float, y: float, text: str, size: int, colour: str = "ink", anchor: str = "start", weight: str = ""
) -> str:
    """Return a text element, escaped; x, y and size are in SVG units, and colour is the class that fills it."""
    how = f'class="{colour}" font-size="{size}"' + (f' font-weight="{weight}"' if weight else "")
    how += "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {how}>{escape(text)}</text>'


# Advance widths of DejaVu Sans, the widest font of FONT, rounded up, in em: what fits with it fits with all.
NARROW, BROAD, WIDE, BOLD = "ijl.,:;'|!()[]/ftIr ", "+<=>~^#×≤≥±&", "mwMW@%—…→½■", 1.13


def wrapped(text: str, room: float, size: float, bold: bool = False) -> list[str]:
    """Break a text into lines that are at most `room` SVG units wide at this font size; no text gives no line."""
    lines: list[str] = []
    for word in text.split():
        if lines and _width(f"{lines[-1]} {word}", size, bold) <= room:
            lines[-1] += f" {word}"
        else:
            lines += _broken(word, room, size, bold)
    return lines


def _broken(word: str, room: float, size: float, bold: bool) -> list[str]:
    """Break a word that is wider than a line, such as a path, wherever the line ends."""
    lines = [""]
    for character in word:
        if lines[-1] and _width(lines[-1] + character, size, bold) > room:
            lines.append("")
        lines[-1] += character
    return lines


def _width(text: str, size: float, bold: bool) -> float:
    """Return how wide a text is at most, in SVG units."""
    return sum(map(_advance, text)) * size * (BOLD if bold else 1.0)


def _advance(character: str) -> float:
    if character in NARROW:
        return 0.44
    if character in WIDE or ord(character) > 0x2FFF:  # CJK fills its square
        return 1.05
    if character in BROAD:
        return 0.84
    return 0.79 if character.isupper() else 0.65


def heading(
    x: float, y: float, room: float, title: str, size: int, about: Iterable[str]
) -> tuple[list[str], float]:
    """Lay out a title whose first line stands at x and y, and grey lines below it, none wider than `room`.

    Returns their elements, and y of the last line; all in SVG units.
    """
    elements = []
    for number, line in enumerate(wrapped(title, room, size, bold=True)):
        y += size + 4 if number else 0
        elements.append(text_at(x, y, line, size, weight="bold"))
    for number, line in enumerate(line for text in about for line in wrapped(text, room, 13)):
        y += 18 if number else 22
        elements.append(text_at(x, y, line, 13, "grey"))
    return elements, y


def axis_step(span: float, most: int = 12) -> float:
    """Return a round distance of ticks (1, 2 or 5 times a power of ten) with which a span has `most` at most."""
    step = 10.0**-3
    while True:
        for factor in (1, 2, 5):
            if span / (step * factor) <= most:
                return step * factor
        step *= 10
