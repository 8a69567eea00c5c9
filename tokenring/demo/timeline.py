"""What every rank did when, as a self-contained SVG: one row a rank, all on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby

from tokenring.demo.results import Bar, Measured, Message, Pass

# Sizes in SVG units, which viewers show as pixels.
WIDTH, MARGIN, LABEL, SHARE = 1180, 28, 58, 78
TOP, BAND, ROW, LANE, AXIS, LEGEND = 92, 30, 58, 30, 34, 28
LEAST_BAR = 0.8  # so that what takes microseconds is seen
CHARACTER = 5.6  # mean width of a character of 10 units, generous for digits
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
INK, GREY, PALE, RULE, BANDS = "#22282f", "#6b7480", "#8d959e", "#e3e7eb", ("#f4f7fb", "#faf6f1")
MESSAGE = "#8a93a0"
KINDS = {  # what a bar of each kind is called, and its colour
    "compute": ("attention of a tile", "#2f6db5"),
    "wait": ("waiting for a message", "#f3b33d"),
    "merge": ("merging partial results", "#2f9e6b"),
    "pack": ("packing and clearing", "#8f6cc0"),
    "post": ("posting sends, receives", "#cf4a5e"),
}


def to_svg(measured: Measured, title: str) -> str:
    """The picture of one call, forward and backward."""
    return "\n".join(_Timeline(measured, title).lines()) + "\n"


def axis_step(span_ms: float, most: int = 12) -> float:
    """A round distance of ticks (1, 2 or 5 times a power of ten), for at most so many."""
    step = 10.0**-3
    while True:
        for factor in (1, 2, 5):
            if span_ms / (step * factor) <= most:
                return step * factor
        step *= 10


class _Timeline:
    def __init__(self, measured: Measured, title: str) -> None:
        self.measured, self.title = measured, title
        self.ranks = len(measured.passes[0].counted_bytes)
        self.end = max((bar.ended for bar in measured.bars), default=0.0) or 1e-3
        self.bottom = TOP + BAND + self.ranks * ROW
        self.height = self.bottom + AXIS + LEGEND + MARGIN
        self.right = WIDTH - MARGIN - SHARE

    def x(self, seconds: float) -> float:
        left = MARGIN + LABEL
        return left + seconds / self.end * (self.right - left)

    def y(self, rank: int) -> float:
        """The top of a rank's lane."""
        return TOP + BAND + rank * ROW + (ROW - LANE) / 2

    def lines(self) -> Iterator[str]:
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" font-family="{FONT}" role="img">'
        )
        yield f"<title>{escape(self.title)}</title>"
        yield _box(0, 0, WIDTH, self.height, "#ffffff")
        yield from self._heading()
        for number, each in enumerate(self.measured.passes):
            yield from self._band(each, BANDS[number % 2])
        yield from self._axis()
        yield '<g fill="none" stroke-width="0.8" opacity="0.6">'
        yield from map(self._message, self.measured.messages)
        yield "</g>"
        for rank, bars in groupby(sorted(self.measured.bars, key=lambda bar: bar.rank), key=lambda bar: bar.rank):
            yield from self._row(rank, list(bars))
        yield from self._legend()
        yield "</svg>"

    def _heading(self) -> Iterator[str]:
        yield _text(MARGIN, 42, "One attention call on every rank, forward and backward", 20, INK, "bold")
        schedule = f"schedule {self.measured.schedule}"
        yield _text(MARGIN, 66, f"{schedule} · {self.title}", 13, GREY)

    def _band(self, each: Pass, colour: str) -> Iterator[str]:
        """The ground of one pass, from its first bar to its last."""
        bars = [bar for bar in self.measured.bars if bar.direction == each.name]
        if not bars:
            return
        began, ended = min(bar.began for bar in bars), max(bar.ended for bar in bars)
        left, right = self.x(began), self.x(ended)
        yield _box(left, TOP, right - left, self.bottom - TOP, colour)
        text = f"{each.name}  {1e3 * (ended - began):,.1f} ms"
        if right - left > len(text) * CHARACTER * 1.3:
            yield _text((left + right) / 2, TOP + 19, text, 13, INK, "bold", "middle")

    def _axis(self) -> Iterator[str]:
        step = axis_step(1e3 * self.end)
        for number in range(int(1e3 * self.end / step) + 1):
            x = self.x(number * step / 1e3)
            yield f'<line x1="{x:.1f}" y1="{TOP + BAND}" x2="{x:.1f}" y2="{self.bottom + 5}" stroke="{RULE}"/>'
            yield _text(x, self.bottom + 20, f"{number * step:g}", 11, GREY, anchor="middle")
        yield _text(self.right + 14, self.bottom + 20, "ms", 11, GREY)
        yield _text(self.right + SHARE, TOP + 19, "in attention", 11, GREY, anchor="end")

    def _message(self, message: Message) -> str:
        """From where it was posted to where its receiver had it, between the lanes."""
        down = message.dst > message.src
        x1, x2 = self.x(message.sent), self.x(message.received)
        y1 = self.y(message.src) + (LANE if down else 0)
        y2 = self.y(message.dst) + (0 if down else LANE)
        label = f"{message.label}: rank {message.src} → rank {message.dst}"
        line = (
            f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{MESSAGE}"><title>{escape(label)}</title></path>'
        )
        return line + f'<circle cx="{x2:.1f}" cy="{y2:.1f}" r="1.6" fill="{MESSAGE}" stroke="none"/>'

    def _row(self, rank: int, bars: Sequence[Bar]) -> Iterator[str]:
        y = self.y(rank)
        yield _text(MARGIN, y + LANE / 2 + 5, f"rank {rank}", 13, INK, "bold")
        # Short ones come last, over their long neighbours: at this scale they would vanish under them.
        for bar in sorted(bars, key=lambda bar: bar.began - bar.ended):
            yield from self._bar(bar, y)
        busy = sum(bar.ended - bar.began for bar in bars if bar.kind == "compute")
        total = sum(bar.ended - bar.began for bar in bars)
        share = busy / total if total else 0.0
        yield _text(self.right + SHARE, y + LANE / 2 + 5, f"{share:.0%}", 13, INK, anchor="end")

    def _bar(self, bar: Bar, y: float) -> Iterator[str]:
        left, width = self.x(bar.began), self.x(bar.ended) - self.x(bar.began)
        tip = f"{bar.direction}, rank {bar.rank}: {bar.label}, {1e3 * (bar.ended - bar.began):.3f} ms"
        # A gap of half a unit tells neighbours of one colour apart.
        shown = max(width - 0.5, LEAST_BAR)
        height = LANE / 2 if bar.kind == "post" else LANE  # else these many short ones would cover the rest
        yield (
            f'<rect x="{left:.2f}" y="{y + (LANE - height) / 2:.1f}" width="{shown:.2f}" height="{height:.1f}" '
            f'fill="{KINDS[bar.kind][1]}">'
            f"<title>{escape(tip)}</title></rect>"
        )
        if bar.kind == "compute" and width > len(bar.short) * CHARACTER + 8:
            yield _text(left + width / 2, y + LANE / 2 + 4, bar.short, 10, "#ffffff", anchor="middle")

    def _legend(self) -> Iterator[str]:
        x, y = float(MARGIN + LABEL), self.bottom + AXIS + LEGEND / 2
        for name, colour in KINDS.values():
            yield _box(x, y - 10, 14, 12, colour)
            yield _text(x + 20, y, name, 12, INK)
            x += 20 + len(name) * CHARACTER * 1.2 + 20
        yield f'<path d="M{x:.1f} {y}L{x + 16:.1f} {y - 8}" stroke="{MESSAGE}"/>'
        yield f'<circle cx="{x + 16:.1f}" cy="{y - 8}" r="1.6" fill="{MESSAGE}"/>'
        yield _text(x + 24, y, "message", 12, INK)


def _box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" fill="{colour}"/>'


def _text(x: float, y: float, text: str, size: int, colour: str, weight: str = "normal", anchor: str = "start") -> str:
    style = f'font-size="{size}" fill="{colour}" font-weight="{weight}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'
