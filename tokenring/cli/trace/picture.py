"""A timeline of all ranks as a self-contained SVG: one row a rank, all on one clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from statistics import mean

from tokenring.cli.bench.table import case_text, machine_text, ms
from tokenring.cli.trace.record import Bar, Stretch, Traced, TracedMessage
from tokenring.display.svg import axis_step, box, heading, opening, style, text_at, wrapped
from tokenring.ir.schedule_data import PASSES

# Sizes in SVG units, which viewers show as pixels.
WIDTH, MARGIN, LABEL, SHARE = 1180, 28, 58, 78
LINE, BAND, ROW, LANE, AXIS, LEGEND, SECOND = 18, 36, 64, 30, 34, 28, 24
ROOM = WIDTH - 2 * MARGIN
LEAST_BAR = 0.8  # so that what takes microseconds is seen
CHARACTER = 5.6  # mean width of a character of 10 units, generous for digits
LEAST_STEP = 13  # narrower ones get no number
KINDS = {  # what a bar of each kind is called
    "compute": "attention of a tile",
    "wait": "waiting for a message",
    "merge": "merging, clearing results",
    "pack": "packing",
    "post": "posting sends, receives",
}
COLOURS = {  # class: (light, dark)
    "paper": ("#ffffff", "#14181d"),
    "ink": ("#22282f", "#e8ecf0"),
    "grey": ("#66707b", "#9aa5b1"),
    "forward": ("#eef3fa", "#1c2530"),
    "backward": ("#faf3ea", "#2a241c"),
    "compute": ("#2f6db5", "#3f7fcb"),
    "wait": ("#f3b33d", "#e0a63a"),
    "merge": ("#2f9e6b", "#3fb57f"),
    "pack": ("#8f6cc0", "#a583d6"),
    "post": ("#cf4a5e", "#e8687b"),
    "end": ("#8a93a0", "#8a95a3"),
}
RULES = [".on { fill: #ffffff } .step { stroke-width: 0.8 } .message { stroke-width: 0.8 } .messages { opacity: 0.6 }"]
LINES = {"rule": ("#dfe4e9", "#2c333b"), "step": ("#66707b", "#9aa5b1"), "message": ("#8a93a0", "#8a95a3")}


@dataclass(frozen=True)
class Timeline:
    """A timeline to draw. `stretches` are the passes, at each rank."""

    heading: str
    about: Sequence[str]  # lines below it
    ranks: int
    stretches: Sequence[Stretch]
    bars: Sequence[Bar]
    messages: Sequence[TracedMessage]


def to_svg(timeline: Timeline, beside: Timeline | None = None) -> str:
    """Return the picture as SVG. beside: a simulation of the same, drawn below at the same scale."""
    return "\n".join(_page(timeline, beside)) + "\n"


def timeline_of(traced: Traced) -> Timeline:
    """Return the timeline of a traced call, with its sizes and where it ran."""
    passes = "forward and backward" if traced.case.backward else "forward"
    about = [
        f"{case_text(traced.case).partition(', ')[2]}, layout {traced.case.layout}: {ms(traced.seconds)} ms",
        machine_text(traced.machine),
    ]
    heading = f"Schedule {traced.schedule} on {traced.ranks} rank{'s' if traced.ranks > 1 else ''}, {passes}"
    return Timeline(heading, about, traced.ranks, traced.stretches, traced.bars, traced.messages)


def simulation_of(traced: Traced) -> Timeline | None:
    """Return the timeline that the planner expected of a traced call; None for one rank."""
    if (expected := traced.simulated) is None:
        return None
    heading = f"Simulated: {ms(sum(expected.seconds(each) for each in PASSES))} ms on {expected.source}"
    return Timeline(heading, (), traced.ranks, expected.stretches, expected.bars, expected.messages)


def _page(timeline: Timeline, beside: Timeline | None) -> Iterator[str]:
    end = max(_end(each) for each in (timeline, beside) if each is not None)
    titles, below = heading(MARGIN, 40, ROOM, timeline.heading, 20, timeline.about)
    drawings = [_Drawing(timeline, below + 2 + BAND, end)]
    second = wrapped(beside.heading, ROOM, 13, bold=True) if beside is not None else []
    if beside is not None:
        drawings.append(_Drawing(beside, drawings[0].bottom + AXIS + SECOND + LINE * (len(second) - 1) + BAND, end))
    bottom = drawings[-1].bottom
    height = bottom + AXIS + LEGEND + MARGIN
    yield from opening(WIDTH, height, timeline.heading)
    yield from style(COLOURS, LINES, RULES)
    yield box(0, 0, WIDTH, height, "paper")
    yield from titles
    yield from drawings[0].lines()
    for drawing in drawings[1:]:
        for number, line in enumerate(reversed(second)):
            yield text_at(MARGIN, drawing.top - BAND - LINE * number, line, 13, weight="bold")
        yield from drawing.lines()
    yield from _legend(bottom)
    yield "</svg>"


def _end(timeline: Timeline) -> float:
    times = [*(each.ended for each in timeline.stretches), *(bar.ended for bar in timeline.bars)]
    return max([0.0, *times]) or 1e-3


class _Drawing:
    """A timeline from `top` down, with `end` seconds from the left to the right."""

    def __init__(self, timeline: Timeline, top: float, end: float) -> None:
        self.timeline, self.ranks, self.top, self.end = timeline, timeline.ranks, top, end
        self.bottom = top + self.ranks * ROW
        self.right = WIDTH - MARGIN - SHARE

    def x(self, seconds: float) -> float:
        left = MARGIN + LABEL
        return left + seconds / self.end * (self.right - left)

    def y(self, rank: int) -> float:
        """Return the top of a rank's lane."""
        return self.top + rank * ROW + (ROW - LANE) / 2 + 3

    def lines(self) -> Iterator[str]:
        yield from map(self._stretch, self.timeline.stretches)
        yield from self._axis()
        yield from self._passes()
        yield '<g class="messages">'
        yield from map(self._message, self.timeline.messages)
        yield "</g>"
        for rank, bars in groupby(sorted(self.timeline.bars, key=lambda bar: bar.rank), key=lambda bar: bar.rank):
            yield from self._row(rank, list(bars))

    def _stretch(self, stretch: Stretch) -> str:
        """Draw the ground of one pass at one rank."""
        left, right = self.x(stretch.began), self.x(stretch.ended)
        return box(left, self.top + stretch.rank * ROW, right - left, ROW, stretch.direction)

    def _passes(self) -> Iterator[str]:
        """Draw the names of passes, each over the middle of its grounds."""
        for direction in dict.fromkeys(each.direction for each in self.timeline.stretches):
            these = [each for each in self.timeline.stretches if each.direction == direction]
            left, right = (self.x(mean(times)) for times in zip(*((e.began, e.ended) for e in these), strict=True))
            text = f"{direction}  {ms(max(each.ended - each.began for each in these))} ms"
            if right - left > len(text) * CHARACTER * 1.3:
                yield text_at((left + right) / 2, self.top - 10, text, 13, anchor="middle", weight="bold")

    def _axis(self) -> Iterator[str]:
        step = axis_step(1e3 * self.end)
        for number in range(int(1e3 * self.end / step) + 1):
            x = self.x(number * step / 1e3)
            yield f'<path class="rule" d="M{x:.1f} {self.top}V{self.bottom + 5}"/>'
            yield text_at(x, self.bottom + 20, f"{number * step:g}", 11, "grey", "middle")
        yield text_at(self.right + 14, self.bottom + 20, "ms", 11, "grey")
        yield text_at(self.right + SHARE, self.top - 10, "in attention", 11, "grey", "end")

    def _message(self, message: TracedMessage) -> str:
        """Draw a message from where it was posted to where its receiver had it, between the lanes."""
        down = message.dst > message.src
        x1, x2 = self.x(message.sent), self.x(message.received)
        y1 = self.y(message.src) + (LANE if down else 0)
        y2 = self.y(message.dst) + (0 if down else LANE)
        label = f"{message.label}: rank {message.src} → rank {message.dst}"
        line = f'<path class="message" d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}"><title>{escape(label)}</title></path>'
        return line + f'<circle class="end" cx="{x2:.1f}" cy="{y2:.1f}" r="1.6"/>'

    def _row(self, rank: int, bars: Sequence[Bar]) -> Iterator[str]:
        y = self.y(rank)
        yield text_at(MARGIN, y + LANE / 2 + 5, f"rank {rank}", 13, weight="bold")
        # Short ones come last, over their long neighbours: at this scale they would vanish under them.
        for bar in sorted(bars, key=lambda bar: bar.began - bar.ended):
            yield from self._bar(bar, y)
        yield from self._steps(bars, y)
        busy = sum(bar.seconds for bar in bars if bar.kind == "compute")
        total = sum(each.ended - each.began for each in self.timeline.stretches if each.rank == rank)
        share = busy / total if total else 0.0
        yield text_at(self.right + SHARE, y + LANE / 2 + 5, f"{share:.0%}", 13, anchor="end")

    def _steps(self, bars: Sequence[Bar], y: float) -> Iterator[str]:
        """Draw the beginnings of steps, with their numbers above the lane."""
        for _, step in groupby(bars, key=lambda bar: (bar.direction, bar.step)):
            inside = list(step)
            left, right = self.x(inside[0].began), self.x(inside[-1].ended)
            yield f'<path class="step" d="M{left:.1f} {y - 12:.1f}V{y + LANE:.1f}"/>'
            if right - left >= LEAST_STEP:
                yield text_at(left + 3, y - 4, str(inside[0].step), 10, "grey")

    def _bar(self, bar: Bar, y: float) -> Iterator[str]:
        left, width = self.x(bar.began), self.x(bar.ended) - self.x(bar.began)
        tip = f"{bar.direction}, rank {bar.rank}: {bar.label}, {1e3 * bar.seconds:.3f} ms"
        # A gap of half a unit tells neighbours of one colour apart.
        shown = max(width - 0.5, LEAST_BAR)
        height = LANE / 2 if bar.kind == "post" else LANE  # else these many short ones would cover the rest
        yield (
            f'<rect class="{bar.kind}" x="{left:.2f}" y="{y + (LANE - height) / 2:.1f}" width="{shown:.2f}" '
            f'height="{height:.1f}"><title>{escape(tip)}</title></rect>'
        )
        if bar.kind == "compute" and width > len(bar.short) * CHARACTER + 8:
            yield text_at(left + width / 2, y + LANE / 2 + 4, bar.short, 10, "on", "middle")


def _legend(bottom: float) -> Iterator[str]:
    x, y = float(MARGIN + LABEL), bottom + AXIS + LEGEND / 2
    for kind, name in KINDS.items():
        yield box(x, y - 10, 14, 12, kind)
        yield text_at(x + 20, y, name, 12)
        x += 20 + len(name) * CHARACTER * 1.2 + 20
    yield f'<path class="message" d="M{x:.1f} {y}L{x + 16:.1f} {y - 8}"/>'
    yield f'<circle class="end" cx="{x + 16:.1f}" cy="{y - 8}" r="1.6"/>'
    yield text_at(x + 24, y, "message", 12)
    yield f'<path class="step" d="M{x + 96:.1f} {y + 2}V{y - 11}"/>'
    yield text_at(x + 99, y - 2, "0", 10, "grey")
    yield text_at(x + 112, y, "step begins", 12)
